//! *retention*: 500,000 expired rows go beside live inserts; what that does to the time an insert takes.
//!
//! While writers insert at a steady rate, `walpost prune` is frozen and let go every two seconds, so that a busy moment
//! of the machine falls into both kinds of phases alike. No broker is needed: the record of what was delivered is
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
const PHASE: Duration = Duration::from_secs(2);

const INSERT: &str = "INSERT INTO outbox (event_type, key, payload) VALUES ('t', 'k', $1::text::json)";

fn main() {
    // neither shall fall into one round and not into the other
    let settings = Settings::default()
        .set("fsync", "on")
        .set("full_page_writes", "on")
        .set("shared_buffers", "512MB")
        .set("checkpoint_timeout", "30min")
        .set("autovacuum", "off")
        .set("max_wal_size", "20GB");
    let postgres = Postgres::start(Version::System, &settings);
    let database = postgres.database();
    database.execute(include_str!("../../sql/outbox.sql"));
    database.execute(include_str!("../../sql/retention.sql"));
    expire(&database);
    let ([alone, beside], took) = measure(&database);
    for (name, mut taken) in [("alone", alone), ("beside prune", beside)] {
        taken.sort_by(f64::total_cmp);
        let quantile = |share: f64| taken[((taken.len() - 1) as f64 * share) as usize];
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(quantile);
        println!("{name}: {} inserts, p50 {p50:.2} ms, p99 {p99:.2} ms, p99.9 {p999:.2} ms", taken.len());
    }
    println!("{EXPIRED} rows in {:.0} s, half of which prune was frozen", took.as_secs_f64());
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

/// What inserts took in ms, while prune was frozen and while it was not; and how long prune took.
fn measure(database: &Database<'_>) -> ([Vec<f64>; 2], Duration) {
    let (stop, beside, url) = (AtomicBool::new(false), AtomicBool::new(true), database.url());
    thread::scope(|scope| {
        let prune = scope.spawn(|| {
            let env = [("WALPOST_POSTGRES_URL", url.as_str()), ("WALPOST_POSTGRES_SLOT", "bench")];
            let began = Instant::now();
            let walpost = Walpost::start_with(&["prune", "--set", "retention.keep=7d"], &env);
            while walpost.process().exit_status().is_none() {
                thread::sleep(PHASE);
                if beside.fetch_xor(true, Relaxed) { walpost.freeze() } else { walpost.thaw() }
            }
            stop.store(true, Relaxed);
            assert!(walpost.log().contains(&format!("deleted {EXPIRED} rows")), "{}", walpost.log());
            began.elapsed()
        });
        let taken = write(database, &stop, &beside);
        (taken, prune.join().expect("it prunes"))
    })
}

/// Inserts at a steady rate until told to stop: what each took in ms, its commit included, by phase.
fn write(database: &Database<'_>, stop: &AtomicBool, beside: &AtomicBool) -> [Vec<f64>; 2] {
    let began = Instant::now();
    let writer = |number: u32| {
        let client = database.connect();
        complete(async move { client.prepare(INSERT).await.map(|insert| (client, insert)) })
            .map(|(client, insert)| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                let payload = format!("{{\"pad\": \"{}\"}}", "x".repeat(280));
                let mut taken = [Vec::new(), Vec::new()];
                for turn in (number..).step_by(WRITERS as usize) {
                    if stop.load(Relaxed) {
                        break;
                    }
                    let due = Duration::from_secs_f64(f64::from(turn) / f64::from(INSERTS_PER_SECOND));
                    thread::sleep(due.saturating_sub(began.elapsed()));
                    let (phase, start) = (beside.load(Relaxed), Instant::now());
                    runtime.block_on(client.execute(&insert, &[&payload])).expect("an insert");
                    taken[usize::from(phase)].push(start.elapsed().as_secs_f64() * 1000.0);
                }
                complete(async move { drop(client) });
                taken
            })
            .expect("a legal statement")
    };
    let mut all = [Vec::new(), Vec::new()];
    thread::scope(|scope| {
        let writer = &writer;
        let writers: Vec<_> = (0..WRITERS).map(|number| scope.spawn(move || writer(number))).collect();
        for writer in writers {
            for (all, taken) in all.iter_mut().zip(writer.join().expect("it writes")) {
                all.extend(taken);
            }
        }
    });
    all
}
