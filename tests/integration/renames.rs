//! An outbox table that gets another name: no row of it is passed over.

use crate::{
    halts::{claim_said, ids},
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
    },
};

/// Only new rows in it would be missed: what maintenance does to a table that was swapped out is none of our business.
#[test]
fn a_renamed_outbox_halts_when_it_gets_a_row_and_a_swapped_in_one_is_followed() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        outbox.execute("ALTER TABLE outbox ADD PRIMARY KEY (id)");
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        let publication = outbox.database.name();
        outbox.execute(&format!("ALTER PUBLICATION {publication} SET (publish = 'insert, delete')"));
        outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
        outbox.execute(&format!(
            "ALTER TABLE outbox RENAME TO old; {TABLE}; ALTER PUBLICATION {publication} ADD TABLE outbox;
             INSERT INTO outbox VALUES ('2', 't', 'k', ''); DELETE FROM old"
        ));
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), ["1", "2"]);
        outbox.execute("INSERT INTO old VALUES ('3', 't', 'k', '')");
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        claim_said(&walpost.log(), &["public.outbox", "renamed to public.old", "outbox.table"]);
    });
}

/// A new session hears of the table under its new name only; whose rows these are must still be known.
#[test]
fn a_renamed_outbox_halts_also_after_the_link_was_lost() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
        let publication = outbox.database.name();
        outbox.execute(&format!(
            "ALTER TABLE outbox RENAME TO old; {TABLE}; ALTER PUBLICATION {publication} ADD TABLE outbox;
             INSERT INTO outbox VALUES ('2', 't', 'k', '')"
        ));
        outbox.wait_until_confirmed();
        let walsender = outbox.walsender().expect("it streams");
        outbox.execute(&format!("SELECT pg_terminate_backend({walsender})"));
        wait_until(PATIENCE, "another session", || outbox.walsender().is_some_and(|pid| pid != walsender));
        outbox.execute("INSERT INTO old VALUES ('3', 't', 'k', '')");
        let behind = outbox.wal_end();
        assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
        claim_said(&walpost.log(), &["public.outbox", "renamed to public.old", "outbox.table"]);
        assert!(outbox.confirmed() < behind, "the row is still in front of the slot");
        assert_eq!(ids(&outbox, &topic), ["1", "2"]);
    });
}

/// What walpost advises. The row was written under the other name, and stays so in the WAL.
#[test]
fn rows_of_a_renamed_outbox_follow_whichever_name_is_made_right() {
    let repairs = [("ALTER TABLE x RENAME TO outbox", "public.outbox"), ("SELECT 1", "public.x")];
    for (statement, table) in repairs {
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
        outbox.wait_until_confirmed();
        walpost.freeze();
        outbox.execute("INSERT INTO outbox VALUES ('2', 't', 'k', '')");
        outbox.execute("ALTER TABLE outbox RENAME TO x; INSERT INTO x VALUES ('3', 't', 'k', '')");
        walpost.kill9();
        outbox.execute(statement);
        wait_until(PATIENCE, "the slot is free", || outbox.walsender().is_none());
        let _walpost = outbox.relay(&[("WALPOST_OUTBOX_TABLE", table)]);
        outbox.wait_until_confirmed();
        assert_eq!(ids(&outbox, &topic), ["1", "2", "3"], "{table}");
    }
}
