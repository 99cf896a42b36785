//! What an operator does to a walpost that runs: pause, resume, take over, and what can be done about a slot's past.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::{
    ledger::{EVENT_TYPE, TABLE, Verdict, Writers},
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        run, wait_until,
        walpost::Ended,
    },
    victim::victim,
};

const TOKEN: &str = "5f0c3a4e9d7b1268";

/// Settings that let an operator in, at a listener that is known beforehand.
struct Desk {
    listen: String,
    token_file: String,
}

impl Desk {
    fn new() -> Self {
        let token_file = run::folder("desk").join("token");
        fs::write(&token_file, format!("{TOKEN}\n")).expect("our own folder");
        Self { listen: format!("127.0.0.1:{}", run::free_port()), token_file: token_file.display().to_string() }
    }

    fn env(&self) -> [(&str, &str); 2] {
        [("WALPOST_HTTP_LISTEN", &self.listen), ("WALPOST_HTTP_ADMIN_TOKEN_FILE", &self.token_file)]
    }

    /// One request; the status code.
    fn ask(&self, method: &str, token: &str) -> String {
        let mut stream = TcpStream::connect(&self.listen).expect("walpost listens");
        let head = format!("{method} /admin/pause HTTP/1.0\r\nAuthorization: Bearer {token}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
    }
}

fn claim_done(ended: &Ended, code: i32, words: &str) {
    assert_eq!(ended.code, Some(code), "{}", ended.output);
    assert!(ended.output.contains(words), "{words:?}: {}", ended.output);
}

#[test]
fn while_paused_nothing_is_sent_and_the_stream_stays() {
    at_both_ends(|version| {
        let (outbox, desk) = (Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE), Desk::new());
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&desk.env());
        walpost.wait_until_ready(PATIENCE);
        outbox.execute("INSERT INTO outbox VALUES (1, 't', 'k', NULL)");
        outbox.wait_until_confirmed();
        let walsender = outbox.walsender();
        claim_done(&outbox.command(&["pause"], &desk.env()), 0, "paused");
        let unready = walpost.get("/readyz");
        assert!(unready.status == 503 && unready.body.contains("walpost resume"), "{unready:?}");
        assert!((walpost.metric("walpost_paused") - 1.0).abs() < 0.1 && walpost.status()["paused"] == true);

        outbox.execute("INSERT INTO outbox SELECT n, 't', 'k', NULL FROM generate_series(2, 100) n");
        let held = outbox.confirmed();
        let reply =
            format!("SELECT reply_time::text FROM pg_stat_replication WHERE pid = {}", walsender.expect("it streams"));
        let before = outbox.text(&reply);
        stays(Duration::from_secs(2), "nothing is sent", || outbox.kafka.record_count(&topic) == 1);
        wait_until(PATIENCE, "the server is answered meanwhile", || outbox.text(&reply) != before);
        assert_eq!((outbox.walsender(), outbox.confirmed()), (walsender, held));
        assert!(walpost.metric("walpost_replication_lag_seconds") > 1.0, "a pause is no reason to hide the lag");
        assert!(walpost.metric("walpost_backpressure_seconds_total") < 1.0, "it is not Kafka that holds it up");

        claim_done(&outbox.command(&["resume"], &desk.env()), 0, "resumed");
        outbox.wait_until_confirmed();
        walpost.wait_until_ready(PATIENCE);
        let delivered = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!((delivered.len(), delivered.values().max()), (100, Some(&1)));

        // a stop in a pause leaves what was held to the next one
        claim_done(&outbox.command(&["pause"], &desk.env()), 0, "paused");
        outbox.execute("INSERT INTO outbox VALUES (101, 't', 'k', NULL)");
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0), "{}", walpost.log());
        let _next = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        assert_eq!(deliveries(&outbox.kafka.read_all(&[&topic])).values().sum::<usize>(), 101);
    });
}

#[test]
fn nobody_pauses_without_the_token() {
    let (outbox, desk) = (Outbox::shared(Version::NEWEST), Desk::new());
    let [listen, token] = desk.env();
    let walpost = outbox.relay(&[listen]);
    assert_eq!(desk.ask("POST", TOKEN), "404", "it is off unless it is wanted");
    claim_done(&outbox.command(&["pause"], &desk.env()), 1, "[WP-605]");
    claim_done(&outbox.command(&["pause"], &[listen]), 1, "[WP-604]");
    drop(walpost);
    let walpost = outbox.relay(&[listen, token]);
    assert_eq!(
        [desk.ask("POST", "5f0c3a4e9d7b1269"), desk.ask("POST", ""), desk.ask("GET", TOKEN)],
        ["401", "401", "405"]
    );
    assert_eq!(walpost.status()["paused"], false);
    // a new token needs no restart
    fs::write(&desk.token_file, "another token of some length").expect("our own file");
    assert_eq!([desk.ask("POST", TOKEN), desk.ask("POST", "another token of some length")], ["401", "200"]);
    let short = [listen, ("WALPOST_HTTP_ADMIN_TOKEN", "short")];
    claim_done(&outbox.command(&["status"], &short), 2, "[WP-601]");
    for printed in [walpost.log(), walpost.get("/metrics").body, walpost.get("/status").body] {
        assert!(!printed.contains(TOKEN) && !printed.contains("another token"), "{printed}");
    }
}

#[test]
fn a_takeover_amid_writers_loses_nothing_and_repeats_nothing() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE);
        let (topic, old, new) = (outbox.topic(EVENT_TYPE, 3), Desk::new(), Desk::new());
        let first = outbox.relay(&old.env());
        let writers = Writers::start(&outbox, 2);
        outbox.wait_until_confirmed();
        let token = ("WALPOST_HTTP_ADMIN_TOKEN_FILE", old.token_file.as_str());
        let second = outbox.start(&["takeover", "--from", &old.listen], &[new.env()[0], token]);
        second.wait_for_log(PATIENCE, "streaming slot=");
        assert_eq!(first.wait(PATIENCE).code(), Some(0), "{}", first.log());
        let committed = writers.stop();
        outbox.wait_until_confirmed();
        assert_eq!(Verdict::on(&outbox.kafka.read_all(&[&topic]), &committed), Verdict::default(), "{}", second.log());
    });
}

#[test]
fn a_takeover_that_could_repeat_events_changes_nothing() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let (topic, desk) = (outbox.topic("t", 1), Desk::new());
    let walpost = outbox.relay(&desk.env());
    outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
    outbox.wait_until_confirmed();
    kafka.freeze();
    outbox.execute("INSERT INTO outbox VALUES ('stuck', 't', 'k', NULL)");
    wait_until(PATIENCE, "an event is in flight", || walpost.metric("walpost_in_flight_events") > 0.0);
    let env = [desk.env()[1], ("WALPOST_SHUTDOWN_DRAIN_TIMEOUT_MS", "1000")];
    claim_done(&outbox.command(&["takeover", "--from", &desk.listen], &env), 1, "[WP-606]");
    kafka.thaw();
    walpost.wait_until_ready(PATIENCE);
    outbox.execute("INSERT INTO outbox VALUES ('after', 't', 'k', NULL)");
    outbox.wait_until_confirmed();
    assert_eq!(deliveries(&kafka.read_all(&[&topic])).values().sum::<usize>(), 3);
    let nobody = format!("127.0.0.1:{}", run::free_port());
    claim_done(&outbox.command(&["takeover", "--from", &nobody], &env), 1, "nothing was changed");
}

#[test]
fn a_slot_goes_forward_past_events_that_were_counted_and_never_back() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        outbox.execute("CREATE TABLE other (id int); INSERT INTO outbox (event_type) VALUES ('t')");
        outbox.wait_until_confirmed();
        let rewind = |to: &str, more: &[&str]| outbox.command(&[&["rewind", "--to", to], more].concat(), &[]);
        claim_done(&rewind("0/1", &[]), 1, "[WP-209]");
        claim_done(&rewind("FFFF/0", &[]), 1, "beyond the end");
        // so that it confirms nothing meanwhile
        walpost.freeze();
        let here = outbox.text("SELECT pg_current_wal_lsn()");
        claim_done(&rewind(&here, &["--yes"]), 1, "[WP-205]");
        walpost.thaw();
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));

        outbox.execute(
            "INSERT INTO outbox (event_type) SELECT 't' FROM generate_series(1, 5); INSERT INTO other VALUES (1)",
        );
        let to = outbox.text("SELECT pg_current_wal_insert_lsn()");
        outbox.execute("INSERT INTO outbox (event_type) VALUES ('t')");
        let before = outbox.confirmed();
        claim_done(&rewind(&to, &[]), 2, "5 events would never be published");
        assert_eq!(outbox.confirmed(), before);
        claim_done(&rewind(&to, &["--yes"]), 0, "5 events were skipped");
        let walpost = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        assert_eq!(outbox.kafka.record_count(&topic), 2);

        // what was skipped is still in the table
        let since = |more: &[&str]| outbox.command(&[&["rewind", "--events-since", "2020-01-01"], more].concat(), &[]);
        claim_done(&since(&[]), 2, "7 rows would be published");
        assert_eq!(outbox.kafka.record_count(&topic), 2);
        claim_done(&since(&["--yes"]), 0, "7 rows published");
        let delivered = deliveries(&outbox.kafka.read_all(&[&topic]));
        assert_eq!((delivered.len(), delivered.values().sum::<usize>()), (7, 9));
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    });
}

/// One code at all places: the log, /readyz, /status, and the page on errors has it.
#[test]
fn an_error_has_its_code_wherever_it_is_told() {
    let outbox = Outbox::shared(Version::NEWEST);
    let url = outbox.database.url();
    let elsewhere = url.replace(outbox.database.name(), "no_such_database");
    let url = ("WALPOST_POSTGRES_URL", elsewhere.as_str());
    let walpost = outbox.start(&["run"], &[url, ("WALPOST_LOG_FORMAT", "json")]);
    wait_until(PATIENCE, "/readyz names the code", || walpost.get("/readyz").body.contains("[WP-106]"));
    assert!(
        walpost.status()["last_error"].as_str().is_some_and(|error| error.ends_with(']') || error.contains("[WP-106]"))
    );
    let lines = walpost.log();
    let told = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    assert!(told.into_iter().any(|line| line["code"] == "WP-106" && line["level"] == "WARN"), "{lines}");
    claim_done(&outbox.command(&["peek"], &[url]), 1, "[WP-106]");
    assert!(include_str!("../../docs/errors.md").contains("| `WP-106` | no such database |"));
}
