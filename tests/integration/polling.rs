//! `postgres.source = "poll"`: the table itself instead of the log, on a table that knows nothing of walpost's names.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use tokio_postgres::{Client, error::SqlState};

use crate::{
    denied::{ALLOW, CREATE_ACLS, DELETE_ACLS, DENY, DESCRIBE, READ, WRITE, acl, ask},
    outbox::{Outbox, PATIENCE, deliveries, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        topics::Received,
        wait, wait_until,
        walpost::{Ended, Walpost, with_environment},
    },
    victim::victim,
};

const TABLE: &str = "CREATE TABLE xabarlar (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hodisa_id uuid NOT NULL DEFAULT gen_random_uuid(),
    tur text NOT NULL,
    foydalanuvchi_id bigint,
    malumot jsonb,
    yaratilgan_vaqt timestamptz NOT NULL DEFAULT now(),
    tarqatilgan_vaqt timestamptz,
    urinishlar int NOT NULL DEFAULT 0)";

const MAPPING: [(&str, &str); 12] = [
    ("WALPOST_POSTGRES_SOURCE", "poll"),
    ("WALPOST_OUTBOX_TABLE", "xabarlar"),
    ("WALPOST_OUTBOX_COLUMNS_ID", "hodisa_id"),
    ("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "tur"),
    ("WALPOST_OUTBOX_COLUMNS_KEY", "foydalanuvchi_id"),
    ("WALPOST_OUTBOX_COLUMNS_PAYLOAD", "malumot"),
    ("WALPOST_OUTBOX_COLUMNS_TIMESTAMP", "yaratilgan_vaqt"),
    ("WALPOST_OUTBOX_COLUMNS_DELIVERED_AT", "tarqatilgan_vaqt"),
    ("WALPOST_OUTBOX_COLUMNS_ATTEMPTS", "urinishlar"),
    ("WALPOST_OUTBOX_COLUMNS_ORDER", "id"),
    ("WALPOST_POLL_INTERVAL_MS", "200"),
    ("WALPOST_POLL_NOTIFY_CHANNEL", "xabar"),
];

/// The versions that the pattern was taught with: 17, and the newest.
fn at_17_and_18(claim: impl Fn(Version) + Sync) {
    let claim = &claim;
    thread::scope(|scope| {
        for version in [Version::Major(17), Version::NEWEST] {
            scope.spawn(move || claim(version));
        }
    });
}

struct Lesson<'a> {
    outbox: Outbox<'a>,
}

impl<'a> Lesson<'a> {
    /// The table, with what `walpost init` adds to it.
    fn new(version: Version, kafka: &'a Kafka) -> Self {
        let lesson = Self { outbox: Outbox::with(Postgres::shared(version), kafka, TABLE) };
        let said = lesson.command(&["init"], &[]);
        assert_eq!(said.code, Some(0), "{}", said.output);
        lesson
    }

    fn shared(version: Version) -> Lesson<'static> {
        Lesson::new(version, Kafka::shared())
    }

    fn with_mapping<T>(&self, env: &[(&str, &str)], run: impl FnOnce(&[(&str, &str)]) -> T) -> T {
        with_environment(&self.outbox.database, self.outbox.kafka, &[&MAPPING[..], env].concat(), run)
    }

    fn command(&self, args: &[&str], env: &[(&str, &str)]) -> Ended {
        self.with_mapping(env, |env| Walpost::run_to_end(args, env))
    }

    /// A relay that has reached the table.
    fn relay(&self, env: &[(&str, &str)]) -> Walpost {
        let walpost = self.with_mapping(env, Walpost::start);
        walpost.wait_for_log(PATIENCE, "polling tables=1");
        walpost
    }

    fn insert(&self, tur: &str, count: u32) {
        self.outbox.execute(&format!(
            "INSERT INTO xabarlar (tur, foydalanuvchi_id, malumot)
             SELECT '{tur}', n % 20, jsonb_build_object('n', n) FROM generate_series(1, {count}) n"
        ));
    }

    fn wait_until_delivered(&self) {
        self.outbox.wait_until_true(2 * PATIENCE, "SELECT count(*) = 0 FROM xabarlar WHERE tarqatilgan_vaqt IS NULL");
    }

    fn ids(&self) -> BTreeSet<String> {
        let rows = self.outbox.database.rows("SELECT hodisa_id FROM xabarlar");
        rows.into_iter().map(|mut row| row.remove(0).expect("an id")).collect()
    }

    /// Every row has arrived, `at_most` times.
    fn claim_all_arrived(&self, topics: &[&str], at_most: usize) {
        let delivered = deliveries(&self.outbox.kafka.read_all(topics));
        assert!(delivered.values().all(|times| *times <= at_most), "something came more than {at_most} times");
        assert_eq!(delivered.into_keys().collect::<BTreeSet<_>>(), self.ids());
    }
}

fn run(client: &Client, sql: &str) -> Result<(), tokio_postgres::Error> {
    wait(client.batch_execute(sql))
}

fn numbers_by_key(records: &[Received]) -> BTreeMap<Vec<u8>, Vec<u64>> {
    let mut numbers: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    for record in records {
        let value: serde_json::Value = serde_json::from_slice(record.value.as_deref().expect("a value")).expect("JSON");
        numbers.entry(record.key.clone().expect("a key")).or_default().push(value["n"].as_u64().expect("a number"));
    }
    numbers
}

#[test]
fn a_rollback_leaves_neither_row_nor_event_and_a_commit_both() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let outbox = &lesson.outbox;
        outbox.execute("CREATE TABLE buyurtmalar (id int)");
        let topic = outbox.topic("t", 1);
        let walpost = lesson.relay(&[]);
        let both = "INSERT INTO buyurtmalar VALUES (1);
                    INSERT INTO xabarlar (tur, foydalanuvchi_id, malumot) VALUES ('t', 7, '{\"a\": 1}')";
        outbox.execute(&format!("BEGIN; {both}; ROLLBACK"));
        assert_eq!(outbox.text("SELECT (SELECT count(*) FROM xabarlar) + (SELECT count(*) FROM buyurtmalar)"), "0");
        outbox.execute(&format!("BEGIN; {both}; COMMIT"));
        lesson.wait_until_delivered();
        assert_eq!(outbox.text("SELECT count(*) FROM buyurtmalar"), "1");
        let records = outbox.kafka.read_all(&[&topic]);
        let [record] = &records[..] else { panic!("{} records", records.len()) };
        assert_eq!(record.header("id"), Some(outbox.text("SELECT hodisa_id FROM xabarlar").as_str()));
        assert_eq!((record.key.as_deref(), record.value.as_deref()), (Some(&b"7"[..]), Some(&b"{\"a\": 1}"[..])));
        assert_eq!((record.header("event_type"), record.header("walpost_position")), (Some("t"), None));
        // nothing of a log was needed
        assert_eq!(outbox.text("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"), "0");
        assert_eq!(outbox.text("SELECT count(*) FROM pg_publication"), "0");
        walpost.wait_until_ready(PATIENCE);
        let status = walpost.status();
        assert_eq!((status["source"].as_str(), status["lag_seconds"].as_f64()), (Some("poll"), Some(0.0)));
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    });
}

#[test]
fn an_event_whose_delivery_fails_stays_with_one_more_attempt_and_arrives_next_time() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let outbox = &lesson.outbox;
        let topic = outbox.topic("t", 1);
        let walpost = lesson.relay(&[]);
        outbox.execute(
            "INSERT INTO xabarlar (tur, foydalanuvchi_id, malumot) VALUES
             ('t', 1, '{\"n\": 1}'), ('yoq', 2, '{\"n\": 2}'), ('t', 2, '{\"n\": 3}'), ('t', 3, '{\"n\": 4}')",
        );
        outbox.wait_until_true(PATIENCE, "SELECT urinishlar >= 1 FROM xabarlar WHERE tur = 'yoq'");
        // the rest goes, but for what comes later of the same key
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 2 FROM xabarlar WHERE tarqatilgan_vaqt IS NOT NULL");
        let left = "SELECT string_agg(malumot->>'n' || ':' || (urinishlar > 0)::text, ' ' ORDER BY id)
                    FROM xabarlar WHERE tarqatilgan_vaqt IS NULL";
        assert_eq!(outbox.text(left), "2:true 3:false");
        stays(Duration::from_secs(1), "a key waits", || outbox.text(left) == "2:true 3:false");
        assert!(walpost.metric("walpost_poll_failed_events") > 0.5);
        assert!(walpost.metric("walpost_poll_failures_total") > 0.5);
        assert_eq!(walpost.get("/readyz").status, 503);
        let late = outbox.topic("yoq", 1);
        lesson.wait_until_delivered();
        lesson.claim_all_arrived(&[&topic, &late], 1);
        walpost.wait_until_ready(PATIENCE);
        assert!(walpost.metric("walpost_poll_failed_events") < 0.5);
    });
}

#[test]
fn poison_of_every_kind_counts_an_attempt_and_lets_the_rest_go() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let outbox = &lesson.outbox;
        let topic = outbox.topic_name("t");
        outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000")]);
        outbox.execute("ALTER TABLE xabarlar ALTER tur DROP NOT NULL");
        let walpost = lesson.relay(&[]);
        let noise = "(SELECT string_agg(md5(n || '/' || m), '') FROM generate_series(1, CASE WHEN n IN (60, 61) THEN 200 ELSE 4 END) m)";
        outbox.execute(&format!(
            "INSERT INTO xabarlar (tur, foydalanuvchi_id, malumot)
             SELECT CASE n WHEN 10 THEN NULL WHEN 20 THEN 'a/b' ELSE 't' END, n, jsonb_build_object('n', n, 'x', {noise})
             FROM generate_series(1, 100) n"
        ));
        let left = "SELECT string_agg(malumot->>'n', ' ' ORDER BY id) FROM xabarlar WHERE tarqatilgan_vaqt IS NULL";
        wait_until(PATIENCE, "all but the poison is delivered", || {
            outbox.value(left).as_deref() == Some("10 20 60 61")
        });
        outbox
            .wait_until_true(PATIENCE, "SELECT bool_and(urinishlar > 0) FROM xabarlar WHERE tarqatilgan_vaqt IS NULL");
        assert_eq!(outbox.text("SELECT max(urinishlar) FROM xabarlar WHERE tarqatilgan_vaqt IS NOT NULL"), "0");
        lesson.insert("t", 9);
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 105 FROM xabarlar WHERE tarqatilgan_vaqt IS NOT NULL");
        wait_until(PATIENCE, "others flow on", || outbox.value(left).as_deref() == Some("10 20 60 61"));
        let delivered = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!((delivered.len(), delivered.values().max()), (105, Some(&1)), "{}", walpost.log());
        assert!(!walpost.log().contains("halted"), "{}", walpost.log());
    });
}

/// Case 37.
#[test]
fn a_topic_that_denies_writing_holds_up_its_own_events_only() {
    let kafka = victim();
    let lesson = Lesson::new(Version::NEWEST, &kafka);
    let outbox = &lesson.outbox;
    let (topic, denied) = (outbox.topic("t", 1), outbox.topic("denied", 1));
    let acls = [acl(&denied, WRITE, DENY), acl(&denied, DESCRIBE, ALLOW), acl(&denied, READ, ALLOW)];
    ask(&kafka, CREATE_ACLS, &acls);
    let walpost = lesson.relay(&[]);
    outbox.execute(
        "INSERT INTO xabarlar (tur, foydalanuvchi_id)
         SELECT CASE n % 2 WHEN 0 THEN 'denied' ELSE 't' END, n % 10 FROM generate_series(1, 100) n",
    );
    outbox.wait_until_true(PATIENCE, "SELECT bool_and(tarqatilgan_vaqt IS NOT NULL) FROM xabarlar WHERE tur = 't'");
    outbox.wait_until_true(PATIENCE, "SELECT count(*) = 5 FROM xabarlar WHERE urinishlar > 0 AND tur = 'denied'");
    wait_until(PATIENCE, "the topic is named", || walpost.get("/readyz").body.contains(&denied));
    ask(&kafka, DELETE_ACLS, &acls);
    lesson.wait_until_delivered();
    lesson.claim_all_arrived(&[&topic, &denied], 2);
    assert_eq!(kafka.record_count(&denied), 50, "what was refused was sent once in the end");
    walpost.wait_until_ready(PATIENCE);
}

#[test]
fn poison_goes_to_the_dead_letter_topic_where_there_is_one() {
    let lesson = Lesson::shared(Version::NEWEST);
    let outbox = &lesson.outbox;
    let (topic, graves) = (outbox.topic("t", 1), outbox.topic("dead-letter", 1));
    let _walpost = lesson.relay(&[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &graves)]);
    outbox.execute("INSERT INTO xabarlar (tur, foydalanuvchi_id) VALUES ('t', 1), ('a/b', 1), ('t', 1)");
    lesson.wait_until_delivered();
    assert_eq!(outbox.text("SELECT sum(urinishlar) FROM xabarlar"), "0");
    assert_eq!(outbox.kafka.read_all(&[&topic]).len(), 2);
    let letters = outbox.kafka.read_all(&[&graves]);
    assert_eq!(letters.len(), 1);
    let meant = outbox.topic_name("a/b");
    assert_eq!(letters[0].header("walpost_topic"), Some(meant.as_str()));
}

#[test]
fn two_relays_side_by_side_send_each_of_200_events_once() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let topic = lesson.outbox.topic("t", 3);
        let small = [("WALPOST_POLL_BATCH", "7")];
        let relays = [lesson.relay(&small), lesson.relay(&small)];
        lesson.insert("t", 200);
        lesson.wait_until_delivered();
        lesson.claim_all_arrived(&[&topic], 1);
        // both had a part in it
        let series = format!("walpost_events_published_total{{topic=\"{topic}\"}}");
        let parts = relays.each_ref().map(|relay| relay.metrics().get(&series).copied().unwrap_or(0.0));
        assert!((parts.iter().sum::<f64>() - 200.0).abs() < 0.5, "{parts:?}");
        assert!(parts.iter().all(|part| *part > 0.5), "{parts:?}");
    });
}

/// Case 14.
#[test]
fn what_commits_late_with_a_lower_id_is_found() {
    let lesson = Lesson::shared(Version::NEWEST);
    let outbox = &lesson.outbox;
    let topic = outbox.topic("t", 1);
    let _walpost = lesson.relay(&[]);
    let late = outbox.database.connect();
    run(&late, "BEGIN; INSERT INTO xabarlar (tur, malumot) VALUES ('t', '1')").expect("a row");
    outbox.execute("INSERT INTO xabarlar (tur, malumot) VALUES ('t', '2')");
    lesson.wait_until_delivered();
    run(&late, "COMMIT").expect("the row is there");
    outbox.wait_until_true(PATIENCE, "SELECT count(tarqatilgan_vaqt) = 2 FROM xabarlar");
    let records = outbox.kafka.read_all(&[&topic]);
    let values: Vec<_> = records.iter().filter_map(|record| record.value.as_deref()).collect();
    assert_eq!(values, [b"2", b"1"]);
}

#[test]
fn a_partitioned_table_is_marked_row_by_row() {
    at_17_and_18(|version| {
        let table = "CREATE TABLE outbox (id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text NOT NULL, key text, payload json,
                       headers jsonb, created_at timestamptz NOT NULL DEFAULT now()) PARTITION BY LIST (key);
                     CREATE TABLE outbox_a PARTITION OF outbox FOR VALUES IN ('a');
                     CREATE TABLE outbox_b PARTITION OF outbox FOR VALUES IN ('b')";
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), table);
        let (topic, graves) = (outbox.topic("t", 1), outbox.topic("late", 1));
        let env = [
            ("WALPOST_POSTGRES_SOURCE", "poll"),
            ("WALPOST_POLL_INTERVAL_MS", "100"),
            ("WALPOST_RETENTION_KEEP", "1h"),
            ("WALPOST_RETENTION_INTERVAL", "1s"),
        ];
        let said = outbox.command(&["init"], &env);
        assert_eq!(said.code, Some(0), "{}", said.output);
        // rows of different fate at the same place in their partitions
        outbox.execute(
            "INSERT INTO outbox (event_type, key, payload) VALUES ('t', 'a', '1'), ('absent', 'b', '2'), ('t', 'a', '3')",
        );
        let _walpost = outbox.start(&["run"], &env);
        outbox.wait_until_true(PATIENCE, "SELECT attempts > 0 FROM outbox_b");
        outbox.wait_until_true(PATIENCE, "SELECT count(delivered_at) = 2 FROM outbox_a");
        assert_eq!(outbox.text("SELECT count(delivered_at) FROM outbox_b"), "0");
        assert_eq!(outbox.text("SELECT sum(attempts) FROM outbox_a"), "0");
        outbox.execute("UPDATE outbox_a SET delivered_at = now() - interval '2 hours'");
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 0 FROM outbox_a");
        outbox.execute("UPDATE outbox_b SET event_type = 'late'");
        outbox.wait_until_true(PATIENCE, "SELECT count(delivered_at) = 1 FROM outbox_b");
        assert_eq!(outbox.kafka.read_all(&[&topic, &graves]).len(), 3);
    });
}

#[test]
fn events_of_a_key_come_in_the_order_of_their_ids() {
    let lesson = Lesson::shared(Version::NEWEST);
    let topic = lesson.outbox.topic("t", 3);
    let _walpost = lesson.relay(&[("WALPOST_POLL_BATCH", "50")]);
    lesson.insert("t", 2000);
    lesson.wait_until_delivered();
    let records = lesson.outbox.kafka.read_all(&[&topic]);
    assert_eq!(records.len(), 2000);
    for (key, numbers) in numbers_by_key(&records) {
        assert!(numbers.is_sorted(), "{key:?}: {numbers:?}");
    }
}

#[test]
fn killed_anywhere_it_loses_nothing() {
    for point in ["poll_after_send:150", "after_ack:60", "poll_before_mark:2", "poll_before_commit:2"] {
        let lesson = Lesson::shared(Version::NEWEST);
        let topic = lesson.outbox.topic("t", 3);
        lesson.insert("t", 300);
        let doomed = lesson.with_mapping(&[("CRASH_KILL", point), ("WALPOST_POLL_BATCH", "100")], Walpost::start);
        assert_eq!(doomed.wait(PATIENCE).code(), None, "killed at {point}");
        let marked = "SELECT hodisa_id FROM xabarlar WHERE tarqatilgan_vaqt IS NOT NULL";
        let marked = lesson.outbox.database.rows(marked);
        let arrived = deliveries(&lesson.outbox.kafka.read_all(&[&topic]));
        assert!(marked.iter().all(|row| arrived.contains_key(row[0].as_deref().expect("an id"))), "{point}");
        let _walpost = lesson.relay(&[("WALPOST_POLL_BATCH", "100")]);
        lesson.wait_until_delivered();
        lesson.claim_all_arrived(&[&topic], 2);
    }
}

#[test]
fn a_broker_that_stands_still_for_20_seconds_loses_nothing_and_keeps_no_transaction_open_for_ever() {
    let kafka = victim();
    let lessons = [Version::Major(17), Version::NEWEST].map(|version| Lesson::new(version, &kafka));
    let topics = lessons.each_ref().map(|lesson| lesson.outbox.topic("t", 3));
    // one that outwaits the broker, and one that gives up and comes again
    let patience = ["30000", "3000"];
    let relays: Vec<_> = lessons
        .iter()
        .zip(patience)
        .map(|(lesson, patience)| lesson.relay(&[("WALPOST_POLL_ACK_TIMEOUT_MS", patience)]))
        .collect();
    for lesson in &lessons {
        lesson.insert("t", 100);
        lesson.wait_until_delivered();
    }
    kafka.freeze();
    for lesson in &lessons {
        lesson.insert("t", 300);
    }
    let undelivered = "SELECT count(*) FROM xabarlar WHERE tarqatilgan_vaqt IS NULL";
    stays(Duration::from_secs(20), "nothing is marked, and no transaction is old", || {
        let longest =
            "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) < 8 FROM pg_stat_activity
                       WHERE datname = current_database() AND pid <> pg_backend_pid()";
        lessons.iter().all(|lesson| lesson.outbox.text(undelivered) == "300") && lessons[1].outbox.text(longest) == "t"
    });
    assert_eq!(relays[1].get("/readyz").status, 503);
    kafka.thaw();
    for (lesson, topic) in lessons.iter().zip(&topics) {
        lesson.wait_until_delivered();
        assert_eq!(lesson.outbox.text("SELECT max(urinishlar) FROM xabarlar"), "0", "no event was at fault");
        lesson.claim_all_arrived(&[topic], 2);
    }
    lessons[0].claim_all_arrived(&[&topics[0]], 1);
}

#[test]
fn a_notification_wakes_it_at_once() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let topic = lesson.outbox.topic("t", 1);
        let _walpost = lesson.relay(&[("WALPOST_POLL_INTERVAL_MS", "600000")]);
        lesson.insert("t", 1);
        lesson.wait_until_delivered();
        let mut waits: Vec<_> = (0..5)
            .map(|_| {
                let start = Instant::now();
                lesson.insert("t", 1);
                lesson.wait_until_delivered();
                start.elapsed()
            })
            .collect();
        waits.sort_unstable();
        // machines that tests run on have bad moments
        assert!(waits[2] < Duration::from_millis(100), "{waits:?}");
        lesson.claim_all_arrived(&[&topic], 1);
    });
}

#[test]
fn what_was_delivered_seven_days_ago_is_deleted_and_nothing_else() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let outbox = &lesson.outbox;
        outbox.topic("t", 1);
        lesson.insert("t", 50);
        outbox.execute(
            "UPDATE xabarlar SET tarqatilgan_vaqt = now() - interval '8 days' WHERE id <= 20;
             UPDATE xabarlar SET tarqatilgan_vaqt = now() - interval '6 days' WHERE id BETWEEN 21 AND 40;
             UPDATE xabarlar SET yaratilgan_vaqt = now() - interval '80 days', tur = 'yoq'",
        );
        let retention = [("WALPOST_RETENTION_KEEP", "7d"), ("WALPOST_RETENTION_BATCH", "3")];
        let walpost = lesson.relay(&retention);
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 30 FROM xabarlar");
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 10 FROM xabarlar WHERE urinishlar > 0");
        // however old: what nobody has is kept
        assert_eq!(outbox.text("SELECT min(id) || ' ' || count(*) FROM xabarlar"), "21 30", "{}", walpost.log());
        assert!(!walpost.log().contains("has no effect"), "{}", walpost.log());
    });
}

#[test]
fn the_roles_that_init_prints_suffice_and_the_application_cannot_read() {
    at_17_and_18(|version| {
        let lesson = Lesson::shared(version);
        let outbox = &lesson.outbox;
        let topic = outbox.topic("t", 1);
        let printed = lesson.command(&["init", "--print"], &[]).output;
        assert!(!printed.contains("PUBLICATION") && !printed.contains("LOGIN REPLICATION"), "{printed}");
        outbox.execute(&format!("BEGIN; {printed} {printed} COMMIT"));
        let name = outbox.database.name();
        let (shop, relay) = (format!("{name}_shop"), format!("{name}_relay"));
        outbox.execute(&format!(
            "CREATE ROLE {shop} LOGIN IN ROLE walpost_app; CREATE ROLE {relay} LOGIN IN ROLE walpost_relay"
        ));
        let client = outbox.database.connect();
        let as_shop = |sql: &str| run(&client, &format!("SET ROLE {shop}; {sql}"));
        as_shop("INSERT INTO xabarlar (tur, foydalanuvchi_id, malumot) VALUES ('t', 1, '{\"sir\": 1}')")
            .expect("a row");
        for refused in [
            "SELECT FROM xabarlar",
            "SELECT malumot FROM xabarlar",
            "UPDATE xabarlar SET tarqatilgan_vaqt = now()",
            "UPDATE xabarlar SET urinishlar = 0",
            "DELETE FROM xabarlar",
            "TRUNCATE xabarlar",
            "SELECT FROM xabarlar FOR UPDATE",
        ] {
            let error = as_shop(refused).expect_err(refused);
            assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{refused}");
        }
        let url = outbox.database.url_as(&relay);
        let as_relay = [("WALPOST_POSTGRES_URL", url.as_str()), ("WALPOST_RETENTION_KEEP", "0s")];
        let report = lesson.command(&["check"], &as_relay);
        assert_eq!(report.code, Some(0), "{}", report.output);
        let _walpost = lesson.relay(&as_relay);
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
        assert_eq!(records.len(), 1);
        outbox.wait_until_true(PATIENCE, "SELECT count(*) = 0 FROM xabarlar");
        let denied = run(&client, &format!("SET ROLE {relay}; UPDATE xabarlar SET malumot = '1'")).expect_err("denied");
        assert_eq!(denied.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE));
        outbox.execute(&format!("DROP ROLE {shop}, {relay}"));
    });
}

#[test]
fn rows_that_were_there_before_the_mark_are_decided_about() {
    for (backfill, undelivered) in [("none", "0"), ("all", "3"), ("payload::text = '2'", "1")] {
        let outbox = Outbox::shared(Version::NEWEST);
        outbox.execute("INSERT INTO outbox (event_type, payload) VALUES ('t', '1'), ('t', '2'), ('t', '3')");
        let init =
            |env: &[(&str, &str)]| outbox.command(&["init"], &[&[("WALPOST_POSTGRES_SOURCE", "poll")], env].concat());
        let refused = init(&[]);
        assert_eq!(refused.code, Some(1), "{}", refused.output);
        assert!(refused.output.contains("3 rows") && refused.output.contains("outbox.backfill"), "{}", refused.output);
        let said = init(&[("WALPOST_OUTBOX_BACKFILL", backfill)]);
        assert_eq!(said.code, Some(0), "{}", said.output);
        assert_eq!(outbox.text("SELECT count(*) FROM outbox WHERE delivered_at IS NULL"), undelivered);
        outbox.execute("INSERT INTO outbox (event_type, payload) VALUES ('t', '4')");
        assert_eq!(outbox.text("SELECT count(delivered_at) FROM outbox WHERE payload::text = '4'"), "0");
        let said = init(&[]);
        assert!(said.output.contains("found delivery marks") && !said.output.contains("created"), "{}", said.output);
    }
}

#[test]
fn a_table_without_marks_is_refused_with_advice_and_commands_of_the_slot_say_what_to_do_instead() {
    let outbox = Outbox::shared(Version::NEWEST);
    let env = [("WALPOST_POSTGRES_SOURCE", "poll")];
    for args in [&["run"][..], &["check"]] {
        let ended = outbox.command(args, &env);
        assert_eq!(ended.code, Some(1), "{}", ended.output);
        assert!(ended.output.contains("no column") && ended.output.contains("walpost init"), "{}", ended.output);
    }
    for args in [&["peek"][..], &["drop", "--yes"], &["backfill", "all"]] {
        let ended = outbox.command(args, &env);
        assert_eq!(ended.code, Some(1), "{}", ended.output);
        assert!(ended.output.contains("there is no slot"), "{}", ended.output);
    }
    assert_eq!(outbox.command(&["init"], &env).code, Some(0));
    let status = outbox.command(&["status"], &env);
    assert_eq!(status.code, Some(0), "{}", status.output);
    assert!(status.output.contains("poll") && !status.output.contains("publication"), "{}", status.output);
}
