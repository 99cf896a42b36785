//! `walpost check`: each ailment is brought about for real, is found and nothing else is, and is gone once somebody has typed
//! what the finding says.

use std::{fs, path::Path, process::Command, sync::OnceLock};

use rdkafka::{
    Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewPartitions},
    client::DefaultClientContext,
};
use serde_json::Value;

use crate::{
    denied::{ALLOW, CREATE_ACLS, DELETE_ACLS, DENY, DESCRIBE, READ, WRITE, acl, ask},
    doctor::findings,
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{
        complete, kafka,
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        run, wait_until,
    },
    victim::victim,
};

const DESCRIBE_CONFIGS: u8 = 10;

/// A server of which `walpost check` has nothing to say.
fn healthy() -> Settings {
    let settings = [
        ("max_wal_size", "64MB"),
        ("min_wal_size", "32MB"),
        ("max_slot_wal_keep_size", "2GB"),
        ("max_prepared_transactions", "5"),
    ];
    settings.into_iter().fold(Settings::default(), |all, (name, value)| all.set(name, value))
}

/// One that is shared by tests that break their own tables and topics only.
fn shared() -> &'static Postgres {
    static SHARED: OnceLock<Postgres> = OnceLock::new();
    SHARED.get_or_init(|| Postgres::start(Version::NEWEST, &healthy()))
}

/// An outbox with publication and slot.
fn made<'a>(server: &'a Postgres, kafka: &'a Kafka) -> Outbox<'a> {
    let outbox = Outbox::new(server, kafka);
    let made = outbox.command(&["init"], &[]);
    assert_eq!(made.code, Some(0), "{}", made.output);
    outbox
}

/// The findings that are not well.
fn unwell(outbox: &Outbox<'_>, flags: &[&str], env: &[(&str, &str)]) -> Vec<Value> {
    let mut findings = findings(outbox, flags, env);
    findings.retain(|finding| finding["severity"] != "ok");
    findings
}

/// Waits until exactly these are found; a server takes a moment to read its settings again.
fn claim_with(outbox: &Outbox<'_>, expected: &[&str], flags: &[&str], env: &[(&str, &str)]) -> Vec<Value> {
    let mut found = Vec::new();
    let mut last = String::new();
    wait_until(PATIENCE, &format!("exactly {expected:?} is found; see what was, above"), || {
        found = unwell(outbox, flags, env);
        let codes: Vec<&str> = found.iter().filter_map(|finding| finding["code"].as_str()).collect();
        let seen = format!("{found:#?}");
        if codes != expected && seen != last {
            eprintln!("{seen}");
            last = seen;
        }
        codes == expected
    });
    found
}

fn claim(outbox: &Outbox<'_>, expected: &[&str]) -> Vec<Value> {
    claim_with(outbox, expected, &[], &[])
}

/// What stands in backticks in a finding's `fix`.
fn commands(finding: &Value) -> Vec<String> {
    let fix = finding["fix"].as_str().unwrap_or_default();
    let commands: Vec<String> = fix.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(!commands.is_empty(), "nothing to type: {finding}");
    commands
}

/// Types it.
fn mend(outbox: &Outbox<'_>, finding: &Value) {
    for command in commands(finding) {
        let words: Vec<&str> = command.split_whitespace().collect();
        let kafka = |class: &str| kafka::tool(class, &words[1..]);
        match words[0] {
            "kafka-configs.sh" => kafka("kafka.admin.ConfigCommand"),
            "kafka-topics.sh" => kafka("org.apache.kafka.tools.TopicCommand"),
            "kafka-reassign-partitions.sh" => reassign(&command),
            "echo" | "psql" => shell(outbox, &command),
            _ => outbox.execute(&command),
        }
    }
}

/// Breaks, is found out, mends, and is well.
fn claim_mended(outbox: &Outbox<'_>, ailment: &str) {
    let found = claim(outbox, &[ailment]);
    mend(outbox, &found[0]);
    claim(outbox, &[]);
}

/// Where the files are that commands write and read.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<std::path::PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| run::folder("ailments"))
}

fn shell(outbox: &Outbox<'_>, command: &str) {
    let server = outbox.database.server();
    let psql = Postgres::shared(Version::System).program("psql");
    let typed = Command::new("sh")
        .args(["-ec", command])
        .current_dir(folder())
        .env("PATH", format!("{}:/usr/bin:/bin", psql.parent().expect("a folder").display()))
        .env("PGHOST", server.socket_folder())
        .env("PGPORT", server.port().to_string())
        .env("PGUSER", "postgres")
        .output()
        .expect("sh starts");
    assert!(typed.status.success(), "{command}: {}", String::from_utf8_lossy(&typed.stderr));
}

fn reassign(command: &str) {
    let file = folder().join("replicas.json");
    let command = command.replace("replicas.json", &file.display().to_string());
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    kafka::tool("org.apache.kafka.tools.reassign.ReassignPartitionsCommand", &words);
    fs::remove_file(file).expect("it was written a moment ago");
}

fn set(outbox: &Outbox<'_>, name: &str, value: &str) {
    outbox.execute(&format!("ALTER SYSTEM SET {name} = '{value}'"));
    outbox.execute("SELECT pg_reload_conf()");
}

fn switch_wal(outbox: &Outbox<'_>, segments: u32) {
    for _ in 0..segments {
        outbox.execute("SELECT pg_logical_emit_message(false, 'noise', 'x'); SELECT pg_switch_wal()");
    }
}

#[test]
fn settings_that_endanger_the_slot_are_found() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &healthy());
        let outbox = made(&server, Kafka::shared());
        claim(&outbox, &[]);
        set(&outbox, "max_slot_wal_keep_size", "-1");
        claim_mended(&outbox, "slot_wal_unlimited");
        set(&outbox, "max_slot_wal_keep_size", "48MB");
        claim_mended(&outbox, "slot_wal_limit_low");
        // the remedy names standbys that are not there, and so does the next finding
        set(&outbox, "synchronous_standby_names", "*");
        mend(&outbox, &claim(&outbox, &["synchronous_standby"])[0]);
        claim_mended(&outbox, "synchronous_standby_missing");
        outbox.execute("SELECT pg_create_physical_replication_slot('left_behind', true)");
        switch_wal(&outbox, 8);
        claim_mended(&outbox, "other_slot_holds_wal");
        if version == Version::NEWEST {
            set(&outbox, "idle_replication_slot_timeout", "1d");
            claim_mended(&outbox, "slot_idle_timeout");
            claim_that_awaited_standbys_are_found(&outbox);
            claim_that_another_timeout_is_found(&outbox);
        }
    });
}

fn claim_that_awaited_standbys_are_found(outbox: &Outbox<'_>) {
    outbox.execute("SELECT pg_create_physical_replication_slot('standby1')");
    set(outbox, "synchronized_standby_slots", "standby1");
    let found = claim(outbox, &["awaited_standby_away"]);
    assert_eq!(outbox.command(&["check"], &[]).code, Some(1));
    let (slot, database) = (outbox.database.name(), outbox.database.name());
    let alter =
        format!("psql 'dbname={database} replication=database' -c 'ALTER_REPLICATION_SLOT {slot} (FAILOVER false)'");
    shell(outbox, &alter);
    mend(outbox, &claim(outbox, &["slot_without_failover"])[0]);
    // a failover slot again
    claim(outbox, &["awaited_standby_away"]);
    mend(outbox, &found[0]);
    claim(outbox, &[]);
}

/// What a login trigger sets wins over what a session asks for.
fn claim_that_another_timeout_is_found(outbox: &Outbox<'_>) {
    outbox.execute(
        "CREATE FUNCTION patient() RETURNS event_trigger LANGUAGE plpgsql AS
         $$ BEGIN PERFORM set_config('wal_sender_timeout', '0', false); END $$;
         CREATE EVENT TRIGGER patient ON login EXECUTE FUNCTION patient()",
    );
    let found = claim(outbox, &["wal_sender_timeout"]);
    let look = commands(&found[0]).into_iter().find(|command| command.contains("pg_event_trigger")).expect("a look");
    assert_eq!(outbox.text(&look), "patient");
    outbox.execute("DROP EVENT TRIGGER patient");
    claim(outbox, &[]);
}

/// Ten seconds are how long a transaction must be open to be one that matters.
#[test]
fn a_transaction_that_holds_the_slot_is_found() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &healthy());
        let outbox = made(&server, Kafka::shared());
        let without_slot = Outbox::new(&server, Kafka::shared());
        let walpost = outbox.relay(&[]);
        outbox.execute("CREATE TABLE other (id int)");
        outbox.execute("BEGIN; INSERT INTO other VALUES (1); PREPARE TRANSACTION 'forgotten'");
        let forgetful = outbox.database.connect();
        let begun = complete(async move {
            forgetful.batch_execute("BEGIN; INSERT INTO other VALUES (2)").await.map(|()| forgetful)
        });
        let _forgetful = begun.expect("a transaction begins");
        // confirmed is all of it, and the log is kept all the same
        switch_wal(&outbox, 6);
        outbox.execute("CHECKPOINT");
        outbox.wait_until_confirmed();
        claim(&outbox, &["long_transaction"]);
        let other_side = ["other_slot_holds_wal", "long_transaction"];
        let found = claim(&without_slot, &other_side);
        assert!(found[1]["why"].as_str().is_some_and(|why| why.contains("cannot be created")), "{found:#?}");
        mend(&outbox, &found[1]);
        let found = claim(&without_slot, &other_side);
        assert!(found[1]["what"].as_str().is_some_and(|what| what.contains("of process")), "{found:#?}");
        mend(&outbox, &found[1]);
        claim(&outbox, &[]);
        // the next checkpoint tells the slot that nothing is open any more
        outbox.execute("CHECKPOINT");
        outbox.wait_until_confirmed();
        claim(&without_slot, &[]);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    });
}

#[test]
fn a_synchronous_standby_that_lags_is_found() {
    let primary = Postgres::start(Version::NEWEST, &healthy());
    let standby = primary.standby(&Settings::default());
    let outbox = made(&primary, Kafka::shared());
    set(&outbox, "synchronous_standby_names", "walreceiver");
    outbox.wait_until_true(PATIENCE, "EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')");
    claim(&outbox, &[]);
    standby.freeze();
    for _ in 0..70 {
        outbox.execute("SELECT pg_logical_emit_message(false, 'noise', repeat('x', 1048576))");
    }
    claim_mended(&outbox, "synchronous_standby_behind");
    standby.thaw();
}

/// Nothing fails for lack of rights: what could not be seen is said, with what to grant.
#[test]
fn what_a_role_may_not_see_is_said_and_is_no_failure() {
    let outbox = made(shared(), Kafka::shared());
    let role = format!("blind_{}", outbox.database.name());
    outbox.execute(&format!("CREATE ROLE {role} LOGIN REPLICATION"));
    let url = outbox.database.url_as(&role);
    let env = [("WALPOST_POSTGRES_URL", url.as_str())];
    let found = claim_with(&outbox, &["activity_unseen", "table_unsampled"], &[], &env);
    assert!(found.iter().all(|finding| finding["severity"] == "unknown"), "{found:#?}");
    let checked = outbox.command(&["check"], &env);
    assert!(checked.code == Some(0) && checked.output.contains("not looked at: 2"), "{}", checked.output);
    for finding in &found {
        mend(&outbox, finding);
    }
    claim_with(&outbox, &[], &[], &env);
    outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn keys_and_headers_that_consumers_would_miss_are_found() {
    let outbox = made(shared(), Kafka::shared());
    outbox.topic("t", 1);
    let headers = |json: &str| {
        outbox.execute(&format!(
            "DELETE FROM outbox; INSERT INTO outbox (event_type, key, headers) VALUES ('t', 'k', '{json}')"
        ));
    };
    headers(r#"{"traceparent": "00", "tenant-id": 7}"#);
    claim(&outbox, &[]);
    for (json, ailment) in [
        (r#"{"id": "mine"}"#, "header_taken"),
        (r#"{"walpost_error": "none"}"#, "header_taken"),
        (r#"{"Event_Type": "t"}"#, "header_alike"),
        (r#"{"tenant": 1, "Tenant": 1}"#, "header_alike"),
        (r#"{"tenant id": 1}"#, "header_odd"),
        (r#"{"": 1}"#, "header_odd"),
    ] {
        headers(json);
        claim(&outbox, &[ailment]);
    }
    headers("{}");
    claim_with(&outbox, &["header_taken"], &["--set", "outbox.header_columns.id=key"], &[]);
    claim(&outbox, &[]);

    outbox.execute("INSERT INTO outbox (event_type, key) SELECT 't', n FROM generate_series(1, 300) n");
    let without_key = "INSERT INTO outbox (event_type) VALUES ('t')";
    outbox.execute(without_key);
    claim(&outbox, &[]);
    outbox.execute(&format!("{without_key}, ('t'), ('t')"));
    mend(&outbox, &claim(&outbox, &["key_null"])[0]);
    outbox.execute(&format!(
        "DO $$ BEGIN {without_key}; RAISE 'it was taken'; EXCEPTION WHEN check_violation THEN NULL; END $$"
    ));
    outbox.execute("DELETE FROM outbox WHERE key IS NULL");
    claim(&outbox, &[]);
}

/// A large table is sampled by blocks, and one that answers too late is let be.
#[test]
fn a_sample_is_bounded_in_rows_and_in_time() {
    let outbox = made(shared(), Kafka::shared());
    outbox.topic("t", 1);
    outbox.execute("INSERT INTO outbox (event_type) SELECT 't' FROM generate_series(1, 100000)");
    outbox.execute("ANALYZE outbox");
    let found = claim(&outbox, &["key_null"]);
    let said = found[0]["what"].as_str().unwrap_or_default();
    let rows: u32 = said.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number");
    assert!((1000..=10_000).contains(&rows), "{said}");
    // rows that take their time
    let role = format!("patient_{}", outbox.database.name());
    outbox.execute(&format!(
        "CREATE ROLE {role} LOGIN REPLICATION; GRANT pg_read_all_stats TO {role}; GRANT SELECT ON outbox TO {role};
         CREATE POLICY slow ON outbox USING (pg_sleep(0.1) IS NOT NULL); ALTER TABLE outbox ENABLE ROW LEVEL SECURITY"
    ));
    let url = outbox.database.url_as(&role);
    let found = claim_with(&outbox, &["table_unsampled"], &[], &[("WALPOST_POSTGRES_URL", &url)]);
    assert!(found[0]["what"].as_str().is_some_and(|what| what.contains("longer than 2 s")), "{found:#?}");
    outbox.execute(&format!("DROP POLICY slow ON outbox; DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// Even views of the catalog wait for a table that is locked.
#[test]
fn a_table_that_is_locked_does_not_hold_up_the_examination() {
    let outbox = made(shared(), Kafka::shared());
    let holder = outbox.database.connect();
    let held = complete(async move { holder.batch_execute("BEGIN; LOCK TABLE outbox").await.map(|()| holder) });
    let holder = held.expect("a lock");
    let found = unwell(&outbox, &[], &[]);
    let failed = found.iter().find(|finding| finding["code"] == "postgres_failed").expect("it is said");
    assert!(failed["what"].as_str().is_some_and(|what| what.contains("lock timeout")), "{found:#?}");
    drop(holder);
    claim(&outbox, &[]);
}

#[test]
fn topics_that_would_refuse_events_are_found() {
    let outbox = made(shared(), Kafka::shared());
    let topic = outbox.topic("t", 1);
    let insert = |event_type: &str, payload: &str| {
        outbox
            .execute(&format!("INSERT INTO outbox (event_type, key, payload) VALUES ('{event_type}', 'k', {payload})"));
    };
    insert("t", "'{}'");
    claim(&outbox, &[]);
    insert("t", "to_json(repeat('x', 2000000))");
    claim_mended(&outbox, "topic_payload_too_large");
    outbox.execute("DELETE FROM outbox WHERE length(payload::text) > 2");
    outbox.kafka.alter_topic(&topic, &[("max.message.bytes", "100000")]);
    claim_mended(&outbox, "topic_max_message_bytes");
    outbox.kafka.alter_topic(&topic, &[("min.insync.replicas", "2")]);
    claim_mended(&outbox, "topic_min_insync_impossible");
    insert("new", "'{}'");
    claim_mended(&outbox, "topic_missing");
}

#[test]
fn a_topic_that_was_given_partitions_is_found_as_long_as_it_has_the_old_records() {
    let outbox = made(shared(), Kafka::shared());
    let topic = outbox.topic("t", 2);
    let walpost = outbox.relay(&[]);
    let insert = || outbox.execute("INSERT INTO outbox (event_type, key) SELECT 't', n FROM generate_series(1, 40) n");
    insert();
    outbox.wait_until_confirmed();
    claim(&outbox, &[]);
    let admin: AdminClient<DefaultClientContext> =
        outbox.kafka.client_config().create().expect("a client needs no broker to be created");
    let grown = topic.clone();
    let admin = complete(async move {
        let answer = admin.create_partitions(&[NewPartitions::new(&grown, 5)], &AdminOptions::new()).await;
        answer.expect("the broker answers").pop().expect("one answer").expect("it does as it is asked");
        admin
    });
    wait_until(PATIENCE, "there are five", || outbox.kafka.partitions(&topic) == Some(5));
    claim(&outbox, &["topic_partitions_changed"]);
    let mut old = TopicPartitionList::new();
    for partition in 0..2 {
        old.add_partition_offset(&topic, partition, Offset::End).expect("a legal offset");
    }
    complete(async move { admin.delete_records(&old, &AdminOptions::new()).await }).expect("they are deleted");
    claim(&outbox, &[]);
    drop(walpost);
    // of a process that knows the new number
    let _walpost = outbox.relay(&[]);
    insert();
    outbox.wait_until_confirmed();
    claim(&outbox, &[]);
}

#[test]
fn topics_that_may_not_be_read_are_said_to_be_unseen() {
    let kafka = victim();
    let outbox = made(shared(), &kafka);
    let topic = outbox.topic("t", 2);
    outbox.execute("INSERT INTO outbox (event_type, key) VALUES ('t', 'k')");
    claim(&outbox, &[]);
    let acls = [
        acl(&topic, READ, DENY),
        acl(&topic, WRITE, ALLOW),
        acl(&topic, DESCRIBE, ALLOW),
        acl(&topic, DESCRIBE_CONFIGS, ALLOW),
    ];
    ask(&kafka, CREATE_ACLS, &acls);
    let found = claim(&outbox, &["topic_records_unseen"]);
    assert_eq!(found[0]["severity"], "unknown");
    ask(&kafka, DELETE_ACLS, &acls);
    claim(&outbox, &[]);
}

#[test]
fn a_clock_that_is_wrong_is_found() {
    let library =
        ["x86_64", "aarch64"].map(|machine| format!("/usr/lib/{machine}-linux-gnu/faketime/libfaketime.so.1"));
    let library = library.into_iter().find(|path| Path::new(path).exists()).expect("package libfaketime");
    let variables = [("LD_PRELOAD", library.as_str()), ("FAKETIME", "+90s"), ("FAKETIME_DISABLE_SHM", "1")];
    let settings = variables.iter().fold(healthy(), |settings, (name, value)| settings.variable(name, value));
    let server = Postgres::start(Version::NEWEST, &settings);
    let outbox = made(&server, Kafka::shared());
    let found = claim(&outbox, &["clock_skew"]);
    let what = found[0]["what"].as_str().unwrap_or_default();
    assert!(what.contains("ahead of") && (what.contains("1m 29s") || what.contains("1m 30s")), "{what}");
}

/// A cluster of three: what one broker cannot show.
#[test]
fn replicas_that_are_too_few_are_found() {
    let settings = kafka::Settings::default().nodes(3);
    let settings = settings.set("broker.session.timeout.ms", "3000").set("broker.heartbeat.interval.ms", "500");
    let kafka = Kafka::start(&settings);
    let outbox = made(shared(), &kafka);
    let topic = outbox.topic_name("t");
    outbox.execute("INSERT INTO outbox (event_type, key) VALUES ('t', 'k')");
    kafka::tool(
        "org.apache.kafka.tools.TopicCommand",
        &["--bootstrap-server", &kafka.brokers(), "--create", "--topic", &topic, "--replication-factor", "1"],
    );
    let found = claim(&outbox, &["topic_replicas", "topic_min_insync_replicas"]);
    for finding in &found {
        mend(&outbox, finding);
    }
    claim(&outbox, &[]);
    kafka.alter_topic(&topic, &[("min.insync.replicas", "3")]);
    claim(&outbox, &["topic_no_spare_replica"]);
    kafka.nodes()[2].kill();
    let found = claim(&outbox, &["topic_under_min_insync"]);
    assert!(found[0]["fix"].as_str().is_some_and(|fix| fix.ends_with(": 3")), "{found:#?}");
    kafka.nodes()[2].start_again();
    claim_mended(&outbox, "topic_no_spare_replica");
}
