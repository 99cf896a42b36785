//! A standby takes the place of its primary.

use std::{collections::BTreeSet, thread, time::Duration};

use crate::{
    ledger::{EVENT_TYPE, TABLE, Verdict, Writers},
    outbox::{Outbox, PATIENCE},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Settings, Stop, Version},
        wait_until,
        walpost::Walpost,
    },
};

/// A primary whose commits wait for its standby, and an outbox in it. The standby follows by a slot of its own.
fn pair(version: Version, settings: &Settings) -> (Postgres, Postgres) {
    let primary = Postgres::start(version, &Settings::default());
    let database = primary.database();
    database.execute("SELECT pg_create_physical_replication_slot('standby', true)");
    let standby =
        primary.standby(&settings.clone().set("primary_slot_name", "standby").set("hot_standby_feedback", "on"));
    database.execute("ALTER SYSTEM SET synchronous_standby_names = '*'");
    database.execute("SELECT pg_reload_conf()");
    drop(database);
    (primary, standby)
}

/// Walpost with both hosts; it takes the one that writes.
fn relay(outbox: &Outbox<'_>, standby: &Postgres, more: &[(&str, &str)]) -> Walpost {
    let (primary, name) = (outbox.database.server(), outbox.database.name());
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", primary.port(), standby.port());
    let url = format!("postgres://postgres@{hosts}/{name}?target_session_attrs=read-write");
    outbox.relay(&[&[("WALPOST_POSTGRES_URL", url.as_str())], more].concat())
}

/// Promotes a standby with a failover slot, in the midst of events; returns how often one came twice.
fn promote(version: Version, more: &[(&str, &str)]) -> usize {
    let (primary, standby) = pair(version, &Settings::default().set("sync_replication_slots", "on"));
    let outbox = Outbox::with(&primary, Kafka::shared(), TABLE);
    outbox.execute("ALTER SYSTEM SET synchronized_standby_slots = 'standby'");
    outbox.execute("SELECT pg_reload_conf()");
    let topic = outbox.topic(EVENT_TYPE, 3);
    let walpost = relay(&outbox, &standby, more);
    let writers = Writers::start(&outbox, 3);
    let promoted = outbox.on(&standby);
    let slot = outbox.database.name();
    let synchronized =
        format!("EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}' AND synced AND NOT temporary)");
    wait_until(PATIENCE, "the slot is on the standby", || {
        // lets the slot's horizon pass the standby's, which else takes a quarter of a minute
        outbox.execute("SELECT pg_log_standby_snapshot()");
        thread::sleep(Duration::from_millis(200));
        promoted.text(&format!("SELECT {synchronized}")) == "t"
    });
    let mut committed = writers.stop();
    // the primary dies with some of these on their way
    let late = |numbers: std::ops::RangeInclusive<u32>| -> BTreeSet<String> {
        numbers.map(|number| format!("late/{number}")).collect()
    };
    let insert = |first: u32, last: u32| {
        format!(
            "INSERT INTO outbox SELECT 'late/' || n, '{EVENT_TYPE}', 'late', 'x' FROM generate_series({first}, {last}) n"
        )
    };
    outbox.execute(&insert(1, 2000));
    primary.stop(Stop::Immediate);
    promoted.execute("SELECT pg_promote()");
    promoted.execute(&insert(2001, 2500));
    promoted.wait_until_confirmed();
    committed.extend(late(1..=2500));
    let verdict = Verdict::on(&promoted.kafka.read_all(&[&topic]), &committed);
    let duplicates = verdict.duplicates;
    eprintln!("{version:?}: {} committed, {duplicates} sent twice", committed.len());
    assert_eq!(verdict.forgiving_duplicates(), Verdict::default(), "{}", walpost.log());
    walpost.wait_until_ready(PATIENCE);
    duplicates
}

/// Case 44: with a failover slot.
#[test]
fn a_promoted_standby_goes_on_where_the_primary_ended() {
    thread::scope(|scope| {
        for version in [Version::Major(17), Version::NEWEST] {
            scope.spawn(move || promote(version, &[]));
        }
    });
}

#[test]
fn a_promoted_standby_repeats_nothing_under_exactly_once_delivery() {
    assert_eq!(promote(Version::NEWEST, &[("WALPOST_KAFKA_DELIVERY", "exactly_once")]), 0);
}

/// Case 44: before 17 a standby knows nothing of its primary's logical slots.
#[test]
fn a_promoted_standby_without_the_slot_is_a_loss_that_is_said() {
    let (primary, standby) = pair(Version::OLDEST, &Settings::default());
    let outbox = Outbox::with(&primary, Kafka::shared(), TABLE);
    outbox.topic(EVENT_TYPE, 1);
    let walpost = relay(&outbox, &standby, &[]);
    outbox.execute(&format!("INSERT INTO outbox VALUES ('1', '{EVENT_TYPE}', 'k', '')"));
    outbox.wait_until_confirmed();
    primary.stop(Stop::Immediate);
    let promoted = outbox.on(&standby);
    promoted.execute("SELECT pg_promote()");
    assert_eq!(walpost.wait(PATIENCE).code(), Some(3), "{}", walpost.log());
    for said in [outbox.database.name(), "may be missing", "walpost init"] {
        assert!(walpost.log().contains(said), "{said:?} is not said in:\n{}", walpost.log());
    }
}
