//! *start*: one event is pending; from process start until it is in Kafka.

use std::time::Duration;

use crate::{
    Servers,
    arrivals::Arrivals,
    backlog::Backlog,
    candidate::Candidate,
    verdict::{Target, Verdict, median},
};

const STARTS: u64 = 10;

/// The target.
const MILLISECONDS: f64 = 100.0;

/// Measures.
pub fn measure(servers: &Servers, candidates: &[Candidate]) -> Vec<Verdict> {
    println!("\nstart: process start to the first record in Kafka, {STARTS} starts");
    let setups: Vec<_> = candidates.iter().map(|candidate| Setup::new(servers, candidate)).collect();
    let mut times = vec![Vec::new(); setups.len()];
    for start in 0..=STARTS {
        for (setup, times) in setups.iter().zip(&mut times) {
            let time = setup.start(servers, start + 1);
            if start > 0 {
                times.push(time); // the first one warms up
            }
        }
    }
    let verdict = |(setup, mut times): (&Setup<'_>, Vec<f64>)| {
        times.sort_by(f64::total_cmp);
        println!("  {:<16} {times:.0?} ms", setup.candidate.name);
        Verdict {
            what: format!("{}: start to the first record", setup.candidate.name),
            value: median(times),
            unit: "ms",
            target: Target::AtMost(MILLISECONDS),
        }
    };
    setups.iter().zip(times).map(verdict).collect()
}

/// A table, a slot and topics of a candidate's own.
struct Setup<'a> {
    candidate: &'a Candidate,
    backlog: Backlog<'a>,
    slot: String,
    arrivals: Arrivals,
}

impl<'a> Setup<'a> {
    fn new(servers: &'a Servers, candidate: &'a Candidate) -> Self {
        let backlog = Backlog::empty(servers);
        let slot = backlog.slot();
        Self { candidate, backlog, arrivals: Arrivals::create(servers, &slot), slot }
    }

    /// Milliseconds of one start, after which there are `expected` records.
    fn start(&self, servers: &Servers, expected: u64) -> f64 {
        self.backlog.load(1, 1);
        let relay = self.candidate.start(servers, &self.backlog, &self.slot, &self.slot);
        self.arrivals.wait_for(expected, Duration::from_millis(20), &relay);
        // the broker's clock has whole milliseconds, rounded down
        let milliseconds = self.arrivals.last_append(&relay) * 1e3 + 1.0;
        relay.stop();
        milliseconds
    }
}
