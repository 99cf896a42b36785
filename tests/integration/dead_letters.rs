//! Poison goes to the dead-letter topic: exactly the culprit, and nothing else moves for it.

use std::time::Duration;

use crate::{
    bounds::MEMORY_MB,
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        topics::Received,
        wait_until,
        walpost::Walpost,
    },
};

const TABLE: &str = "CREATE TABLE outbox \
    (id text, event_type text, key text, payload text, headers jsonb, created_at timestamptz NOT NULL DEFAULT now())";

/// Random digits: no compression helps.
const NOISE: &str = "(SELECT string_agg(md5(n || '/' || m), '') FROM generate_series(1, {}) m)";

struct Case {
    outbox: Outbox<'static>,
    graves: String,
}

impl Case {
    /// An outbox whose poison goes to a topic that exists.
    fn new(version: Version) -> Self {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let graves = outbox.topic("dead-letter", 1);
        Self { outbox, graves }
    }

    fn relay(&self) -> Walpost {
        self.outbox.relay(&[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &self.graves)])
    }

    fn read(&self, topic: &str) -> Vec<Received> {
        self.outbox.kafka.read_all(&[topic])
    }
}

fn ids(records: &[Received]) -> Vec<&str> {
    records.iter().map(|record| record.header("id").expect("an id")).collect()
}

fn expect_ids(numbers: impl Iterator<Item = u32>) -> Vec<String> {
    numbers.map(|number| number.to_string()).collect()
}

fn claim_counted(walpost: &Walpost, topic: &str, reason: &str, count: u32) {
    let series = format!("walpost_dead_lettered_total{{reason=\"{reason}\",topic=\"{topic}\"}}");
    assert!((walpost.metric(&series) - f64::from(count)).abs() < 0.5, "{series}: {}", walpost.metric(&series));
}

/// Cases 3 and 59: the broker refuses the whole batch.
#[test]
fn a_record_that_is_too_large_is_buried_alone_and_its_neighbours_arrive_once() {
    at_both_ends(|version| {
        let case = Case::new(version);
        let outbox = &case.outbox;
        let topic = outbox.topic_name("t");
        outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000")]);
        let walpost = case.relay();
        let noise = NOISE.replace("{}", "CASE n WHEN 60 THEN 200 ELSE 10 END");
        outbox.execute(&format!(
            "INSERT INTO outbox SELECT n, 't', 'key ' || n % 3, {noise}, '{{\"a\": 1}}' FROM generate_series(1, 100) n"
        ));
        outbox.wait_until_confirmed();
        assert_eq!(ids(&case.read(&topic)), expect_ids((1..=100).filter(|n| *n != 60)));
        let graves = case.read(&case.graves);
        assert_eq!(ids(&graves), ["60"]);
        let [grave] = &graves[..] else { unreachable!("one id") };
        assert_eq!((grave.key.as_deref(), grave.value.as_deref()), (Some(&b"key 0"[..]), None));
        let payload = outbox.text("SELECT encode(sha256(payload::bytea), 'hex') FROM outbox WHERE id = '60'");
        let headers =
            ["event_type", "a", "walpost_topic", "walpost_attempts", "walpost_value_bytes", "walpost_value_sha256"];
        let expected = ["t", "1", &topic, "2", "6400", &payload].map(Some);
        assert_eq!(headers.map(|name| grave.header(name)), expected);
        assert!(grave.header("walpost_error").is_some_and(|text| text.contains("MessageSizeTooLarge")));
        assert!(grave.header("walpost_position").is_some_and(|text| text.ends_with("/59")));
        claim_counted(&walpost, &topic, "too_large", 1);
        walpost.wait_until_ready(PATIENCE);
        // and it goes on
        outbox.execute("INSERT INTO outbox VALUES ('after', 't', 'k', '')");
        outbox.wait_until_confirmed();
        assert_eq!(case.read(&topic).len(), 100);
    });
}

/// Case 59.
#[test]
fn innocents_of_a_refused_batch_are_never_called_poison() {
    at_both_ends(|version| {
        let case = Case::new(version);
        let outbox = &case.outbox;
        let compacted = outbox.topic_name("compacted");
        outbox.kafka.create_topic(&compacted, 1, &[("cleanup.policy", "compact")]);
        let dated = outbox.topic("dated", 1);
        let walpost = case.relay();
        outbox.execute(
            "INSERT INTO outbox SELECT n, 'compacted', CASE WHEN n <> 7 THEN 'k' END, 'v' FROM generate_series(1, 20) n;
             INSERT INTO outbox SELECT n, 'dated', 'k', 'v', NULL, now() + CASE n WHEN 7 THEN interval '11 days' ELSE '0' END
             FROM generate_series(1, 20) n",
        );
        outbox.wait_until_confirmed();
        for topic in [&compacted, &dated] {
            assert_eq!(ids(&case.read(topic)), expect_ids((1..=20).filter(|n| *n != 7)), "{topic}\n{}", walpost.log());
        }
        let graves = case.read(&case.graves);
        let mut found: Vec<_> = graves
            .iter()
            .map(|grave| (grave.header("walpost_topic"), grave.key.as_deref(), grave.value.as_deref()))
            .collect();
        found.sort_unstable();
        let value = Some(&b"v"[..]);
        assert_eq!(found, [(Some(compacted.as_str()), None, value), (Some(dated.as_str()), Some(&b"k"[..]), value)]);
        claim_counted(&walpost, &compacted, "invalid_record", 1);
        claim_counted(&walpost, &dated, "invalid_timestamp", 1);
    });
}

/// Case 60.
#[test]
fn a_batch_that_is_larger_than_its_topic_takes_shrinks_and_nothing_is_poison() {
    let case = Case::new(Version::NEWEST);
    let outbox = &case.outbox;
    let topic = outbox.topic_name("t");
    outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "2000")]);
    let walpost = outbox.relay(&[]); // and without a dead-letter topic nothing halts
    for round in 0..5 {
        let noise = NOISE.replace("{}", "2");
        outbox.execute(&format!(
            "INSERT INTO outbox SELECT n, 't', 'k', {noise} FROM generate_series({}, {}) n",
            round * 500 + 1,
            round * 500 + 500
        ));
        outbox.wait_until_confirmed();
    }
    assert_eq!(ids(&case.read(&topic)), expect_ids(1..=2500));
    let restarts = walpost.metric("walpost_producer_restarts_total{reason=\"batch_refused\"}");
    assert!((1.0..=3.0).contains(&restarts), "batches did not shrink: {restarts} restarts");
    assert!(case.read(&case.graves).is_empty());
}

/// Case 35 and its neighbours.
#[test]
fn what_has_no_topic_or_is_no_event_is_buried_and_others_flow() {
    at_both_ends(|version| {
        let case = Case::new(version);
        let outbox = &case.outbox;
        let topic = outbox.topic("t", 1);
        let walpost = case.relay();
        outbox.execute(
            "INSERT INTO outbox VALUES
               ('1', 't', 'k', 'v', NULL), ('2', 'Order Created', 'k', 'v', NULL), ('3', 'a/b', 'k', 'v', NULL), ('4', 'Outer$Inner', 'k', 'v', NULL),
               ('5', repeat('x', 300), 'k', 'v', NULL), ('6', NULL, 'k', 'v', NULL), (NULL, 't', 'k', 'v', NULL), ('8', 't', 'k', 'v', '[1]'),
               ('9', 't', 'k', 'v', NULL)",
        );
        outbox.wait_until_confirmed();
        assert_eq!(ids(&case.read(&topic)), ["1", "9"], "{}", walpost.log());
        let graves = case.read(&case.graves);
        let found: Vec<_> = graves.iter().map(|grave| grave.header("id")).collect();
        assert_eq!(found, [Some("2"), Some("3"), Some("4"), Some("5"), Some("6"), None, Some("8")]);
        for grave in &graves {
            assert_eq!((grave.key.as_deref(), grave.value.as_deref()), (Some(&b"k"[..]), Some(&b"v"[..])));
            assert_eq!(grave.header("walpost_attempts"), Some("0"));
            assert!(grave.header("walpost_error").is_some_and(|text| !text.is_empty()));
        }
        assert_eq!(graves[0].header("walpost_topic"), Some(outbox.topic_name("Order Created").as_str()));
        assert_eq!(graves[6].header("walpost_topic"), Some(topic.as_str()));
        claim_counted(&walpost, "", "illegal_topic", 4);
        claim_counted(&walpost, "", "undecodable", 2);
        claim_counted(&walpost, &topic, "bad_headers", 1);
    });
}

#[test]
fn dead_letters_are_listed_with_reasons_and_go_back_when_asked() {
    let case = Case::new(Version::NEWEST);
    let outbox = &case.outbox;
    let topic = outbox.topic_name("t");
    outbox.kafka.create_topic(&topic, 1, &[("cleanup.policy", "compact"), ("max.message.bytes", "3000")]);
    let walpost = case.relay();
    let noise = NOISE.replace("{}", "200");
    outbox.execute(&format!(
        "INSERT INTO outbox VALUES ('1', 't', NULL, 'v', '{{\"a\": 1}}'), ('2', 't', 'k', 'v', NULL);
         INSERT INTO outbox SELECT n, 't', 'k', {noise} FROM generate_series(3, 3) n"
    ));
    outbox.wait_until_confirmed();
    let env = [("WALPOST_KAFKA_DEAD_LETTER_TOPIC", case.graves.as_str())];
    let command = |arguments: &[&str]| outbox.command(&[&["dead-letters"], arguments].concat(), &env);

    let listed = command(&["list", "--format", "json"]);
    let letters: serde_json::Value =
        serde_json::from_str(&listed.output).unwrap_or_else(|_| panic!("{}", listed.output));
    let of = |field: &str| letters.as_array().expect("a list").iter().map(|it| it[field].clone()).collect::<Vec<_>>();
    assert_eq!(of("id"), ["1", "3"]);
    assert_eq!(of("topic"), [topic.as_str(), topic.as_str()]);
    assert_eq!(of("value_bytes"), [1, 6400]);
    let text = command(&["list"]).output;
    assert!(text.contains("InvalidRecord") && text.contains("left out"), "{text}");

    for (arguments, said) in [
        (["requeue", "3"], "max.message.bytes"),
        (["requeue", "9"], "no dead letter"),
        (["requeue", "--all"], "cannot go back"),
    ] {
        let refused = command(&arguments);
        assert_eq!(refused.code, Some(1));
        assert!(refused.output.contains(said), "{}", refused.output);
    }
    let refused = command(&["requeue", "1"]);
    assert!(refused.code == Some(1) && refused.output.contains("nvalid"), "the topic takes it now? {}", refused.output);
    outbox.kafka.alter_topic(&topic, &[("cleanup.policy", "delete")]);
    assert_eq!(command(&["requeue", "1"]).code, Some(0));
    let records = case.read(&topic);
    assert_eq!(ids(&records), ["2", "1"]);
    assert_eq!((records[1].key.as_deref(), records[1].value.as_deref()), (None, Some(&b"v"[..])));
    assert_eq!((records[1].header("a"), records[1].header("walpost_error")), (Some("1"), None));
    drop(walpost);
}

#[test]
fn nothing_is_confirmed_past_poison_that_has_no_grave_yet() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let graves = outbox.topic_name("dead-letter");
    let topic = outbox.topic_name("t");
    outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000")]);
    let walpost = outbox.relay(&[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &graves)]);
    let before = outbox.confirmed();
    let noise = NOISE.replace("{}", "CASE n WHEN 1 THEN 200 ELSE 1 END");
    outbox.execute(&format!("INSERT INTO outbox SELECT n, 't', 'k', {noise} FROM generate_series(1, 3) n"));
    wait_until(PATIENCE, "walpost names the dead-letter topic", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains(&graves)
    });
    let event = outbox.text("SELECT pg_current_wal_insert_lsn()");
    assert!((before..crate::outbox::lsn(&event)).contains(&outbox.confirmed()));
    outbox.kafka.create_topic(&graves, 1, &[]);
    outbox.wait_until_confirmed();
    assert_eq!(ids(&outbox.kafka.read_all(&[&graves])), ["1"]);
    assert_eq!(ids(&outbox.kafka.read_all(&[&topic])), ["2", "3"]);
    walpost.wait_until_ready(PATIENCE);
}

#[test]
fn a_flood_of_poison_neither_starves_the_healthy_nor_fills_memory_or_log() {
    let case = Case::new(Version::NEWEST);
    let outbox = &case.outbox;
    let topic = outbox.topic_name("small");
    outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "1000")]);
    let healthy = outbox.topic("healthy", 3);
    let walpost = case.relay();
    let noise = NOISE.replace("{}", "100");
    outbox.execute(&format!(
        "DO $$ BEGIN FOR n IN 1..2000 LOOP
           INSERT INTO outbox VALUES (n, 'small', 'k' || n % 7, {noise}), (n, 'healthy', 'k' || n % 7, ''); COMMIT;
         END LOOP; END $$"
    ));
    let published = format!("walpost_events_published_total{{topic=\"{healthy}\"}}");
    wait_until(Duration::from_mins(1), "the healthy arrive", || {
        walpost.metrics().get(&published).is_some_and(|count| *count >= 2000.0)
    });
    outbox.wait_until_confirmed();
    assert_eq!(case.read(&case.graves).len(), 2000);
    assert_eq!(case.read(&healthy).len(), 2000, "the healthy came twice");
    assert!(case.read(&topic).is_empty());
    assert!(walpost.peak_mb() < MEMORY_MB, "{} MB", walpost.peak_mb());
    assert!(walpost.log().lines().count() < 60, "{}", walpost.log());
}

/// The largest that Postgres can send is 1 GB; what no broker takes is never copied.
#[test]
fn a_giant_is_buried_by_size_and_held_in_memory_once() {
    let case = Case::new(Version::NEWEST);
    let outbox = &case.outbox;
    let topic = outbox.topic("t", 1);
    let walpost = case.relay();
    outbox.execute(
        "INSERT INTO outbox VALUES ('1', 't', 'k', 'v'), ('2', 't', 'k', repeat('x', 300000000)), ('3', 't', 'k', 'v')",
    );
    wait_until(Duration::from_mins(1), "the giant is buried", || {
        walpost.metrics().iter().any(|(name, count)| name.starts_with("walpost_dead_lettered") && *count >= 1.0)
    });
    outbox.wait_until_confirmed();
    assert_eq!(ids(&case.read(&topic)), ["1", "3"]);
    let graves = case.read(&case.graves);
    assert_eq!((ids(&graves), graves[0].header("walpost_value_bytes")), (vec!["2"], Some("300000000")));
    let peak = walpost.peak_mb();
    assert!(peak < 300.0 + MEMORY_MB, "it was held twice: {peak} MB");
}
