//! What `docs/runbook.md` says to type, where no other test does it already.

use std::process::Command;

use clap::Parser;
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use walpost::cli::Cli;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries},
    services::{
        complete,
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        wait_until,
        walpost::Ended,
    },
};

fn small_wal(keep: &str) -> Settings {
    let settings = [("max_wal_size", "32MB"), ("min_wal_size", "32MB"), ("max_slot_wal_keep_size", keep)];
    settings.into_iter().fold(Settings::default(), |all, (name, value)| all.set(name, value))
}

fn insert(outbox: &Outbox<'_>, count: u32) {
    outbox.execute(&format!(
        "INSERT INTO outbox (event_type, key, payload) SELECT 't', 'k', to_json(n) FROM generate_series(1, {count}) n"
    ));
}

/// "The disk of the database fills": what holds the WAL is named, and mending it frees the disk.
#[test]
fn the_disk_is_free_again_once_what_held_the_slot_is_mended() {
    let server = Postgres::start(Version::NEWEST, &small_wal("512MB"));
    let outbox = Outbox::new(&server, Kafka::shared());
    let walpost = outbox.relay(&[]);
    insert(&outbox, 1);
    for _ in 0..6 {
        outbox.execute("SELECT pg_logical_emit_message(false, 'noise', 'x'); SELECT pg_switch_wal()");
    }
    let retained = || walpost.metric("walpost_slot_retained_wal_bytes");
    wait_until(PATIENCE, "64 MB are retained", || {
        walpost.metrics().contains_key("walpost_slot_retained_wal_bytes") && retained() > 60e6
    });
    let Ended { output, .. } =
        outbox.command(&["status"], &[("WALPOST_HTTP_LISTEN", &format!("127.0.0.1:{}", walpost.http_port()))]);
    for said in ["retained WAL", "until lost", "[WP-401]"] {
        assert!(output.contains(said), "{said:?}: {output}");
    }
    outbox.topic("t", 1);
    outbox.wait_until_confirmed();
    outbox.execute("CHECKPOINT");
    wait_until(PATIENCE, "the disk is free", || retained() < 20e6);
}

/// "The slot is lost": exit code 3, then the way back, and every event is there in the end.
#[test]
fn behind_a_lost_slot_the_rows_of_the_table_fill_the_gap() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &small_wal("1MB"));
        let outbox = Outbox::new(&server, Kafka::shared());
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        insert(&outbox, 10);
        outbox.wait_until_confirmed();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        let slot = outbox.database.name();
        let lost = format!("(SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{slot}') = 'lost'");
        wait_until(PATIENCE, "the slot is lost", || {
            insert(&outbox, 1);
            outbox.execute("SELECT pg_switch_wal()");
            outbox.execute("CHECKPOINT");
            outbox.text(&format!("SELECT {lost}")) == "t"
        });
        let ended = outbox.command(&["run"], &[]);
        assert!(ended.code == Some(3) && ended.output.contains("[WP-202]"), "{}", ended.output);

        outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
        let filled = outbox.command(&["init", "--backfill", "created_at > now() - interval '1 hour'"], &[]);
        assert_eq!(filled.code, Some(0), "{}", filled.output);
        let walpost = outbox.relay(&[]);
        insert(&outbox, 1);
        outbox.wait_until_confirmed();
        let rows: usize = outbox.text("SELECT count(*) FROM outbox").parse().expect("a count");
        assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), rows, "{}", walpost.log());
    });
}

/// "Upgrade of Postgres", by dump: the slot does not come along, so nothing may be on its way.
#[test]
fn an_upgrade_by_dump_loses_nothing_and_repeats_nothing() {
    let old = Postgres::start(Version::OLDEST, &Settings::default());
    let new = Postgres::start(Version::NEWEST, &Settings::default());
    let before = Outbox::new(&old, Kafka::shared());
    let topic = before.topic("t", 1);
    let walpost = before.relay(&[]);
    insert(&before, 100);
    // writers are stopped by now
    wait_until(PATIENCE, "lag is 0", || walpost.metric("walpost_replication_lag_bytes") < 1.0);
    before.wait_until_confirmed();
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

    let name = before.database.name();
    let after = Outbox::with(&new, Kafka::shared(), "SELECT 1");
    let tools = Postgres::shared(Version::System);
    let copied = Command::new("sh")
        .arg("-ec")
        .arg("\"$1\" \"$2\" | \"$3\" -qX -v ON_ERROR_STOP=1 \"$4\"")
        .args(["sh".as_ref(), tools.program("pg_dump").as_os_str()])
        .arg(before.database.url())
        .arg(tools.program("psql"))
        .arg(after.database.url())
        .output()
        .expect("sh starts");
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));

    // the same slot and publication, in the new cluster
    let env = [("WALPOST_POSTGRES_SLOT", name), ("WALPOST_POSTGRES_PUBLICATION", name)];
    let route = format!("{name}.{{event_type}}");
    let env = [env[0], env[1], ("WALPOST_ROUTE_TOPIC", &*route)];
    let made = after.command(&["init", "--backfill", "none"], &env);
    assert_eq!(made.code, Some(0), "{}", made.output);
    let _walpost = after.relay(&env);
    insert(&after, 50);
    let records = after.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= 150);
    let delivered = deliveries(&records);
    assert_eq!((delivered.len(), delivered.values().max()), (150, Some(&1)));
}

/// "A topic is repartitioned": everything is in Kafka before the change, and the new partitions are used behind it.
#[test]
fn new_partitions_are_used_at_once_by_a_walpost_that_was_stopped_for_them() {
    let outbox = Outbox::shared(Version::NEWEST);
    let topic = outbox.topic("t", 1);
    let keys = |round: &str| {
        outbox.execute(&format!(
            "INSERT INTO outbox (event_type, key, payload) SELECT 't', 'k' || n, '\"{round}\"' FROM generate_series(1, 40) n"
        ));
    };
    let walpost = outbox.relay(&[]);
    keys("before");
    outbox.wait_until_confirmed();
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let admin: AdminClient<_> = outbox.kafka.client_config().create().expect("an admin client");
    let name = topic.clone();
    let grown =
        complete(async move { admin.create_partitions(&[NewPartitions::new(&name, 6)], &AdminOptions::new()).await });
    assert!(grown.expect("the broker answers").iter().all(Result::is_ok));
    wait_until(PATIENCE, "six partitions", || outbox.kafka.partitions(&topic) == Some(6));
    let _walpost = outbox.relay(&[]);
    keys("after");
    outbox.wait_until_confirmed();
    let records = outbox.kafka.read_all(&[&topic]);
    let used = |value: &[u8]| {
        let of = records.iter().filter(|record| record.value.as_deref() == Some(value));
        of.map(|record| record.partition).collect::<std::collections::BTreeSet<_>>().len()
    };
    assert_eq!((records.len(), used(b"\"before\"")), (80, 1));
    assert!(used(b"\"after\"") > 3, "{} partitions are used", used(b"\"after\""));
}

const RUNBOOK: &str = include_str!("../../docs/runbook.md");

/// What stands in the runbook in backticks, in blocks and in lines, without what an operator has to fill in.
fn to_type() -> Vec<String> {
    let block = |block: &str| {
        let text = block.split_once('\n').map_or("", |(_, text)| text).to_owned();
        if block.starts_with("sql") { vec![text] } else { text.lines().map(str::to_owned).collect() }
    };
    let (mut typed, mut rest) = (Vec::new(), String::new());
    for (number, part) in RUNBOOK.split("```").enumerate() {
        if number % 2 == 1 { typed.extend(block(part)) } else { rest.push_str(part) }
    }
    typed.extend(rest.split('`').skip(1).step_by(2).map(str::to_owned));
    typed.retain(|text| !text.contains(['<', '…']));
    typed
}

#[test]
fn what_the_runbook_has_in_sql_is_understood_by_every_server() {
    let statements: Vec<_> = to_type().into_iter().filter(|text| text.starts_with("SELECT ")).collect();
    // it is not told to end the walsenders of other tests, nor to name what only later versions know
    let harmless = |text: &&String| !text.contains("pg_terminate_backend") && !text.contains("pg_drop_");
    assert!(statements.iter().filter(harmless).count() >= 5, "{statements:?}");
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        for statement in statements.iter().filter(harmless) {
            if version == Version::NEWEST || !statement.contains("synced") {
                outbox.execute(statement);
            }
        }
    });
}

#[test]
fn what_the_runbook_has_of_walpost_is_understood_by_it() {
    let mut known = 0;
    for line in to_type().iter().filter(|line| line.starts_with("walpost ")) {
        let line = line.split(" #").next().unwrap_or_default().trim();
        // alternating: outside and inside of quotes
        let words = line.split('"').enumerate().flat_map(|(number, part)| {
            if number % 2 == 1 { vec![part.to_owned()] } else { part.split_whitespace().map(str::to_owned).collect() }
        });
        let words: Vec<_> = words.collect();
        if let Err(error) = Cli::try_parse_from(&words) {
            panic!("{line}: {error}");
        }
        known += 1;
    }
    assert!(known >= 10, "{known}");
}
