//! Rows that are older than the slot: first, and once; none is left out, whatever happens on the way. Case 8.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    bounds::MEMORY_MB,
    halts::{claim_said, ids},
    ledger::{EVENT_TYPE, Verdict, Writers},
    outbox::{Outbox, PATIENCE, at_both_ends, lsn},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        topics::Received,
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

const ALL: (&str, &str) = ("WALPOST_OUTBOX_BACKFILL", "all");
const TABLE: &str = "CREATE TABLE outbox (id bigint, event_type text, key text, payload text)";
/// What the ledger's writers write to, with a time for the order of its ids, which do not count up.
const TIMED: &str = "CREATE TABLE outbox (id text NOT NULL, event_type text NOT NULL, key text, payload text, \
     created_at timestamptz NOT NULL DEFAULT clock_timestamp())";

fn outbox(version: Version, tables: &str) -> Outbox<'static> {
    Outbox::with(Postgres::shared(version), Kafka::shared(), tables)
}

fn insert(outbox: &Outbox<'_>, from: u32, to: u32) {
    outbox.execute(&format!(
        "INSERT INTO outbox SELECT n, '{EVENT_TYPE}', 'k' || n % 7, 'of ' || n FROM generate_series({from}, {to}) n"
    ));
}

/// The slots of an outbox, without the name of its database.
fn slots(outbox: &Outbox<'_>) -> String {
    let name = outbox.database.name();
    outbox.text(&format!(
        "SELECT coalesce(string_agg(substr(slot_name, length('{name}') + 1), ',' ORDER BY slot_name), 'none')
         FROM pg_replication_slots WHERE database = '{name}'"
    ))
}

fn numbers(from: u32, to: u32) -> Vec<String> {
    (from..=to).map(|number| number.to_string()).collect()
}

fn wait_until_published(walpost: &Walpost, topic: &str, count: u32) {
    let metric = format!("walpost_events_published_total{{topic=\"{topic}\"}}");
    wait_until(PATIENCE, &format!("{count} events of {topic} are published"), || {
        walpost.metrics().get(&metric).is_some_and(|published| *published >= f64::from(count))
    });
}

fn position(record: &Received) -> (u64, u64) {
    let text = record.header("walpost_position").expect("a position");
    let (commit_lsn, ordinal) = text.rsplit_once('/').expect("an LSN and an ordinal");
    (lsn(commit_lsn), ordinal.parse().expect("a number"))
}

/// Case 8.
#[test]
fn amid_writers_every_row_comes_once_and_the_old_ones_of_a_key_first() {
    at_both_ends(|version| {
        let outbox = outbox(version, TIMED);
        let topic = outbox.topic(EVENT_TYPE, 3);
        outbox.execute(&format!(
            "INSERT INTO outbox SELECT 'old-' || n % 5 || '/' || n, '{EVENT_TYPE}', 'old-' || n % 5, ''
             FROM generate_series(1, 20000) n"
        ));
        let writers = Writers::start(&outbox, 3);
        let walpost = outbox.relay(&[ALL]);
        walpost.wait_for_log(PATIENCE, "backfilled: the brokers have every row");
        wait_until_published(&walpost, &topic, 21_000);
        let mut committed = writers.stop();
        committed.extend((1..=20_000).map(|number| format!("old-{}/{number}", number % 5)));
        outbox.wait_until_confirmed();
        let records = outbox.kafka.read_all(&[&topic]);
        assert_eq!(Verdict::on(&records, &committed), Verdict::default());
        // in each partition, positions rise from the first old row to the last new one
        for partition in 0..3 {
            let positions: Vec<_> = records.iter().filter(|it| it.partition == partition).map(position).collect();
            assert!(positions.is_sorted() && !positions.is_empty());
        }
        assert_eq!(slots(&outbox), "");
    });
}

#[test]
fn killed_in_the_middle_nothing_is_lost_not_even_what_was_deleted_meanwhile() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        let topic = outbox.topic(EVENT_TYPE, 3);
        insert(&outbox, 1, 3000);
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "500")]);
        wait_until_published(&walpost, &topic, 200);
        walpost.kill9();
        assert_eq!(slots(&outbox), "_backfill");
        // whoever sees a slot relies on it
        insert(&outbox, 3001, 3010);
        outbox.execute("DELETE FROM outbox WHERE id > 3000");
        insert(&outbox, 3011, 3020);
        let walpost = outbox.relay(&[ALL]);
        outbox.wait_until_confirmed();
        assert_eq!(slots(&outbox), "");
        let records = outbox.kafka.read_all(&[&topic]);
        let found: BTreeSet<_> = records.iter().map(|record| record.header("id").expect("an id").to_owned()).collect();
        assert_eq!(found, numbers(1, 3020).into_iter().collect());
        let sent = records.len();
        assert!((3220..5000).contains(&sent), "{sent} records: the first 200 again, and the last ten from the stream");
        // a position belongs to one row, also after the table has changed
        let positions: BTreeSet<_> = records.iter().map(position).collect();
        assert_eq!(positions.len(), sent);
        claim_said(&walpost.log(), &["a backfill was interrupted"]);
    });
}

/// Between the copy and the end of the slot's first life there is an instant in which both exist.
#[test]
fn killed_while_the_slot_gets_its_name_nothing_is_lost_and_it_follows_its_primary() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        let topic = outbox.topic(EVENT_TYPE, 1);
        insert(&outbox, 1, 100);
        let env = [ALL, ("CRASH_KILL", "in_replace:1")];
        let ended = Walpost::relay(&outbox.database, outbox.kafka, &env).wait(PATIENCE);
        assert_eq!((ended.code(), slots(&outbox)), (None, ",_backfill".to_owned()));
        let follow = "SELECT string_agg(failover::text, ' ' ORDER BY slot_name) FROM pg_replication_slots
             WHERE database = current_database()";
        if version == Version::NEWEST {
            assert_eq!(outbox.text(follow), "false true", "a copy does not follow its primary");
        }
        insert(&outbox, 101, 110);
        let _walpost = outbox.relay(&[ALL]);
        outbox.wait_until_confirmed();
        assert_eq!(slots(&outbox), "");
        assert_eq!(ids(&outbox, &topic), numbers(1, 110));
        if version == Version::NEWEST {
            assert_eq!(
                outbox.text("SELECT failover FROM pg_replication_slots WHERE database = current_database()"),
                "t"
            );
        }
    });
}

#[test]
fn a_lost_link_to_postgres_in_the_middle_costs_repetitions_and_nothing_else() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        let topic = outbox.topic(EVENT_TYPE, 1);
        insert(&outbox, 1, 5000);
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "2500")]);
        wait_until_published(&walpost, &topic, 300);
        outbox.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
             AND query LIKE '%FROM walpost'",
        );
        walpost.wait_for_log(PATIENCE, "streaming slot=");
        outbox.wait_until_confirmed();
        let found: BTreeSet<_> = ids(&outbox, &topic).into_iter().collect();
        assert_eq!(found, numbers(1, 5000).into_iter().collect());
        assert_eq!(walpost.log().matches("backfilling: publishing").count(), 2, "{}", walpost.log());
    });
}

#[test]
fn init_waits_for_a_broker_that_is_away_and_a_second_init_finds_the_slot() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 50);
    kafka.kill();
    let init = outbox.start(&["init", "--backfill", "all"], &[]);
    init.wait_for_log(PATIENCE, "backfilling: publishing");
    assert_eq!(slots(&outbox), "_backfill");
    kafka.start_again();
    assert_eq!(init.wait(PATIENCE).code(), Some(0), "{}", init.log());
    claim_said(&init.log(), &["created replication slot"]);
    assert_eq!((slots(&outbox), ids(&outbox, &topic)), (String::new(), numbers(1, 50)));
    let again = outbox.command(&["init", "--backfill", "all"], &[]);
    claim_said(&again.output, &["found replication slot"]);
    assert_eq!(ids(&outbox, &topic).len(), 50);
}

#[test]
fn an_init_that_is_stopped_in_the_middle_is_no_success_and_run_completes_it() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 5000);
    let init = outbox.start(&["init", "--backfill", "all", "--rate", "200"], &[]);
    outbox.kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
    assert_eq!(init.sigterm_and_wait(PATIENCE), Some(1), "{}", init.log());
    claim_said(&init.log(), &["stopped before the backfill was complete"]);
    let _walpost = outbox.relay(&[ALL]);
    outbox.wait_until_confirmed();
    let found: BTreeSet<_> = ids(&outbox, &topic).into_iter().collect();
    assert_eq!((found, slots(&outbox)), (numbers(1, 5000).into_iter().collect(), String::new()));
}

#[test]
fn a_second_walpost_waits_while_the_first_backfills() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        let topic = outbox.topic(EVENT_TYPE, 1);
        insert(&outbox, 1, 1000);
        let first = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "500")]);
        wait_until_published(&first, &topic, 1);
        let second = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
        second.wait_for_log(PATIENCE, "another walpost");
        insert(&outbox, 1001, 1010);
        first.wait_for_log(PATIENCE, "the backfill is complete");
        // whoever is quicker, once the slot has its name
        let streams = |walpost: &Walpost| walpost.log().contains("streaming slot=");
        wait_until(PATIENCE, "one of them streams", || streams(&first) || streams(&second));
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), numbers(1, 1010));
    });
}

#[test]
fn poison_halts_with_its_name_and_the_backfill_is_completed_once_it_has_a_grave() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        let (topic, graves) = (outbox.topic_name(EVENT_TYPE), outbox.topic("dead-letter", 1));
        outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "3000")]);
        insert(&outbox, 1, 500);
        // one that the broker refuses, one that never reaches it
        outbox.execute(
            "UPDATE outbox SET payload = (SELECT string_agg(md5(m::text), '') FROM generate_series(1, 200) m) WHERE id = 250;
             UPDATE outbox SET event_type = 'no topic' WHERE id = 400",
        );
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        assert!(["event 250", "event 400"].iter().any(|event| walpost.log().contains(event)), "{}", walpost.log());
        assert_eq!(slots(&outbox), "_backfill");
        let before = ids(&outbox, &topic).len();
        let _walpost = outbox.relay(&[ALL, ("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &graves)]);
        outbox.wait_until_confirmed();
        let (mut buried, healthy) = (ids(&outbox, &graves), ids(&outbox, &topic).split_off(before));
        buried.sort();
        assert_eq!(buried, ["250", "400"]);
        let expected: Vec<_> = numbers(1, 500).into_iter().filter(|id| !buried.contains(id)).collect();
        assert_eq!(healthy, expected, "the healthy ones come once and in order");
    });
}

/// Case 36.
#[test]
fn rows_of_a_missing_topic_are_held_and_follow_once() {
    let outbox = outbox(Version::NEWEST, TABLE);
    insert(&outbox, 1, 300);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
    walpost.wait_for_log(PATIENCE, "held");
    assert_eq!(slots(&outbox), "_backfill");
    let topic = outbox.topic(EVENT_TYPE, 1);
    walpost.wait_for_log(PATIENCE, "streaming slot=");
    assert_eq!(ids(&outbox, &topic), numbers(1, 300));
}

#[test]
fn each_of_several_tables_has_its_own_backfill() {
    at_both_ends(|version| {
        let table = |name: &str| format!("CREATE TABLE {name} (id bigint, event_type text, key text, payload text)");
        let parted = "CREATE TABLE parted (id bigint, event_type text, key text, payload text) PARTITION BY RANGE (id);
             CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (50);
             CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (50) TO (1000)";
        let outbox = outbox(version, &[&table("picked"), &table("_left"), parted].map(str::to_owned).join(";"));
        let fill = |name: &str| {
            format!("INSERT INTO {name} SELECT n, '{name}', 'k', '' FROM generate_series(1, 100) n ORDER BY n DESC;")
        };
        let topics = ["picked", "_left", "parted"].map(|name| outbox.topic(name, 1));
        outbox.execute(&["picked", "_left", "parted"].map(fill).concat());
        let outboxes = "[{table = 'picked', backfill = 'id <= 3 or id = 77 -- the best'}, {table = '_left', backfill = 'none'}, \
             {table = 'parted', backfill = 'all'}]";
        let _walpost = outbox.relay(&[("WALPOST_OUTBOX", outboxes)]);
        outbox.execute(
            "INSERT INTO _left VALUES (101, '_left', 'k', ''); INSERT INTO parted VALUES (101, 'parted', 'k', '')",
        );
        outbox.wait_until_confirmed();
        let found = topics.map(|topic| ids(&outbox, &topic));
        assert_eq!(found, [["1", "2", "3", "77"].map(str::to_owned).to_vec(), numbers(101, 101), numbers(1, 101)]);
    });
}

#[test]
fn streamed_and_backfilled_records_hold_the_same_bytes() {
    let rows = [
        ("json", r#"'{"b" :1,  "a": "ü", "a": 1.0e1}'"#),
        ("jsonb", r#"'{"b" :1,  "a": "ü"}'"#),
        ("text", r"E'tab\tline\n \\x00 ü'"),
        ("bytea", r"'\x5c000af09fff'"),
        ("raw", r"'\x00ff'"), // a domain: its text in both
        ("json", "NULL"),
        ("text", "''"),
    ];
    at_both_ends(|version| {
        for (kind, payload) in rows {
            let outbox = outbox(
                version,
                &format!(
                    "CREATE DOMAIN raw AS bytea;
                     CREATE TABLE outbox (gone int, id bigserial, event_type text, key bytea, payload {kind}, headers jsonb,
                       created_at timestamp, moment timestamptz, span interval, float float8, list text[],
                       twice float8 GENERATED ALWAYS AS (float * 2) STORED);
                     ALTER TABLE outbox DROP COLUMN gone;
                     DO $$ BEGIN
                       EXECUTE format('ALTER DATABASE %I SET datestyle = German', current_database());
                       EXECUTE format('ALTER DATABASE %I SET bytea_output = escape', current_database());
                       EXECUTE format('ALTER DATABASE %I SET extra_float_digits = 0', current_database());
                       EXECUTE format('ALTER DATABASE %I SET statement_timeout = 1', current_database());
                       EXECUTE format('ALTER ROLE postgres IN DATABASE %I SET timezone = ''Asia/Tokyo''', current_database());
                     END $$"
                ),
            );
            let topic = outbox.topic("t", 1);
            let row = format!(
                r#"INSERT INTO outbox (event_type, key, payload, headers, created_at, moment, span, float, list)
                   VALUES ('t', '\x00ff', {payload}, '{{"trace": "x", "n": 1}}', '2024-01-02 03:04:05.678',
                     '2024-01-02 03:04:05.678+00', '1 day 2 hours', 0.1::float8 + 0.2::float8, '{{a,"b c",NULL}}')"#
            );
            outbox.execute(&row);
            let columns = "{moment = 'moment', span = 'span', float = 'float', list = 'list'}";
            let _walpost = outbox.relay(&[ALL, ("WALPOST_OUTBOX_HEADER_COLUMNS", columns)]);
            outbox.execute(&row);
            let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= 2);
            let content = |record: &Received| {
                let own = ["id", "walpost_position"];
                let headers: Vec<_> =
                    record.headers.iter().filter(|(name, _)| !own.contains(&&**name)).cloned().collect();
                (record.key.clone(), record.value.clone(), headers, record.timestamp)
            };
            assert_eq!(content(&records[0]), content(&records[1]), "{version:?} {kind} {payload}");
            assert!(position(&records[0]) < position(&records[1]));
            assert_eq!(ids(&outbox, &topic), ["1", "2"]);
        }
    });
}

#[test]
fn a_wrong_condition_is_answered_in_postgres_own_words_and_leaves_nothing_behind() {
    at_both_ends(|version| {
        let outbox = outbox(version, TABLE);
        insert(&outbox, 1, 10);
        let conditions = [
            ("colour = 'red'", "does not exist"),
            ("id <=", "syntax error"),
            ("true); DELETE FROM outbox; SELECT (1", "multiple commands"),
            ("1 / (id - 5) > 0", "division by zero"),
            ("id = $1", "parameters"),
            ("id = (SELECT count(*) FROM nowhere)", "nowhere"),
        ];
        for (condition, said) in conditions {
            let init = outbox.command(&["init", "--backfill", condition], &[]);
            assert_eq!((init.code, &*slots(&outbox)), (Some(1), "none"), "{}", init.output);
            claim_said(&init.output, &[said, "backfill condition"]);
            let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[("WALPOST_OUTBOX_BACKFILL", condition)]);
            assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
            claim_said(&walpost.log(), &[said, "outbox.backfill"]);
            let again = outbox.command(&["backfill", condition], &[]);
            assert_eq!(again.code, Some(1), "{}", again.output);
            claim_said(&again.output, &[said]);
        }
        assert_eq!(outbox.text("SELECT count(*) FROM outbox"), "10");
    });
}

#[test]
fn no_condition_can_write() {
    let outbox = outbox(
        Version::NEWEST,
        &format!(
            "{TABLE}; CREATE FUNCTION empties() RETURNS boolean LANGUAGE plpgsql AS
             $$ BEGIN DELETE FROM outbox; RETURN true; END $$"
        ),
    );
    insert(&outbox, 1, 10);
    let init = outbox.command(&["init", "--backfill", "empties()"], &[]);
    assert_eq!(init.code, Some(1), "{}", init.output);
    claim_said(&init.output, &["read-only transaction"]);
    assert_eq!((outbox.text("SELECT count(*) FROM outbox"), slots(&outbox)), ("10".to_owned(), "none".to_owned()));
}

#[test]
fn a_rate_is_kept() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 600);
    let began = std::time::Instant::now();
    let init = outbox.command(&["init", "--backfill", "all", "--rate", "200"], &[]);
    assert_eq!(init.code, Some(0), "{}", init.output);
    // a tenth of a second may be made up for
    assert!(began.elapsed() >= Duration::from_millis(2850), "{:?}", began.elapsed());
    assert_eq!(ids(&outbox, &topic), numbers(1, 600));
}

#[test]
fn rows_come_again_on_purpose_beside_a_stream_and_without_one() {
    at_both_ends(|version| {
        let tables = format!("{TABLE}; CREATE TABLE other (id bigint, event_type text, key text, payload text)");
        let outbox = outbox(version, &tables);
        let topic = outbox.topic(EVENT_TYPE, 1);
        let outboxes = ("WALPOST_OUTBOX", "[{table = 'outbox'}, {table = 'other'}]");
        let walpost = outbox.relay(&[outboxes]);
        insert(&outbox, 1, 10);
        outbox.execute(&format!("INSERT INTO other VALUES (77, '{EVENT_TYPE}', 'k', '')"));
        outbox.wait_until_confirmed();
        let counted = outbox.command(&["backfill", "id > 7", "--dry-run"], &[outboxes]);
        assert_eq!(counted.code, Some(0), "{}", counted.output);
        claim_said(&counted.output, &["public.outbox: 3 rows would be published", "public.other: 1 rows"]);
        assert_eq!(ids(&outbox, &topic).len(), 11);

        let again = outbox.command(&["backfill", "id > 7", "--only", "public.outbox"], &[outboxes]);
        assert_eq!(again.code, Some(0), "{}", again.output);
        claim_said(&again.output, &["public.outbox: 3 rows published"]);
        insert(&outbox, 11, 11);
        outbox.wait_until_confirmed();
        let records = outbox.kafka.read_all(&[&topic]);
        let expected = [numbers(1, 10), numbers(77, 77), numbers(8, 10), numbers(11, 11)].concat();
        assert_eq!(ids(&outbox, &topic), expected);
        assert!(records.iter().map(position).is_sorted(), "what comes later has a later position");

        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{}')", outbox.database.name()));
        let again = outbox.command(&["backfill", "all", "--only", "other"], &[outboxes]);
        assert_eq!((again.code, &*slots(&outbox)), (Some(0), "none"), "{}", again.output);
        assert_eq!(ids(&outbox, &topic).len(), 16);
        for (arguments, said) in
            [(&["backfill", "none"][..], "say which"), (&["backfill", "all", "--only", "a.b"], "no outbox")]
        {
            let refused = outbox.command(arguments, &[outboxes]);
            assert_eq!(refused.code, Some(1), "{}", refused.output);
            claim_said(&refused.output, &[said]);
        }
    });
}

#[test]
fn the_role_that_sql_grants_can_backfill_and_policies_hide_nothing_from_it() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let (topic, role) = (outbox.topic(EVENT_TYPE, 1), outbox.database.name());
        outbox.execute(&format!(
            "INSERT INTO outbox (event_type, payload) SELECT '{EVENT_TYPE}', to_json(n) FROM generate_series(1, 50) n;
             CREATE ROLE {role} LOGIN REPLICATION; GRANT USAGE ON SCHEMA public TO {role};
             GRANT SELECT, DELETE ON outbox TO {role};
             CREATE PUBLICATION {role} FOR TABLE outbox WITH (publish = 'insert');
             ALTER TABLE outbox ENABLE ROW LEVEL SECURITY"
        ));
        let url = outbox.database.url_as(role);
        let env = [ALL, ("WALPOST_POSTGRES_URL", url.as_str())];
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &env);
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        claim_said(&walpost.log(), &["row-level security", "BYPASSRLS"]);
        assert_eq!(slots(&outbox), "none");
        outbox.execute("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY");
        let walpost = outbox.relay(&env);
        assert_eq!((ids(&outbox, &topic).len(), &*slots(&outbox)), (50, ""));
        walpost.sigterm_and_wait(PATIENCE);
        outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    });
}

#[test]
fn what_was_decided_while_a_backfill_is_interrupted_is_done() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 1000);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "100")]);
    wait_until_published(&walpost, &topic, 1);
    walpost.kill9();
    insert(&outbox, 1001, 1001);
    // no word: it is asked again
    let unsaid = outbox.command(&["init"], &[]);
    assert_eq!((unsaid.code, &*slots(&outbox)), (Some(1), "_backfill"), "{}", unsaid.output);
    claim_said(&unsaid.output, &["1001 rows", "outbox.backfill"]);
    // none: the stream begins where it would have begun
    let _walpost = outbox.relay(&[("WALPOST_OUTBOX_BACKFILL", "none")]);
    outbox.wait_until_confirmed();
    let found = ids(&outbox, &topic);
    assert_eq!((found.last().map(String::as_str), slots(&outbox)), (Some("1001"), String::new()));
    assert!(found.len() < 1000);
}

#[test]
fn a_slot_made_by_hand_beside_an_interrupted_backfill_is_not_streamed() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 1000);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "100")]);
    wait_until_published(&walpost, &topic, 1);
    walpost.kill9();
    let slot = outbox.database.name();
    insert(&outbox, 1001, 1001);
    outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
    assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
    claim_said(&walpost.log(), &[&format!("{slot}_backfill"), "pg_drop_replication_slot"]);
}

#[test]
fn a_name_that_leaves_no_room_is_refused_and_so_is_one_that_is_taken_for_a_marker() {
    let outbox = outbox(Version::NEWEST, TABLE);
    insert(&outbox, 1, 1);
    let long = format!("{:x<60}", outbox.database.name());
    let refused = outbox.command(&["init", "--backfill", "all", "--slot", &long], &[]);
    assert_eq!((refused.code, &*slots(&outbox)), (Some(1), "none"), "{}", refused.output);
    claim_said(&refused.output, &["63 characters", "postgres.slot"]);
    let refused = outbox.command(&["init", "--slot", "other_backfill"], &[]);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    // a slot of that name that is none of ours
    let name = outbox.database.name();
    outbox.execute(&format!("SELECT pg_create_physical_replication_slot('{name}_backfill')"));
    let refused = outbox.command(&["init", "--backfill", "all"], &[]);
    assert_eq!(refused.code, Some(1), "{}", refused.output);
    claim_said(&refused.output, &["_backfill", "no pgoutput slot of this database"]);
    outbox.execute(&format!("SELECT pg_drop_replication_slot('{name}_backfill')"));
}

#[test]
fn check_says_that_a_backfill_was_not_completed() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 1000);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "100")]);
    wait_until_published(&walpost, &topic, 1);
    let answer = walpost.get("/readyz");
    assert_eq!(answer.status, 503);
    claim_said(&answer.body, &["rows older than the slot are published first"]);
    walpost.kill9();
    let check = outbox.command(&["check"], &[ALL]);
    assert_eq!(check.code, Some(0), "{}", check.output);
    claim_said(&check.output, &["_backfill stands for it"]);
}

#[test]
fn a_million_rows_cost_no_memory() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 3);
    outbox.execute(&format!(
        "INSERT INTO outbox SELECT n, '{EVENT_TYPE}', 'k' || n % 997, repeat(n::text, 40) FROM generate_series(1, 1000000) n"
    ));
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
    walpost.wait_for_log(8 * PATIENCE, "streaming slot=");
    assert!(walpost.peak_mb() < MEMORY_MB, "{} MB", walpost.peak_mb());
    wait_until_published(&walpost, &topic, 1_000_000);
}

/// Whoever has lost the lock finds the slot under its name, and streams.
#[test]
fn a_walpost_that_was_overtaken_begins_nothing_anew() {
    let outbox = outbox(Version::NEWEST, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 2000);
    let first = Walpost::relay(&outbox.database, outbox.kafka, &[ALL, ("WALPOST_LIMITS_BACKFILL_RATE", "200")]);
    wait_until_published(&first, &topic, 1);
    first.freeze();
    outbox.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks
         WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    );
    let second = outbox.relay(&[ALL]);
    insert(&outbox, 2001, 2001);
    outbox.wait_until_confirmed();
    first.thaw();
    assert_eq!(second.sigterm_and_wait(PATIENCE), Some(0));
    first.wait_for_log(PATIENCE, "streaming slot=");
    insert(&outbox, 2002, 2002);
    outbox.wait_until_confirmed();
    assert_eq!(first.log().matches("backfilling: publishing").count(), 1, "{}", first.log());
    let (found, mut seen) = (ids(&outbox, &topic), BTreeSet::new());
    let fresh: Vec<_> = found.into_iter().filter(|id| seen.insert(id.clone())).collect();
    assert_eq!(fresh, numbers(1, 2002));
}

#[test]
fn a_server_without_room_for_a_second_slot_is_told_before_anything_is_published() {
    let server = Postgres::start(Version::OLDEST, &Settings::default().set("max_replication_slots", "1"));
    let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    insert(&outbox, 1, 10);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[ALL]);
    walpost.wait_for_log(PATIENCE, "raise max_replication_slots");
    assert_eq!((slots(&outbox), ids(&outbox, &topic)), ("none".to_owned(), Vec::new()));
    // without a backfill one is enough
    walpost.kill9();
    let _walpost = outbox.relay(&[("WALPOST_OUTBOX_BACKFILL", "none")]);
}
