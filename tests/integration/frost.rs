//! A broker that stands still.

use std::{collections::BTreeSet, thread, time::Duration};

use crate::{
    halts::ids,
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, deliveries, lsn, stays},
    services::{
        kafka::{Kafka, Settings},
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// More than the 15 s after which the server gives a silent walpost up, and more than two of its keepalives.
const FROST: Duration = Duration::from_secs(18);
/// More than fits in flight.
const FLOOD: u32 = 30_000;

/// An outbox whose walpost has delivered its first event.
struct Warm<'a> {
    outbox: Outbox<'a>,
    walpost: Walpost,
    topic: String,
}

impl<'a> Warm<'a> {
    fn new(version: Version, kafka: &'a Kafka) -> Self {
        let outbox = Outbox::with(Postgres::shared(version), kafka, TABLE);
        let topic = outbox.topic("t", 3);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
        outbox.wait_until_confirmed();
        Self { outbox, walpost, topic }
    }

    fn in_flight(&self) -> f64 {
        self.walpost.metric("walpost_in_flight_events")
    }
}

/// Two on each server: one reaches its bound and reads no more, the other reads on with an event in flight.
/// Cases 1, 2 and 19: nothing is confirmed meanwhile, whatever is written elsewhere, and it is one connection throughout.
#[test]
fn a_frozen_broker_costs_neither_memory_nor_the_connection_and_nothing_is_confirmed() {
    let kafka = victim();
    let flooded = [Version::NEWEST, Version::OLDEST].map(|version| Warm::new(version, &kafka));
    let trickling = [Version::NEWEST, Version::OLDEST].map(|version| Warm::new(version, &kafka));
    kafka.freeze();
    thread::scope(|scope| {
        for (flooded, trickling) in flooded.iter().zip(&trickling) {
            scope.spawn(|| claim_calm_when_flooded(flooded));
            scope.spawn(|| claim_that_unrelated_writes_confirm_nothing(trickling));
        }
    });
    kafka.thaw();
    for (side, last) in flooded.iter().zip([FLOOD; 2]).chain(trickling.iter().zip([0; 2])) {
        side.outbox.wait_until_confirmed();
        let delivered = deliveries(&kafka.read_all(&[&side.topic]));
        let expected: BTreeSet<_> = (0..=last).map(|number| number.to_string()).chain(["warm".to_owned()]).collect();
        assert_eq!(delivered.values().max(), Some(&1), "something was sent twice");
        assert_eq!(delivered.into_keys().collect::<BTreeSet<_>>(), expected);
        assert!(side.walpost.metric("walpost_reconnects_total{side=\"replication\"}") < 1.0);
    }
}

fn claim_calm_when_flooded(side: &Warm<'_>) {
    const MEGABYTE: u64 = 1024 * 1024;
    let Warm { outbox, walpost, .. } = side;
    let walsender = outbox.walsender();
    assert!(walsender.is_some());
    outbox.execute("INSERT INTO outbox VALUES ('0', 't', 'k', NULL)");
    let after_first = outbox.wal_end();
    outbox.execute(&format!(
        "DO $$ BEGIN
           FOR n IN 1..{FLOOD} LOOP
             INSERT INTO outbox VALUES (n, 't', n % 100, repeat('x', 300));
             IF n % 100 = 0 THEN COMMIT; END IF;
           END LOOP;
         END $$"
    ));
    wait_until(PATIENCE, "the in-flight bound is reached", || side.in_flight() >= 20_000.0);
    let memory = walpost.resident_bytes();
    stays(FROST, "one connection, nothing confirmed, no more memory", || {
        outbox.walsender() == walsender
            && outbox.confirmed() < after_first
            && walpost.resident_bytes() < memory + 8 * MEGABYTE
    });
    assert!(side.in_flight() <= 20_000.0);
    let answer = walpost.get("/readyz");
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("kafka"), "{}", answer.body);
}

fn claim_that_unrelated_writes_confirm_nothing(side: &Warm<'_>) {
    let Warm { outbox, walpost, .. } = side;
    let walsender = outbox.walsender();
    outbox.execute("CREATE TABLE other (a int)");
    outbox.execute("INSERT INTO outbox VALUES ('0', 't', 'k', NULL)");
    let after_first = outbox.wal_end();
    stays(FROST, "the slot stands before the event", || {
        outbox.execute("INSERT INTO other VALUES (1)");
        outbox.walsender() == walsender && outbox.confirmed() < after_first
    });
    let status = walpost.status();
    let received = lsn(status["received_lsn"].as_str().expect("it has received something"));
    assert!(received > after_first, "the stream went on meanwhile");
}

/// Case 15: the request is given up while the broker may still have it, and goes out again; what comes behind it waits.
#[test]
fn a_request_that_is_sent_again_is_not_overtaken_by_later_events_of_its_key() {
    let kafka = victim();
    let hasty = [
        ("WALPOST_KAFKA_PROPERTIES_REQUEST_TIMEOUT_MS", "2000"),
        ("WALPOST_KAFKA_PROPERTIES_SOCKET_TIMEOUT_MS", "2000"),
        ("WALPOST_LOG_LEVEL", "walpost::librdkafka=debug,info"),
    ];
    for delivery in ["at_least_once", "exactly_once"] {
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
        let topic = outbox.topic("t", 1);
        let env = [&hasty[..], &[("WALPOST_KAFKA_DELIVERY", delivery)]].concat();
        let walpost = outbox.relay(&env);
        let insert = |id: u32| outbox.execute(&format!("INSERT INTO outbox VALUES ({id}, 't', 'k', NULL)"));
        insert(0);
        outbox.wait_until_confirmed();
        for round in 0..3 {
            kafka.freeze();
            insert(3 * round + 1);
            wait_until(PATIENCE, "the request is given up", || {
                walpost.log().matches("REQTMOUT").count() > round as usize
            });
            insert(3 * round + 2);
            insert(3 * round + 3);
            thread::sleep(Duration::from_secs(1));
            kafka.thaw();
            outbox.wait_until_confirmed();
        }
        let mut seen = Vec::new();
        for id in ids(&outbox, &topic) {
            if !seen.contains(&id) {
                seen.push(id);
            }
        }
        assert_eq!(seen, (0..=9).map(|id| id.to_string()).collect::<Vec<_>>(), "{delivery}");
    }
}

/// In the middle of a segment; then its broker gives up its only log directory, as it does on a full disk.
#[test]
fn a_broker_whose_disk_is_full_loses_nothing() {
    const LARGEST_FILE: u64 = 16 << 20;
    let kafka = Kafka::start(&Settings::default());
    for once in [false, true] {
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
        let topic = outbox.topic("t", 1);
        let delivery = if once { "exactly_once" } else { "at_least_once" };
        let walpost = outbox.relay(&[("WALPOST_KAFKA_DELIVERY", delivery)]);
        outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
        outbox.wait_until_confirmed();
        let [broker] = kafka.nodes() else { unreachable!("one was started") };
        broker.limit_files(LARGEST_FILE);
        // more than one file may hold, and no compression helps
        outbox.execute(
            "INSERT INTO outbox SELECT n, 't', 'k', (SELECT string_agg(md5(n || '/' || m), '') FROM generate_series(1, 100) m)
             FROM generate_series(1, 12000) n",
        );
        let end = outbox.wal_end();
        wait_until(2 * PATIENCE, "the broker has given up", || kafka.ended() == 1);
        wait_until(PATIENCE, "walpost says so", || walpost.get("/readyz").status == 503);
        assert!(outbox.confirmed() < end, "confirmed what no broker has");
        kafka.start_again();
        outbox.wait_until_confirmed();
        let delivered = deliveries(&kafka.read_all(&[&topic]));
        assert_eq!(delivered.len(), 12_001);
        assert!(!once || delivered.values().all(|times| *times == 1));
    }
}
