//! Slot and publication, as the server has them: whether they are ours, and what becomes of them under a running walpost.

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
};

fn insert(id: &str) -> String {
    format!("INSERT INTO outbox VALUES ('{id}', 't', 'k', NULL)")
}

/// From 18 on the server skips the rows and only warns; before, it ends the stream.
#[test]
fn a_publication_that_is_dropped_halts_before_anything_behind_is_confirmed() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute(&insert("before"));
        outbox.wait_until_confirmed();
        outbox.execute(&format!("DROP PUBLICATION {}", outbox.database.name()));
        outbox.execute(&insert("skipped"));
        let behind = outbox.wal_end();
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        assert!(walpost.log().contains("publication"), "{}", walpost.log());
        assert!(outbox.confirmed() < behind);
    });
}

#[test]
fn a_table_that_is_taken_out_of_the_publication_is_noticed() {
    at_both_ends(|version| {
        let outbox =
            Outbox::with(Postgres::shared(version), Kafka::shared(), &format!("{TABLE}; CREATE TABLE other (a int)"));
        outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        walpost.wait_until_ready(PATIENCE);
        let publication = outbox.database.name();
        outbox.execute(&format!("ALTER PUBLICATION {publication} SET TABLE other"));
        wait_until(PATIENCE, "walpost says so", || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains("publication:") && answer.body.contains("ALTER PUBLICATION")
        });
        outbox.execute(&format!("ALTER PUBLICATION {publication} SET TABLE outbox"));
        walpost.wait_until_ready(PATIENCE);
    });
}

/// Case 10.
#[test]
fn a_table_that_is_dropped_and_created_again_is_noticed_and_goes_on_once_it_is_published() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute(&insert("before"));
        outbox.wait_until_confirmed();
        outbox.execute(&format!("DROP TABLE outbox; {TABLE}"));
        outbox.execute(&insert("between"));
        wait_until(PATIENCE, "walpost says so", || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains("publication:") && answer.body.contains("ALTER PUBLICATION")
        });
        outbox.execute(&format!("ALTER PUBLICATION {} ADD TABLE outbox", outbox.database.name()));
        walpost.wait_until_ready(PATIENCE);
        outbox.execute(&insert("after"));
        outbox.wait_until_confirmed();
        // what no publication named when it was written comes from the table
        let again = outbox.command(&["backfill", "id = 'between'"], &[("WALPOST_HTTP_LISTEN", "")]);
        assert_eq!(again.code, Some(0), "{}", again.output);
        let ids = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!(ids, ["after", "before", "between"].map(|id| (id.to_owned(), 1)).into());
    });
}

#[test]
fn a_slot_that_is_not_ours_is_refused_and_left_alone() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
    let elsewhere = outbox.database.server().database();
    let slot = outbox.database.name();
    let physical = format!("SELECT pg_create_physical_replication_slot('{slot}')");
    let two_phase = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)");
    let of_another = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    outbox.execute(&format!("CREATE PUBLICATION {slot} FOR TABLE outbox"));
    for (create, in_another_database, said) in
        [(physical, false, "physical"), (two_phase, false, "two_phase"), (of_another, true, elsewhere.name())]
    {
        if in_another_database {
            elsewhere.execute(&create);
        } else {
            outbox.execute(&create);
        }
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[]);
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        assert!(walpost.log().contains(said), "{}", walpost.log());
        outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    }
}

#[test]
fn hosts_that_are_dead_or_read_only_are_passed_over() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        // a server of another major has a database of this name as well, and refuses to write
        let other = Postgres::shared(if version == Version::NEWEST { Version::OLDEST } else { Version::NEWEST });
        let name = outbox.database.name();
        let witness = other.database();
        witness.execute(&format!("CREATE DATABASE {name}"));
        witness.execute(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
        let hosts = format!("127.0.0.1:1,127.0.0.1:{},127.0.0.1:{}", other.port(), outbox.database.server().port());
        let url = format!("postgres://postgres@{hosts}/{name}?target_session_attrs=read-write");
        let _walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", &url)]);
        outbox.execute(&insert("1"));
        outbox.wait_until_confirmed();
        assert_eq!(outbox.kafka.record_count(&topic), 1);
        witness.execute(&format!("DROP DATABASE {name} WITH (FORCE)"));
    });
}
