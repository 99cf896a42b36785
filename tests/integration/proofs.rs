//! Rows that a backfill has published count as delivered, and no other rows do for it.

use std::time::Duration;

use crate::{
    ledger::EVENT_TYPE,
    outbox::{DEFAULT_TABLE, Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

const KEEP: (&str, &str) = ("WALPOST_RETENTION_KEEP", "0s");
const OFTEN: (&str, &str) = ("WALPOST_RETENTION_INTERVAL", "1s");
const ALL: (&str, &str) = ("WALPOST_OUTBOX_BACKFILL", "all");
/// Long enough for several passes and entries in the record.
const PASSES: Duration = Duration::from_secs(3);

fn insert(outbox: &Outbox<'_>, key: &str, count: u32) {
    outbox.execute(&format!(
        "INSERT INTO outbox (event_type, key, payload, created_at)
         SELECT '{EVENT_TYPE}', '{key}', '{{}}', now() - interval '30 days' FROM generate_series(1, {count})"
    ));
}

fn count(outbox: &Outbox<'_>, condition: &str) -> u32 {
    outbox.text(&format!("SELECT count(*) FROM outbox WHERE {condition}")).parse().expect("a number")
}

fn wait_until_empty(outbox: &Outbox<'_>) {
    wait_until(PATIENCE, "every row is gone", || count(outbox, "true") == 0);
}

fn published(outbox: &Outbox<'_>, topic: &str) -> usize {
    deliveries(&outbox.kafka.read_all(&[topic])).len()
}

/// Wherever it dies, all arrives, and in the end all goes; what was written on the way as well.
#[test]
fn killed_around_the_proof_nothing_goes_undelivered_and_in_the_end_all_goes() {
    for point in ["before_proof:1", "after_proof:1", "in_replace:1"] {
        at_both_ends(|version| {
            let outbox = Outbox::shared(version);
            let topic = outbox.topic(EVENT_TYPE, 1);
            insert(&outbox, "older", 100);
            let env = [ALL, KEEP, OFTEN, ("CRASH_KILL", point)];
            let ended = Walpost::relay(&outbox.database, outbox.kafka, &env).wait(PATIENCE);
            assert_eq!((ended.code(), count(&outbox, "true")), (None, 100), "{point}");
            insert(&outbox, "around", 10);
            let _walpost = outbox.relay(&[ALL, KEEP, OFTEN]);
            insert(&outbox, "later", 10);
            wait_until_empty(&outbox);
            assert_eq!(published(&outbox, &topic), 120, "{point}");
        });
    }
}

/// A row whose transaction was open at the snapshot, one that a condition leaves out, and all while the broker is away.
#[test]
fn what_the_backfill_has_not_published_stays() {
    let kafka = victim();
    let outboxes = [Version::NEWEST, Version::OLDEST].map(|version| Outbox::new(Postgres::shared(version), &kafka));
    let sides = outboxes.each_ref().map(|outbox| {
        let topic = outbox.topic(EVENT_TYPE, 1);
        insert(outbox, "older", 50);
        (outbox, topic)
    });
    kafka.freeze();
    let relays = sides.each_ref().map(|(outbox, _)| Walpost::relay(&outbox.database, &kafka, &[ALL, KEEP, OFTEN]));
    for (walpost, (outbox, _)) in relays.iter().zip(&sides) {
        walpost.wait_for_log(PATIENCE, "backfilling: publishing");
        insert(outbox, "meanwhile", 5);
    }
    stays(PASSES, "no undelivered row goes", || sides.iter().all(|(outbox, _)| count(outbox, "true") == 55));
    kafka.thaw();
    for (outbox, topic) in &sides {
        wait_until_empty(outbox);
        assert_eq!(published(outbox, topic), 55);
    }
    drop(relays);

    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic(EVENT_TYPE, 1);
        insert(&outbox, "wanted", 4);
        insert(&outbox, "left", 3);
        let some = [("WALPOST_OUTBOX_BACKFILL", "key = 'wanted'"), KEEP, OFTEN];
        let walpost = outbox.relay(&some);
        insert(&outbox, "later", 2);
        wait_until(PATIENCE, "what was streamed goes", || count(&outbox, "key = 'later'") == 0);
        assert_eq!(count(&outbox, "true"), 7, "which rows a condition picked is not known of a row");
        // once more, and all of them: now it is known
        let again = outbox.command(&["backfill", "all"], &[]);
        assert_eq!(again.code, Some(0), "{}", again.output);
        wait_until_empty(&outbox);
        drop(walpost);
    });
}

/// The slot of a backfill is dropped and made anew: what was written in between is older than the new one.
#[test]
fn a_proof_does_not_reach_over_a_slot_that_was_made_anew() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic(EVENT_TYPE, 1);
        insert(&outbox, "older", 5);
        let init = outbox.command(&["init", "--backfill", "all"], &[]);
        assert_eq!(init.code, Some(0), "{}", init.output);
        insert(&outbox, "gap", 3);
        let name = outbox.database.name();
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{name}')"));
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
        let pruned = outbox.command(&["prune"], &[KEEP]);
        assert!(pruned.code == Some(0) && pruned.output.contains("deleted 5 rows"), "{}", pruned.output);
        let _walpost = outbox.relay(&[ALL, KEEP, OFTEN]);
        insert(&outbox, "later", 2);
        wait_until(PATIENCE, "what was streamed goes", || count(&outbox, "key = 'later'") == 0);
        assert_eq!(count(&outbox, "key = 'gap'"), 3);
    });
}

/// What was written while a table or a part of it was not published stays, also where nobody saw it away: here walpost is
/// down meanwhile, and finds everything as it left it.
#[test]
fn what_was_written_while_the_table_was_not_published_stays() {
    let parts = "
        CREATE TABLE outbox (id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text NOT NULL, key text, payload json,
            created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
        CREATE TABLE middle PARTITION OF outbox FOR VALUES FROM (MINVALUE) TO (MAXVALUE) PARTITION BY RANGE (created_at);
        CREATE TABLE leaf PARTITION OF middle FOR VALUES FROM (MINVALUE) TO (MAXVALUE)";
    let whole_schema = format!("{DEFAULT_TABLE}; CREATE SCHEMA away");
    let ways = [
        (
            parts,
            "outbox DETACH PARTITION middle",
            "middle",
            "outbox ATTACH PARTITION middle FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        ),
        (
            parts,
            "middle DETACH PARTITION leaf",
            "leaf",
            "middle ATTACH PARTITION leaf FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        ),
        (&whole_schema, "outbox SET SCHEMA away", "away.outbox", "away.outbox SET SCHEMA public"),
    ];
    for (tables, leave, there, come_back) in ways {
        at_both_ends(|version| {
            let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), tables);
            let topic = outbox.topic(EVENT_TYPE, 1);
            let name = outbox.database.name();
            // publications of whole schemas are known from 15 on; before, a table that moves stays published
            let by_schema = leave.contains("SCHEMA") && version != Version::OLDEST;
            if by_schema {
                outbox.execute(&format!(
                    "CREATE PUBLICATION {name} FOR TABLES IN SCHEMA public WITH (publish = 'insert')"
                ));
            }
            let walpost = outbox.relay(&[KEEP, OFTEN]);
            insert(&outbox, "first", 2);
            wait_until_empty(&outbox);
            assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
            outbox.execute(&format!("ALTER TABLE {leave}"));
            outbox.execute(&format!(
                "INSERT INTO {there} (event_type, key, payload, created_at) VALUES ('{EVENT_TYPE}', 'apart', '{{}}', '2020-05-05')"
            ));
            outbox.execute(&format!("ALTER TABLE {come_back}"));
            let walpost = outbox.relay(&[KEEP, OFTEN]);
            insert(&outbox, "second", 2);
            if version == Version::OLDEST && leave.contains("DETACH") {
                return late_partitions_are_published_anew_and_keep_their_rows(&outbox, &walpost, &topic);
            }
            wait_until(PATIENCE, "what was streamed goes", || count(&outbox, "key = 'second'") == 0);
            std::thread::sleep(PASSES);
            let keys = keys_in(&outbox, &topic);
            let apart = keys.iter().any(|key| key == "apart");
            assert_eq!(keys.len(), 4 + usize::from(apart), "{leave}, {version:?}: {keys:?}");
            // 14 goes on publishing a table that moves: then the row may go, and need not
            assert!(
                apart || count(&outbox, "key = 'apart'") == 1,
                "{leave}, {version:?}: gone, and was never delivered"
            );
            assert!(!apart || version == Version::OLDEST, "{leave}: published, so this shows nothing");
        });
    }
}

fn keys_in(outbox: &Outbox<'_>, topic: &str) -> Vec<String> {
    let records = outbox.kafka.read_all(&[topic]);
    records.iter().map(|record| String::from_utf8_lossy(record.key.as_deref().unwrap_or_default()).into()).collect()
}

/// On 14, which may not publish them in a session that has met their rows before.
fn late_partitions_are_published_anew_and_keep_their_rows(outbox: &Outbox<'_>, walpost: &Walpost, topic: &str) {
    walpost.wait_for_log(PATIENCE, "WP-210");
    walpost.wait_until_ready(PATIENCE);
    insert(outbox, "third", 2);
    let thirds = || keys_in(outbox, topic).iter().filter(|key| *key == "third").count();
    wait_until(PATIENCE, "the new session publishes the partition", || thirds() == 2);
    std::thread::sleep(PASSES);
    assert_eq!(count(outbox, "true"), 5, "which of these were published, nobody can tell");
    assert_eq!(walpost.log().matches("streaming slot").count(), 2, "one new session is enough: {}", walpost.log());
}

/// The same while walpost runs.
#[test]
fn on_14_a_partition_that_comes_back_is_published_by_a_new_session() {
    let table = "
        CREATE TABLE outbox (id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text NOT NULL, key text, payload json,
            created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
        CREATE TABLE leaf PARTITION OF outbox FOR VALUES FROM (MINVALUE) TO (MAXVALUE)";
    for env in [&[KEEP, OFTEN][..], &[]] {
        let outbox = Outbox::with(Postgres::shared(Version::OLDEST), Kafka::shared(), table);
        let topic = outbox.topic(EVENT_TYPE, 1);
        outbox.execute("ALTER TABLE outbox DETACH PARTITION leaf");
        let walpost = outbox.relay(env);
        outbox.execute(&format!(
            "INSERT INTO leaf (event_type, key, payload, created_at) VALUES ('{EVENT_TYPE}', 'apart', '{{}}', '2020-05-05')"
        ));
        outbox.wait_until_confirmed();
        outbox.execute("ALTER TABLE outbox ATTACH PARTITION leaf FOR VALUES FROM (MINVALUE) TO (MAXVALUE)");
        let check = outbox.command(&["check"], &[]);
        assert!(check.output.contains("was attached after it was made"), "{}", check.output);
        walpost.wait_for_log(PATIENCE, "WP-210");
        walpost.wait_until_ready(PATIENCE);
        insert(&outbox, "third", 2);
        wait_until(PATIENCE, "the new session publishes it", || keys_in(&outbox, &topic) == ["third", "third"]);
        std::thread::sleep(PASSES);
        assert_eq!(count(&outbox, "true"), 3);
    }
}

#[test]
fn dead_letters_of_a_backfill_have_their_own_retention() {
    let outbox = Outbox::shared(Version::NEWEST);
    outbox.topic(EVENT_TYPE, 1);
    let graves = outbox.topic("graves", 1);
    insert(&outbox, "older", 5);
    outbox.execute(
        "UPDATE outbox SET event_type = 'no topic has this name' WHERE id = (SELECT min(id::text)::uuid FROM outbox)",
    );
    let init = outbox.command(&["init", "--backfill", "all"], &[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &graves)]);
    assert_eq!(init.code, Some(0), "{}", init.output);
    let pruned = outbox.command(&["prune"], &[KEEP]);
    for said in ["deleted 4 rows", "kept 1 rows of dead-lettered events"] {
        assert!(pruned.output.contains(said), "{}", pruned.output);
    }
}
