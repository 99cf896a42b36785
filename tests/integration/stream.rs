//! The main job: an insert into the outbox becomes a record.

use std::time::Duration;

use crate::services::{
    kafka::Kafka,
    postgres::{Postgres, Version},
    wait_until,
    walpost::Walpost,
};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn an_insert_reaches_its_topic() {
    for version in Version::MAJORS {
        let (database, kafka) = (Postgres::shared(version).database(), Kafka::shared());
        let name = database.name();
        database.execute("CREATE TABLE outbox (id uuid PRIMARY KEY, event_type text NOT NULL, key text, payload json)");
        let topic = format!("{name}.order.placed");
        kafka.create_topic(&topic, 3, &[]);
        let walpost = Walpost::relay(&database, kafka, &[]);
        walpost.wait_until_ready(PATIENCE);

        database.execute("INSERT INTO outbox VALUES (gen_random_uuid(), 'order.placed', 'k', '{\"a\":  1}')");
        let records = kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
        assert_eq!(records[0].key.as_deref(), Some(&b"k"[..]));
        assert_eq!(records[0].value.as_deref(), Some(&b"{\"a\":  1}"[..]));
        assert_eq!(records[0].header("event_type"), Some("order.placed"));
        wait_until(PATIENCE, "the metrics say so", || {
            walpost.metric(&format!("walpost_events_published_total{{topic=\"{topic}\"}}")) > 0.0
        });
        assert_eq!(walpost.status()["slot"], name);
        assert!(walpost.resident_bytes() > 1_000_000);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0), "{}", walpost.log());
    }
}
