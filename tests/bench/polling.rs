//! *polling*: the same events by the log and from the table: a backlog's rate and cost, and the way of single events.

use std::time::Duration;

use crate::{
    PATIENCE, Servers, arrivals::Arrivals, backlog::Backlog, candidate::Candidate, latency, services::wait_until,
    verdict::median,
};

const EVENTS: u64 = 100_000;
const PER_TRANSACTION: u64 = 100;
const LATENCY_DURATION: Duration = Duration::from_secs(10);

/// One backlog's way.
#[derive(Debug, Clone, Copy)]
struct Drained {
    seconds: f64,
    cpu_us: f64,
    peak_mb: f64,
    wal_bytes: f64,
}

/// Measures each candidate by the log, and from the table with and without notifications.
pub fn measure(servers: &Servers, candidates: &[Candidate], rounds: usize) {
    let ways: [(&str, &[(&str, &str)]); 3] = [
        ("wal", &[]),
        ("poll, 1 s", &[("WALPOST_POSTGRES_SOURCE", "poll")]),
        ("poll, notified", &[("WALPOST_POSTGRES_SOURCE", "poll"), ("WALPOST_POLL_NOTIFY_CHANNEL", "walpost")]),
    ];
    let ways: Vec<Candidate> = candidates
        .iter()
        .flat_map(|candidate| ways.map(|(name, environment)| candidate.with(name, environment)))
        .collect();
    println!("\npolling: {EVENTS} events, {PER_TRANSACTION} rows a transaction");
    let mut runs: Vec<Vec<Drained>> = vec![Vec::new(); ways.len()];
    for round in 0..=rounds {
        for (way, runs) in ways.iter().zip(&mut runs) {
            let run = drain(servers, way);
            println!("  round {round}: {}", row(&way.name, run));
            if round > 0 {
                runs.push(run);
            }
        }
    }
    println!("  medians:");
    for (way, runs) in ways.iter().zip(&runs) {
        let of = |value: fn(&Drained) -> f64| median(runs.iter().map(value));
        let run = Drained {
            seconds: of(|run| run.seconds),
            cpu_us: of(|run| run.cpu_us),
            peak_mb: of(|run| run.peak_mb),
            wal_bytes: of(|run| run.wal_bytes),
        };
        println!("  {}", row(&way.name, run));
    }
    println!("\npolling: insert to append in Kafka, {} transactions/s", latency::TRANSACTIONS_PER_SECOND);
    for round in 0..=rounds {
        for way in &ways {
            let run = latency::run(servers, way, LATENCY_DURATION);
            println!("  round {round}: {:<16} {run}", way.name);
        }
    }
}

fn row(name: &str, run: Drained) -> String {
    let rate = EVENTS as f64 / run.seconds / 1e3;
    let Drained { seconds, cpu_us, peak_mb, wal_bytes } = run;
    format!(
        "{name:<16} {seconds:>6.3} s {rate:>6.1} k/s {cpu_us:>6.2} µs/event {peak_mb:>6.1} MB {wal_bytes:>6.0} B of WAL/event"
    )
}

/// Walpost from its start until the last event is in Kafka, and marked.
fn drain(servers: &Servers, way: &Candidate) -> Drained {
    let backlog = Backlog::empty(servers);
    if way.polls() {
        backlog.prepare_for_polling(way.is_notified());
    }
    backlog.load(EVENTS, PER_TRANSACTION);
    backlog.database.execute("VACUUM ANALYZE outbox");
    let slot = backlog.slot();
    let arrivals = Arrivals::create(servers, &slot);
    let written = backlog.written();
    let relay = way.start(servers, &backlog, &slot, &slot);
    arrivals.wait_for(EVENTS, Duration::from_millis(50), &relay);
    if way.polls() {
        let undelivered = "SELECT EXISTS (SELECT FROM outbox WHERE delivered_at IS NULL)";
        wait_until(PATIENCE, "all is marked", || backlog.database.value(undelivered).as_deref() == Some("f"));
    }
    let (cpu, peak_mb, wal) = (relay.cpu(), relay.peak_mb(), backlog.written() - written);
    let seconds = arrivals.last_append(&relay);
    relay.stop();
    backlog.drop_slot(&slot);
    let per_event = |total: f64| total / EVENTS as f64;
    Drained { seconds, cpu_us: per_event(cpu.as_secs_f64() * 1e6), peak_mb, wal_bytes: per_event(wal) }
}
