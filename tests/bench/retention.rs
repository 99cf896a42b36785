//! *retention*: 500,000 expired rows go beside live inserts; what that does to the time an insert takes.
//!
//! Rounds alternate: writers alone, writers beside `walpost prune`. No broker is needed: the record of what was delivered is
//! written by hand, and it is Postgres that works.
#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures for people: no digit that matters is lost"
)]

#[expect(dead_code, reason = "each user of the services needs a part of them")]
#[path = "../services/mod.rs"]
mod services;

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use services::{
    complete,
    database::Database,
    postgres::{Postgres, Settings, Version},
    walpost::Walpost,
};

const EXPIRED: u32 = 500_000;
const WRITERS: u32 = 4;
const INSERTS_PER_SECOND: u32 = 1_000;
const ALONE: Duration = Duration::from_secs(20);
const ROUNDS: usize = 3;

const INSERT: &str = "INSERT INTO outbox (event_type, key, payload) VALUES ('t', 'k', $1::text::json)";

fn main() {
    // neither shall fall into one round and not into the other
    let settings = Settings::default()
        .set("fsync", "on")
        .set("full_page_writes", "on")
        .set("shared_buffers", "512MB")
        .set("checkpoint_timeout", "30min")
        .set("max_wal_size", "20GB");
    let postgres = Postgres::start(Version::System, &settings);
    let database = postgres.database();
    database.execute(include_str!("../../sql/outbox.sql"));
    database.execute(include_str!("../../sql/retention.sql"));
    let mut changes = Vec::new();
    for round in 1..=ROUNDS {
        expire(&database);
        let before = alone(&database);
        let (beside, took) = beside_prune(&database);
        let after = alone(&database);
        let calm = [before[0].midpoint(after[0]), before[1].midpoint(after[1])];
        println!(
            "round {round}: alone p50 {:.2} p99 {:.2} ms (before: {:.2}, after: {:.2}); beside prune p50 {:.2} p99 {:.2} ms; {EXPIRED} \
             rows in {:.0} s",
            calm[0],
            calm[1],
            before[1],
            after[1],
            beside[0],
            beside[1],
            took.as_secs_f64()
        );
        changes.push((beside[1] / calm[1] - 1.0) * 100.0);
    }
    changes.sort_by(f64::total_cmp);
    println!(
        "p99 of an insert changes by {:+.0} % (median of {ROUNDS} rounds; target: below +20 %)",
        changes[ROUNDS / 2]
    );
}

/// Rows that are old and delivered; the table is as after an ordinary day.
fn expire(database: &Database<'_>) {
    database.execute("TRUNCATE outbox, walpost_delivered");
    for _ in 0..EXPIRED / 10_000 {
        database.execute(
            "INSERT INTO outbox (event_type, key, payload, created_at)
             SELECT 't', 'k', json_build_object('pad', repeat('x', 280)), now() - interval '8 days' + n * interval '1 ms'
             FROM generate_series(1, 10000) n",
        );
    }
    database.execute(
        "INSERT INTO walpost_delivered (slot, system, relation, shape, since, until, confirmed)
         SELECT 'bench', system_identifier::text, 'outbox'::regclass, '', 3,
                pg_snapshot_xmin(pg_current_snapshot())::text::bigint, '0/1' FROM pg_control_system()",
    );
    database.execute("VACUUM ANALYZE outbox");
    database.execute("CHECKPOINT");
}

fn alone(database: &Database<'_>) -> [f64; 2] {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(ALONE);
            stop.store(true, Relaxed);
        });
        write(database, &stop)
    })
}

fn beside_prune(database: &Database<'_>) -> ([f64; 2], Duration) {
    let (stop, url) = (AtomicBool::new(false), database.url());
    thread::scope(|scope| {
        let prune = scope.spawn(|| {
            let env = [("WALPOST_POSTGRES_URL", url.as_str()), ("WALPOST_POSTGRES_SLOT", "bench")];
            let began = Instant::now();
            let walpost = Walpost::start_with(&["prune", "--set", "retention.keep=7d"], &env);
            let status = walpost.wait(Duration::from_mins(10));
            stop.store(true, Relaxed);
            assert!(
                status.success() && walpost.log().contains(&format!("deleted {EXPIRED} rows")),
                "{}",
                walpost.log()
            );
            began.elapsed()
        });
        let figures = write(database, &stop);
        (figures, prune.join().expect("it prunes"))
    })
}

/// Inserts at a steady rate until told to stop: p50 and p99 of what one takes, its commit included, in ms.
fn write(database: &Database<'_>, stop: &AtomicBool) -> [f64; 2] {
    let began = Instant::now();
    let writer = |number: u32| {
        let client = database.connect();
        complete(async move { client.prepare(INSERT).await.map(|insert| (client, insert)) })
            .map(|(client, insert)| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                let payload = format!("{{\"pad\": \"{}\"}}", "x".repeat(280));
                let mut taken = Vec::new();
                for turn in (number..).step_by(WRITERS as usize) {
                    if stop.load(Relaxed) {
                        break;
                    }
                    let due = Duration::from_secs_f64(f64::from(turn) / f64::from(INSERTS_PER_SECOND));
                    thread::sleep(due.saturating_sub(began.elapsed()));
                    let start = Instant::now();
                    runtime.block_on(client.execute(&insert, &[&payload])).expect("an insert");
                    taken.push(start.elapsed().as_secs_f64() * 1000.0);
                }
                complete(async move { drop(client) });
                taken
            })
            .expect("a legal statement")
    };
    let mut taken: Vec<f64> = thread::scope(|scope| {
        let writer = &writer;
        let writers: Vec<_> = (0..WRITERS).map(|number| scope.spawn(move || writer(number))).collect();
        writers.into_iter().flat_map(|writer| writer.join().expect("it writes")).collect()
    });
    taken.sort_by(f64::total_cmp);
    [0.5, 0.99].map(|share| taken[((taken.len() - 1) as f64 * share) as usize])
}
