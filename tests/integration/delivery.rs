//! What is delivered and what is confirmed, whatever the transactions look like.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use crate::{
    bounds::MEMORY_MB,
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        walpost::Walpost,
    },
};

/// An outbox with a walpost at work.
struct AtWork<'a> {
    // first to go
    walpost: Walpost,
    outbox: Outbox<'a>,
    topic: String,
}

impl<'a> AtWork<'a> {
    fn on(server: &'a Postgres) -> Self {
        let outbox = Outbox::with(server, Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        Self { walpost: outbox.relay(&[]), outbox, topic }
    }

    /// The ids of all records, in their order, once everything is confirmed; none of them twice.
    fn published(&self) -> Vec<String> {
        self.outbox.wait_until_confirmed();
        let records = self.outbox.kafka.read_all(&[&self.topic]);
        assert_eq!(deliveries(&records).len(), records.len(), "something was sent twice");
        records.iter().map(|record| record.header("id").expect("an id").to_owned()).collect()
    }
}

fn insert(id: &str) -> String {
    format!("INSERT INTO outbox VALUES ('{id}', 't', 'k', NULL)")
}

#[test]
fn a_transaction_that_is_rolled_back_is_not_published() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        it.outbox.execute(&format!("BEGIN; {}; ROLLBACK", insert("undone")));
        it.outbox.execute(&format!("BEGIN; {}; COMMIT", insert("done")));
        assert_eq!(it.published(), ["done"]);
    });
}

/// Case 23, too: with protocol 1 the server streams no transaction that may yet change, however large.
#[test]
fn what_a_savepoint_took_back_is_not_published() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        let (one, undone, two) = (insert("1"), insert("undone"), insert("2"));
        let inner = format!("SAVEPOINT a; {undone}; SAVEPOINT b; {undone}; RELEASE b; ROLLBACK TO a");
        it.outbox.execute(&format!("BEGIN; {one}; {inner}; SAVEPOINT c; {two}; RELEASE c; COMMIT"));
        assert_eq!(it.published(), ["1", "2"]);
    });
}

/// Case 14.
#[test]
fn events_come_in_the_order_of_their_commits() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        let early = it.outbox.database.connect();
        let statement = format!("BEGIN; {}", insert("written first, committed last"));
        let early = crate::services::complete(async move {
            early.batch_execute(&statement).await.expect("the server takes it");
            early
        });
        it.outbox.execute(&insert("written last, committed first"));
        crate::services::complete(async move { early.batch_execute("COMMIT").await }).expect("the server takes it");
        assert_eq!(it.published(), ["written last, committed first", "written first, committed last"]);
    });
}

#[test]
fn a_prepared_transaction_is_published_once_it_is_committed() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &Settings::default().set("max_prepared_transactions", "10"));
        let it = AtWork::on(&server);
        it.outbox.execute(&format!("BEGIN; {}; PREPARE TRANSACTION 'kept'", insert("kept")));
        it.outbox.execute(&format!("BEGIN; {}; PREPARE TRANSACTION 'dropped'", insert("dropped")));
        it.outbox.execute(&insert("between"));
        assert_eq!(it.published(), ["between"]);
        it.outbox.execute("ROLLBACK PREPARED 'dropped'");
        it.outbox.execute("COMMIT PREPARED 'kept'");
        assert_eq!(it.published(), ["between", "kept"]);
    });
}

/// Case 5: all rows of a COPY have one LSN. The crash kit kills walpost amid such.
#[test]
fn a_copy_is_published_row_for_row() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        let program = r"seq 1 1000 | sed ''s/.*/&\tt\tk\t&/''";
        it.outbox.execute(&format!("COPY outbox FROM PROGRAM '{program}'"));
        assert_eq!(it.published(), (1..=1000).map(|number| number.to_string()).collect::<Vec<_>>());
    });
}

#[test]
fn a_transaction_beyond_every_bound_is_published_in_order_and_costs_no_memory() {
    at_both_ends(|version| {
        let mut it = AtWork::on(Postgres::shared(version));
        it.walpost = {
            it.walpost.sigterm_and_wait(PATIENCE);
            it.outbox.relay(&[("WALPOST_LIMITS_IN_FLIGHT_BYTES", "1000000")])
        };
        let rows = "SELECT n, 't', 'k', repeat('x', 1000) FROM generate_series(1, 15000) n";
        it.outbox.execute(&format!("INSERT INTO outbox {rows}"));
        assert_eq!(it.published(), (1..=15_000).map(|number| number.to_string()).collect::<Vec<_>>());
        assert!(it.walpost.resident_bytes() < 100 << 20, "{} bytes", it.walpost.resident_bytes());
    });
}

/// Case 17.
#[test]
fn an_idle_outbox_in_a_busy_server_lets_the_slot_advance() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        let other_database = Postgres::shared(version).database();
        other_database.execute("CREATE TABLE other (a text)");
        it.outbox.execute("CREATE TABLE other (a text)");
        let busy = "INSERT INTO other SELECT repeat('x', 100) FROM generate_series(1, 1000)";
        for _ in 0..3 {
            it.outbox.execute(busy);
            it.outbox.wait_until_confirmed();
            other_database.execute(busy);
            it.outbox.wait_until_confirmed();
        }
        assert!(it.walpost.metric("walpost_reconnects_total{side=\"replication\"}") < 1.0);
        assert_eq!(it.published(), [""; 0]);
    });
}

/// Cases 24 and 25, the latter in a transaction that commits.
#[test]
fn changes_that_are_no_inserts_are_counted_and_passed_over() {
    at_both_ends(|version| {
        let outbox =
            Outbox::with(Postgres::shared(version), Kafka::shared(), &format!("{TABLE}; CREATE TABLE other (a int)"));
        let topic = outbox.topic("t", 1);
        // an operator's own publication may publish more than walpost asks for
        let name = outbox.database.name();
        outbox.execute(&format!(
            "ALTER TABLE outbox REPLICA IDENTITY FULL; CREATE PUBLICATION {name} FOR TABLE outbox, other"
        ));
        let it = AtWork { walpost: outbox.relay(&[]), outbox, topic };
        it.outbox.execute(&insert("1"));
        it.outbox.execute("UPDATE outbox SET payload = 'new'");
        it.outbox.execute("DELETE FROM outbox");
        it.outbox.execute("TRUNCATE outbox");
        it.outbox.execute("INSERT INTO other VALUES (1), (2)");
        it.outbox
            .execute("SELECT pg_logical_emit_message(true, 'app', 'text'), pg_logical_emit_message(false, 'app', '')");
        it.outbox.execute(&insert("2"));
        assert_eq!(it.published(), ["1", "2"]);
        let ignored =
            |kind| it.walpost.metric(&format!("walpost_ignored_changes_total{{kind=\"{kind}\"}}")).to_string();
        assert_eq!(["update", "delete", "truncate"].map(ignored), ["1"; 3]);
        assert_eq!(it.walpost.metric("walpost_other_table_rows_total").to_string(), "2");
        assert_eq!(it.walpost.metrics().keys().filter(|name| name.contains("kind=\"other")).count(), 0);
        let log = it.walpost.log();
        assert_eq!(log.matches("is no outbox are skipped").count(), 1, "once a table:\n{log}");
    });
}

/// Case 25, where nothing commits, and with more than a packet holds.
#[test]
fn logical_messages_of_a_transaction_that_is_rolled_back_disturb_nothing() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        it.outbox.execute(&insert("1"));
        it.outbox.execute(
            "BEGIN; INSERT INTO outbox VALUES ('taken back', 't', 'k', '');
             SELECT pg_logical_emit_message(true, 'app', repeat('x', 100000));
             SELECT pg_logical_emit_message(false, 'app', repeat('y', 100000)); ROLLBACK",
        );
        it.outbox.execute(&insert("2"));
        assert_eq!(it.published(), ["1", "2"]);
        assert!(it.walpost.metric("walpost_reconnects_total{side=\"replication\"}") < 1.0);
    });
}

/// Case 39: rows from before and after a change wait for walpost.
#[test]
fn a_table_may_change_while_walpost_is_down() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        it.outbox.execute("ALTER TABLE outbox ADD COLUMN middle int DEFAULT 7, ADD COLUMN last text DEFAULT 'l'");
        it.outbox.execute(&insert("1"));
        it.outbox.wait_until_confirmed();
        assert_eq!(it.walpost.sigterm_and_wait(PATIENCE), Some(0));
        it.outbox.execute(&insert("2"));
        it.outbox.execute(
            "BEGIN; ALTER TABLE outbox DROP COLUMN middle, ADD COLUMN another text; INSERT INTO outbox (id, event_type, key, payload, \
             another) VALUES ('3', 't', 'key of 3', 'value of 3', 'a'); COMMIT",
        );
        it.outbox.execute(&insert("4"));
        let it = AtWork { walpost: it.outbox.relay(&[]), ..it };
        assert_eq!(it.published(), ["1", "2", "3", "4"]);
        let records = it.outbox.kafka.read_all(&[&it.topic]);
        let third = (records[2].key.as_deref(), records[2].value.as_deref());
        assert_eq!(third, (Some(&b"key of 3"[..]), Some(&b"value of 3"[..])));
    });
}

/// Case 39.
#[test]
fn a_table_may_change_under_the_stream() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        it.outbox.execute(&insert("1"));
        it.outbox.execute("ALTER TABLE outbox ADD COLUMN further int DEFAULT 7");
        it.outbox.execute(&insert("2"));
        it.outbox.execute("ALTER TABLE outbox DROP COLUMN payload, ADD COLUMN payload jsonb");
        it.outbox.execute("INSERT INTO outbox (payload, key, event_type, id) VALUES ('{\"a\": 1}', 'k', 't', '3')");
        assert_eq!(it.published(), ["1", "2", "3"]);
        let records = it.outbox.kafka.read_all(&[&it.topic]);
        assert_eq!(records[2].value.as_deref(), Some(&b"{\"a\": 1}"[..]));
    });
}

/// Cases 18 and 23: under a load that never ends the slot follows all the time; and what a large transaction took back, beyond
/// what the server keeps in memory, is not published.
#[test]
fn the_slot_follows_a_steady_load_and_large_transactions_lose_what_they_took_back() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        let name = it.outbox.database.name();
        it.outbox.execute(&format!("ALTER DATABASE {name} SET logical_decoding_work_mem = '64kB'"));
        let walsender = it.outbox.walsender().expect("it streams");
        it.outbox.execute(&format!("SELECT pg_terminate_backend({walsender})"));
        let large = |id: &str| {
            format!(
                "INSERT INTO outbox SELECT '{id}' || n, 't', 'k', repeat('x', 1000) FROM generate_series(1, 2000) n"
            )
        };
        it.outbox.execute(&format!(
            "BEGIN; {}; SAVEPOINT s; {}; ROLLBACK TO s; {}; COMMIT",
            large("a"),
            large("undone"),
            large("b")
        ));
        let end = Instant::now() + Duration::from_secs(5);
        let (mut number, mut last, mut moved) = (0, it.outbox.confirmed(), Instant::now());
        while Instant::now() < end {
            number += 1;
            it.outbox.execute(&insert(&format!("c{number}")));
            let confirmed = it.outbox.confirmed();
            if confirmed > last {
                (last, moved) = (confirmed, Instant::now());
            }
            assert!(moved.elapsed() < Duration::from_secs(4), "the slot stands still under load");
        }
        let ids = it.published();
        assert_eq!(ids.len(), 4000 + number);
        assert!(!ids.iter().any(|id| id.starts_with("undone")));
    });
}

/// Case 26: what maintenance writes anew is no event.
#[test]
fn rewrites_publish_nothing_again() {
    at_both_ends(|version| {
        let it = AtWork::on(Postgres::shared(version));
        it.outbox.execute("ALTER TABLE outbox ADD PRIMARY KEY (id)");
        it.outbox.execute(&insert("1"));
        for rewrite in [
            "VACUUM FULL outbox",
            "CLUSTER outbox USING outbox_pkey",
            "ALTER TABLE outbox ALTER COLUMN payload TYPE jsonb USING payload::jsonb",
            "ALTER TABLE outbox ADD COLUMN further float8 DEFAULT random()",
        ] {
            it.outbox.execute(rewrite);
        }
        it.outbox.execute(&insert("2"));
        assert_eq!(it.published(), ["1", "2"]);
    });
}

/// Case 27: an UPDATE carries no large value that it leaves as it was; nothing of it is published.
#[test]
fn an_update_beside_a_large_payload_publishes_nothing() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.execute("ALTER TABLE outbox ADD PRIMARY KEY (id), ALTER COLUMN payload SET STORAGE EXTERNAL");
        outbox.execute(&format!("CREATE PUBLICATION {} FOR TABLE outbox", outbox.database.name()));
        let topic = outbox.topic("t", 1);
        let it = AtWork { walpost: outbox.relay(&[]), outbox, topic };
        it.outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', repeat('x', 20000))");
        it.outbox.execute("UPDATE outbox SET key = 'other'");
        it.outbox.execute("UPDATE outbox SET id = 'other'");
        it.outbox.execute(&insert("2"));
        assert_eq!(it.published(), ["1", "2"]);
        let records = it.outbox.kafka.read_all(&[&it.topic]);
        assert_eq!(records[0].value.as_ref().map(Vec::len), Some(20_000));
        assert_eq!(it.walpost.metric("walpost_ignored_changes_total{kind=\"update\"}").to_string(), "2");
    });
}

/// Case 61: what counts is the size as the broker sees it.
#[test]
fn a_giant_that_compresses_well_is_delivered() {
    let it = AtWork::on(Postgres::shared(Version::NEWEST));
    it.outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', repeat('x', 4000000))");
    it.outbox.execute(&insert("2"));
    assert_eq!(it.published(), ["1", "2"]);
    let records = it.outbox.kafka.read_all(&[&it.topic]);
    assert_eq!(records[0].value.as_ref().map(Vec::len), Some(4_000_000));
    assert!(it.walpost.peak_mb() < MEMORY_MB, "{} MB", it.walpost.peak_mb());
}

#[test]
fn partitions_are_published_as_their_root() {
    at_both_ends(|version| {
        let tables = "CREATE TABLE outbox (id text, event_type text, key text, payload text) PARTITION BY HASH (id);
            CREATE TABLE p0 (payload text, key text, event_type text, id text);
            ALTER TABLE outbox ATTACH PARTITION p0 FOR VALUES WITH (MODULUS 2, REMAINDER 0);
            CREATE TABLE p1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)";
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), tables);
        let topic = outbox.topic("t", 1);
        let it = AtWork { walpost: outbox.relay(&[]), outbox, topic };
        it.outbox.execute("INSERT INTO outbox SELECT n, 't', 'k', n FROM generate_series(1, 20) n");
        assert_eq!(it.published().into_iter().collect::<BTreeSet<_>>().len(), 20);
    });
}
