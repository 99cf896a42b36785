//! What needs a human: walpost says what and why, and ends or waits; nothing is lost meanwhile.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use crate::{
    ledger::TABLE,
    outbox::{DEFAULT_TABLE, Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Stop, Version},
        wait_until,
        walpost::Walpost,
    },
};

/// Long enough for walpost to have compared the slot with where it was left.
const LOOKS: Duration = Duration::from_secs(2);

/// Runs a walpost that ends by itself with this exit code; what it said.
fn halted(outbox: &Outbox<'_>, env: &[(&str, &str)], code: i32) -> String {
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, env);
    let ended = walpost.wait(PATIENCE).code();
    assert_eq!(ended, Some(code), "{}", walpost.log());
    walpost.log()
}

/// Claims that a text says all this.
pub fn claim_said(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not said in:\n{text}");
    }
}

/// The events of a topic by id, in their order.
pub fn ids(outbox: &Outbox<'_>, topic: &str) -> Vec<String> {
    let records = outbox.kafka.read_all(&[topic]);
    records.iter().map(|record| record.header("id").expect("an id").to_owned()).collect()
}

/// Case 39: a required column is missing.
#[test]
fn a_missing_column_is_named_and_mapping_it_resumes() {
    at_both_ends(|version| {
        let tables = "CREATE TABLE outbox (id int, kind text, payload text)";
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), tables);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES (1, 't', '')");
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        claim_said(
            &walpost.log(),
            &["public.outbox", "has no column", "event_type", "id, kind, payload", "outbox.columns"],
        );
        let _walpost = outbox.relay(&[("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "kind")]);
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), ["1"]);
    });
}

/// Case 35, without a dead-letter topic.
#[test]
fn an_illegal_topic_halts_with_the_event_and_a_rule_resumes() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES ('before', 't', 'k', ''), ('culprit', 'no topic', 'k', ''), ('after', 't', 'k', '')");
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        let illegal = outbox.topic_name("no topic");
        claim_said(&walpost.log(), &["culprit", &illegal, "route.rules", "route.on_illegal_topic"]);
        let rule = format!("[{{event_type = 'no *', topic = '{topic}'}}]");
        let _walpost = outbox.relay(&[("WALPOST_ROUTE_RULES", &rule)]);
        outbox.wait_until_confirmed();
        let ids = ids(&outbox, &topic);
        // what came before in the same transaction may be there twice
        assert_eq!(ids[ids.len() - 3..], ["before", "culprit", "after"]);
    });
}

/// Case 3, without a dead-letter topic.
#[test]
fn a_record_that_is_too_large_is_found_among_innocents_and_a_larger_limit_resumes() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic_name("t");
        outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000")]);
        let walpost = outbox.relay(&[]);
        // no compression helps
        outbox.execute(
            "INSERT INTO outbox SELECT 'event-' || n, 't', 'k',
               (SELECT string_agg(md5(n || '/' || m), '') FROM generate_series(1, CASE n WHEN 60 THEN 200 ELSE 10 END) m)
             FROM generate_series(1, 100) n",
        );
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        let log = walpost.log();
        claim_said(&log, &["event-60 ", &topic, "max.message.bytes"]);
        assert_eq!(log.matches("event-").count(), log.matches("event-60 ").count(), "{log}");
        outbox.kafka.alter_topic(&topic, &[("max.message.bytes", "1000000")]);
        let _walpost = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        let expected: Vec<_> = (1..=100).map(|number| format!("event-{number}")).collect();
        let mut ids = ids(&outbox, &topic);
        assert_eq!(ids.split_off(ids.len() - 100), expected);
        // the innocents before it were delivered more than once, each time in their order
        assert!(ids.iter().all(|id| expected[..59].contains(id)), "{ids:?}");
    });
}

/// Each is legal by itself; only the producer tells.
#[test]
fn settings_that_do_not_fit_together_are_a_fault_of_the_configuration() {
    let outbox = Outbox::shared(Version::NEWEST);
    let env =
        [("WALPOST_KAFKA_PROPERTIES_BATCH_SIZE", "100"), ("WALPOST_KAFKA_PROPERTIES_RECONNECT_BACKOFF_MAX_MS", "1")];
    let log = halted(&outbox, &env, 2);
    claim_said(&log, &["reconnect.backoff", "[kafka]"]);
    let log = halted(&outbox, &[("WALPOST_KAFKA_PROPERTIES_COMPRESSION_CODEC", "bogus")], 2);
    claim_said(&log, &["kafka.properties", "compression.codec"]);
}

/// Case 8.
#[test]
fn rows_older_than_the_slot_must_be_decided_about() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        outbox.execute("INSERT INTO outbox SELECT 'old ' || n, 't', 'k', '' FROM generate_series(1, 3) n");
        claim_said(
            &halted(&outbox, &[], 1),
            &["public.outbox", "3 rows", "older", "outbox.backfill", "publishes them"],
        );
        let slots = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}'", outbox.database.name());
        assert_eq!(outbox.text(&slots), "0");
        let _walpost = outbox.relay(&[("WALPOST_OUTBOX_BACKFILL", "none")]);
        outbox.execute("INSERT INTO outbox VALUES ('new', 't', 'k', '')");
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), ["new"]);
    });
}

#[test]
fn a_slot_that_is_dropped_under_a_running_walpost_is_a_loss() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let walpost = outbox.relay(&[]);
        walpost.freeze();
        let slot = outbox.database.name();
        outbox.execute(&format!("SELECT pg_terminate_backend({})", outbox.walsender().expect("it streams")));
        wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
        outbox.execute("INSERT INTO outbox VALUES ('lost', 't', 'k', '')");
        walpost.thaw();
        assert_eq!(walpost.wait(PATIENCE).code(), Some(3), "{}", walpost.log());
        claim_said(&walpost.log(), &[slot, "dropped", "may be missing"]);
    });
}

/// Case 6, while walpost runs.
#[test]
fn a_slot_that_is_moved_behind_a_running_walpost_is_said_with_both_positions() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        walpost.freeze();
        outbox.execute(&format!("SELECT pg_terminate_backend({})", outbox.walsender().expect("it streams")));
        wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
        outbox.execute("INSERT INTO outbox VALUES ('skipped', 't', 'k', '')");
        let slot = outbox.database.name();
        outbox.execute(&format!("SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"));
        let moved =
            outbox.text(&format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'"));
        walpost.thaw();
        walpost.wait_for_log(PATIENCE, &format!("to {moved} while walpost was away"));
        assert!(walpost.status()["last_error"].as_str().is_some_and(|text| text.contains(&moved)));
    });
}

/// Case 6.
#[test]
fn a_slot_that_was_made_anew_while_walpost_was_down_is_said_and_its_own_position_counts() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let insert = |id: &str| outbox.execute(&format!("INSERT INTO outbox VALUES ('{id}', 't', 'k', '')"));
        let delivered = |count| wait_until(PATIENCE, "it is delivered", || outbox.kafka.record_count(&topic) == count);
        let walpost = outbox.relay(&[]);
        insert("before");
        outbox.wait_until_confirmed();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

        // neither a restart in order nor one after a kill is more than that
        insert("meanwhile");
        let walpost = outbox.relay(&[]);
        delivered(2);
        outbox.wait_until_confirmed();
        thread::sleep(LOOKS);
        assert!(!walpost.log().contains("was moved"), "{}", walpost.log());
        walpost.kill9();
        wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
        let walpost = outbox.relay(&[]);
        thread::sleep(LOOKS);
        assert!(!walpost.log().contains("was moved"), "{}", walpost.log());
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

        let slot = outbox.database.name();
        insert("never published");
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
        for id in ["1", "2", "3"] {
            insert(id);
        }
        let walpost = outbox.relay(&[]);
        walpost.wait_for_log(PATIENCE, "the slot was moved from");
        delivered(5);
        claim_said(&walpost.log(), &["events in between may not have been published"]);
        assert!(walpost.status()["last_error"].as_str().is_some_and(|text| text.contains("was moved")));
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

        // said once
        let walpost = outbox.relay(&[]);
        thread::sleep(LOOKS);
        assert!(!walpost.log().contains("was moved"), "{}", walpost.log());
    });
}

/// The same address, another cluster with a slot of the same name: an upgrade or a restore, done half.
#[test]
fn another_cluster_behind_the_same_address_is_refused() {
    let [first, second] = [(); 2].map(|()| Postgres::start(Version::NEWEST, &Settings::default()));
    let outbox = Outbox::with(&first, Kafka::shared(), TABLE);
    outbox.topic("t", 1);
    let name = outbox.database.name();
    second.database().execute(&format!("CREATE DATABASE {name}"));
    let other = outbox.on(&second);
    other.execute(&format!("{TABLE}; CREATE PUBLICATION {name} FOR TABLE outbox WITH (publish = 'insert')"));
    other.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", first.port(), second.port());
    let walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", &format!("postgres://postgres@{hosts}/{name}"))]);
    first.stop(Stop::Immediate);
    assert_eq!(walpost.wait(PATIENCE).code(), Some(3), "{}", walpost.log());
    claim_said(&walpost.log(), &["system identifier", "postgres.url"]);
}

#[test]
fn a_slot_that_is_dropped_while_walpost_is_away_is_not_replaced_unasked() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    outbox.topic("t", 1);
    let walpost = outbox.relay(&[]);
    outbox.execute("INSERT INTO outbox VALUES ('delivered', 't', 'k', '')");
    outbox.wait_until_confirmed();
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let slot = outbox.database.name();
    wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
    outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    outbox.execute("INSERT INTO outbox VALUES ('lost', 't', 'k', '')");
    claim_said(&halted(&outbox, &[], 1), &["2 rows", "older"]);
    claim_said(&halted(&outbox, &[("WALPOST_POSTGRES_AUTO_CREATE", "false")], 1), &[slot, "walpost init"]);
}

/// Case 7.
#[test]
fn a_slot_whose_wal_was_removed_is_a_loss() {
    at_both_ends(|version| {
        let settings = [("max_wal_size", "32MB"), ("min_wal_size", "32MB"), ("max_slot_wal_keep_size", "1MB")];
        let settings = settings.iter().fold(Settings::default(), |all, (name, value)| all.set(name, value));
        let server = Postgres::start(version, &settings);
        let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
        outbox.relay(&[]).kill9();
        let lost = format!(
            "(SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{}') = 'lost'",
            outbox.database.name()
        );
        wait_until(PATIENCE, "the slot is lost", || {
            outbox.execute("INSERT INTO outbox VALUES ('lost', 't', 'k', '')");
            outbox.execute("SELECT pg_switch_wal()");
            outbox.execute("CHECKPOINT");
            outbox.text(&format!("SELECT {lost}")) == "t"
        });
        let log = halted(&outbox, &[], 3);
        claim_said(&log, &[outbox.database.name(), "wal_removed", "may be missing", "pg_drop_replication_slot"]);
    });
}

/// Version 18 ends slots that nobody used for a while. Case 7.
#[test]
fn a_slot_that_idled_for_too_long_is_a_loss() {
    let server = Postgres::start(Version::NEWEST, &Settings::default().set("idle_replication_slot_timeout", "1s"));
    let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
    outbox.relay(&[]).kill9();
    let reason =
        format!("SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{}'", outbox.database.name());
    wait_until(PATIENCE, "the slot is invalidated", || {
        outbox.execute("CHECKPOINT");
        outbox.value(&reason).as_deref() == Some("idle_timeout")
    });
    let log = halted(&outbox, &[], 3);
    claim_said(&log, &[outbox.database.name(), "idle_timeout", "may be missing", "pg_drop_replication_slot"]);
}

#[test]
fn every_fault_of_a_configuration_is_said_at_once() {
    let faults = [
        ("WALPOST_POSTGRES_URL", "postgres://u:hush-hush@localhost:nonsense/db"),
        ("WALPOST_POSTGRES_SLOT", "No-Slot"),
        ("WALPOST_KAFKA_PROPERTIES_ACKS", "1"),
        ("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "many"),
        ("WALPOST_ROUTE_TOPICS", "t"),
    ];
    let ended = Walpost::run_to_end(&["run", "--set", "log.format=xml"], &faults);
    assert_eq!(ended.code, Some(2), "{}", ended.output);
    let named =
        ["postgres.url", "postgres.slot", "acks", "limits.in_flight_events", "WALPOST_ROUTE_TOPIC", "log.format"];
    claim_said(&ended.output, &named);
    claim_said(&ended.output, &["6 faults"]);
    assert!(!ended.output.contains("hush-hush"), "{}", ended.output);
    assert_eq!(Walpost::run_to_end(&["fly"], &[]).code, Some(2));
}

/// Case 40.
#[test]
fn wal_that_is_not_logical_is_said_plainly() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &Settings::default().set("wal_level", "replica"));
        let outbox = Outbox::new(&server, Kafka::shared());
        claim_said(&halted(&outbox, &[], 1), &["wal_level = logical", "restart"]);
    });
}

/// Case 40.
#[test]
fn what_stands_between_and_knows_nothing_of_replication_is_said_plainly() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let port = without_replication(Postgres::shared(version).port());
        let url = format!("postgres://postgres@127.0.0.1:{port}/{}?sslmode=disable", outbox.database.name());
        let log = halted(&outbox, &[("WALPOST_POSTGRES_URL", &url)], 1);
        claim_said(&log, &["WP-108", "pooler"]);
        let check = outbox.command(&["check"], &[("WALPOST_POSTGRES_URL", &url)]);
        assert_eq!(check.code, Some(1), "{}", check.output);
        claim_said(&check.output, &["pooler"]);
    });
}

/// In front of a port, as some poolers are: the startup parameter `replication` does not get through. Its port.
fn without_replication(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || pool(client, server));
        }
    });
    port
}

fn pool(mut client: TcpStream, server: u16) -> io::Result<()> {
    let mut head = [0; 8];
    client.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
    let mut body = vec![0; length - head.len()];
    client.read_exact(&mut body)?;
    let words: Vec<&[u8]> = body.split(|byte| *byte == 0).collect();
    let kept = words.chunks(2).filter(|pair| pair[0] != b"replication" && !pair[0].is_empty());
    let mut startup: Vec<u8> = kept.flatten().flat_map(|word| [word, &b"\0"[..]].concat()).collect();
    startup.push(0);
    let length = u32::try_from(head.len() + startup.len()).expect("a short packet");
    let mut upstream = TcpStream::connect(("127.0.0.1", server))?;
    upstream.write_all(&[&length.to_be_bytes()[..], &head[4..], &startup].concat())?;
    let (mut answers, mut back) = (upstream.try_clone()?, client.try_clone()?);
    let answering = thread::spawn(move || {
        let _ = io::copy(&mut answers, &mut back);
        back.shutdown(Shutdown::Both)
    });
    let _ = io::copy(&mut client, &mut upstream);
    upstream.shutdown(Shutdown::Both)?;
    answering.join().expect("it only copies")
}

/// Case 40.
#[test]
fn a_role_that_may_not_replicate_is_said_plainly() {
    at_both_ends(|version| {
        let outbox = Outbox::new(Postgres::shared(version), Kafka::shared());
        let role = outbox.database.name();
        assert_eq!(outbox.command(&["init"], &[]).code, Some(0));
        outbox.execute(&format!("CREATE ROLE {role} LOGIN"));
        let log = halted(&outbox, &[("WALPOST_POSTGRES_URL", &outbox.database.url_as(role))], 1);
        claim_said(&log, &["ALTER ROLE", "REPLICATION"]);
        outbox.execute(&format!("DROP ROLE {role}"));
    });
}

/// What it lacks is not REPLICATION, so it is not told to ask for that.
#[test]
fn a_role_that_may_not_create_or_count_is_told_what_to_do() {
    at_both_ends(|version| {
        let outbox = Outbox::new(Postgres::shared(version), Kafka::shared());
        let role = outbox.database.name();
        outbox.execute(&format!("CREATE ROLE {role} LOGIN REPLICATION"));
        let url = outbox.database.url_as(role);
        let (create, count) = ("create publication", "count the rows that are older than the slot");
        for attempt in [create, count] {
            let log = halted(&outbox, &[("WALPOST_POSTGRES_URL", &url)], 1);
            claim_said(&log, &[attempt, "permission denied", "walpost init"]);
            assert!(!log.contains("ALTER ROLE"), "{log}");
            outbox.execute(&format!("DROP PUBLICATION IF EXISTS {role}; CREATE PUBLICATION {role} FOR TABLE outbox"));
        }
        outbox.execute(&format!("DROP ROLE {role}"));
    });
}

/// Claims that walpost halts over a publication for this, names both, and says how to mend it.
fn claim_publication_refused(version: Version, publishes: &str, named: &str) {
    let tables = format!("{DEFAULT_TABLE}; CREATE TABLE other (a int)");
    let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), &tables);
    let name = outbox.database.name();
    outbox.execute(&format!("CREATE PUBLICATION {name} FOR TABLE {publishes}"));
    claim_said(&halted(&outbox, &[], 1), &[name, named, "ALTER PUBLICATION"]);
}

/// Case 9.
#[test]
fn a_publication_without_inserts_or_without_the_table_is_refused() {
    at_both_ends(|version| {
        claim_publication_refused(version, "outbox WITH (publish = 'update')", "inserts");
        claim_publication_refused(version, "other", "outbox");
    });
}

/// Only 15 and later know row filters and column lists. Case 9.
#[test]
fn a_publication_that_leaves_rows_or_columns_out_is_refused() {
    claim_publication_refused(Version::NEWEST, "outbox WHERE (event_type <> 'secret')", "event_type");
    claim_publication_refused(Version::NEWEST, "outbox (id, event_type)", "payload");
}

/// Case 36.
#[test]
fn events_for_a_missing_topic_are_held_until_it_is_there() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let walpost = outbox.relay(&[]);
        let topic = outbox.topic_name("later");
        outbox.execute("INSERT INTO outbox VALUES ('1', 'later', 'k', ''), ('2', 'later', 'k', '')");
        wait_until(PATIENCE, "walpost names the topic", || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains(&topic)
        });
        outbox.kafka.create_topic(&topic, 1, &[]);
        walpost.wait_until_ready(PATIENCE);
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), ["1", "2"]);
        let errors = format!("walpost_delivery_errors_total{{code=\"UnknownTopicOrPartition\",topic=\"{topic}\"}}");
        assert!(walpost.metric(&errors) >= 1.0);
    });
}

/// Case 16.
#[test]
fn a_topic_that_is_deleted_under_way_is_waited_for_as_well() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    outbox.wait_until_confirmed();
    outbox.kafka.delete_topic(&topic);
    outbox.execute("INSERT INTO outbox VALUES ('2', 't', 'k', '')");
    // librdkafka may take half a minute to believe that a topic it knew is gone
    wait_until(4 * PATIENCE, "walpost names the topic", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains(&topic)
    });
    outbox.kafka.create_topic(&topic, 1, &[]);
    walpost.wait_until_ready(PATIENCE);
    outbox.wait_until_confirmed();
    assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).keys().collect::<Vec<_>>(), ["2"]);
}

#[test]
fn missing_topics_are_created_where_that_is_wanted() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let topic = outbox.topic_name("new");
    let _walpost = outbox.relay(&[("WALPOST_KAFKA_CREATE_TOPICS", "true"), ("WALPOST_KAFKA_PARTITIONS", "4")]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 'new', 'k', '')");
    outbox.wait_until_confirmed();
    assert_eq!(outbox.kafka.partitions(&topic), Some(4));
    assert_eq!(ids(&outbox, &topic), ["1"]);
}
