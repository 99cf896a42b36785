//! A partitioned outbox: partitions whose rows were all delivered are dropped whole, those of days to come are there in time.

use std::time::Duration;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        complete,
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
    },
    victim::victim,
};

const KEEP: (&str, &str) = ("WALPOST_RETENTION_KEEP", "0s");
const OFTEN: (&str, &str) = ("WALPOST_RETENTION_INTERVAL", "1s");
const DROP: (&str, &str) = ("WALPOST_RETENTION_DROP_PARTITIONS", "true");
const AHEAD: (&str, &str) = ("WALPOST_RETENTION_PARTITIONS_AHEAD", "3");
/// Long enough for several passes and entries in the record.
const PASSES: Duration = Duration::from_secs(4);

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

fn partitions(outbox: &Outbox<'_>) -> String {
    outbox.text("SELECT coalesce(string_agg(inhrelid::regclass::text, ' ' ORDER BY 1), '') FROM pg_inherits WHERE inhparent = 'outbox'::regclass")
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
        outbox.wait_until_confirmed();
        outbox.wait_until_true(
            PATIENCE,
            "NOT EXISTS (SELECT FROM outbox o WHERE o.xmin::text::bigint >= (SELECT max(until) FROM walpost_delivered))",
        );
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
        let long = outbox.database.connect();
        let sql = format!("BEGIN; {}; SAVEPOINT s; {}", rows("l", "2020-05-02", 1), rows("l", "2020-05-02", 1));
        let long = complete(async move { long.batch_execute(&sql).await.map(|()| long) }).expect("it begins");
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let walpost = outbox.relay(&[KEEP, OFTEN, DROP]);
        outbox.execute(&rows("first", "2020-05-01", 3));
        wait_until(PATIENCE, "what was delivered is dropped", || !partitions(outbox).contains("first"));
        (outbox, topic, walpost, long)
    });
    stays(PASSES, "a partition that a transaction writes to stays", || {
        sides.iter().all(|(outbox, ..)| partitions(outbox) == "second")
    });
    kafka.freeze();
    let sides = sides.map(|(outbox, topic, walpost, long)| {
        complete(async move { long.batch_execute("COMMIT").await }).expect("it commits");
        (outbox, topic, walpost)
    });
    stays(PASSES, "a partition with rows that are not delivered stays", || {
        sides.iter().all(|(outbox, ..)| outbox.text("SELECT count(*) FROM second") == "2")
    });
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
        let _walpost = outbox.relay(&[KEEP, OFTEN, DROP, ("WALPOST_OUTBOX_BACKFILL", "none"), grave]);
        outbox.execute(&rows("streamed", "2020-05-01", 4));
        outbox.execute(&rows("streamed", "2020-05-02", 4));
        outbox.execute(&rows("streamed", "2020-05-02", 1).replace("'t'", "'no topic has this name'"));
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
    assert_eq!(outbox.command(&["prune"], &env).code, Some(1));
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
