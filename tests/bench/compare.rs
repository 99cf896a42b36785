//! Walpost against `pg_recvlogical`, and builds of walpost against each other, on one machine in one go.
//!
//! What is compared alternates, so that a machine's bad minute hits all of it; ratios are taken within a round, and of the
//! rounds the median counts. `docs/benchmarks.md` says what is measured and how.
#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures for people: no digit that matters is lost"
)]

#[expect(dead_code, reason = "each user of the services needs a part of them")]
#[path = "../services/mod.rs"]
mod services;

mod arrivals;
mod backlog;
mod candidate;
mod drain;
mod latency;
mod once;
mod polling;
mod start;
mod verdict;

use std::{process::ExitCode, time::Duration};

use candidate::Candidate;
use services::{kafka, kafka::Kafka, postgres, postgres::Postgres, postgres::Version};
use verdict::Verdict;

/// How long anything may take before the measurement is given up.
const PATIENCE: Duration = Duration::from_mins(10);

/// The servers, set up as servers come rather than as tests want them.
struct Servers {
    postgres: Postgres,
    kafka: Kafka,
}

impl Servers {
    fn start() -> Self {
        let settings = postgres::Settings::default()
            .set("fsync", "on")
            .set("full_page_writes", "on")
            .set("shared_buffers", "512MB")
            // neither shall fall into one run and not into the other
            .set("checkpoint_timeout", "30min")
            .set("autovacuum", "off");
        let postgres = Postgres::start(Version::System, &settings);
        Self { postgres, kafka: Kafka::start(&kafka::Settings::default().for_measuring()) }
    }
}

/// What the command line asks for.
struct Request {
    what: String,
    /// Of the drains, only the one with so many rows a transaction.
    rows: Option<u64>,
    rounds: usize,
    candidates: Vec<Candidate>,
}

impl Request {
    fn parse(arguments: impl Iterator<Item = String>) -> Option<Self> {
        let mut request = Self { what: "all".to_owned(), rows: None, rounds: 3, candidates: Vec::new() };
        let mut arguments = arguments.filter(|argument| argument != "--bench"); // cargo adds it
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "drain" | "latency" | "once" | "start" | "polling" | "all" => request.what = argument,
                "--rows" => request.rows = Some(arguments.next()?.parse().ok()?),
                "--rounds" => request.rounds = arguments.next()?.parse().ok().filter(|rounds| *rounds > 0)?,
                _ => request.candidates.push(Candidate::parse(&argument)?),
            }
        }
        if request.candidates.is_empty() {
            request.candidates.push(Candidate::release_build());
        }
        Some(request)
    }

    fn wants(&self, what: &str) -> bool {
        self.what == what || self.what == "all"
    }
}

fn main() -> ExitCode {
    let Some(request) = Request::parse(std::env::args().skip(1)) else {
        eprintln!(
            "usage: [drain|latency|once|start|polling|all] [--rows N] [--rounds N] [NAME=BINARY[,VARIABLE=VALUE]...]..."
        );
        return ExitCode::from(2);
    };
    println!("machine: {}", verdict::machine());
    let servers = Servers::start();
    let mut verdicts: Vec<Verdict> = Vec::new();
    if request.wants("drain") {
        verdicts.extend(drain::measure(&servers, &request.candidates, request.rounds, request.rows));
    }
    if request.wants("latency") {
        verdicts.extend(latency::measure(&servers, &request.candidates, request.rounds));
    }
    if request.wants("once") {
        verdicts.extend(once::measure(&servers, &request.candidates, request.rounds));
    }
    if request.wants("start") {
        verdicts.extend(start::measure(&servers, &request.candidates));
    }
    if request.wants("polling") {
        polling::measure(&servers, &request.candidates, request.rounds);
    }
    println!("\nmedians against the targets (load of the machine now: {})", verdict::load());
    for verdict in verdicts {
        println!("  {verdict}");
    }
    ExitCode::SUCCESS
}
