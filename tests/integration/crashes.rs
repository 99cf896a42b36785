//! Stops and crashes of walpost itself.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::{
    ledger::{EVENT_TYPE, TABLE, Verdict, Writers},
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// Case 11.
#[test]
fn a_clean_stop_amid_writers_leaves_nothing_to_send_again() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic(EVENT_TYPE, 3);
        let mut walpost = outbox.relay(&[]);
        let writers = Writers::start(&outbox, 2);
        for _ in 0..4 {
            wait_until_published(&walpost, &topic, 50);
            assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0), "{}", walpost.log());
            walpost = outbox.relay(&[]);
        }
        let committed = writers.stop();
        outbox.wait_until_confirmed();
        assert_eq!(Verdict::on(&outbox.kafka.read_all(&[&topic]), &committed), Verdict::default());
    });
}

/// Case 4.
#[test]
fn nothing_is_lost_when_walpost_is_killed_again_and_again() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic(EVENT_TYPE, 3);
        let mut walpost = outbox.relay(&[]);
        let writers = Writers::start(&outbox, 3);
        for _ in 0..6 {
            wait_until_published(&walpost, &topic, fastrand::u32(1..300));
            walpost.kill9();
            walpost = outbox.relay(&[]);
        }
        wait_until_published(&walpost, &topic, 100);
        let committed = writers.stop();
        outbox.wait_until_confirmed();
        let verdict = Verdict::on(&outbox.kafka.read_all(&[&topic]), &committed);
        eprintln!("{version:?}: {} committed, {} sent twice", committed.len(), verdict.duplicates);
        assert_eq!(verdict.forgiving_duplicates(), Verdict::default());
    });
}

/// Case 1.
#[test]
fn killed_while_the_broker_is_frozen_everything_arrives_after_both_are_back() {
    let kafka = victim();
    let outboxes = [Version::NEWEST, Version::OLDEST].map(|version| {
        let outbox = Outbox::with(Postgres::shared(version), &kafka, TABLE);
        let topic = outbox.topic(EVENT_TYPE, 3);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
        wait_until_published(&walpost, &topic, 1);
        (outbox, topic, walpost)
    });
    kafka.freeze();
    for (outbox, _, walpost) in &outboxes {
        outbox.execute("INSERT INTO outbox SELECT n, 't', n % 7, n FROM generate_series(1, 2000) n");
        wait_until(PATIENCE, "events are in flight", || walpost.metric("walpost_in_flight_events") >= 2000.0);
        walpost.kill9();
    }
    kafka.thaw();
    for (outbox, topic, _) in &outboxes {
        let _walpost = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        let delivered = deliveries(&kafka.read_all(&[topic]));
        let expected = (1..=2000).map(|number| number.to_string()).chain(["warm".to_owned()]).collect();
        assert_eq!(delivered.into_keys().collect::<std::collections::BTreeSet<_>>(), expected);
    }
}

#[test]
fn a_second_sigterm_stops_at_once() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let walpost = outbox.relay(&[("WALPOST_SHUTDOWN_DRAIN_TIMEOUT_MS", "3600000")]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 'nowhere', 'k', NULL)");
    walpost.wait_for_log(PATIENCE, "held");
    walpost.process().signal(Signal::SIGTERM);
    walpost.wait_for_log(PATIENCE, "told to stop");
    assert_eq!(walpost.sigterm_and_wait(Duration::from_secs(3)), Some(0), "{}", walpost.log());
}

#[test]
fn a_stop_waits_for_kafka_no_longer_than_it_was_told() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let walpost = outbox.relay(&[("WALPOST_SHUTDOWN_DRAIN_TIMEOUT_MS", "500")]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 'nowhere', 'k', NULL)");
    walpost.wait_for_log(PATIENCE, "held");
    assert_eq!(walpost.sigterm_and_wait(Duration::from_secs(4)), Some(0), "{}", walpost.log());
}

fn wait_until_published(walpost: &Walpost, topic: &str, count: u32) {
    let metric = format!("walpost_events_published_total{{topic=\"{topic}\"}}");
    wait_until(PATIENCE, &format!("{count} events of {topic} are published"), || {
        walpost.metrics().get(&metric).is_some_and(|published| *published >= f64::from(count))
    });
}
