//! A build of walpost with its settings, and what a run of it costs.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::{
    PATIENCE, Servers,
    backlog::Backlog,
    services::{walpost, walpost::Walpost},
};

/// What is measured: `NAME=BINARY[,VARIABLE=VALUE…]` on the command line.
#[derive(Debug)]
pub struct Candidate {
    /// What tables call it.
    pub name: String,
    binary: PathBuf,
    environment: Vec<(String, String)>,
}

impl Candidate {
    /// Understands the command line.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once('=')?;
        let mut parts = rest.split(',');
        let binary = fs::canonicalize(parts.next()?).ok()?;
        let variable = |part: &str| part.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        Some(Self { name: name.to_owned(), binary, environment: parts.map(variable).collect::<Option<_>>()? })
    }

    /// What `cargo build --release` made, with the defaults.
    pub fn release_build() -> Self {
        let debug_build = Path::new(env!("CARGO_BIN_EXE_walpost"));
        let target = debug_build.ancestors().nth(2).expect("<target>/<profile>/walpost");
        let binary = target.join("release/walpost");
        assert!(binary.exists(), "no {}: cargo build --release", binary.display());
        Self { name: "walpost".to_owned(), binary, environment: Vec::new() }
    }

    /// The same build with further settings.
    pub fn with(&self, name: &str, environment: &[(&str, &str)]) -> Self {
        let more = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let environment = self.environment.iter().cloned().chain(more).collect();
        Self { name: name.to_owned(), binary: self.binary.clone(), environment }
    }

    /// The same build under exactly-once delivery.
    pub fn exactly_once(&self) -> Self {
        self.with("exactly once", &[("WALPOST_KAFKA_DELIVERY", "exactly_once")])
    }

    /// Whether its delivery is exactly once.
    pub fn is_exactly_once(&self) -> bool {
        self.environment.iter().any(|(name, _)| name == "WALPOST_KAFKA_DELIVERY")
    }

    /// Whether it reads the table rather than the log.
    pub fn polls(&self) -> bool {
        self.environment.iter().any(|(name, value)| name == "WALPOST_POSTGRES_SOURCE" && value == "poll")
    }

    /// Whether somebody has to notify it.
    pub fn is_notified(&self) -> bool {
        self.environment.iter().any(|(name, _)| name == "WALPOST_POLL_NOTIFY_CHANNEL")
    }

    /// Starts it from a slot of the backlog's table to the topics `<prefix>.<aggregatetype>`.
    pub fn start(&self, servers: &Servers, backlog: &Backlog<'_>, slot: &str, prefix: &str) -> Relay {
        let mut environment: Vec<(String, String)> = walpost::environment(&backlog.database, &servers.kafka)
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let own = [
            ("WALPOST_POSTGRES_SLOT", slot),
            ("WALPOST_ROUTE_TOPIC", &format!("{prefix}.{{aggregatetype}}")),
            ("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "type"),
            ("WALPOST_OUTBOX_COLUMNS_KEY", "aggregateid"),
        ];
        environment.retain(|(name, _)| own.iter().all(|(other, _)| other != name));
        environment.extend(own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        environment.extend(self.environment.iter().cloned());
        let environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let wall = SystemTime::now();
        // the slot was made without it
        let accepted = self.is_exactly_once().then_some("--accept-duplicates");
        let arguments: Vec<&str> = ["run"].into_iter().chain(accepted).collect();
        let walpost = Walpost::start_build(&self.binary, &arguments, &environment);
        Relay { walpost, wall }
    }
}

/// A running candidate.
pub struct Relay {
    /// The process.
    pub walpost: Walpost,
    /// When it was started, by the clock that the broker stamps with.
    pub wall: SystemTime,
}

impl Relay {
    /// CPU time of all its threads so far.
    pub fn cpu(&self) -> Duration {
        self.walpost.process().cpu()
    }

    /// The most memory that was ever resident, in MB.
    pub fn peak_mb(&self) -> f64 {
        self.walpost.peak_mb()
    }

    /// Fails when the process has ended.
    pub fn assert_alive(&self) {
        assert!(self.walpost.process().exit_status().is_none(), "walpost ended:\n{}", self.walpost.log());
    }

    /// Ends it as an operator would.
    pub fn stop(self) {
        let code = self.walpost.sigterm_and_wait(PATIENCE);
        assert_eq!(code, Some(0), "walpost did not stop cleanly:\n{}", self.walpost.log());
    }
}
