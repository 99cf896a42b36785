//! *waiting*: the broker is frozen until the server holds back ten gigabytes of WAL; then it comes back. What walpost takes
//! of memory and CPU meanwhile, before and after it is killed and started again, and how long the rest takes. Fails above
//! the bounds that docs/sizing.md promises.
#![expect(clippy::cast_precision_loss, reason = "figures for people: no digit that matters is lost")]

#[expect(dead_code, reason = "each user of the services needs a part of them")]
#[path = "../services/mod.rs"]
mod services;

use std::time::{Duration, Instant};

use services::{
    database::Database,
    kafka::{Kafka, Settings as KafkaSettings},
    postgres::{Postgres, Settings, Version},
    wait_until,
    walpost::Walpost,
};

/// Each writes 30 events of a megabyte that neither the server nor the WAL compresses, 10,000 of 300 bytes, and 70 MB that
/// are no business of walpost's.
const TURNS: u32 = 100;
const EVENTS: i64 = 100 * 10_030;
const MEMORY_MB: f64 = 120.0;
const CORE_SHARE: f64 = 0.02;
const WAITING: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_mins(30);

fn main() {
    let settings = Settings::default().set("max_wal_size", "2GB").set("autovacuum", "off");
    let postgres = Postgres::start(Version::NEWEST, &settings);
    let kafka = Kafka::start(&KafkaSettings::default());
    let database = postgres.database();
    database.execute(include_str!("../../sql/outbox.sql"));
    database.execute("ALTER TABLE outbox ALTER COLUMN payload SET STORAGE EXTERNAL");
    let topic = format!("{}.t", database.name());
    kafka.create_topic(&topic, 3, &[("max.message.bytes", "3000000")]);
    let walpost = Walpost::relay(&database, &kafka, &[]);
    walpost.wait_until_ready(PATIENCE);
    kafka.freeze();
    fill(&database);
    println!("waiting: {:.1} GB of WAL are held back", held_back(&database));
    claim_small("while the broker is away", &walpost);
    walpost.kill9();
    walpost.wait(PATIENCE);
    let walpost = Walpost::relay(&database, &kafka, &[]);
    claim_small("started again, with the broker still away", &walpost);
    kafka.thaw();
    let began = Instant::now();
    wait_until(PATIENCE, "everything arrives", || kafka.record_count(&topic) >= EVENTS);
    let took = began.elapsed().as_secs_f64();
    wait_until(PATIENCE, "everything is confirmed", || held_back(&database) < 0.1);
    println!("{} records of {EVENTS} events, {took:.0} s after the broker came back", kafka.record_count(&topic));
    assert!(walpost.peak_mb() < MEMORY_MB, "{:.0} MB", walpost.peak_mb());
    println!("peak over all of it: {:.0} MB", walpost.peak_mb());
}

fn fill(database: &Database<'_>) {
    let small = "INSERT INTO outbox (event_type, key, payload)
        SELECT 't', n::text, json_build_object('pad', repeat('x', 280)) FROM generate_series(1, 10000) n";
    let large = "INSERT INTO outbox (event_type, key, payload)
        SELECT 't', n::text, json_build_object('pad', repeat('x', 1000000)) FROM generate_series(1, 30) n";
    let others = "SELECT pg_logical_emit_message(false, 'noise', repeat('x', 1000000)) FROM generate_series(1, 70)";
    for _ in 0..TURNS {
        for sql in [large, small, others] {
            database.execute(sql);
        }
    }
}

/// Gigabytes between the slot's position and the end of the WAL.
fn held_back(database: &Database<'_>) -> f64 {
    let sql = "SELECT (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint::text FROM pg_replication_slots
               WHERE slot_name = current_database()";
    database.value(sql).and_then(|bytes| bytes.parse::<i64>().ok()).expect("the slot is there") as f64 / 1e9
}

/// What it takes while there is nothing that it could do.
fn claim_small(when: &str, walpost: &Walpost) {
    let share = walpost.core_share(WAITING);
    println!("{when}: peak {:.0} MB, {:.1} % of a core", walpost.peak_mb(), share * 100.0);
    assert!(walpost.peak_mb() < MEMORY_MB && share < CORE_SHARE, "{when}: beyond the bounds");
}
