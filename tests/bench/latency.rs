//! *latency*: transactions at a steady rate, from the insert to the append in Kafka.
//!
//! The payload carries the database's clock at the insert, and the broker stamps the record: both are clocks of this
//! machine, the broker's in whole milliseconds, rounded down.

use std::time::{Duration, Instant};

use crate::{
    PATIENCE, Servers,
    arrivals::Arrivals,
    backlog::{Backlog, TYPES},
    candidate::Candidate,
    services::{complete, wait_until},
    verdict::{Target, Verdict, median, quantile},
};

/// The rate.
pub const TRANSACTIONS_PER_SECOND: u64 = 1_000;
const WRITERS: u64 = 4;
const WARM_UP: Duration = Duration::from_secs(3);
const DURATION: Duration = Duration::from_secs(10);

/// Targets.
const P50_MS: f64 = 3.0;
const P99_MS: f64 = 10.0;
const CORES: f64 = 0.15;

/// Milliseconds with a fraction.
const INSERT: &str = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ($1, $2, 'Created', \
     jsonb_build_object('lat', extract(epoch FROM clock_timestamp()) * 1000))";

/// One run of one candidate.
#[derive(Debug, Clone, Copy)]
pub struct Latency {
    p50_ms: f64,
    p95_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    cores: f64,
    per_second: f64,
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { p50_ms, p95_ms, p99_ms, max_ms, cores, per_second } = self;
        write!(
            f,
            "p50 {p50_ms:.1}, p95 {p95_ms:.1}, p99 {p99_ms:.1}, max {max_ms:.1} ms, {cores:.3} core, {per_second:.0} transactions/s"
        )
    }
}

/// Measures.
pub fn measure(servers: &Servers, candidates: &[Candidate], rounds: usize) -> Vec<Verdict> {
    println!("\nlatency: {TRANSACTIONS_PER_SECOND} transactions/s by {WRITERS} writers, insert to append in Kafka");
    let mut runs: Vec<Vec<Latency>> = vec![Vec::new(); candidates.len()];
    for round in 0..=rounds {
        let (label, duration) =
            if round == 0 { ("warm-up".to_owned(), WARM_UP) } else { (format!("round {round}"), DURATION) };
        for index in (0..candidates.len()).map(|index| (index + round) % candidates.len()) {
            let run = run(servers, &candidates[index], duration);
            println!("  {label}: {:<16} {run}", candidates[index].name);
            if round > 0 {
                runs[index].push(run);
            }
        }
    }
    candidates.iter().zip(&runs).flat_map(|(candidate, runs)| verdicts(candidate, runs)).collect()
}

fn verdicts(candidate: &Candidate, runs: &[Latency]) -> [Verdict; 3] {
    let verdict = |what, value: fn(&Latency) -> f64, unit, most| Verdict {
        what: format!("{}: latency at {TRANSACTIONS_PER_SECOND}/s: {what}", candidate.name),
        value: median(runs.iter().map(value)),
        unit,
        target: Target::AtMost(most),
    };
    [
        verdict("p50", |run| run.p50_ms, "ms", P50_MS),
        verdict("p99", |run| run.p99_ms, "ms", P99_MS),
        verdict("CPU", |run| run.cores, "core", CORES),
    ]
}

/// One candidate, for so long.
pub fn run(servers: &Servers, candidate: &Candidate, duration: Duration) -> Latency {
    let backlog = Backlog::empty(servers);
    if candidate.polls() {
        backlog.prepare_for_polling(candidate.is_notified());
    }
    let slot = backlog.slot();
    let arrivals = Arrivals::create(servers, &slot);
    let relay = candidate.start(servers, &backlog, &slot, &slot);
    wait_until(PATIENCE, "walpost is ready", || relay.walpost.get("/readyz").status == 200);
    let (cpu, began) = (relay.cpu(), Instant::now());
    let sent = write_all(&backlog, began, duration);
    let elapsed = began.elapsed().as_secs_f64();
    let cpu = relay.cpu().saturating_sub(cpu);
    arrivals.wait_for(sent, Duration::from_millis(100), &relay);
    let mut latencies = Vec::new();
    arrivals.read(i64::MAX, |timestamp_ms, payload| latencies.push(timestamp_ms as f64 - inserted_ms(payload)));
    relay.stop();
    backlog.drop_slot(&slot);
    latencies.sort_by(f64::total_cmp);
    Latency {
        p50_ms: quantile(&latencies, 0.5),
        p95_ms: quantile(&latencies, 0.95),
        p99_ms: quantile(&latencies, 0.99),
        max_ms: quantile(&latencies, 1.0),
        cores: cpu.as_secs_f64() / elapsed,
        per_second: sent as f64 / elapsed,
    }
}

/// All transactions, each at its time; returns how many.
pub fn write_all(backlog: &Backlog<'_>, began: Instant, duration: Duration) -> u64 {
    std::thread::scope(|scope| {
        let write = |writer| {
            let client = backlog.database.connect();
            scope.spawn(move || write(client, writer, began, duration))
        };
        let writers: Vec<_> = (0..WRITERS).map(write).collect();
        writers.into_iter().map(|writer| writer.join().expect("a writer that does not fail")).sum()
    })
}

/// One of the writers: its share of the transactions, each at its time.
fn write(client: tokio_postgres::Client, writer: u64, began: Instant, duration: Duration) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let insert = runtime.block_on(client.prepare(INSERT)).expect("a legal statement");
    let mut sent = 0;
    for number in (writer..).step_by(usize::try_from(WRITERS).expect("a few")) {
        let due = Duration::from_secs_f64(number as f64 / TRANSACTIONS_PER_SECOND as f64);
        if due >= duration {
            break;
        }
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        let (aggregate_type, key) = (format!("t{}", number % TYPES), format!("k{}", number % 1000));
        let inserted = runtime.block_on(client.execute(&insert, &[&aggregate_type, &key]));
        inserted.expect("an insert");
        sent += 1;
    }
    // the connection lives on the services' runtime
    complete(async move { drop(client) });
    sent
}

/// The database's clock at the insert, Unix ms.
pub fn inserted_ms(payload: &[u8]) -> f64 {
    let payload: serde_json::Value = serde_json::from_slice(payload).expect("the payload is JSON");
    payload["lat"].as_f64().expect("the database's clock")
}
