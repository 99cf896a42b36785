//! A broker that stands still.

use std::{collections::BTreeSet, thread, time::Duration};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, deliveries, lsn, stays},
    services::{
        kafka::{self, Kafka},
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
};

/// More than the 15 s after which the server gives a silent walpost up.
const FROST: Duration = Duration::from_secs(18);

/// An outbox whose walpost has delivered its first event: `warm`.
struct Warm<'a> {
    outbox: Outbox<'a>,
    walpost: Walpost,
    topic: String,
}

impl<'a> Warm<'a> {
    /// One of the newest and one of the oldest major, then the broker stands still.
    fn at_both_ends_then_freeze(kafka: &'a Kafka) -> [Self; 2] {
        let warm = [Version::NEWEST, Version::OLDEST].map(|version| {
            let outbox = Outbox::with(Postgres::shared(version), kafka, TABLE);
            let topic = outbox.topic("t", 3);
            let walpost = outbox.relay(&[]);
            outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
            outbox.wait_until_confirmed();
            Self { outbox, walpost, topic }
        });
        kafka.freeze();
        warm
    }

    fn in_flight(&self) -> f64 {
        self.walpost.metric("walpost_in_flight_events")
    }
}

#[test]
fn a_frozen_broker_costs_neither_memory_nor_the_replication_connection() {
    let kafka = Kafka::start(&kafka::Settings::default());
    let sides = Warm::at_both_ends_then_freeze(&kafka);
    thread::scope(|scope| {
        for side in &sides {
            scope.spawn(|| claim_calm_while_frozen(side));
        }
    });
    kafka.thaw();
    for Warm { outbox, walpost, topic } in &sides {
        outbox.wait_until_confirmed();
        let delivered = deliveries(&kafka.read_all(&[topic]));
        let expected: BTreeSet<_> = (0..=40_000).map(|number| number.to_string()).chain(["warm".to_owned()]).collect();
        assert_eq!(delivered.values().max(), Some(&1), "something was sent twice");
        assert_eq!(delivered.into_keys().collect::<BTreeSet<_>>(), expected);
        assert!(walpost.metric("walpost_reconnects_total{side=\"replication\"}") < 1.0);
    }
}

fn claim_calm_while_frozen(side: &Warm<'_>) {
    const MEGABYTE: u64 = 1024 * 1024;
    let Warm { outbox, walpost, .. } = side;
    let walsender = outbox.walsender();
    assert!(walsender.is_some());
    outbox.execute("INSERT INTO outbox VALUES ('0', 't', 'k', NULL)");
    let after_first = outbox.wal_end();
    outbox.execute(
        "DO $$ BEGIN
           FOR n IN 1..40000 LOOP
             INSERT INTO outbox VALUES (n, 't', n % 100, repeat('x', 300));
             IF n % 100 = 0 THEN COMMIT; END IF;
           END LOOP;
         END $$",
    );
    wait_until(PATIENCE, "the in-flight bound is reached", || side.in_flight() >= 20_000.0);
    let memory = walpost.resident_bytes();
    stays(FROST, "one connection, nothing confirmed, no more memory", || {
        outbox.walsender() == walsender
            && outbox.confirmed() < after_first
            && walpost.resident_bytes() < memory + 8 * MEGABYTE
    });
    assert!(side.in_flight() <= 20_000.0);
    assert_eq!(walpost.get("/readyz").status, 503);
    assert!(walpost.get("/readyz").body.contains("kafka"), "{}", walpost.get("/readyz").body);
}

/// Keepalives come at least every 7.5 s: half of the `wal_sender_timeout` that walpost sets.
#[test]
fn keepalives_and_unrelated_writes_confirm_nothing_while_an_event_is_in_flight() {
    let kafka = Kafka::start(&kafka::Settings::default());
    let sides = Warm::at_both_ends_then_freeze(&kafka);
    thread::scope(|scope| {
        for Warm { outbox, walpost, .. } in &sides {
            scope.spawn(move || {
                outbox.execute("CREATE TABLE other (a int)");
                outbox.execute("INSERT INTO outbox VALUES ('0', 't', 'k', NULL)");
                let after_first = outbox.wal_end();
                stays(Duration::from_secs(9), "the slot stands before the event", || {
                    outbox.execute("INSERT INTO other VALUES (1)");
                    outbox.confirmed() < after_first
                });
                let status = walpost.status();
                let received = lsn(status["received_lsn"].as_str().expect("it has received something"));
                assert!(received > after_first, "the stream went on meanwhile");
            });
        }
    });
    kafka.thaw();
    for Warm { outbox, topic, .. } in &sides {
        outbox.wait_until_confirmed();
        assert_eq!(deliveries(&kafka.read_all(&[topic])).get("0"), Some(&1));
    }
}
