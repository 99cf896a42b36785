//! Links that break, and servers that go and come back.

use std::{net::TcpListener, thread, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    ledger::{EVENT_TYPE, TABLE, Verdict, Writers},
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, lsn, stays},
    services::{
        kafka::{self, Kafka},
        postgres::{Postgres, Settings, Stop, Version},
        wait_for, wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// Case 46.
#[test]
fn a_walsender_that_is_terminated_is_replaced_and_nothing_is_lost() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic(EVENT_TYPE, 3);
        let walpost = outbox.relay(&[]);
        let writers = Writers::start(&outbox, 2);
        for _ in 0..3 {
            let walsender = wait_for(PATIENCE, "the slot is in use", || outbox.walsender());
            outbox.execute(&format!("SELECT pg_terminate_backend({walsender})"));
            wait_until(PATIENCE, "another walsender", || outbox.walsender().is_some_and(|pid| pid != walsender));
        }
        let committed = writers.stop();
        outbox.wait_until_confirmed();
        let verdict = Verdict::on(&outbox.kafka.read_all(&[&topic]), &committed);
        assert_eq!(verdict.forgiving_duplicates(), Verdict::default());
        assert!(walpost.metric(REPLICATION_RECONNECTS) >= 3.0);
    });
}

/// Case 46.
#[test]
fn an_sql_link_that_is_terminated_is_replaced_beside_the_stream() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let walpost = outbox.relay(&[]);
        walpost.wait_until_ready(PATIENCE);
        let links = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
            AND backend_type = 'client backend'";
        // the monitor's, once it has looked; those that a start needs are gone after a moment
        wait_until(PATIENCE, "a first look", || walpost.status()["current_wal_lsn"].is_string());
        outbox.wait_until_true(PATIENCE, &format!("(SELECT count(*) {links}) = 1"));
        outbox.execute(&format!("SELECT pg_terminate_backend(pid) {links}"));
        let sql_reconnects = "walpost_reconnects_total{side=\"sql\"}";
        wait_until(PATIENCE, "a new SQL link", || walpost.metric(sql_reconnects) >= 1.0);
        let end = outbox.wal_end();
        wait_until(PATIENCE, "the server's position is looked at again", || {
            walpost.status()["current_wal_lsn"].as_str().is_some_and(|current| lsn(current) >= end)
        });
        assert!(walpost.metric(REPLICATION_RECONNECTS) < 1.0);
    });
}

/// Case 46.
#[test]
fn a_server_that_crashes_or_restarts_is_found_again_and_nothing_is_lost() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &Settings::default());
        let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        for (first, mode) in [(0, Stop::Immediate), (2000, Stop::Fast)] {
            insert_one_by_one(&outbox, first..first + 1000);
            server.stop(mode);
            server.start_again();
            insert_one_by_one(&outbox, first + 1000..first + 2000);
        }
        outbox.wait_until_confirmed();
        let delivered = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!(delivered.len(), 4000);
        walpost.wait_until_ready(PATIENCE);
    });
}

/// Case 47.
#[test]
fn a_fast_stop_takes_a_moment_when_everything_is_confirmed() {
    at_both_ends(|version| {
        let server = Postgres::start(version, &Settings::default());
        let outbox = Outbox::with(&server, Kafka::shared(), &format!("{TABLE}; CREATE TABLE other (a int)"));
        outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        walpost.wait_until_ready(PATIENCE);
        insert_one_by_one(&outbox, 0..1000);
        outbox.wait_until_confirmed();
        // the last word is about a table that is not published
        outbox.execute("INSERT INTO other SELECT generate_series(1, 1000)");
        let taken = server.stop(Stop::Fast);
        assert!(taken < Duration::from_secs(2), "{taken:?}\n{}", walpost.log());
    });
}

/// Two slots on each server: one walpost waits for Kafka, the other has reached its bound as well and reads no more.
/// Case 47.
#[test]
fn a_fast_stop_waits_only_seconds_for_kafka() {
    const EVENTS: u32 = 1000;
    let kafka = victim();
    let servers = [Version::NEWEST, Version::OLDEST].map(|version| Postgres::start(version, &Settings::default()));
    let at_work = |server, env| {
        let outbox = Outbox::with(server, &kafka, TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(env);
        outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
        outbox.wait_until_confirmed();
        (outbox, topic, walpost)
    };
    let sides = servers
        .each_ref()
        .map(|server| (server, [at_work(server, &[]), at_work(server, &[("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "10")])]));
    kafka.freeze();
    thread::scope(|scope| {
        for (server, pairs) in &sides {
            scope.spawn(move || {
                for (outbox, _, walpost) in pairs {
                    insert_one_by_one(outbox, 0..EVENTS);
                    let in_flight = || walpost.metric("walpost_in_flight_events");
                    wait_until(PATIENCE, "events are in flight", || in_flight() >= 10.0);
                }
                let taken = server.stop(Stop::Fast);
                let logs = || pairs.each_ref().map(|(_, _, walpost)| walpost.log()).join("\n");
                assert!(taken < Duration::from_secs(6), "{taken:?}\n{}", logs());
                server.start_again();
            });
        }
    });
    kafka.thaw();
    for (outbox, topic, _) in sides.iter().flat_map(|(_, pairs)| pairs) {
        outbox.wait_until_confirmed();
        assert_eq!(deliveries(&kafka.read_all(&[topic])).len(), 1 + EVENTS as usize);
    }
}

/// Case 12.
#[test]
fn a_second_walpost_waits_for_the_slot_and_takes_over() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let topic = outbox.topic("t", 1);
        let first = outbox.relay(&[]);
        let second = Walpost::relay(&outbox.database, outbox.kafka, &[]);
        wait_until(PATIENCE, "the second says that the slot is in use", || {
            let answer = second.get("/readyz");
            answer.status == 503 && answer.body.contains("is active for PID")
        });
        insert_one_by_one(&outbox, 0..10);
        outbox.wait_until_confirmed();
        assert!(first.metric(REPLICATION_RECONNECTS) < 1.0, "the first goes on undisturbed");
        first.kill9();
        insert_one_by_one(&outbox, 10..20);
        second.wait_until_ready(PATIENCE);
        outbox.wait_until_confirmed();
        assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), 20);
    });
}

/// Case 45.
#[test]
fn a_link_that_is_silent_is_given_up_and_replaced() {
    let server = Postgres::start(Version::NEWEST, &Settings::default());
    let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[]);
    walpost.wait_until_ready(PATIENCE);
    let walsender = outbox.walsender().expect("it streams");
    kill(Pid::from_raw(walsender), Signal::SIGSTOP).expect("it is alive");
    insert_one_by_one(&outbox, 0..10);
    wait_until(Duration::from_secs(20), "another connection finds the slot in use", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains(&format!("is active for PID {walsender}"))
    });
    kill(Pid::from_raw(walsender), Signal::SIGCONT).expect("it is alive");
    walpost.wait_until_ready(PATIENCE);
    outbox.wait_until_confirmed();
    assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), 10);
}

/// Case 57.
#[test]
fn brokers_that_are_away_are_waited_for() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    kafka.kill();
    let walpost = outbox.relay(&[]);
    for numbers in [0..10, 10..20] {
        kafka.kill(); // the second time, under way
        insert_one_by_one(&outbox, numbers);
        claim_waiting_without_noise(&walpost, "kafka:");
        kafka.start_again();
        walpost.wait_until_ready(PATIENCE);
        outbox.wait_until_confirmed();
    }
    let delivered = deliveries(&kafka.read_all(&[&topic]));
    assert_eq!((delivered.len(), delivered.values().max()), (20, Some(&1)));
}

#[test]
fn a_broker_of_three_may_die_amid_writers() {
    // noticed within seconds
    let settings = kafka::Settings::default().nodes(3).set("min.insync.replicas", "2");
    let settings = settings.set("broker.session.timeout.ms", "3000").set("broker.heartbeat.interval.ms", "500");
    let kafka = Kafka::start(&settings);
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 6);
    let _walpost = outbox.relay(&[]);
    let writers = Writers::start(&outbox, 3);
    outbox.wait_until_confirmed();
    kafka.nodes()[0].kill();
    // a third of the partitions have lost their leader
    outbox.wait_until_confirmed();
    let committed = writers.stop();
    outbox.wait_until_confirmed();
    assert_eq!(Verdict::on(&kafka.read_all(&[&topic]), &committed), Verdict::default());
}

/// Case 57.
#[test]
fn a_server_that_is_down_at_the_start_is_waited_for() {
    let server = Postgres::start(Version::NEWEST, &Settings::default());
    let outbox = Outbox::with(&server, Kafka::shared(), TABLE);
    let topic = outbox.topic("t", 1);
    server.stop(Stop::Fast);
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[]);
    claim_waiting_without_noise(&walpost, "stream:");
    server.start_again();
    walpost.wait_until_ready(PATIENCE);
    insert_one_by_one(&outbox, 0..10);
    outbox.wait_until_confirmed();
    assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).len(), 10);
}

/// Case 57: a name that nobody knows may be known in a while.
#[test]
fn names_that_cannot_be_looked_up_are_waited_for() {
    let outbox = Outbox::shared(Version::NEWEST);
    let nowhere = "postgres://relay@no-such-host.invalid:5432/shop";
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[("WALPOST_POSTGRES_URL", nowhere)]);
    claim_waiting_without_noise(&walpost, "no-such-host.invalid");
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let brokers = [("WALPOST_KAFKA_BROKERS", "no-such-host.invalid:9092")];
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &brokers);
    walpost.wait_for_log(PATIENCE, "streaming slot=");
    claim_waiting_without_noise(&walpost, "kafka:");
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
}

#[test]
fn until_a_broker_has_answered_walpost_is_not_ready() {
    let outbox = Outbox::shared(Version::NEWEST);
    let nobody =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").to_string();
    // from the first answer on, and on beyond the moment when it streams
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[("WALPOST_KAFKA_BROKERS", &nobody)]);
    stays(Duration::from_secs(5), "it is not ready", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains("kafka:")
    });
    assert_eq!(walpost.status()["streaming"], true, "{}", walpost.log());
    let log = walpost.log();
    assert!(
        !log.contains("whole again") && !log.contains("healthy again"),
        "a first look is told as a recovery:\n{log}"
    );
}

const REPLICATION_RECONNECTS: &str = "walpost_reconnects_total{side=\"replication\"}";

/// It says why it is not ready, stays alive, and does not fill the log.
fn claim_waiting_without_noise(walpost: &Walpost, part: &str) {
    wait_until(PATIENCE, "the trouble is noticed", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains(part)
    });
    let lines = walpost.log().lines().count();
    stays(Duration::from_secs(3), "it is alive", || walpost.get("/livez").status == 200);
    let more = walpost.log().lines().count() - lines;
    assert!(more <= 5, "{more} lines in 3 s:\n{}", walpost.log());
}

/// Inserts events with these numbers as ids, each in a transaction of its own.
fn insert_one_by_one(outbox: &Outbox<'_>, numbers: std::ops::Range<u32>) {
    let (first, last) = (numbers.start, numbers.end - 1);
    outbox.execute(&format!(
        "DO $$ BEGIN FOR n IN {first}..{last} LOOP INSERT INTO outbox VALUES (n, 't', 'k', n); COMMIT; END LOOP; END $$"
    ));
}
