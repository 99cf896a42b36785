//! *drain*: events that are committed already, from process start until the last of them is in Kafka.
//!
//! Case 20 is the shape of one transaction, whose payload is more than the memory allowed; case 22 is that of one row each.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    Servers,
    arrivals::Arrivals,
    backlog::Backlog,
    candidate::Candidate,
    verdict::{Target, Verdict, median},
};

/// A shape of the backlog.
struct Shape {
    name: &'static str,
    events: u64,
    per_transaction: u64,
    /// Times the rate of `pg_recvlogical`, at least.
    ratio: f64,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "100 rows a transaction", events: 300_000, per_transaction: 100, ratio: 0.9 },
    Shape { name: "1 row a transaction", events: 150_000, per_transaction: 1, ratio: 1.2 },
    Shape { name: "one transaction of 300,000", events: 300_000, per_transaction: 300_000, ratio: 1.0 },
];

/// Client cost, at most.
const CPU_US_PER_EVENT: f64 = 4.0;
const PEAK_MB: f64 = 60.0;

/// One run of one candidate.
#[derive(Debug, Clone, Copy)]
struct Drained {
    seconds: f64,
    cpu_us: f64,
    peak_mb: f64,
    ratio: f64,
}

/// Measures all shapes, or the one with so many rows a transaction.
pub fn measure(servers: &Servers, candidates: &[Candidate], rounds: usize, rows: Option<u64>) -> Vec<Verdict> {
    let wanted = SHAPES.iter().filter(|shape| rows.is_none_or(|rows| shape.per_transaction == rows));
    wanted.flat_map(|shape| measure_shape(servers, candidates, rounds, shape)).collect()
}

fn measure_shape(servers: &Servers, candidates: &[Candidate], rounds: usize, shape: &Shape) -> Vec<Verdict> {
    println!("\ndrain: {} events, {}", shape.events, shape.name);
    let backlog = Backlog::empty(servers);
    backlog.load(shape.events, shape.per_transaction);
    let end = backlog.end();
    let mut runs: Vec<Vec<Drained>> = vec![Vec::new(); candidates.len()];
    for round in 0..=rounds {
        let ceiling = receive(servers, &backlog, &end);
        let rate = |seconds: f64| shape.events as f64 / seconds / 1e3;
        let label = if round == 0 { "warm-up".to_owned() } else { format!("round {round}") };
        println!("  {label}: {:<16} {ceiling:>6.3} s {:>6.1} k/s", "pg_recvlogical", rate(ceiling));
        // each is first once in a while
        for index in (0..candidates.len()).map(|index| (index + round) % candidates.len()) {
            let mut run = drain(servers, &backlog, &candidates[index], shape);
            run.ratio = ceiling / run.seconds;
            println!(
                "  {label}: {:<16} {:>6.3} s {:>6.1} k/s {:>5.2} x {:>6.2} µs/event {:>6.1} MB",
                candidates[index].name,
                run.seconds,
                rate(run.seconds),
                run.ratio,
                run.cpu_us,
                run.peak_mb
            );
            if round > 0 {
                runs[index].push(run);
            }
        }
    }
    compare(candidates, &runs);
    candidates.iter().zip(&runs).flat_map(|(candidate, runs)| verdicts(candidate, runs, shape)).collect()
}

/// How the others stand to the first one, round by round.
fn compare(candidates: &[Candidate], runs: &[Vec<Drained>]) {
    for (candidate, others) in candidates.iter().zip(runs).skip(1) {
        let pairs = || others.iter().zip(&runs[0]);
        println!(
            "  {} to {}: rate {:.3} x, CPU {:.3} x, memory {:.2} x",
            candidate.name,
            candidates[0].name,
            median(pairs().map(|(other, first)| first.seconds / other.seconds)),
            median(pairs().map(|(other, first)| other.cpu_us / first.cpu_us)),
            median(pairs().map(|(other, first)| other.peak_mb / first.peak_mb)),
        );
    }
}

fn verdicts(candidate: &Candidate, runs: &[Drained], shape: &Shape) -> [Verdict; 3] {
    let of = |value: fn(&Drained) -> f64| median(runs.iter().map(value));
    let what = |subject: &str| format!("{}: drain, {}: {subject}", candidate.name, shape.name);
    let ratio = of(|run| run.ratio);
    [
        Verdict {
            what: what("rate to pg_recvlogical's"),
            value: ratio,
            unit: "x",
            target: Target::AtLeast(shape.ratio),
        },
        Verdict {
            what: what("CPU"),
            value: of(|run| run.cpu_us),
            unit: "µs/event",
            target: Target::AtMost(CPU_US_PER_EVENT),
        },
        Verdict {
            what: what("peak memory"),
            value: of(|run| run.peak_mb),
            unit: "MB",
            target: Target::AtMost(PEAK_MB),
        },
    ]
}

/// Walpost from its start until the last event is in Kafka.
fn drain(servers: &Servers, backlog: &Backlog<'_>, candidate: &Candidate, shape: &Shape) -> Drained {
    let slot = backlog.slot();
    let arrivals = Arrivals::create(servers, &slot);
    let relay = candidate.start(servers, backlog, &slot, &slot);
    arrivals.wait_for(shape.events, Duration::from_millis(50), &relay);
    let (cpu, peak_mb) = (relay.cpu(), relay.peak_mb());
    let seconds = arrivals.last_append(&relay);
    relay.stop();
    backlog.drop_slot(&slot);
    Drained { seconds, cpu_us: cpu.as_secs_f64() * 1e6 / shape.events as f64, peak_mb, ratio: 0.0 }
}

/// `pg_recvlogical` to `/dev/null` over the same log; seconds from its start to its end.
fn receive(servers: &Servers, backlog: &Backlog<'_>, end: &str) -> f64 {
    let slot = backlog.slot();
    let mut command = Command::new(servers.postgres.program("pg_recvlogical"));
    command.env_clear().args(["--start", "--no-loop", "--fsync-interval=0", "-f", "/dev/null"]);
    command.args(["-d", &backlog.database.url(), "-S", &slot, "--endpos", end, "-o", "proto_version=1"]);
    command.args(["-o", &format!("publication_names={}", backlog.database.name())]);
    command.stdin(Stdio::null()).stderr(Stdio::inherit());
    let began = Instant::now();
    let status = command.status().expect("pg_recvlogical starts");
    let seconds = began.elapsed().as_secs_f64();
    assert!(status.success(), "pg_recvlogical: {status}");
    backlog.drop_slot(&slot);
    seconds
}
