//! What walpost may cost while the world misbehaves: memory, and CPU while it waits.

use std::time::Duration;

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, deliveries, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Stop, Version},
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// The largest memory that walpost may ever have taken with the default limits, MB.
pub const MEMORY_MB: f64 = 120.0;

/// The share of a core that waiting may cost: thrice what is promised, since this is a debug build on a machine that is busy
/// with other tests.
const WAITING_SHARE: f64 = 0.06;
const WAITING: Duration = Duration::from_secs(8);

fn claim_small(walpost: &Walpost) {
    assert!(walpost.peak_mb() < MEMORY_MB, "{} MB", walpost.peak_mb());
}

fn claim_waiting_is_cheap(walpost: &Walpost) {
    let share = walpost.core_share(WAITING);
    println!("waiting takes {share:.3} of a core");
    assert!(share < WAITING_SHARE, "waiting takes {share:.3} of a core:\n{}", walpost.log());
}

/// Case 21.
#[test]
fn half_a_gigabyte_of_large_events_waits_for_a_frozen_broker_within_the_bound() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic_name("t");
    kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000000")]);
    let walpost = outbox.relay(&[]);
    outbox.execute("INSERT INTO outbox VALUES ('0', 't', 'k', 'warm')");
    outbox.wait_until_confirmed();
    kafka.freeze();
    // hex of noise: the way through the compressor is no way around the bound
    outbox.execute(
        "DO $$ BEGIN FOR n IN 1..500 LOOP
           INSERT INTO outbox SELECT n, 't', 'k', string_agg(md5(random()::text), '') FROM generate_series(1, 32768);
           COMMIT; END LOOP; END $$",
    );
    wait_until(PATIENCE, "walpost stops reading", || walpost.metric("walpost_in_flight_bytes") >= 60e6);
    claim_waiting_is_cheap(&walpost);
    claim_small(&walpost);
    kafka.thaw();
    outbox.wait_until_confirmed();
    assert_eq!(deliveries(&kafka.read_all(&[&topic])).len(), 501);
    claim_small(&walpost);
}

/// Case 39: a column is added and filled in one transaction, again and again.
#[test]
fn a_hundred_thousand_keys_and_a_table_that_changes_a_thousand_times_cost_no_memory() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let topic = outbox.topic("t", 3);
    let walpost = outbox.relay(&[]);
    outbox.execute("INSERT INTO outbox SELECT 'a' || n, 't', 'key ' || n, 'v' FROM generate_series(1, 100000) n");
    outbox.execute(
        "DO $$ BEGIN FOR n IN 1..1000 LOOP
           EXECUTE 'ALTER TABLE outbox ADD COLUMN c int'; INSERT INTO outbox VALUES ('b' || n, 't', 'k', 'v', n);
           EXECUTE 'ALTER TABLE outbox DROP COLUMN c'; COMMIT;
         END LOOP; END $$",
    );
    outbox.wait_until_confirmed();
    assert_eq!(outbox.kafka.record_count(&topic), 101_000);
    claim_small(&walpost);
}

#[test]
fn five_thousand_topics_cost_no_memory() {
    const TOPICS: usize = 5000;
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topics: Vec<String> = (1..=TOPICS).map(|number| outbox.topic_name(&format!("t{number}"))).collect();
    kafka.create_topics(&topics, 1);
    let walpost = outbox.relay(&[]);
    outbox.execute(&format!(
        "INSERT INTO outbox SELECT n, 't' || 1 + n % {TOPICS}, 'k', 'v' FROM generate_series(1, {}) n",
        2 * TOPICS
    ));
    let end = outbox.wal_end();
    wait_until(4 * PATIENCE, "all topics have their events", || outbox.confirmed() >= end);
    claim_small(&walpost);
    let metrics = walpost.get("/metrics").body;
    println!("{} MB, {} bytes of metrics", walpost.peak_mb(), metrics.len());
}

/// Case 57.
#[test]
fn waiting_for_what_is_away_costs_nearly_nothing() {
    let server = Postgres::start(Version::NEWEST, &Settings::default());
    let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
    outbox.topic("t", 1);
    let without_kafka = Walpost::relay(&outbox.database, outbox.kafka, &[("WALPOST_KAFKA_BROKERS", "127.0.0.1:1")]);
    without_kafka.wait_for_log(PATIENCE, "streaming slot=");
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    wait_until(PATIENCE, "it is noticed", || without_kafka.get("/readyz").status == 503);
    claim_waiting_is_cheap(&without_kafka);
    server.stop(Stop::Fast);
    wait_until(PATIENCE, "it is noticed", || without_kafka.get("/readyz").body.contains("stream:"));
    claim_waiting_is_cheap(&without_kafka);
}

#[test]
fn waiting_for_kafka_costs_nearly_nothing_under_exactly_once_delivery_either() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let once = ("WALPOST_KAFKA_DELIVERY", "exactly_once");
    drop(outbox.relay(&[once])); // the slot, and its record
    let walpost = outbox.relay(&[once, ("WALPOST_KAFKA_BROKERS", "127.0.0.1:1")]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    wait_until(PATIENCE, "it is noticed", || walpost.get("/readyz").status == 503);
    claim_waiting_is_cheap(&walpost);
}

/// Long enough that events in flight count as stalled, which is a cause beside the broker's absence.
const OUTAGE: Duration = Duration::from_secs(16);
/// How many lines that may cost.
const LINES: usize = 8;

/// Case 57.
#[test]
fn a_broker_that_is_away_fills_no_log() {
    let kafka = victim();
    let relay = |env: &[(&str, &str)]| {
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
        outbox.topic("t", 1);
        let walpost = outbox.relay(env);
        outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
        outbox.wait_until_confirmed();
        (outbox, walpost)
    };
    let relays = [relay(&[]), relay(&[("WALPOST_KAFKA_DELIVERY", "exactly_once")])];
    let lines = || relays.iter().map(|(_, walpost)| walpost.log().lines().count()).collect::<Vec<_>>();
    let before = lines();
    kafka.kill();
    for (outbox, _) in &relays {
        outbox.execute("INSERT INTO outbox VALUES ('2', 't', 'k', '')");
    }
    stays(OUTAGE, "few lines", || lines().iter().zip(&before).all(|(now, before)| now - before <= LINES));
    kafka.start_again();
    for (outbox, walpost) in &relays {
        assert!(walpost.log().contains("kafka is unreachable"), "{}", walpost.log());
        outbox.wait_until_confirmed();
    }
}
