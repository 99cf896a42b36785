//! *once*: exactly-once delivery beside at-least-once, as a consumer of committed records sees it.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};

use crate::{
    PATIENCE, Servers,
    backlog::{Backlog, TYPES},
    candidate::{Candidate, Relay},
    latency::{TRANSACTIONS_PER_SECOND, inserted_ms, write_all},
    services::wait_until,
    verdict::{Target, Verdict, median, quantile},
};

const EVENTS: u64 = 300_000;
const PER_TRANSACTION: u64 = 100;
const DURATION: Duration = Duration::from_secs(10);
const STARTS: u64 = 5;
const PARTITIONS: i32 = 3;

/// Targets. The interval is the default one of 100 ms.
const RATE: f64 = 0.9;
const P50_MS: f64 = 60.0;
const P99_MS: f64 = 130.0;
const START_MS: f64 = 200.0;
const START_BEHIND_OPEN_MS: f64 = 1500.0;
const PEAK_MB: f64 = 120.0;

/// Measures each candidate in both kinds of delivery.
pub fn measure(servers: &Servers, candidates: &[Candidate], rounds: usize) -> Vec<Verdict> {
    candidates.iter().flat_map(|candidate| compare(servers, candidate, rounds)).collect()
}

fn compare(servers: &Servers, candidate: &Candidate, rounds: usize) -> Vec<Verdict> {
    let modes = [candidate.with("at least once", &[]), candidate.exactly_once()];
    println!("\nonce: {EVENTS} events, {PER_TRANSACTION} rows a transaction, until a consumer has them");
    let (mut seconds, mut peaks) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=rounds {
        for index in [round % 2, (round + 1) % 2] {
            let (taken, cpu_us, peak_mb) = drain(servers, &modes[index]);
            let rate = EVENTS as f64 / taken / 1e3;
            println!(
                "  round {round}: {:<16} {taken:>6.3} s {rate:>6.1} k/s {cpu_us:>6.2} µs/event {peak_mb:>6.1} MB",
                modes[index].name
            );
            if round > 0 {
                seconds[index].push(taken);
                peaks[index].push(peak_mb);
            }
        }
    }
    println!("\nonce: {TRANSACTIONS_PER_SECOND} transactions/s, insert to receipt");
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        for mode in &modes {
            let latencies = latency(servers, mode);
            let at = |share| quantile(&latencies, share);
            println!(
                "  round {round}: {:<16} p50 {:.1}, p99 {:.1}, max {:.1} ms",
                mode.name,
                at(0.5),
                at(0.99),
                at(1.0)
            );
            if round > 0 && mode.is_exactly_once() {
                p50.push(at(0.5));
                p99.push(at(0.99));
            }
        }
    }
    let [alone, behind_open] = starts(servers, &modes[1]);
    let ratios = seconds[0].iter().zip(&seconds[1]).map(|(least, once)| least / once);
    let verdict =
        |what: &str, value, unit, target| Verdict { what: format!("exactly once: {what}"), value, unit, target };
    vec![
        verdict("drain, rate to at least once's", median(ratios), "x", Target::AtLeast(RATE)),
        verdict("drain, peak memory", median(peaks[1].iter().copied()), "MB", Target::AtMost(PEAK_MB)),
        verdict("latency, p50", median(p50), "ms", Target::AtMost(P50_MS)),
        verdict("latency, p99", median(p99), "ms", Target::AtMost(P99_MS)),
        verdict("start, nothing open", median(alone), "ms", Target::AtMost(START_MS)),
        verdict("start, a transaction open", median(behind_open), "ms", Target::AtMost(START_BEHIND_OPEN_MS)),
    ]
}

/// What a consumer has seen.
#[derive(Default)]
struct Seen {
    records: u64,
    last: Option<SystemTime>,
    latencies: Vec<f64>,
}

/// A consumer of committed records, in a thread of its own.
struct Audience {
    seen: Arc<Mutex<Seen>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Audience {
    /// Creates the topics `<prefix>.t0` and so on, and reads them.
    fn of(servers: &Servers, prefix: &str) -> Self {
        let mut assignment = TopicPartitionList::new();
        for topic in (0..TYPES).map(|number| format!("{prefix}.t{number}")) {
            servers.kafka.create_topic(&topic, PARTITIONS, &[]);
            for partition in 0..PARTITIONS {
                assignment.add_partition_offset(&topic, partition, Offset::Beginning).expect("a legal offset");
            }
        }
        let mut config = servers.kafka.client_config();
        config.set("group.id", "nobody").set("enable.auto.commit", "false").set("isolation.level", "read_committed");
        config.set("fetch.wait.max.ms", "50");
        let consumer: BaseConsumer = config.create().expect("a client needs no broker to be created");
        consumer.assign(&assignment).expect("a legal assignment");
        let (seen, end) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let (ours, until) = (Arc::clone(&seen), Arc::clone(&end));
        let thread = thread::spawn(move || {
            while !until.load(Relaxed) {
                if let Some(Ok(record)) = consumer.poll(Duration::from_millis(50)) {
                    let now = SystemTime::now();
                    let mut seen = ours.lock().expect("no panic");
                    seen.records += 1;
                    seen.last = Some(now);
                    if let Some(payload) = record.payload().filter(|payload| payload.starts_with(b"{\"lat\"")) {
                        let now_ms =
                            now.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64() * 1e3;
                        seen.latencies.push(now_ms - inserted_ms(payload));
                    }
                }
            }
        });
        Self { seen, end, thread: Some(thread) }
    }

    fn wait_for(&self, expected: u64, relay: &Relay) {
        wait_until(PATIENCE, "all events have arrived", || {
            relay.assert_alive();
            thread::sleep(Duration::from_millis(10));
            self.seen.lock().expect("no panic").records >= expected
        });
        assert_eq!(self.seen.lock().expect("no panic").records, expected, "more records than events");
    }

    /// Seconds from the relay's start until the last record was here.
    fn seconds(&self, relay: &Relay) -> f64 {
        let last = self.seen.lock().expect("no panic").last.expect("a record");
        last.duration_since(relay.wall).expect("it came after the start").as_secs_f64()
    }
}

impl Drop for Audience {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn drain(servers: &Servers, mode: &Candidate) -> (f64, f64, f64) {
    let backlog = Backlog::empty(servers);
    backlog.load(EVENTS, PER_TRANSACTION);
    let slot = backlog.slot();
    let audience = Audience::of(servers, &slot);
    let relay = mode.start(servers, &backlog, &slot, &slot);
    audience.wait_for(EVENTS, &relay);
    let figures = (audience.seconds(&relay), relay.cpu().as_secs_f64() * 1e6 / EVENTS as f64, relay.peak_mb());
    relay.stop();
    backlog.drop_slot(&slot);
    figures
}

fn latency(servers: &Servers, mode: &Candidate) -> Vec<f64> {
    let backlog = Backlog::empty(servers);
    let slot = backlog.slot();
    let audience = Audience::of(servers, &slot);
    let relay = mode.start(servers, &backlog, &slot, &slot);
    wait_until(PATIENCE, "walpost is ready", || relay.walpost.get("/readyz").status == 200);
    let sent = write_all(&backlog, Instant::now(), DURATION);
    audience.wait_for(sent, &relay);
    relay.stop();
    backlog.drop_slot(&slot);
    let mut latencies = std::mem::take(&mut audience.seen.lock().expect("no panic").latencies);
    latencies.sort_by(f64::total_cmp);
    latencies
}

/// Milliseconds from process start until one event is here, after a clean stop and after a kill with a transaction open.
fn starts(servers: &Servers, mode: &Candidate) -> [Vec<f64>; 2] {
    println!("\nonce: process start to the receipt of one event, {STARTS} starts each");
    let backlog = Backlog::empty(servers);
    let slot = backlog.slot();
    let audience = Audience::of(servers, &slot);
    let mut expected = 0;
    let mut one = |is_open: bool| {
        let mut relay = mode.start(servers, &backlog, &slot, &slot);
        backlog.load(1, 1);
        expected += 1;
        audience.wait_for(expected, &relay);
        if is_open {
            // mid-way through the next transaction
            backlog.load(1, 1);
            expected += 1;
            thread::sleep(Duration::from_millis(5));
            relay.walpost.kill9();
        } else {
            relay.stop();
            backlog.load(1, 1);
            expected += 1;
        }
        relay = mode.start(servers, &backlog, &slot, &slot);
        audience.wait_for(expected, &relay);
        let milliseconds = audience.seconds(&relay) * 1e3;
        relay.stop();
        milliseconds
    };
    [false, true].map(|is_open| {
        let times: Vec<f64> = (0..STARTS).map(|_| one(is_open)).collect();
        println!("  {:<30} {times:.0?} ms", if is_open { "behind an open transaction" } else { "nothing open" });
        times
    })
}
