//! Each metric against what moves it. Those of one capability are with its tests: reconnects in `links`, delivery errors in
//! `denied`, dead letters in `dead_letters`, retention in `retention`, polling in `polling`.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, lsn, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        topics::Received,
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// Bytes of a record as they are counted.
fn size(record: &Received) -> f64 {
    let length = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
    let headers = record.headers.iter().map(|(name, value)| name.len() + length(value)).sum::<usize>();
    f64::from(u32::try_from(length(&record.key) + length(&record.value) + headers).expect("a small record"))
}

/// These series have these values, sooner or later.
fn claim(walpost: &Walpost, expected: &[(&str, f64)]) {
    let mut last = BTreeMap::new();
    let wrong = |seen: &BTreeMap<String, f64>| {
        let differs = |(name, value): &&(&str, f64)| seen.get(*name).is_none_or(|seen| (seen - value).abs() > 1e-9);
        expected.iter().filter(differs).map(|(name, value)| format!("{name} is not {value}")).collect::<Vec<_>>()
    };
    let deadline = std::time::Instant::now() + PATIENCE;
    while std::time::Instant::now() < deadline && (last.is_empty() || !wrong(&last).is_empty()) {
        last = walpost.metrics();
    }
    assert_eq!(wrong(&last), [] as [String; 0], "{last:#?}");
}

/// Case 48, when idle.
#[test]
fn what_is_published_is_counted_exactly_and_an_idle_walpost_lags_by_nothing() {
    let outbox = Outbox::shared(Version::NEWEST);
    let [often, rare] = [outbox.topic("often", 3), outbox.topic("rare", 1)];
    let walpost = outbox.relay(&[]);
    for number in 0..3 {
        outbox.execute(&format!(
            "BEGIN; INSERT INTO outbox (event_type, key, payload) SELECT 'often', 'k', '{number}' FROM generate_series(1, 5);
             INSERT INTO outbox (event_type, headers) VALUES ('rare', '{{\"trace\": \"x\"}}'); COMMIT"
        ));
    }
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('rare'); UPDATE outbox SET key = 'n'; DELETE FROM outbox");
    outbox.wait_until_confirmed();
    let bytes = |topic| outbox.kafka.read_all(&[topic]).iter().map(size).sum::<f64>();
    let of = |name: &str, topic: &str| format!("walpost_{name}{{topic=\"{topic}\"}}");
    claim(
        &walpost,
        &[
            (&of("events_published_total", &often), 15.0),
            (&of("events_published_total", &rare), 4.0),
            (&of("published_bytes_total", &often), bytes(&often)),
            (&of("published_bytes_total", &rare), bytes(&rare)),
            ("walpost_transactions_total", 4.0),
            ("walpost_commit_to_ack_seconds_count", 19.0),
            ("walpost_commit_to_ack_seconds_bucket{le=\"+Inf\"}", 19.0),
            ("walpost_in_flight_events", 0.0),
            ("walpost_in_flight_bytes", 0.0),
            ("walpost_replication_lag_seconds", 0.0),
            ("walpost_replication_lag_bytes", 0.0),
            ("walpost_slot_active", 1.0),
            ("walpost_slot_wal_status{status=\"reserved\"}", 1.0),
            ("walpost_slot_wal_status{status=\"missing\"}", 0.0),
            (&format!("walpost_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0),
        ],
    );
    // what retention and clients do meanwhile can only add to it
    let confirmed = outbox.confirmed();
    let position = |name: &str| walpost.metric(&format!("walpost_{name}_lsn"));
    assert!(position("confirmed") >= f64::from(u32::try_from(confirmed).expect("a young server")));
    assert!(position("received") >= position("confirmed"));
    assert!(walpost.metric("walpost_commit_to_ack_seconds_sum") > 0.0);
    assert!(walpost.metric("walpost_slot_retained_wal_bytes") > 0.0);
    assert!(!walpost.metrics().contains_key("walpost_slot_safe_wal_bytes"), "this server has no limit");
}

/// Case 48.
#[test]
fn lag_grows_while_the_broker_is_frozen_and_is_gone_behind_it() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    outbox.topic("t", 1);
    let walpost = outbox.relay(&[
        ("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "10"),
        ("WALPOST_KAFKA_PROPERTIES_STATISTICS_INTERVAL_MS", "5000"),
    ]);
    outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
    outbox.wait_until_confirmed();
    claim(&walpost, &[("walpost_kafka_broker_up{broker=\"1\"}", 1.0)]);
    // a moment in which the topic was asked for
    assert!(walpost.metric("walpost_backpressure_seconds_total") < 1.0);
    assert!(walpost.metric("walpost_kafka_round_trip_seconds{broker=\"1\"}") > 0.0);

    kafka.freeze();
    outbox.execute("INSERT INTO outbox SELECT n, 't', 'k', repeat('x', 100) FROM generate_series(1, 100) n");
    wait_until(PATIENCE, "lag of more than 3 s", || walpost.metric("walpost_replication_lag_seconds") > 3.0);
    let seen = walpost.metrics();
    let at_least = |name: &str, least: f64| assert!(seen[name] >= least, "{name}: {}", seen[name]);
    at_least("walpost_replication_lag_bytes", 10_000.0);
    at_least("walpost_backpressure_seconds_total", 2.0);
    at_least("walpost_in_flight_bytes", 1000.0);
    claim(&walpost, &[("walpost_in_flight_events", 10.0), ("walpost_kafka_queue_messages", 10.0)]);
    assert!(walpost.metric("walpost_kafka_queue_bytes") >= 1000.0);
    kafka.thaw();
    outbox.wait_until_confirmed();
    claim(
        &walpost,
        &[
            ("walpost_replication_lag_seconds", 0.0),
            ("walpost_replication_lag_bytes", 0.0),
            ("walpost_in_flight_events", 0.0),
            ("walpost_in_flight_bytes", 0.0),
        ],
    );
    let waited = walpost.metric("walpost_backpressure_seconds_total");
    stays(Duration::from_secs(1), "an idle walpost waits for nothing", || {
        (walpost.metric("walpost_backpressure_seconds_total") - waited).abs() < 1e-9
    });
}

/// As after a machine's sleep, or when somebody sets its clock: of walpost's clocks only the wall clock jumps. Case 48.
#[test]
fn a_wall_clock_that_jumps_shows_no_lag_and_stops_nothing() {
    // not by libfaketime: it does not reach the waits of librdkafka's threads, which then stand for as long as the jump
    let file = crate::services::run::folder("clock").join("offset");
    let set = |offset: &str| std::fs::write(&file, offset).expect("a file in our own folder");
    let outbox = Outbox::shared(Version::NEWEST);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[("CRASH_CLOCK", file.to_str().expect("a plain path"))]);
    let now = || {
        let overview: serde_json::Value =
            serde_json::from_str(&walpost.get("/status/history").body).expect("it is JSON");
        overview["now_ms"].as_f64().expect("a number") / 1000.0
    };
    for (number, jump) in [0.0, 3600.0, -3600.0, 86_400.0].into_iter().enumerate() {
        set(&format!("{}", jump * 1e6));
        assert!(
            (now() - std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64() - jump).abs()
                < 60.0,
            "the clock did not jump"
        );
        // held for a moment: an event that waits has an age
        outbox.execute(&format!("INSERT INTO outbox (event_type) VALUES ('late{number}')"));
        let lag = || walpost.metric("walpost_replication_lag_seconds");
        wait_until(PATIENCE, "an event that waits", || lag() > 0.2);
        assert!(lag() < 30.0, "{} s behind after a jump of {jump} s", lag());
        outbox.topic(&format!("late{number}"), 1);
        outbox.execute("INSERT INTO outbox (event_type) VALUES ('t')");
        outbox.wait_until_confirmed();
        claim(&walpost, &[("walpost_replication_lag_seconds", 0.0)]);
    }
    walpost.wait_for_log(PATIENCE, "the clock was set back");
    assert_eq!(outbox.kafka.read_all(&[&topic]).len(), 4);
    assert!(walpost.metric("walpost_commit_to_ack_seconds_sum") < 120.0);
}

/// What an alert needs to know before the slot is lost. Case 58.
#[test]
fn a_slot_that_is_held_back_shows_what_it_costs_and_what_is_left() {
    let settings = [("max_wal_size", "32MB"), ("min_wal_size", "32MB"), ("max_slot_wal_keep_size", "256MB")];
    let settings = settings.into_iter().fold(Settings::default(), |all, (name, value)| all.set(name, value));
    let server = Postgres::start(Version::NEWEST, &settings);
    let outbox = Outbox::new(&server, Kafka::shared());
    let walpost = outbox.relay(&[]);
    wait_until(PATIENCE, "a first look", || walpost.metrics().contains_key("walpost_slot_safe_wal_bytes"));
    let before = walpost.metrics();
    assert!(before["walpost_slot_safe_wal_bytes"] > 200e6, "{}", before["walpost_slot_safe_wal_bytes"]);
    // nobody creates the topic, so the event is held
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('no-such-topic')");
    let held = outbox.wal_end();
    for _ in 0..6 {
        outbox.execute("SELECT pg_logical_emit_message(false, 'noise', 'x'); SELECT pg_switch_wal()");
    }
    outbox.execute("CHECKPOINT");
    claim(
        &walpost,
        &[("walpost_slot_wal_status{status=\"extended\"}", 1.0), ("walpost_slot_wal_status{status=\"reserved\"}", 0.0)],
    );
    let after = walpost.metrics();
    let grown = after["walpost_slot_retained_wal_bytes"] - before["walpost_slot_retained_wal_bytes"];
    let shrunk = before["walpost_slot_safe_wal_bytes"] - after["walpost_slot_safe_wal_bytes"];
    assert!(grown > 60e6 && shrunk > 60e6, "retained grew by {grown}, safe shrank by {shrunk}");
    assert!(after["walpost_replication_lag_bytes"] > 60e6);
    assert!(after["walpost_replication_lag_seconds"] > 0.0);
    assert!(outbox.confirmed() <= held);
    assert!(lsn(walpost.status()["confirmed_lsn"].as_str().expect("known")) <= held);
}
