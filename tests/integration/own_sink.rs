//! The tailer within one's own service: the documentation's example, as it stands there.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{process::Process, walpost::environment},
};

/// `cargo test` builds it beside the tests.
fn example() -> PathBuf {
    let tests = std::env::current_exe().expect("the tests' own binary");
    let example = tests.parent().and_then(Path::parent).expect("target/<profile>/deps").join("examples/own_sink");
    assert!(example.exists(), "run `cargo build --example own_sink`, which `cargo test` without a target does");
    example
}

#[test]
fn the_documented_service_prints_every_event_and_confirms_what_it_printed() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let start = |name: &str| {
            let mut command = Command::new(example());
            command.env_clear().envs(environment(&outbox.database, outbox.kafka));
            let service = Process::start(name, outbox.database.server().socket_folder(), &mut command);
            // a slot that is being created is active as well, and what is written before it is there is older
            let streams =
                "EXISTS (SELECT FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid
                           WHERE s.database = current_database() AND r.state = 'streaming')";
            outbox.wait_until_true(PATIENCE, streams);
            service
        };
        let insert = |number: u8| {
            outbox.execute(&format!("INSERT INTO outbox (event_type, payload) VALUES ('t', '[{number}]')"));
        };
        let name = |part: &str| format!("{}_{part}", outbox.database.name());
        let service = start(&name("first"));
        insert(0);
        service.wait_for_log(PATIENCE, "[0]");
        // the link is lost, and comes back
        outbox.execute(&format!("SELECT pg_terminate_backend(active_pid) {SENDER}"));
        insert(1);
        insert(2);
        service.wait_for_log(PATIENCE, "[2]");
        service.signal(Signal::SIGINT);
        assert_eq!(service.wait(PATIENCE).code(), Some(0), "{}", service.log());
        assert_eq!(printed(&service, &outbox), BTreeSet::from(["[0]", "[1]", "[2]"].map(str::to_owned)));

        insert(3);
        let again = start(&name("again"));
        again.wait_for_log(PATIENCE, "[3]");
        assert_eq!(printed(&again, &outbox), BTreeSet::from(["[3]".to_owned()]), "what was confirmed stays away");
        again.kill();
    });
}

const SENDER: &str = "FROM pg_replication_slots WHERE active AND database = current_database()";

/// The values of the events that it printed.
fn printed(service: &Process, outbox: &Outbox<'_>) -> BTreeSet<String> {
    let topic = outbox.topic_name("t");
    let log = service.log();
    let lines = log.lines().filter(|line| line.split(' ').nth(1) == Some(topic.as_str()));
    lines.filter_map(|line| line.rsplit(' ').next()).map(str::to_owned).collect()
}
