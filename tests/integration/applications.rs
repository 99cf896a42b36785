//! What `walpost init` gives applications: `outbox_emit` for writers, `inbox_claim` and `inbox_prune` for consumers.

use std::{sync::mpsc, thread};

use tokio_postgres::{Client, error::SqlState, types::Type};

use crate::{
    outbox::{DEFAULT_TABLE, Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        database::Database,
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait,
    },
};

const ROLES: &str = include_str!("../../sql/roles.sql");
const EVENT: &str = "00000000-0000-7000-8000-000000000001";

/// Runs `walpost init`; what it said.
fn init(outbox: &Outbox<'_>, args: &[&str], env: &[(&str, &str)]) -> String {
    let ended = outbox.command(&[&["init"], args].concat(), env);
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    ended.output
}

/// An empty database in which `walpost init` has run.
pub fn initialised(version: Version) -> Outbox<'static> {
    let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), "");
    init(&outbox, &[], &[]);
    outbox
}

fn run(client: &Client, sql: &str) -> Result<(), tokio_postgres::Error> {
    wait(client.batch_execute(sql))
}

fn claim(client: &Client, event: &str) -> Result<bool, tokio_postgres::Error> {
    let sql = format!("SELECT inbox_claim('billing', '{event}')");
    wait(client.query_one(&sql, &[])).map(|row| row.get(0))
}

fn code(outcome: Result<impl Sized, tokio_postgres::Error>) -> Option<SqlState> {
    outcome.err().and_then(|error| error.code().cloned())
}

#[test]
fn init_adds_what_an_earlier_walpost_did_not_create_and_then_finds_it() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let name = outbox.database.name();
        outbox.execute(&format!("CREATE PUBLICATION {name} FOR TABLE outbox WITH (publish = 'insert')"));
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
        let said = init(&outbox, &[], &[]);
        assert!(said.contains("found table \"public\".\"outbox\""), "{said}");
        assert!(said.contains("created function \"public\".outbox_emit"), "{said}");
        assert!(said.contains("created inbox \"public\".\"inbox\""), "{said}");
        let said = init(&outbox, &[], &[]);
        assert!(!said.contains("created") && !said.contains("left out"), "{said}");
        assert!(said.contains("found function") && said.contains("found inbox"), "{said}");
        // what a later version adds to those that exist
        outbox.execute("DROP FUNCTION inbox_prune; DROP FUNCTION outbox_emit(text, text, bytea, jsonb)");
        let said = init(&outbox, &[], &[]);
        assert!(said.contains("created function") && said.contains("created inbox"), "{said}");
    });
}

#[test]
fn what_init_prints_does_the_same_and_may_be_run_again_with_any_name() {
    at_both_ends(|version| {
        let outbox =
            Outbox::with(Postgres::shared(version), Kafka::shared(), r#"CREATE SCHEMA "It's ""My"" $walpost$""#);
        let table = ("WALPOST_OUTBOX_TABLE", r#""It's ""My"" $walpost$"."Out""box""#);
        let printed = init(&outbox, &["--print"], &[table]);
        let (sql, _) = printed.split_once("-- Who may do what").expect("the roles");
        outbox.execute(&format!("BEGIN; {sql} {sql} COMMIT"));
        let said = init(&outbox, &[], &[table]);
        assert!(said.contains("found function") && said.contains("found inbox"), "{said}");
        outbox.execute(r#"SET search_path = "It's ""My"" $walpost$""#);
        let id = outbox.text("SELECT outbox_emit('t', 'k', '1')");
        assert_eq!(outbox.text(r#"SELECT id FROM "Out""box""#), id);
        assert_eq!(outbox.text(&format!("SELECT inbox_claim('c', '{id}')")), "t");
        assert_eq!(outbox.text("SELECT inbox_prune('c', '-1 hour')"), "1");
    });
}

#[test]
fn every_type_of_payload_finds_its_function_and_arrives_byte_for_byte() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let topic = outbox.topic("t", 1);
        let _walpost = outbox.relay(&[]);
        let client = outbox.database.connect();
        let emit = |arguments: &str| -> String {
            let sql = format!("SELECT outbox_emit({arguments})::text");
            wait(client.query_one(&sql, &[])).unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
        };
        let ids = [
            emit(r#"'t', 'untyped', '{"b": 1,  "a": 2}'"#),
            emit(r#"'t', 'json', '{"b": 1,  "a": 2}'::json"#),
            emit(r#"'t', 'jsonb', '{"b": 1,  "a": 2}'::jsonb"#),
            emit(r#"'t', 'bytea', convert_to('{"b": 1,  "a": 2}', 'UTF8')"#),
            emit(r#"'t', 'varchar', '{"b": 1,  "a": 2}'::varchar"#),
            emit("'t', NULL, NULL"),
            emit("'t', '', 'null', NULL"),
            emit(r#"key => 'named', payload => '1', headers => '{"trace": "x"}', event_type => 't'"#),
        ];
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= ids.len());
        let mut found: Vec<_> = records
            .iter()
            .map(|record| {
                let text = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
                let headers = (record.header("id").unwrap(), record.header("trace"));
                (headers, text(record.key.as_deref()), text(record.value.as_deref()))
            })
            .collect();
        found.sort_by_key(|((id, _), ..)| ids.iter().position(|other| other == id));
        let verbatim = r#"{"b": 1,  "a": 2}"#;
        let expected = [
            (None, Some("untyped"), Some(verbatim)),
            (None, Some("json"), Some(verbatim)),
            (None, Some("jsonb"), Some(r#"{"a": 2, "b": 1}"#)),
            (None, Some("bytea"), Some(verbatim)),
            (None, Some("varchar"), Some(verbatim)),
            (None, None, None),
            (None, Some(""), Some("null")),
            (Some("x"), Some("named"), Some("1")),
        ];
        let expected: Vec<_> = ids.iter().zip(expected).collect();
        for (found, (id, (trace, key, value))) in found.iter().zip(&expected) {
            let expected = ((id.as_str(), *trace), key.map(str::to_owned), value.map(str::to_owned));
            assert_eq!(*found, expected, "{version:?}");
        }
        assert_eq!(found.len(), expected.len());
    });
}

#[test]
fn parameters_without_types_are_told_theirs_unambiguously() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let client = outbox.database.connect();
        let told = |sql: &str| wait(client.prepare(sql)).expect("one function fits").params().to_vec();
        assert_eq!(told("SELECT outbox_emit($1, $2, $3)"), [Type::TEXT; 3]);
        assert_eq!(told("SELECT outbox_emit($1, $2, $3, $4)"), [Type::TEXT, Type::TEXT, Type::TEXT, Type::JSONB]);
        assert_eq!(told("SELECT inbox_claim($1, $2)"), [Type::TEXT, Type::UUID]);
        // a driver that says varchar of every string, as JDBC does
        for kind in [Type::VARCHAR, Type::TEXT, Type::JSON, Type::JSONB, Type::BYTEA] {
            let types = [Type::VARCHAR, Type::VARCHAR, kind.clone(), Type::JSONB];
            let prepared = wait(client.prepare_typed("SELECT outbox_emit($1, $2, $3, $4)", &types));
            assert!(prepared.is_ok(), "{kind}: {prepared:?}");
        }
    });
}

#[test]
fn what_is_null_or_no_json_is_refused_by_name() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let client = outbox.database.connect();
        for (sql, message) in [
            ("outbox_emit(NULL, 'k', '1')", "outbox_emit: event_type must not be null"),
            ("outbox_emit(NULL, 'k', '1'::bytea)", "outbox_emit: event_type must not be null"),
            ("outbox_emit('t', 'k', '{')", "invalid input syntax for type json"),
            ("outbox_emit('t', 'k', '1', '[]')", "check constraint"),
            (&format!("inbox_claim(NULL, '{EVENT}')"), "inbox_claim: consumer and event_id must not be null"),
            ("inbox_claim('c', NULL)", "inbox_claim: consumer and event_id must not be null"),
            ("inbox_prune('c', '1 day', 0)", "batch must be at least 1"),
        ] {
            let error = run(&client, &format!("SELECT {sql}")).expect_err(sql);
            let said = error.as_db_error().expect("the server's").message();
            assert!(said.contains(message), "{sql}: {said}");
        }
    });
}

#[test]
fn applications_may_emit_and_consumers_may_claim_and_neither_may_do_more() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        outbox.execute(ROLES);
        outbox.execute(ROLES);
        outbox.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC");
        outbox.execute(&format!("SELECT outbox_emit('t', 'k', '\"secret\"'), inbox_claim('billing', '{EVENT}')"));
        let client = outbox.database.connect();
        let as_role = |role: &str, sql: &str| run(&client, &format!("SET ROLE {role}; {sql}"));

        for works in [
            "INSERT INTO outbox (event_type, payload) VALUES ('t', '1')",
            "SELECT outbox_emit('t', 'k', '1'), outbox_emit('t', 'k', '1'::json), outbox_emit('t', 'k', '1'::jsonb)",
            "SELECT outbox_emit('t', 'k', '1'::bytea, '{}')",
        ] {
            as_role("walpost_app", works).unwrap_or_else(|error| panic!("{works}: {error:?}"));
        }
        for refused in [
            "SELECT FROM outbox",
            "SELECT payload FROM outbox",
            "SELECT count(*) FROM outbox",
            "COPY outbox TO STDOUT",
            "UPDATE outbox SET payload = '2'",
            "DELETE FROM outbox",
            "TRUNCATE outbox",
            "INSERT INTO outbox (event_type) VALUES ('t') RETURNING payload",
            "ALTER TABLE outbox ADD x int",
            "DROP FUNCTION outbox_emit(text, text, json, jsonb)",
            &format!("SELECT inbox_claim('billing', '{EVENT}')"),
            "SELECT FROM inbox",
        ] {
            assert_eq!(code(as_role("walpost_app", refused)), Some(SqlState::INSUFFICIENT_PRIVILEGE), "{refused}");
        }

        let again = "00000000-0000-7000-8000-000000000002";
        let claims = format!("SELECT inbox_claim('billing', '{again}'), inbox_claim('billing', '{again}')");
        as_role("walpost_consumer", &claims).expect("a consumer may claim, also twice");
        for refused in [
            "SELECT FROM inbox",
            "SELECT event_id FROM inbox",
            "UPDATE inbox SET consumer = 'other'",
            "DELETE FROM inbox",
            "TRUNCATE inbox",
            "SELECT inbox_prune('billing', '0')",
            "SELECT outbox_emit('t', 'k', '1')",
            "SELECT FROM outbox",
        ] {
            assert_eq!(code(as_role("walpost_consumer", refused)), Some(SqlState::INSUFFICIENT_PRIVILEGE), "{refused}");
        }
        as_role("walpost_relay", "SELECT inbox_prune('billing', '-1 hour')").expect("the relay may prune");
        run(&client, "RESET ROLE").expect("a superuser again");
        // a trap in the caller's search_path is not stepped into
        run(
            &client,
            "CREATE SCHEMA trap; CREATE TABLE trap.outbox (LIKE outbox); CREATE TABLE trap.inbox (LIKE inbox);
             SET search_path = trap, public; SELECT outbox_emit('t', 'k', '1'), inbox_claim('x', gen_random_uuid())",
        )
        .expect("emit and claim");
        assert_eq!(outbox.text("SELECT (SELECT count(*) FROM trap.outbox) + (SELECT count(*) FROM trap.inbox)"), "0");
    });
}

/// Case 53: a rollback removes the mark.
#[test]
fn a_rollback_leaves_neither_event_nor_mark_and_a_commit_both() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let topic = outbox.topic("t", 1);
        let _walpost = outbox.relay(&[]);
        let both = format!("SELECT outbox_emit('t', 'k', '1'), inbox_claim('billing', '{EVENT}')");
        outbox.execute(&format!("BEGIN; {both}; ROLLBACK"));
        outbox.execute(&format!("BEGIN; SAVEPOINT s; {both}; ROLLBACK TO s; COMMIT"));
        assert_eq!(outbox.text("SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM inbox)"), "0");
        outbox.execute(&format!("BEGIN; {both}; COMMIT"));
        let id = outbox.text("SELECT id FROM outbox");
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
        outbox.wait_until_confirmed();
        assert_eq!(deliveries(&records).into_keys().collect::<Vec<_>>(), [id]);
        assert_eq!(outbox.text("SELECT count(*) FROM inbox"), "1");
    });
}

/// Begins a claim of [`EVENT`] in another session and waits until it waits for the first; its answer comes when it has one.
fn second_claim(outbox: &Outbox<'_>, begin: &str) -> mpsc::Receiver<Result<bool, tokio_postgres::Error>> {
    let client = outbox.database.connect();
    run(&client, begin).expect("a transaction");
    let pid: i32 = wait(client.query_one("SELECT pg_backend_pid()", &[])).expect("a backend").get(0);
    let (answer, answers) = mpsc::channel();
    thread::spawn(move || {
        let claimed = claim(&client, EVENT);
        let aborted = claimed.is_ok() && run(&client, "SELECT 1").is_err();
        assert!(!aborted, "a repetition aborts nothing");
        let _ = run(&client, if claimed.is_ok() { "COMMIT" } else { "ROLLBACK" });
        answer.send(claimed)
    });
    outbox
        .wait_until_true(PATIENCE, &format!("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {pid}"));
    answers
}

/// Cases 52 and 53: each consumer has its own first, and a repetition aborts nothing.
#[test]
fn a_second_delivery_waits_for_the_outcome_of_the_first() {
    at_both_ends(|version| {
        for (outcome, second) in [("ROLLBACK", true), ("COMMIT", false)] {
            let outbox = initialised(version);
            let first = outbox.database.connect();
            run(&first, "BEGIN").expect("a transaction");
            assert!(claim(&first, EVENT).expect("a claim"));
            assert!(!claim(&first, EVENT).expect("a repetition in the same transaction"));
            let answers = second_claim(&outbox, "BEGIN");
            assert!(answers.try_recv().is_err(), "it waits");
            run(&first, outcome).expect("the end of the transaction");
            let claimed = answers.recv_timeout(PATIENCE).expect("an answer").expect("a claim");
            assert_eq!(claimed, second, "{version:?}: after {outcome}");
            assert_eq!(outbox.text("SELECT count(*) FROM inbox"), "1");
            // another consumer's claim of the same event is its first
            assert_eq!(outbox.text(&format!("SELECT inbox_claim('shipping', '{EVENT}')")), "t");
        }
    });
}

#[test]
fn under_stricter_isolation_a_race_is_a_serialization_failure_and_the_retry_says_repeated() {
    at_both_ends(|version| {
        for level in ["REPEATABLE READ", "SERIALIZABLE"] {
            let outbox = initialised(version);
            let begin = format!("BEGIN ISOLATION LEVEL {level}");
            let first = outbox.database.connect();
            run(&first, &begin).expect("a transaction");
            assert!(claim(&first, EVENT).expect("a claim"));
            let answers = second_claim(&outbox, &begin);
            run(&first, "COMMIT").expect("the end of the transaction");
            let claimed = answers.recv_timeout(PATIENCE).expect("an answer");
            assert_eq!(code(claimed), Some(SqlState::T_R_SERIALIZATION_FAILURE), "{version:?}: {level}");
            run(&first, &begin).expect("a transaction");
            assert!(!claim(&first, EVENT).expect("the retry"), "{version:?}: {level}");
        }
    });
}

#[test]
fn marks_are_pruned_the_oldest_first_in_bounded_batches() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        outbox.execute(
            "INSERT INTO inbox SELECT consumer, gen_random_uuid(), now() - n * interval '1 day'
             FROM generate_series(1, 100) n, unnest(ARRAY['billing', 'shipping']) consumer",
        );
        let left = || {
            outbox.text(
                "SELECT string_agg(consumer || ' ' || n, ', ' ORDER BY consumer) FROM (
            SELECT consumer, count(*) n FROM inbox GROUP BY 1) counts",
            )
        };
        assert_eq!(outbox.text("SELECT inbox_prune('billing', '30 days 12 hours', 60)"), "60");
        assert_eq!(left(), "billing 40, shipping 100");
        assert_eq!(
            outbox.text("SELECT max(now() - claimed_at) < '41 days' FROM inbox WHERE consumer = 'billing'"),
            "t"
        );
        assert_eq!(outbox.text("SELECT inbox_prune('billing', '30 days 12 hours', 60)"), "10");
        assert_eq!(outbox.text("SELECT inbox_prune('billing', '30 days 12 hours', 60)"), "0");
        assert_eq!(left(), "billing 30, shipping 100");
    });
}

/// A digest of all that the catalog says of the tables and functions that are not walpost's.
fn fingerprint(database: &Database<'_>) -> Option<String> {
    database.value(
        "SELECT string_agg(d, E'\\n' ORDER BY d) FROM (
            SELECT p.oid || md5(pg_get_functiondef(p.oid)) FROM pg_proc p WHERE pronamespace = 'public'::regnamespace
            UNION ALL SELECT attrelid::regclass || attname || atttypid FROM pg_attribute
                WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)) x(d)",
    )
}

#[test]
fn what_belongs_to_others_is_left_as_it_is() {
    at_both_ends(|version| {
        let inbox_of_others = "a table of that name is there";
        for (before, left_out) in [
            ("CREATE TABLE inbox (mail text)", inbox_of_others),
            ("CREATE TABLE inbox (consumer text, event_id uuid, claimed_at timestamptz)", inbox_of_others),
            ("CREATE VIEW inbox AS SELECT 1 AS consumer", inbox_of_others),
            (
                "CREATE TABLE inbox (consumer text, event_id uuid, claimed_at timestamptz, UNIQUE (consumer, event_id)
                 DEFERRABLE)",
                inbox_of_others,
            ),
            (
                "CREATE FUNCTION inbox_claim(text, uuid) RETURNS int LANGUAGE sql AS 'SELECT 1'",
                "a function inbox_claim(text, uuid) is there that is not walpost's",
            ),
            (
                "CREATE FUNCTION outbox_emit(text, text, json, jsonb) RETURNS int LANGUAGE sql AS 'SELECT 1'",
                "a function outbox_emit(text, text, json, jsonb) is there that is not walpost's",
            ),
            ("ALTER TABLE outbox ADD tenant int NOT NULL", "column \"tenant\" must have a value"),
            ("ALTER TABLE outbox DROP headers", "column headers is missing"),
        ] {
            let outbox = Outbox::shared(version);
            outbox.execute(before);
            let was = fingerprint(&outbox.database);
            let said = init(&outbox, &[], &[]);
            assert!(said.contains("left out") && said.contains(left_out), "{before}: {said}");
            assert!(said.contains("created replication slot"), "{said}");
            let is = fingerprint(&outbox.database).expect("a catalog");
            for line in was.iter().flat_map(|was| was.lines()) {
                assert!(is.lines().any(|other| other == line), "{before}: {line} is no more");
            }
        }
        // an inbox of the same shape is taken as it is
        let outbox = Outbox::shared(version);
        outbox.execute(
            "CREATE TABLE inbox (claimed_at timestamptz DEFAULT now(), note text, event_id uuid, consumer text)",
        );
        outbox.execute("CREATE UNIQUE INDEX ON inbox (event_id, consumer)");
        let said = init(&outbox, &[], &[]);
        assert!(said.contains("created inbox"), "{said}");
        assert_eq!(outbox.text(&format!("SELECT inbox_claim('c', '{EVENT}')")), "t");
        assert_eq!(outbox.text(&format!("SELECT inbox_claim('c', '{EVENT}')")), "f");
        assert_eq!(outbox.text("SELECT count(*) FROM pg_index WHERE indrelid = 'inbox'::regclass"), "1");
    });
}

#[test]
fn the_function_fits_every_type_that_the_payload_may_have() {
    at_both_ends(|version| {
        for (kind, expected) in [
            ("jsonb", r#"{"a": 1}|{"a": 1}"#),
            ("text", r#"{"a":1}|{"a":1}"#),
            ("bytea", r"\x7b2261223a317d|\x7b2261223a317d"),
        ] {
            let outbox = Outbox::with(
                Postgres::shared(version),
                Kafka::shared(),
                &DEFAULT_TABLE.replace("payload    json", &format!("payload {kind}")),
            );
            init(&outbox, &[], &[]);
            outbox.execute(r#"SELECT outbox_emit('t', 'k', '{"a":1}'), outbox_emit('t', 'k', '{"a":1}'::bytea)"#);
            assert_eq!(outbox.text("SELECT string_agg(payload::text, '|') FROM outbox"), expected);
        }
        let raw = Outbox::with(
            Postgres::shared(version),
            Kafka::shared(),
            &DEFAULT_TABLE.replace("payload    json", "payload bytea"),
        );
        init(&raw, &[], &[]);
        raw.execute(r"SELECT outbox_emit('t', 'k', '\x00ff'::bytea)");
        assert_eq!(raw.text("SELECT payload FROM outbox"), r"\x00ff");
    });
}

#[test]
fn a_role_that_may_not_create_functions_still_gets_its_slot() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let (name, role) = (outbox.database.name(), format!("{}_relay", outbox.database.name()));
        outbox.execute(&format!(
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC;
             CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON outbox TO {role};
             CREATE PUBLICATION {name} FOR TABLE outbox WITH (publish = 'insert')"
        ));
        let said = init(&outbox, &[], &[("WALPOST_POSTGRES_URL", &outbox.database.url_as(&role))]);
        assert!(said.contains("left out function") && said.contains("left out inbox"), "{said}");
        assert!(said.contains("run walpost init as the schema's owner"), "{said}");
        assert!(said.contains("created replication slot"), "{said}");
        outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    });
}

#[test]
fn no_claim_is_won_twice_among_many_at_once() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let wins: usize = thread::scope(|scope| {
            let racers: Vec<_> = (0..4).map(|_| outbox.database.connect()).collect();
            let racers: Vec<_> = racers.into_iter().map(|client| scope.spawn(move || race(&client))).collect();
            racers.into_iter().map(|racer| racer.join().expect("no panic")).sum()
        });
        assert_eq!(wins, EVENTS, "{version:?}: each event is claimed once");
    });
}

const EVENTS: usize = 100;

/// Claims every event and rolls some of the claims back, which are then claimed by whoever comes next.
fn race(client: &Client) -> usize {
    let mut wins = 0;
    for number in 0..EVENTS {
        let event = format!("00000000-0000-4000-8000-{number:012}");
        let gives_up = fastrand::bool();
        for outcome in if gives_up { &["ROLLBACK", "COMMIT"][..] } else { &["COMMIT"] } {
            run(client, "BEGIN").expect("a transaction");
            let won = claim(client, &event).expect("a claim");
            run(client, outcome).expect("an end");
            wins += usize::from(won && *outcome == "COMMIT");
        }
    }
    wins
}
