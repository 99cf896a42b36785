//! A partitioned outbox in odd surroundings: no undelivered row goes, and no application is held up or turned away.

use std::time::Instant;

use tokio_postgres::error::SqlState;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends},
    partitions::{AHEAD, DROP, KEEP, OFTEN, partitions},
    services::{
        complete,
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
    },
};

const TABLE: &str = "
    CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY, event_type text NOT NULL, key text, payload json,
        created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
    CREATE INDEX ON outbox (created_at);
    CREATE TABLE first PARTITION OF outbox FOR VALUES FROM ('2020-05-01') TO ('2020-05-02');
    CREATE TABLE present PARTITION OF outbox FOR VALUES FROM ('2020-05-02') TO (MAXVALUE)";

/// How long an application may wait, on a machine that has other things to do: far less than whatever would hold it up.
const SHORT: &str = "SET statement_timeout = '10s'";

fn with_tables(version: Version, more: &str) -> Outbox<'static> {
    let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
    outbox.execute(more);
    assert_eq!(outbox.command(&["init"], &[]).code, Some(0));
    outbox
}

fn rows(day: &str, count: u32) -> String {
    format!("INSERT INTO outbox (event_type, created_at) SELECT 't', '{day} 12:00+00' FROM generate_series(1, {count})")
}

/// As if a walpost had delivered whatever is there.
fn call_delivered(outbox: &Outbox<'_>) {
    let slot = outbox.database.name();
    outbox.execute(&format!(
        "INSERT INTO walpost_delivered (slot, system, relation, shape, since, until, since_at, confirmed)
         SELECT '{slot}', s.system_identifier::text, c.oid, 'test', 0, pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
                '2000-01-01', '0/0' FROM pg_class c, pg_control_system() s WHERE c.relname IN ('first', 'present')"
    ));
}

/// An event trigger that does something in the transaction that drops or creates a partition.
fn meanwhile(outbox: &Outbox<'_>, event: &str, tag: &str, what: &str) {
    outbox.execute(&format!(
        "CREATE FUNCTION meanwhile() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN {what} END $$;
         CREATE EVENT TRIGGER meanwhile ON {event} WHEN TAG IN ('{tag}') EXECUTE FUNCTION meanwhile()"
    ));
}

fn wait_until_asleep(outbox: &Outbox<'_>) {
    outbox.wait_until_true(
        PATIENCE,
        "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')",
    );
}

/// Whoever is subject to a policy does not see every row, so what it sees proves nothing.
#[test]
fn rows_that_a_policy_hides_keep_their_partition() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "");
        let name = outbox.database.name();
        let (owner, relay) = (format!("owner_{name}"), format!("relay_{name}"));
        outbox.execute(&format!(
            "CREATE ROLE {owner}; CREATE ROLE {relay} LOGIN REPLICATION; GRANT {owner} TO {relay};
             GRANT CREATE, USAGE ON SCHEMA public TO {owner}; ALTER TABLE outbox OWNER TO {owner};
             ALTER TABLE first OWNER TO {owner}; ALTER TABLE present OWNER TO {owner};
             GRANT SELECT, INSERT, UPDATE, DELETE ON walpost_delivered, walpost_dead_lettered TO {relay};
             ALTER TABLE first ENABLE ROW LEVEL SECURITY; ALTER TABLE first FORCE ROW LEVEL SECURITY"
        ));
        outbox.execute(&rows("2020-05-01", 3));
        let url = outbox.database.url_as(&relay);
        let pruned = outbox.command(&["prune"], &[KEEP, DROP, ("WALPOST_POSTGRES_URL", url.as_str())]);
        assert_eq!(partitions(&outbox), "first present", "{}", pruned.output);
        assert_eq!(outbox.text("SELECT count(*) FROM first"), "3");
        assert!(pruned.output.contains("NO FORCE ROW LEVEL SECURITY"), "{}", pruned.output);
        outbox.execute(&format!(
            "REASSIGN OWNED BY {owner} TO postgres; DROP OWNED BY {relay}; DROP OWNED BY {owner};
             DROP ROLE {relay}; DROP ROLE {owner}"
        ));
    });
}

/// An unlogged partition is not in the WAL, so nothing of it is ever delivered.
#[test]
fn rows_of_an_unlogged_partition_stay() {
    at_both_ends(|version| {
        let unlogged = "DROP TABLE first;
            CREATE UNLOGGED TABLE first PARTITION OF outbox FOR VALUES FROM ('2020-05-01') TO ('2020-05-02')";
        let outbox = with_tables(version, unlogged);
        let checked = outbox.command(&["check"], &[]);
        assert!(
            checked.output.contains("partition public.first of table \"public\".\"outbox\" is unlogged"),
            "{}",
            checked.output
        );
        outbox.topic("t", 1);
        for more in [&[KEEP, OFTEN][..], &[KEEP, OFTEN, DROP]] {
            let walpost = outbox.relay(more);
            outbox.execute(&rows("2020-05-01", 3));
            outbox.execute(&rows("2020-05-02", 3));
            wait_until(PATIENCE, "what was delivered goes", || outbox.text("SELECT count(*) FROM present") == "0");
            assert_ne!(outbox.value("SELECT count(*) FROM outbox").as_deref(), Some("0"));
            assert_eq!(outbox.text("SELECT count(*) % 3 FROM first"), "0");
            assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        }
        assert_eq!(outbox.text("SELECT count(*) FROM first"), "6");
    });
}

/// A table of before the partitioning has become one of them, and its sequence numbers all events still.
#[test]
fn a_partition_whose_sequence_others_may_use_stays() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "CREATE SEQUENCE numbers OWNED BY first.id");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert_eq!(partitions(&outbox), "first present", "{}", pruned.output);
        let advice = "ALTER SEQUENCE public.numbers OWNED BY NONE";
        assert!(pruned.output.contains(advice), "{}", pruned.output);
        outbox.execute(advice);
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert_eq!(
            (partitions(&outbox), outbox.text("SELECT nextval('numbers')").as_str()),
            ("present".to_owned(), "1"),
            "{}",
            pruned.output
        );
    });
}

/// The server ends the transaction by itself: it does not wait for a client with everything locked.
#[test]
fn a_walpost_that_freezes_in_the_middle_of_a_drop_holds_nobody_up() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "");
        meanwhile(&outbox, "sql_drop", "DROP TABLE", "PERFORM pg_sleep(1);");
        let pruning = outbox.start(&["prune"], &[KEEP, DROP]);
        wait_until_asleep(&outbox);
        pruning.freeze();
        outbox.execute(&format!("{SHORT}; {}", rows("2020-05-05", 1)));
        pruning.thaw();
        pruning.wait(PATIENCE);
        assert_eq!(partitions(&outbox), "present");
    });
}

/// Whatever the server has to do under the lock that keeps everybody out, such as looking for rows that refer to these: it
/// is given up after a moment.
#[test]
fn a_drop_that_takes_long_is_given_up() {
    at_both_ends(|version| {
        for (tag, settings) in [("ALTER TABLE", [KEEP, DROP]), ("DROP TABLE", [KEEP, DROP])] {
            let outbox = with_tables(version, "");
            meanwhile(&outbox, "ddl_command_end", tag, "PERFORM pg_sleep(60);");
            let pruning = outbox.start(&["prune"], &settings);
            wait_until_asleep(&outbox);
            outbox.execute(&format!("{SHORT}; {}", rows("2020-05-05", 1)));
            pruning.wait(PATIENCE);
            assert_eq!(partitions(&outbox), "first present");
            assert!(pruning.log().contains("took too long"), "{}", pruning.log());
        }
    });
}

/// To attach a partition the server looks through the DEFAULT one, which nobody can write to meanwhile.
#[test]
fn a_creation_that_takes_long_is_given_up() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "DROP TABLE present; CREATE TABLE rest PARTITION OF outbox DEFAULT");
        meanwhile(&outbox, "ddl_command_end", "ALTER TABLE", "
            IF EXISTS (SELECT FROM pg_locks WHERE relation = 'public.rest'::regclass AND mode = 'AccessExclusiveLock' AND pid = pg_backend_pid())
            THEN PERFORM pg_sleep(60); END IF;");
        let pruning = outbox.start(&["prune"], &[KEEP, AHEAD]);
        wait_until_asleep(&outbox);
        outbox.execute(&format!("{SHORT}; {}", rows("2020-05-05", 1)));
        pruning.wait(PATIENCE);
        assert_eq!(partitions(&outbox), "first rest");
        // once, and not again for each of the others
        assert_eq!(pruning.log().matches("took too long").count(), 1, "{}", pruning.log());
    });
}

/// An insert that waits for the look at its partition holds the table's lock, for which the drop would wait.
#[test]
fn a_late_insert_is_never_the_victim_of_a_deadlock() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "");
        outbox.execute(&rows("2020-05-01", 30_000));
        outbox.execute("VACUUM (ANALYZE) first");
        call_delivered(&outbox);
        let locked = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = to_regclass('first') AND mode = 'ShareLock' AND granted)";
        // one of them has its look at deadlocks while the drop waits for the table, were it to wait for it
        for patience in [100, 200, 300] {
            let writer = outbox.database.connect();
            let late = format!("SET deadlock_timeout = '{patience}ms'; {}", rows("2020-05-01", 1));
            let pruning = outbox.start(&["prune"], &[KEEP, DROP]);
            let end = Instant::now() + PATIENCE;
            while outbox.text(locked) != "t" {
                assert!(Instant::now() < end, "it is never locked: {}", pruning.log());
            }
            let late = complete(async move { writer.batch_execute(&late).await });
            pruning.wait(PATIENCE);
            if let Err(error) = late {
                // it came too late for its partition
                assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{error:?}");
                break;
            }
            assert!(pruning.log().contains("is in use; try again later"), "{}", pruning.log());
            outbox.execute("DELETE FROM first WHERE xmin::text::bigint >= (SELECT max(until) FROM walpost_delivered)");
        }
    });
}

/// The names have come to mean other tables since the rows were looked at, as where schemas are swapped.
#[test]
fn what_is_dropped_is_what_was_looked_at() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "");
        meanwhile(
            &outbox,
            "ddl_command_end",
            "ALTER TABLE",
            "
            IF to_regclass('looked_at') IS NULL THEN
                ALTER TABLE first RENAME TO looked_at; CREATE TABLE first AS SELECT 1 AS precious;
            END IF;",
        );
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert_eq!(partitions(&outbox), "first present", "{}", pruned.output);
    });
}

/// A pass through many rows takes its time, and partitions are needed meanwhile.
#[test]
fn partitions_are_created_while_a_pass_goes_on() {
    let outbox = Outbox::with(
        Postgres::shared(Version::NEWEST),
        Kafka::shared(),
        &TABLE.replace("TO (MAXVALUE)", "TO ('2020-05-03')"),
    );
    assert_eq!(outbox.command(&["init"], &[]).code, Some(0));
    outbox.execute(&rows("2020-05-01", 5000));
    call_delivered(&outbox);
    let walpost = outbox.relay(&[KEEP, OFTEN, AHEAD, ("WALPOST_RETENTION_BATCH", "1")]);
    wait_until(PATIENCE, "the pass has begun", || outbox.text("SELECT count(*) FROM first") != "5000");
    let newest = "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'outbox'::regclass AND inhrelid::regclass::text LIKE 'outbox\\_2%'";
    let name = outbox.text(newest);
    outbox.execute(&format!("DROP TABLE {name}"));
    wait_until(PATIENCE, "it is made again", || outbox.text(newest) == name);
    assert_ne!(outbox.text("SELECT count(*) FROM first"), "0", "the pass has ended, so this shows nothing");
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
}

/// Bounds that are no times, and what a server refuses of one outbox, are no hindrance to others.
#[test]
fn an_outbox_with_strange_bounds_holds_up_no_other() {
    let strange = "CREATE TABLE strange (id bigint GENERATED ALWAYS AS IDENTITY, event_type text NOT NULL, key text, payload json,
            created_at bigint NOT NULL) PARTITION BY RANGE (created_at);
        CREATE TABLE early PARTITION OF strange FOR VALUES FROM (-9223372036854775808) TO ('1588291200000');
        CREATE TABLE day PARTITION OF strange FOR VALUES FROM ('1588291200000') TO ('1588377600000');
        CREATE TABLE late PARTITION OF strange FOR VALUES FROM ('1588377600000') TO (9223372036854775807)";
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), &format!("{TABLE}; {strange}"));
        let table = ("WALPOST_OUTBOX_TABLE", "strange");
        assert_eq!(outbox.command(&["init"], &[table]).code, Some(0));
        let pruned = outbox.command(&["prune"], &[table, KEEP, DROP, AHEAD]);
        assert_eq!(pruned.code, Some(0), "{}", pruned.output);
        assert!(pruned.output.contains("dropped partition public.day with 0"), "{}", pruned.output);
    });
}

/// Between partitions that do not join none of the regular width fits: that is said before an insert fails there.
#[test]
fn a_gap_between_partitions_is_told_of() {
    at_both_ends(|version| {
        let parts = "DROP TABLE first, present;
            CREATE TABLE past PARTITION OF outbox FOR VALUES FROM ('2020-05-01') TO ('2020-06-01');
            DO $$ DECLARE m date := date_trunc('month', now() AT TIME ZONE 'UTC'); BEGIN
                EXECUTE format('CREATE TABLE present PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)', m, m + interval '1 month');
                EXECUTE format('CREATE TABLE later PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                    m + interval '1 month 14 days', m + interval '2 months 14 days');
            END $$";
        let outbox = with_tables(version, parts);
        for command in ["prune", "check"] {
            let told = outbox.command(&[command], &[KEEP, AHEAD]);
            assert_eq!(told.output.matches("only in part").count(), 1, "{}", told.output);
        }
        outbox.execute("CREATE TABLE rest PARTITION OF outbox DEFAULT");
        let told = outbox.command(&["prune"], &[KEEP, AHEAD]);
        assert!(!told.output.contains("only in part"), "{}", told.output);
    });
}

/// Where everybody may create in a schema that is searched, a function that fits better than the server's own is not called.
#[test]
fn a_function_of_somebody_else_is_not_slipped_under() {
    at_both_ends(|version| {
        let outbox = with_tables(version, "");
        outbox.execute(
            "CREATE FUNCTION public.format(text, bigint) RETURNS text LANGUAGE plpgsql AS
                 $$ BEGIN RAISE EXCEPTION 'slipped under'; END $$",
        );
        outbox.execute(&rows("2020-05-01", 3));
        outbox.execute(&rows("2020-05-03", 4));
        call_delivered(&outbox);
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        for said in ["dropped partition public.first with 3 delivered rows", "deleted 4 rows"] {
            assert!(pruned.output.contains(said), "{said} is not said in:\n{}", pruned.output);
        }
    });
}
