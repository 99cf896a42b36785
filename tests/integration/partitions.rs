//! A partitioned outbox: partitions whose rows were all delivered are dropped whole, those of days to come are there in time.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tokio_postgres::error::SqlState;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        complete,
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

pub const KEEP: (&str, &str) = ("WALPOST_RETENTION_KEEP", "0s");
pub const OFTEN: (&str, &str) = ("WALPOST_RETENTION_INTERVAL", "1s");
pub const DROP: (&str, &str) = ("WALPOST_RETENTION_DROP_PARTITIONS", "true");
pub const AHEAD: (&str, &str) = ("WALPOST_RETENTION_PARTITIONS_AHEAD", "3");
/// Long enough for several passes and entries in the record.
pub const PASSES: Duration = Duration::from_secs(4);

/// With an identity column, which partitions may not have of their own, and an index that they get.
const TABLE: &str = "
    CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY, event_type text NOT NULL, key text, payload json,
        created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
    CREATE INDEX ON outbox (created_at);
    CREATE TABLE first PARTITION OF outbox FOR VALUES FROM ('2020-05-01') TO ('2020-05-02');
    CREATE TABLE second PARTITION OF outbox FOR VALUES FROM ('2020-05-02') TO ('2020-05-03')";

fn rows(key: &str, day: &str, count: u32) -> String {
    format!(
        "INSERT INTO outbox (event_type, key, payload, created_at)
         SELECT 't', '{key}', '{{}}', '{day} 12:00+00' FROM generate_series(1, {count})"
    )
}

/// Names of the partitions, the oldest first.
pub fn partitions(outbox: &Outbox<'_>) -> String {
    outbox.text("SELECT coalesce(string_agg(inhrelid::regclass::text, ' ' ORDER BY inhrelid), '') FROM pg_inherits WHERE inhparent = 'outbox'::regclass")
}

/// Whatever is in the table now is in the record as well.
fn wait_until_recorded(outbox: &Outbox<'_>) {
    outbox.wait_until_confirmed();
    outbox.wait_until_true(
        PATIENCE,
        "NOT EXISTS (SELECT FROM outbox o WHERE o.xmin::text::bigint >= (SELECT max(until) FROM walpost_delivered))",
    );
}

fn tables(outbox: &Outbox<'_>) -> u32 {
    let sql = "SELECT count(*) FROM pg_class WHERE relname IN ('first', 'second')";
    outbox.text(sql).parse().expect("a number")
}

#[test]
fn delivered_partitions_are_dropped_and_those_of_days_to_come_are_created() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute(&rows("a", "2020-05-01", 20));
        outbox.execute(&rows("b", "2020-05-02", 5));
        wait_until_recorded(&outbox);
        let dry = outbox.command(&["prune", "--dry-run"], &[KEEP, DROP, AHEAD]);
        for said in
            ["would drop partition public.first with 20", "would drop partition public.second with 5", ": 0 rows would"]
        {
            assert!(dry.output.contains(said), "{said:?} is not said in:\n{}", dry.output);
        }
        assert_eq!(partitions(&outbox), "first second");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP, AHEAD]);
        assert!(pruned.output.contains("dropped partition public.first with 20 delivered rows"), "{}", pruned.output);
        let days = outbox.text(
            "SELECT string_agg('outbox_' || to_char((now() AT TIME ZONE 'UTC') + make_interval(days => n), 'YYYYMMDD'), ' ' ORDER BY n)
             FROM generate_series(0, 3) n",
        );
        assert_eq!((partitions(&outbox), tables(&outbox)), (days.clone(), 0), "{}", pruned.output);
        // what goes into a new one is published and known as its root's, and a second pass has nothing to do
        outbox
            .execute("INSERT INTO outbox (event_type, key, payload) SELECT 't', 'c', '{}' FROM generate_series(1, 7)");
        outbox.wait_until_confirmed();
        let again = outbox.command(&["prune"], &[KEEP, DROP, AHEAD]);
        assert!(again.code == Some(0) && again.output.contains("deleted 0 rows"), "{}", again.output);
        assert_eq!((partitions(&outbox), outbox.text("SELECT count(*) FROM outbox").as_str()), (days, "7"));
        assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), 32);
        drop(walpost);
    });
}

/// A row that nobody has delivered, or that a long transaction has yet to commit, keeps its partition, however old that is.
#[test]
fn a_partition_stays_as_long_as_one_row_in_it_is_not_delivered() {
    let kafka = victim();
    let outboxes =
        [Version::NEWEST, Version::OLDEST].map(|version| Outbox::with(Postgres::shared(version), &kafka, TABLE));
    let sides = outboxes.each_ref().map(|outbox| {
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute(&rows("first", "2020-05-01", 3));
        wait_until_recorded(outbox);
        let long = outbox.database.connect();
        let sql = format!("BEGIN; {}; SAVEPOINT s; {}", rows("l", "2020-05-02", 1), rows("l", "2020-05-02", 1));
        let long = complete(async move { long.batch_execute(&sql).await.map(|()| long) }).expect("it begins");
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let walpost = outbox.relay(&[KEEP, OFTEN, DROP]);
        (outbox, topic, walpost, long)
    });
    stays(PASSES, "while a transaction writes through the root nothing is detached from it", || {
        sides.iter().all(|(outbox, ..)| partitions(outbox) == "first second")
    });
    for (outbox, ..) in &sides {
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert_eq!(pruned.output.matches("is in use; try again later").count(), 2, "{}", pruned.output);
    }
    kafka.freeze();
    let sides = sides.map(|(outbox, topic, walpost, long)| {
        complete(async move { long.batch_execute("COMMIT").await }).expect("it commits");
        (outbox, topic, walpost)
    });
    stays(PASSES, "a partition with rows that are not delivered stays", || {
        sides.iter().all(|(outbox, ..)| outbox.text("SELECT count(*) FROM second") == "2")
    });
    for (outbox, ..) in &sides {
        wait_until(PATIENCE, "the one that was delivered goes meanwhile", || partitions(outbox) == "second");
    }
    kafka.thaw();
    for (outbox, topic, _walpost) in &sides {
        wait_until(PATIENCE, "the partition is dropped once its rows are delivered", || partitions(outbox).is_empty());
        assert_eq!((tables(outbox), deliveries(&kafka.read_all(&[topic])).len()), (0, 5));
    }
}

/// Rows that nothing proves, and those of dead letters, keep their partition; what may go goes row by row.
#[test]
fn rows_that_must_stay_keep_their_partition() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.topic("t", 1);
        let graves = outbox.topic("graves", 1);
        outbox.execute(&rows("older", "2020-05-01", 2));
        let grave = ("WALPOST_KAFKA_DEAD_LETTER_TOPIC", graves.as_str());
        let walpost = outbox.relay(&[("WALPOST_OUTBOX_BACKFILL", "none"), grave]);
        outbox.execute(&rows("streamed", "2020-05-01", 4));
        outbox.execute(&rows("streamed", "2020-05-02", 4));
        outbox.execute(&rows("streamed", "2020-05-02", 1).replace("'t'", "'no topic has this name'"));
        outbox.wait_until_confirmed();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let _walpost = outbox.relay(&[KEEP, OFTEN, DROP, grave]);
        wait_until(PATIENCE, "rows that may go are gone", || outbox.text("SELECT count(*) FROM outbox") == "3");
        assert_eq!(partitions(&outbox), "first second");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert!(pruned.output.contains("partition public.first stays"), "{}", pruned.output);
        assert_eq!(outbox.text("SELECT count(*) FROM outbox"), "3");
    });
}

/// Dropping is the owner's: what the grants of `sql/roles.sql` lack is said, and one more is enough.
#[test]
fn check_says_what_partitions_need() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let name = outbox.database.name();
    let (owner, relay) = (format!("owner_{name}"), format!("relay_{name}"));
    outbox.execute(&format!(
        "CREATE ROLE {owner}; CREATE ROLE {relay} LOGIN REPLICATION; ALTER TABLE outbox OWNER TO {owner};
         GRANT SELECT, DELETE ON outbox TO {relay}; GRANT CREATE, USAGE ON SCHEMA public TO {owner}; GRANT USAGE ON SCHEMA public TO {relay}"
    ));
    assert_eq!(outbox.command(&["init"], &[]).code, Some(0));
    outbox.execute(&format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON walpost_delivered, walpost_dead_lettered TO {relay}"
    ));
    let url = outbox.database.url_as(&relay);
    let env = [KEEP, DROP, AHEAD, ("WALPOST_POSTGRES_URL", url.as_str())];
    let checked = outbox.command(&["check"], &env);
    assert!(checked.output.contains("may neither drop nor create partitions"), "{}", checked.output);
    // what can be done without is done, and the rest is a fault with the command that mends it
    outbox.execute(&rows("old", "2020-05-01", 2));
    let pruned = outbox.command(&["prune"], &env);
    assert_eq!(pruned.code, Some(1), "{}", pruned.output);
    for said in [
        ": deleted 0 rows",
        &format!("GRANT \"{owner}\" TO walpost's role"),
        "2 old rows are not known to be delivered yet",
    ] {
        assert!(pruned.output.contains(said), "{said} is not said in:\n{}", pruned.output);
    }
    outbox.execute("DELETE FROM outbox");
    outbox.execute(&format!(
        "ALTER TABLE first OWNER TO {owner}; ALTER TABLE second OWNER TO {owner}; GRANT {owner} TO {relay}"
    ));
    let checked = outbox.command(&["check"], &env);
    assert!(!checked.output.contains("partitions of"), "{}", checked.output);
    let pruned = outbox.command(&["prune"], &env);
    assert!(pruned.output.contains("dropped partition public.second with 0"), "{}", pruned.output);
    assert_eq!(
        outbox.text("SELECT count(DISTINCT relowner) FROM pg_class WHERE relname LIKE 'outbox_2%' AND relkind = 'r'"),
        "1"
    );
    outbox.execute(&format!(
        "ALTER TABLE outbox OWNER TO postgres; REASSIGN OWNED BY {owner} TO postgres;
        DROP OWNED BY {relay}; DROP OWNED BY {owner}; DROP ROLE {relay}; DROP ROLE {owner}"
    ));
}

/// A slot that was made anew, moved by hand or is another one has not delivered what lies before it.
#[test]
fn what_another_slot_or_none_delivered_keeps_its_partition() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.topic("t", 1);
        let name = outbox.database.name();
        let walpost = outbox.relay(&[]);
        outbox.execute(&rows("first", "2020-05-01", 2));
        wait_until_recorded(&outbox);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let other = format!("{name}_other");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP, ("WALPOST_POSTGRES_SLOT", other.as_str())]);
        assert!(pruned.output.contains("partition public.first stays"), "{}", pruned.output);
        outbox.execute(&rows("gap", "2020-05-01", 3));
        outbox.execute(&format!("SELECT pg_replication_slot_advance('{name}', pg_current_wal_lsn())"));
        let relay = [KEEP, OFTEN, DROP, ("WALPOST_OUTBOX_BACKFILL", "none")];
        let walpost = outbox.relay(&relay);
        outbox.execute(&rows("later", "2020-05-01", 1));
        wait_until(PATIENCE, "rows that may go are gone", || outbox.text("SELECT count(*) FROM outbox") == "3");
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{name}')"));
        outbox.execute(&rows("gap", "2020-05-01", 1));
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
        let _walpost = outbox.relay(&relay);
        outbox.execute(&rows("later", "2020-05-01", 2));
        wait_until(PATIENCE, "rows that may go are gone", || outbox.text("SELECT count(*) FROM outbox") == "4");
        stays(PASSES, "the rest keeps its partition", || partitions(&outbox) == "first");
        assert_eq!(outbox.text("SELECT count(*) FROM outbox WHERE key = 'gap'"), "4");
    });
}

/// While rows of a partition are being backfilled nobody drops it; then it goes, and each row has been delivered once.
#[test]
fn a_backfill_keeps_its_partitions_until_it_is_complete() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        outbox.execute(&rows("older", "2020-05-01", 40));
        outbox.execute(include_str!("../../sql/retention.sql"));
        let env = [KEEP, OFTEN, DROP, ("WALPOST_OUTBOX_BACKFILL", "all"), ("WALPOST_LIMITS_BACKFILL_RATE", "10")];
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &env);
        walpost.wait_for_log(PATIENCE, "backfilling: publishing");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert!(!walpost.log().contains("streaming slot="), "the backfill is to run still:\n{}", walpost.log());
        assert!(
            pruned.output.contains("public.first stays") || pruned.output.contains("public.first is in use"),
            "{}",
            pruned.output
        );
        wait_until(PATIENCE, "what was backfilled goes", || !partitions(&outbox).contains("first"));
        let delivered = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!((delivered.len(), delivered.values().sum::<usize>()), (40, 40));
    });
}

/// The row of a dead letter keeps its partition for as long as dead letters are kept, and no longer.
#[test]
fn a_dead_letter_keeps_its_partition_for_a_time_of_its_own() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.topic("t", 1);
        let graves = outbox.topic("graves", 1);
        let env = |keep: &'static str| {
            let grave = ("WALPOST_KAFKA_DEAD_LETTER_TOPIC", graves.as_str());
            [KEEP, OFTEN, DROP, ("WALPOST_RETENTION_KEEP_DEAD_LETTERED", keep), grave]
        };
        let walpost = outbox.relay(&env("3650d"));
        outbox.execute(&rows("dead", "2020-05-01", 1).replace("'t'", "'no topic has this name'"));
        outbox.execute(&rows("alive", "2020-05-01", 2));
        wait_until(PATIENCE, "the others go", || outbox.text("SELECT count(*) FROM outbox") == "1");
        stays(PASSES, "it keeps its partition", || partitions(&outbox).contains("first"));
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let pruned = outbox.command(&["prune"], &env("30d"));
        assert!(pruned.output.contains("dropped partition public.first with 1"), "{}", pruned.output);
    });
}

/// Rows that were written into a partition while it was detached were not published, also where nobody saw it detached.
#[test]
fn what_was_written_into_a_detached_partition_keeps_it() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute(&rows("first", "2020-05-01", 2));
        wait_until_recorded(&outbox);
        // with nothing between, so that no look at the server comes between
        for sql in [
            "ALTER TABLE outbox DETACH PARTITION first",
            "INSERT INTO first (id, event_type, key, payload, created_at) VALUES (9, 't', 'apart', '{}', '2020-05-01 12:00+00')",
            "ALTER TABLE outbox ATTACH PARTITION first FOR VALUES FROM ('2020-05-01') TO ('2020-05-02')",
        ] {
            outbox.execute(sql);
        }
        outbox.execute(&rows("second", "2020-05-02", 2));
        outbox.wait_until_confirmed();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let _walpost = outbox.relay(&[KEEP, OFTEN, DROP]);
        wait_until(PATIENCE, "the other partition goes", || partitions(&outbox) == "first");
        stays(PASSES, "what was never published stays", || {
            outbox.text("SELECT count(*) FROM outbox WHERE key = 'apart'") == "1"
        });
        // 14 publishes it all the same
        let published = if version == Version::OLDEST { 5 } else { 4 };
        assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), published);
    });
}

/// An application writes into an old partition all the time that it is looked at and dropped: every event whose INSERT was
/// committed arrives, and who is told that there is no partition knows it.
#[test]
fn nothing_that_was_committed_goes_with_a_partition() {
    const AGAIN: &str =
        "CREATE TABLE IF NOT EXISTS first PARTITION OF outbox FOR VALUES FROM ('2020-05-01') TO ('2020-05-02')";
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let _walpost = outbox.relay(&[KEEP, OFTEN, DROP]);
        let (writer, mut written, mut drops) = (Arc::new(outbox.database.connect()), BTreeSet::new(), 0);
        let end = Instant::now() + Duration::from_secs(15);
        while drops < 2 || Instant::now() < end {
            assert!(Instant::now() < end + PATIENCE, "dropped {drops} times only, so nothing is shown");
            // bursts with gaps between, in which all is delivered and the partition may go
            for _ in 0..50 {
                let (writer, sql) = (Arc::clone(&writer), format!("{} RETURNING id::text", rows("k", "2020-05-01", 1)));
                let answer =
                    complete(async move { writer.query_one(&sql, &[]).await.map(|row| row.get::<_, String>(0)) });
                match answer {
                    Ok(id) => _ = written.insert(id),
                    Err(error) => {
                        assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{error:?}");
                        drops += 1;
                        // rows of a partition that walpost has not seen yet keep it; an empty one is dropped at once
                        wait_until(PATIENCE, "the new one is known", || {
                            outbox.execute(AGAIN);
                            outbox.text("SELECT count(*) FROM walpost_delivered WHERE relation = to_regclass('first')")
                                != "0"
                        });
                    }
                }
            }
            thread::sleep(Duration::from_millis(2500 + written.len() as u64 * 7 % 2500));
        }
        outbox.wait_until_confirmed();
        let delivered: BTreeSet<String> = deliveries(&outbox.kafka.read_all(&[&topic])).into_keys().collect();
        assert!(delivered.is_superset(&written), "lost: {:?}", written.difference(&delivered));
    });
}

/// What is refused about one partition is told with advice, and the others go.
#[test]
fn a_partition_that_cannot_be_dropped_does_not_hold_up_others() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    outbox.execute("CREATE VIEW watched AS SELECT * FROM first");
    let walpost = outbox.relay(&[KEEP, OFTEN, DROP]);
    wait_until(PATIENCE, "the other one is dropped", || partitions(&outbox) == "first");
    walpost.wait_for_log(PATIENCE, "drop the view or foreign key that depends on it");
    stays(PASSES, "it stays", || partitions(&outbox) == "first");
    assert_eq!(walpost.log().matches("drop the view").count(), 1, "{}", walpost.log());
    outbox.execute("DROP VIEW watched");
    wait_until(PATIENCE, "it is dropped then", || partitions(&outbox).is_empty());
}

/// Why partitions are not detached CONCURRENTLY: while that is pending, the server publishes nothing of what a transaction
/// with an older snapshot writes there. Such a partition is left alone.
#[test]
fn a_pending_detach_hides_events_so_none_is_ever_made() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[KEEP, OFTEN]);
        let (old, detacher) = (outbox.database.connect(), outbox.database.connect());
        let old = complete(async move {
            old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox").await.map(|()| old)
        })
        .expect("it begins");
        let detach = thread::spawn(move || {
            complete(
                async move { detacher.batch_execute("ALTER TABLE outbox DETACH PARTITION first CONCURRENTLY").await },
            )
        });
        outbox.wait_until_true(PATIENCE, "EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)");
        let pruned = outbox.command(&["prune"], &[KEEP, DROP]);
        assert!(pruned.code == Some(0) && !pruned.output.contains("public.first"), "{}", pruned.output);
        let sql = format!("{}; COMMIT", rows("hidden", "2020-05-01", 1));
        complete(async move { old.batch_execute(&sql).await }).expect("the server takes it");
        detach.join().expect("it ends").expect("it is detached");
        outbox.execute("CREATE TABLE third PARTITION OF outbox FOR VALUES FROM ('2020-05-03') TO ('2020-05-04')");
        outbox.execute(&rows("seen", "2020-05-03", 1));
        outbox.wait_until_confirmed();
        assert_eq!(outbox.text("SELECT count(*) FROM first"), "1");
        let keys: Vec<_> = outbox.kafka.read_all(&[&topic]).iter().map(|record| record.key.clone()).collect();
        assert_eq!(keys, [Some(b"seen".to_vec())], "{}", walpost.log());
    });
}
