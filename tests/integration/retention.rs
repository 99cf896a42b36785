//! Rows that were delivered go when they are old enough; no other row ever does.

use std::{process::Command, thread, time::Duration};

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        account::Account,
        complete,
        kafka::Kafka,
        postgres::{Postgres, Settings, Stop, Version},
        wait_until,
        walpost::Ended,
    },
    victim::victim,
};

/// Everything is too old, and is looked at as often as can be.
const AT_ONCE: [(&str, &str); 2] = [("WALPOST_RETENTION_KEEP", "0s"), ("WALPOST_RETENTION_INTERVAL", "1s")];
/// Long enough for several passes and entries in the record.
const PASSES: Duration = Duration::from_secs(5);

fn insert(outbox: &Outbox<'_>, key: &str, count: u32) {
    outbox.execute(&rows(key, count));
}

/// Rows that claim to be a month old.
fn rows(key: &str, count: u32) -> String {
    format!(
        "INSERT INTO outbox (event_type, key, payload, created_at)
         SELECT 't', '{key}', '{{}}', now() - interval '30 days' FROM generate_series(1, {count})"
    )
}

fn count(outbox: &Outbox<'_>, condition: &str) -> u32 {
    outbox.text(&format!("SELECT count(*) FROM outbox WHERE {condition}")).parse().expect("a number")
}

fn wait_until_count(outbox: &Outbox<'_>, condition: &str, expected: u32) {
    let what = format!("{expected} rows with {condition}");
    wait_until(PATIENCE, &what, || count(outbox, condition) == expected);
}

/// Cases 14 and 49: a row's age proves nothing, only its delivery does. Rows that say they are old are deleted once
/// they are delivered, and not a moment before, however long the broker is away.
#[test]
fn rows_stay_while_the_broker_is_away_and_go_once_they_are_delivered() {
    let kafka = victim();
    let outboxes = [Version::NEWEST, Version::OLDEST].map(|version| Outbox::new(Postgres::shared(version), &kafka));
    let sides = outboxes.each_ref().map(|outbox| (outbox, outbox.topic("t", 1), outbox.relay(&AT_ONCE)));
    for (outbox, _, walpost) in &sides {
        insert(outbox, "first", 30);
        wait_until_count(outbox, "true", 0);
        wait_until(PATIENCE, "the metrics say so", || walpost.metric("walpost_pruned_rows_total") >= 30.0);
        wait_until(PATIENCE, "the table is known to be empty", || {
            walpost.metrics().get("walpost_outbox_rows").is_some_and(|rows| *rows < 1.0)
        });
    }
    kafka.freeze();
    for (outbox, ..) in &sides {
        insert(outbox, "second", 20);
        outbox.execute("CREATE TABLE other (a int); INSERT INTO other VALUES (1)");
    }
    stays(PASSES, "no undelivered row goes", || sides.iter().all(|(outbox, ..)| count(outbox, "true") == 20));
    kafka.thaw();
    for (outbox, topic, _) in &sides {
        wait_until_count(outbox, "true", 0);
        assert_eq!(deliveries(&kafka.read_all(&[topic])).len(), 50);
    }
}

/// Case 8: rows that are older than the slot were never delivered through it; nor were those that were written while
/// there was none.
#[test]
fn rows_that_are_older_than_the_slot_or_than_one_made_anew_stay() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 1);
        insert(&outbox, "older", 5);
        let env = [AT_ONCE[0], AT_ONCE[1], ("WALPOST_OUTBOX_BACKFILL", "none")];
        let walpost = outbox.relay(&env);
        insert(&outbox, "first", 2);
        wait_until_count(&outbox, "key = 'first'", 0);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        insert(&outbox, "gap", 3);
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{}')", outbox.database.name()));
        insert(&outbox, "gap", 1);
        // made anew by hand: nothing of ours notes that
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", outbox.database.name()));
        let _walpost = outbox.relay(&env);
        insert(&outbox, "second", 4);
        wait_until_count(&outbox, "key = 'second'", 0);
        assert_eq!((count(&outbox, "key = 'older'"), count(&outbox, "key = 'gap'")), (5, 4));
        let pruned = outbox.command(&["prune"], &AT_ONCE[..1]);
        assert_eq!(pruned.code, Some(0), "{}", pruned.output);
        assert!(pruned.output.contains("deleted 0 rows") && pruned.output.contains("kept 9 rows"), "{}", pruned.output);
    });
}

/// A slot that is moved by hand while walpost is away skips rows: they stay.
#[test]
fn rows_that_were_skipped_by_hand_stay() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 1);
        let walpost = outbox.relay(&AT_ONCE);
        insert(&outbox, "first", 2);
        wait_until_count(&outbox, "true", 0);
        walpost.kill9();
        walpost.wait(PATIENCE);
        wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
        insert(&outbox, "skipped", 3);
        outbox.execute(&format!(
            "SELECT pg_replication_slot_advance('{}', pg_current_wal_lsn())",
            outbox.database.name()
        ));
        let _walpost = outbox.relay(&AT_ONCE);
        insert(&outbox, "second", 2);
        wait_until_count(&outbox, "key = 'second'", 0);
        assert_eq!(count(&outbox, "true"), 3);
    });
}

/// Case 14: a transaction that is open while later ones are delivered and deleted, with a row under a savepoint, whose
/// xid no snapshot lists. It commits while the broker is away.
#[test]
fn rows_of_a_long_transaction_wait_for_their_own_delivery() {
    let kafka = victim();
    let outboxes = [Version::NEWEST, Version::OLDEST].map(|version| Outbox::new(Postgres::shared(version), &kafka));
    let sides = outboxes.each_ref().map(|outbox| {
        outbox.topic("t", 1);
        let walpost = outbox.relay(&AT_ONCE);
        insert(outbox, "before", 3);
        wait_until_count(outbox, "true", 0);
        let long = outbox.database.connect();
        let sql = format!("BEGIN; {}; SAVEPOINT s; {}", rows("long", 1), rows("long", 1));
        let long = complete(async move { long.batch_execute(&sql).await.map(|()| long) }).expect("it begins");
        insert(outbox, "meanwhile", 3);
        outbox.wait_until_confirmed();
        (outbox, walpost, long)
    });
    stays(PASSES, "no younger row overtakes it", || {
        sides.iter().all(|(outbox, ..)| count(outbox, "key = 'meanwhile'") == 3)
    });
    kafka.freeze();
    let sides = sides.map(|(outbox, walpost, long)| {
        complete(async move { long.batch_execute("COMMIT").await }).expect("it commits");
        (outbox, walpost)
    });
    stays(PASSES, "its rows stay", || sides.iter().all(|(outbox, _)| count(outbox, "key = 'long'") == 2));
    kafka.thaw();
    for (outbox, _walpost) in &sides {
        wait_until_count(outbox, "true", 0);
    }
}

/// What one process has delivered, the next deletes; and a command without any.
#[test]
fn what_was_delivered_is_known_after_a_stop() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        insert(&outbox, "first", 7);
        outbox.wait_until_confirmed();
        let settled = "EXISTS (SELECT FROM walpost_delivered WHERE until > since)";
        outbox.wait_until_true(PATIENCE, settled);
        insert(&outbox, "late", 2);
        outbox.wait_until_confirmed();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let dry = outbox.command(&["prune", "--dry-run"], &AT_ONCE[..1]);
        assert!(dry.code == Some(0) && dry.output.contains("7 rows would be deleted"), "{}", dry.output);
        assert!(dry.output.contains("nobody streams from it"), "{}", dry.output);
        assert_eq!(count(&outbox, "true"), 9, "a dry run deletes nothing");
        let pruned = outbox.command(&["prune"], &[("WALPOST_RETENTION_KEEP", "29d")]);
        assert!(pruned.code == Some(0) && pruned.output.contains("deleted 7 rows"), "{}", pruned.output);
        // the next process goes on where the last one ended, so it can tell of its last moments
        let _walpost = outbox.relay(&AT_ONCE);
        insert(&outbox, "second", 1);
        wait_until_count(&outbox, "true", 0);
    });
}

#[test]
fn prune_says_what_is_missing() {
    let outbox = Outbox::shared(Version::NEWEST);
    let without_keep = outbox.command(&["prune"], &[]);
    assert_eq!(without_keep.code, Some(2), "{}", without_keep.output);
    assert!(without_keep.output.contains("retention.keep"), "{}", without_keep.output);
    let without_record = outbox.command(&["prune"], &AT_ONCE[..1]);
    assert_eq!(without_record.code, Some(1), "{}", without_record.output);
    assert!(without_record.output.contains("walpost init"), "{}", without_record.output);
    // rows that nobody has delivered yet
    assert_eq!(outbox.command(&["init"], &[]).code, Some(0));
    insert(&outbox, "k", 4);
    let undelivered = outbox.command(&["prune"], &AT_ONCE[..1]);
    assert_eq!(undelivered.code, Some(0), "{}", undelivered.output);
    for said in ["deleted 0 rows", "4 old rows are not known to be delivered yet", "has confirmed 0/"] {
        assert!(undelivered.output.contains(said), "{said:?} is not said in:\n{}", undelivered.output);
    }
    assert_eq!(count(&outbox, "true"), 4);
}

/// Case 49: two cleaners at once, beside writers; each row goes once, nobody waits for anybody.
#[test]
fn two_cleaners_share_the_work() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 3);
        let _walpost = outbox.relay(&[]);
        for part in 0..20 {
            insert(&outbox, &part.to_string(), 150);
        }
        outbox.wait_until_confirmed();
        let env = [AT_ONCE[0], ("WALPOST_RETENTION_BATCH", "200")];
        let deleted: Vec<u32> = thread::scope(|scope| {
            let cleaners: Vec<_> = (0..2).map(|_| scope.spawn(|| outbox.command(&["prune"], &env))).collect();
            let number = |ended: Ended| -> u32 {
                assert_eq!(ended.code, Some(0), "{}", ended.output);
                let said = ended.output.split("deleted ").nth(1).and_then(|rest| rest.split(' ').next());
                said.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{}", ended.output))
            };
            cleaners.into_iter().map(|cleaner| number(cleaner.join().expect("it ends"))).collect()
        });
        assert_eq!(deleted.iter().sum::<u32>(), 3_000, "{deleted:?}");
        assert_eq!(count(&outbox, "true"), 0);
    });
}

/// The relay has what `sql/roles.sql` grants and no more; it cannot lock rows, and goes around one that someone holds.
#[test]
fn a_role_with_the_granted_rights_alone_is_enough() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), "");
        outbox.topic("t", 1);
        let printed = outbox.command(&["init", "--print"], &[]);
        assert_eq!(printed.code, Some(0), "{}", printed.output);
        let slot = printed.output.find("SELECT pg_create_logical").expect("the slot is made last");
        outbox.execute(&printed.output[..slot]);
        outbox.execute(&printed.output[slot..]);
        let url = outbox.database.url_as("walpost_relay");
        let env = [AT_ONCE[0], AT_ONCE[1], ("WALPOST_POSTGRES_URL", url.as_str())];
        let checked = outbox.command(&["check"], &env);
        assert!(checked.output.contains("can be deleted"), "{}", checked.output);
        let walpost = outbox.relay(&env);
        insert(&outbox, "first", 30);
        wait_until_count(&outbox, "true", 0);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

        let walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", url.as_str())]);
        insert(&outbox, "held", 1);
        insert(&outbox, "others", 40);
        let recorded = "NOT EXISTS (SELECT FROM outbox o
            WHERE o.xmin::text::bigint >= (SELECT max(until) FROM walpost_delivered))";
        outbox.wait_until_true(PATIENCE, recorded);
        let (holder, lock) = (outbox.database.connect(), "BEGIN; SELECT FROM outbox WHERE key = 'held' FOR UPDATE");
        let holder = complete(async move { holder.batch_execute(lock).await.map(|()| holder) }).expect("a lock");
        for (deleted, left) in [("deleted 40 rows", 1), ("deleted 0 rows", 1)] {
            let pruned = outbox.command(&["prune"], &[env[0], env[2]]);
            assert!(pruned.code == Some(0) && pruned.output.contains(deleted), "{}", pruned.output);
            assert_eq!(count(&outbox, "true"), left);
        }
        complete(async move { holder.batch_execute("ROLLBACK").await }).expect("it lets go");
        let pruned = outbox.command(&["prune"], &[env[0], env[2]]);
        assert!(pruned.output.contains("deleted 1 rows"), "{}", pruned.output);
        drop(walpost);
    });
}

/// Case 51: rows of dead-lettered events have a retention of their own. The value of one that was too large is nowhere
/// else.
#[test]
fn rows_of_dead_letters_have_a_retention_of_their_own() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 1);
        let graves = outbox.topic("graves", 1);
        let env = [AT_ONCE[0], AT_ONCE[1], ("WALPOST_KAFKA_DEAD_LETTER_TOPIC", graves.as_str())];
        let walpost = outbox.relay(&env);
        let giant = "INSERT INTO outbox (event_type, key, payload)
            VALUES ('t', 'giant', to_json((SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, 60000))))";
        insert(&outbox, "before", 3);
        outbox.execute(giant);
        outbox.execute(
            "INSERT INTO outbox (event_type, key, payload) VALUES ('no topic has this name', 'nameless', '{}')",
        );
        insert(&outbox, "after", 3);
        wait_until_count(&outbox, "key IN ('before', 'after')", 0);
        outbox.wait_until_confirmed();
        stays(PASSES, "the dead letters' rows stay", || count(&outbox, "true") == 2);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let kept = outbox.command(&["prune"], &env[..1]);
        assert!(kept.output.contains("kept 2 rows of dead-lettered events"), "{}", kept.output);
        let with_end = [env[0], ("WALPOST_RETENTION_KEEP_DEAD_LETTERED", "1s")];
        let gone = outbox.command(&["prune"], &with_end);
        assert!(gone.output.contains("deleted 2 rows"), "{}", gone.output);
    });
}

/// Rows of a partitioned outbox go through its root; those of a partition that was filled before it was attached were
/// never published, and stay.
#[test]
fn rows_go_through_the_root_of_a_partitioned_outbox() {
    let table = "
        CREATE TABLE outbox (id uuid NOT NULL DEFAULT gen_random_uuid(), event_type text NOT NULL, key text, payload json,
            created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
        CREATE TABLE old PARTITION OF outbox FOR VALUES FROM (MINVALUE) TO ('2020-01-01');
        CREATE TABLE new PARTITION OF outbox FOR VALUES FROM ('2021-01-01') TO (MAXVALUE);
        CREATE TABLE apart (LIKE outbox INCLUDING ALL)";
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), table);
        outbox.topic("t", 1);
        let walpost = outbox.relay(&AT_ONCE);
        insert(&outbox, "new", 10);
        let old = "INSERT INTO outbox (event_type, key, payload, created_at) SELECT 't', 'old', '{}', '2019-05-05'
                   FROM generate_series(1, 10)";
        outbox.execute(old);
        outbox.execute(
            "INSERT INTO apart (event_type, key, payload, created_at) SELECT 't', 'apart', '{}', '2020-05-05'
             FROM generate_series(1, 3)",
        );
        wait_until_count(&outbox, "true", 0);
        outbox.execute("ALTER TABLE outbox ATTACH PARTITION apart FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')");
        outbox.execute(old);
        wait_until_count(&outbox, "key = 'old'", 0);
        stays(PASSES, "what was never published stays", || count(&outbox, "key = 'apart'") == 3);
        assert!(!walpost.log().contains("WARN delivered rows"), "{}", walpost.log());
    });
}

/// A table that is rewritten shows every row as if it had just been written.
#[test]
fn a_rewrite_makes_no_row_delivered() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.topic("t", 1);
        insert(&outbox, "older", 5);
        let _walpost = outbox.relay(&[AT_ONCE[0], AT_ONCE[1], ("WALPOST_OUTBOX_BACKFILL", "none")]);
        insert(&outbox, "first", 2);
        wait_until_count(&outbox, "key = 'first'", 0);
        outbox.execute("ALTER TABLE outbox ALTER COLUMN payload TYPE jsonb USING payload::jsonb");
        insert(&outbox, "around", 1);
        outbox.wait_until_confirmed();
        stays(PASSES, "rows older than the slot stay", || count(&outbox, "key = 'older'") == 5);
        insert(&outbox, "second", 2);
        wait_until_count(&outbox, "key = 'second'", 0);
        assert_eq!(count(&outbox, "key = 'older'"), 5);
    });
}

/// A table that applications leave empty is no trouble, and neither is one without a primary key: rows are told apart
/// by place. Case 50: walpost publishes inserts only, so a DELETE needs no replica identity.
#[test]
fn an_outbox_that_stays_empty_and_one_without_a_key_are_served() {
    at_both_ends(|version| {
        let table =
            "CREATE TABLE outbox (id text NOT NULL, event_type text NOT NULL, key text, payload text, at bigint)";
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), table);
        let topic = outbox.topic("t", 1);
        let env = [AT_ONCE[0], AT_ONCE[1], ("WALPOST_OUTBOX_COLUMNS_TIMESTAMP", "at")];
        let checked = outbox.command(&["check"], &env);
        for finding in ["has no index that begins with \"at\"", "has no primary key", "walpost_delivered"] {
            assert!(checked.output.contains(finding), "{finding:?} is not found:\n{}", checked.output);
        }
        let walpost = outbox.relay(&env);
        outbox.execute("INSERT INTO outbox VALUES ('a', 't', 'k', '', 1); DELETE FROM outbox");
        outbox.execute("INSERT INTO outbox SELECT 'same', 't', 'k', '', 1700000000000 FROM generate_series(1, 5)");
        outbox.execute("INSERT INTO outbox VALUES ('timeless', 't', 'k', '', NULL)");
        wait_until_count(&outbox, "at IS NOT NULL", 0);
        outbox.wait_until_confirmed();
        assert_eq!(outbox.kafka.record_count(&topic), 7);
        assert_eq!(count(&outbox, "id = 'timeless'"), 1, "{}", walpost.log());
    });
}

#[test]
fn check_says_what_retention_lacks() {
    let table = "CREATE TABLE outbox (id text PRIMARY KEY, event_type text NOT NULL, key text, payload text)";
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), table);
    let checked = outbox.command(&["check"], &AT_ONCE);
    assert!(checked.output.contains("has no column \"created_at\" that holds a time"), "{}", checked.output);
    let role = format!("reader_of_{}", outbox.database.name());
    outbox.execute(&format!("CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON outbox TO {role}"));
    let url = outbox.database.url_as(&role);
    let env = [AT_ONCE[0], ("WALPOST_POSTGRES_URL", url.as_str())];
    let checked = outbox.command(&["check"], &env);
    assert!(checked.output.contains("may not read and delete rows"), "{}", checked.output);
    // a record in the hands of someone else proves nothing
    outbox.execute(&format!("GRANT CREATE ON SCHEMA public TO {role}; GRANT DELETE ON outbox TO {role}"));
    outbox.execute(&format!("SET ROLE {role}; {}; RESET ROLE", include_str!("../../sql/retention.sql")));
    let pruned = outbox.command(&["prune"], &AT_ONCE[..1]);
    assert!(pruned.code == Some(1) && pruned.output.contains("belongs to role"), "{}", pruned.output);
    outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// A row shows 32 bits of its xid. Once a server has used them all, one that has stayed for four billion transactions
/// looks like a new one: so there its own time must speak for it as well.
#[test]
fn past_four_billion_transactions_an_xid_alone_proves_nothing() {
    let server = Postgres::start(Version::System, &Settings::default());
    let outbox = Outbox::new(&server, Kafka::shared());
    outbox.topic("t", 1);
    server.stop(Stop::Fast);
    let mut reset = Command::new(server.program("pg_resetwal"));
    reset.args(["--epoch", "1", "-D"]).arg(server.data());
    if let Some(account) = Account::for_servers() {
        account.runs(&mut reset);
    }
    assert!(reset.status().expect("it came with the server").success());
    server.start_again();
    let _walpost = outbox.relay(&AT_ONCE);
    insert(&outbox, "claims to be old", 2);
    outbox.execute("INSERT INTO outbox (event_type, key, payload) SELECT 't', 'new', '{}' FROM generate_series(1, 3)");
    wait_until_count(&outbox, "key = 'new'", 0);
    stays(PASSES, "what could be older than the proof stays", || count(&outbox, "true") == 2);
}
