//! `kafka.delivery = "exactly_once"`: whoever reads committed records sees each event once, whatever ends walpost.

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries},
    services::{kafka::Kafka, postgres::Version, topics::Received, walpost::Walpost},
};

/// The keys that switch it on.
const ONCE: (&str, &str) = ("WALPOST_KAFKA_DELIVERY", "exactly_once");

impl Outbox<'_> {
    /// A walpost that streams under exactly-once delivery.
    fn relay_once(&self, more: &[(&str, &str)]) -> Walpost {
        self.relay(&[&[ONCE], more].concat())
    }

    /// The topic of its position.
    fn progress_topic(&self) -> String {
        format!("walpost.progress.{}", self.database.name())
    }
}

fn claim_each_once(records: &[Received], ids: impl IntoIterator<Item = String>) {
    let deliveries = deliveries(records);
    let expected = ids.into_iter().map(|id| (id, 1)).collect();
    assert_eq!(deliveries, expected);
}

const TABLE: &str = "CREATE TABLE outbox (id text, event_type text, key text, payload text)";

fn with_text_ids(version: Version) -> Outbox<'static> {
    Outbox::with(crate::services::postgres::Postgres::shared(version), Kafka::shared(), TABLE)
}

#[test]
fn events_arrive_once_and_the_position_behind_them_is_stored() {
    at_both_ends(|version| {
        let outbox = with_text_ids(version);
        let topic = outbox.topic("t", 3);
        let walpost = outbox.relay_once(&[]);
        outbox.execute("INSERT INTO outbox SELECT n, 't', 'k' || n % 7, n FROM generate_series(1, 500) n");
        outbox.wait_until_confirmed();
        claim_each_once(&outbox.kafka.read_all(&[&topic]), (1..=500).map(|n| n.to_string()));
        let stored = outbox.kafka.read_all(&[&outbox.progress_topic()]);
        let last = stored.last().expect("a position");
        let value = String::from_utf8_lossy(last.value.as_deref().expect("a value"));
        assert_eq!(last.key.as_deref(), Some(outbox.database.name().as_bytes()));
        assert!(value.contains(outbox.database.name()) && value.contains("end_lsn"), "{value}");
        walpost.wait_until_ready(PATIENCE);
        assert!(walpost.metric("walpost_kafka_transactions_total{outcome=\"committed\"}") >= 1.0);
    });
}

#[test]
fn a_transaction_that_is_too_large_for_one_is_split_and_a_kill_in_between_repeats_nothing() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let limit = ("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "1000");
    let walpost = outbox.relay_once(&[limit, ("CRASH_KILL", "after_commit:4")]);
    outbox.execute("INSERT INTO outbox SELECT n, 't', 'k' || n % 7, n FROM generate_series(1, 20000) n");
    walpost.wait(PATIENCE);
    let walpost = outbox.relay_once(&[limit]);
    outbox.wait_until_confirmed();
    claim_each_once(&outbox.kafka.read_all(&[&topic]), (1..=20000).map(|n| n.to_string()));
    assert!(walpost.metric("walpost_skipped_events_total") >= 1000.0, "{}", walpost.log());
}
