//! Every metric: its name, type and help text.
//!
//! Counters are incremented where things happen. What is a state (lag, LSNs, in flight, the slot) is not kept twice: it is
//! read from [`Progress`] and the last [`Observation`] when somebody asks. Labels are bounded: topics come from routes.

use std::collections::HashMap;

use prometheus::{
    Counter, Encoder as _, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder, core::Collector, proto::LabelPair,
};
use serde::Serialize;

use super::{
    Progress,
    once::Once,
    slot::{Observation, SlotState, WalStatus},
};
use crate::lsn::Lsn;

/// The content type of what [`Metrics::render`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Bounds of `commit_to_ack_seconds`: 0.5 ms is a broker beside us, 60 s an outage.
const COMMIT_TO_ACK_SECONDS: [f64; 17] =
    [0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0];

/// Values of `slot_wal_status{status}`: Postgres' own, and `missing`.
const WAL_STATUSES: [&str; 5] = ["reserved", "extended", "unreserved", "lost", "missing"];

/// The metrics, each registered once in its own registry.
pub struct Metrics {
    /// Where they are registered.
    pub registry: Registry,
    /// `walpost_events_published_total{topic}`
    pub events_published: IntCounterVec,
    /// `walpost_published_bytes_total{topic}`
    pub published_bytes: IntCounterVec,
    /// `walpost_transactions_total`
    pub transactions: IntCounter,
    /// `walpost_commit_to_ack_seconds`
    pub commit_to_ack: Histogram,
    /// `walpost_backpressure_seconds_total`
    pub backpressure: Counter,
    /// `walpost_delivery_errors_total{topic,code}`
    pub delivery_errors: IntCounterVec,
    /// `walpost_dead_lettered_total{topic,reason}`
    pub dead_lettered: IntCounterVec,
    /// `walpost_ignored_changes_total{kind}`: update, delete, truncate, message
    pub ignored_changes: IntCounterVec,
    /// `walpost_other_table_rows_total`: of tables that are published and are no outbox
    pub other_table_rows: IntCounter,
    /// `walpost_reconnects_total{side}`: replication, sql
    pub reconnects: IntCounterVec,
    /// `walpost_producer_restarts_total{reason}`
    pub producer_restarts: IntCounterVec,
    /// Of exactly-once delivery.
    pub once: Once,
    /// `walpost_pruned_rows_total`
    pub pruned_rows: IntCounter,
    /// `walpost_outbox_rows`: absent until a retention pass has looked
    pub outbox_rows: IntGaugeVec,
    /// `walpost_poll_failures_total`
    pub poll_failures: IntCounter,
    /// `walpost_poll_failed_events`
    pub poll_failed_events: IntGauge,
    /// `walpost_trace_spans_dropped_total`
    pub trace_spans_dropped: IntCounter,
    /// `walpost_halted{reason}`: 1 while walpost stands still until a human acts
    pub halted: GaugeVec,
    /// `walpost_trouble{part}`: what `/readyz` names, 1 while it does
    pub trouble: IntGaugeVec,
    /// `walpost_kafka_*`: what librdkafka says of itself
    pub kafka: KafkaMetrics,
    states: States,
}

/// librdkafka's statistics, every few seconds; labels are numbers of brokers.
pub struct KafkaMetrics {
    /// `walpost_kafka_queue_messages`
    pub queue_messages: IntGauge,
    /// `walpost_kafka_queue_bytes`
    pub queue_bytes: IntGauge,
    /// `walpost_kafka_broker_up{broker}`
    pub broker_up: IntGaugeVec,
    /// `walpost_kafka_request_retries_total{broker}`
    pub retries: IntCounterVec,
    /// `walpost_kafka_round_trip_seconds{broker}`
    pub round_trip: GaugeVec,
}

impl KafkaMetrics {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| register(registry, IntGauge::new(name, help).expect("the name is legal"));
        let broker = &["broker"];
        let by_broker = |name: &str, help: &str| Opts::new(name, help);
        Self {
            queue_messages: gauge("kafka_queue_messages", "Records in the producer's queue or on their way."),
            queue_bytes: gauge("kafka_queue_bytes", "Their bytes."),
            broker_up: register(
                registry,
                IntGaugeVec::new(by_broker("kafka_broker_up", "1 while the connection to the broker is up."), broker)
                    .expect("the name is legal"),
            ),
            retries: register(
                registry,
                IntCounterVec::new(
                    by_broker("kafka_request_retries_total", "Requests that were sent to the broker once more."),
                    broker,
                )
                .expect("the name is legal"),
            ),
            round_trip: register(
                registry,
                GaugeVec::new(
                    by_broker(
                        "kafka_round_trip_seconds",
                        "Mean time of a request to the broker, over the last seconds in which there was one.",
                    ),
                    broker,
                )
                .expect("the name is legal"),
            ),
        }
    }
}

impl Metrics {
    /// Registers every metric in a registry of their own.
    #[expect(clippy::missing_panics_doc, reason = "names are constants; an illegal or doubled one fails every test")]
    pub fn new() -> Self {
        let registry = Registry::new_custom(Some("walpost".into()), None).expect("the prefix is a legal name");
        let counters = |name, help, labels: &[&str]| {
            register(&registry, IntCounterVec::new(Opts::new(name, help), labels).expect("the name is legal"))
        };
        let counter = |name, help| register(&registry, IntCounter::new(name, help).expect("the name is legal"));
        let metrics = Self {
            events_published: counters(
                "events_published_total",
                "Events acknowledged by the brokers, re-sent ones included.",
                &["topic"],
            ),
            published_bytes: counters(
                "published_bytes_total",
                "Bytes of keys, values and headers of the events acknowledged by the brokers.",
                &["topic"],
            ),
            transactions: counter("transactions_total", "Transactions with at least one event, delivered whole."),
            commit_to_ack: register(&registry, commit_to_ack()),
            backpressure: register(
                &registry,
                Counter::new(
                    "backpressure_seconds_total",
                    "Seconds in which nothing was read from Postgres because the in-flight bound was reached.",
                )
                .expect("the name is legal"),
            ),
            delivery_errors: counters(
                "delivery_errors_total",
                "Delivery attempts that failed, by topic and librdkafka's error code.",
                &["topic", "code"],
            ),
            dead_lettered: counters(
                "dead_lettered_total",
                "Events that the brokers have in the dead-letter topic, by the topic they were meant for and the reason.",
                &["topic", "reason"],
            ),
            ignored_changes: counters(
                "ignored_changes_total",
                "Changes received that are no inserts and were skipped, by kind.",
                &["kind"],
            ),
            other_table_rows: counter(
                "other_table_rows_total",
                "Rows received of published tables that are no outbox of the configuration, and skipped.",
            ),
            reconnects: counters(
                "reconnects_total",
                "Connections made anew after one was lost: replication is the stream, sql the monitor's link.",
                &["side"],
            ),
            producer_restarts: counters(
                "producer_restarts_total",
                "Kafka producers rebuilt after a fatal error, by reason.",
                &["reason"],
            ),
            once: Once::new(&registry),
            pruned_rows: counter("pruned_rows_total", "Delivered rows that retention deleted from the outbox tables."),
            outbox_rows: register(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "outbox_rows",
                        "Rows in the outbox tables at the last retention pass; above 10,000 as the server estimates.",
                    ),
                    &[],
                )
                .expect("the name is legal"),
            ),
            poll_failures: counter("poll_failures_total", "Polling: tries to deliver an event that failed."),
            poll_failed_events: register(
                &registry,
                IntGauge::new(
                    "poll_failed_events",
                    "Polling: events that wait to be tried again after a failure; counted to 1000 for each table.",
                )
                .expect("the name is legal"),
            ),
            trace_spans_dropped: counter(
                "trace_spans_dropped_total",
                "Spans that were not exported: the collector was away or slow and the queue full, or it refused them.",
            ),
            halted: register(
                &registry,
                GaugeVec::new(Opts::new("halted", "1 while nothing is published until a human acts."), &["reason"])
                    .expect("the name is legal"),
            ),
            trouble: register(
                &registry,
                IntGaugeVec::new(Opts::new("trouble", "1 for each part that /readyz complains of."), &["part"])
                    .expect("the name is legal"),
            ),
            kafka: KafkaMetrics::new(&registry),
            states: States::new(&registry),
            registry,
        };
        metrics.start_at_zero();
        metrics
    }

    /// A series that appears with its first event hides that event from `rate()`; so those with known labels begin at 0.
    fn start_at_zero(&self) {
        for kind in ["update", "delete", "truncate", "message"] {
            self.ignored_changes.with_label_values(&[kind]);
        }
        for side in ["replication", "sql"] {
            self.reconnects.with_label_values(&[side]);
        }
    }

    /// Events that the brokers acknowledged, over all topics.
    pub fn events(&self) -> u64 {
        counts(&self.events_published).map(|(_, events)| events).sum()
    }

    /// Volume by topic, most events first.
    pub fn topics(&self) -> Vec<TopicCount> {
        let bytes: HashMap<_, _> =
            counts(&self.published_bytes).map(|(labels, bytes)| (label(&labels, "topic"), bytes)).collect();
        let counted = counts(&self.events_published).map(|(labels, events)| {
            let topic = label(&labels, "topic");
            TopicCount { bytes: bytes.get(&topic).copied(), topic, reason: None, events }
        });
        by_events(counted)
    }

    /// Dead letters by the topic they were meant for and the reason, most first.
    pub fn dead_letters(&self) -> Vec<TopicCount> {
        by_events(counts(&self.dead_lettered).map(|(labels, events)| TopicCount {
            topic: label(&labels, "topic"),
            reason: Some(label(&labels, "reason")),
            events,
            bytes: None,
        }))
    }

    /// All metrics in Prometheus' text format, as of `now_us` ([`clock::steady_us`](crate::clock::steady_us)).
    pub fn render(&self, progress: &Progress, seen: &Observation, now_us: i64) -> String {
        self.states.set(progress, seen, now_us);
        let mut text = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            Ok(()) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) => {
                tracing::error!(%error, "metrics cannot be encoded");
                String::new()
            }
        }
    }
}

/// What was counted of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopicCount {
    /// The topic.
    pub topic: String,
    /// Why they are dead letters, where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Events.
    pub events: u64,
    /// Bytes of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

fn by_events(counted: impl Iterator<Item = TopicCount>) -> Vec<TopicCount> {
    let mut counted: Vec<_> = counted.filter(|count| count.events > 0).collect();
    counted.sort_by(|one, other| other.events.cmp(&one.events).then_with(|| one.topic.cmp(&other.topic)));
    counted
}

/// (labels, value) of each series of a counter.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it counts whole things, far below 2^53")]
fn counts(counter: &IntCounterVec) -> impl Iterator<Item = (Vec<LabelPair>, u64)> {
    counter.collect().into_iter().flat_map(|mut family| {
        family.take_metric().into_iter().map(|mut series| {
            let value = series.get_counter().get_value() as u64;
            (series.take_label().into_iter().collect(), value)
        })
    })
}

fn label(labels: &[LabelPair], name: &str) -> String {
    labels.iter().find(|label| label.name() == name).map(|label| label.value().to_owned()).unwrap_or_default()
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Bytes between the server's current WAL position and what is confirmed; never negative, `None` while nothing is known to be
/// confirmed.
///
/// Either side may know more: the observation is seconds old, and before the first session only the slot knows what was
/// confirmed.
pub fn lag_bytes(progress: &Progress, seen: &Observation) -> Option<u64> {
    let confirmed = confirmed_lsn(progress, seen);
    let current = seen.current_wal.max(progress.received_lsn());
    (confirmed > Lsn::ZERO).then(|| current.bytes_since(confirmed))
}

/// The last confirmed LSN: our own, else the slot's.
pub fn confirmed_lsn(progress: &Progress, seen: &Observation) -> Lsn {
    match seen.slot.reading() {
        Some(slot) => progress.confirmed_lsn().max(slot.confirmed_lsn),
        None => progress.confirmed_lsn(),
    }
}

/// Gauges that are set when somebody asks.
struct States {
    lag_bytes: IntGaugeVec,
    lag_seconds: Gauge,
    received_lsn: IntGauge,
    confirmed_lsn: IntGauge,
    in_flight_events: IntGauge,
    in_flight_bytes: IntGauge,
    slot_active: IntGaugeVec,
    slot_retained_wal_bytes: IntGaugeVec,
    slot_safe_wal_bytes: IntGaugeVec,
    slot_wal_status: IntGaugeVec,
    streaming: IntGauge,
    paused: IntGauge,
}

impl States {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| register(registry, IntGauge::new(name, help).expect("the name is legal"));
        let gauges = |name, help, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels).expect("the name is legal"))
        };
        gauges("build_info", "Always 1; the label says which version runs.", &["version"])
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1);
        let lag_seconds = Gauge::new(
            "replication_lag_seconds",
            "Age of the oldest committed event that is not yet confirmed, by the server's clock; 0 when there is none.",
        );
        Self {
            lag_bytes: gauges(
                "replication_lag_bytes",
                "Bytes of WAL between the server's current position and the confirmed one; absent when unknown.",
                &[],
            ),
            lag_seconds: register(registry, lag_seconds.expect("the name is legal")),
            received_lsn: gauge("received_lsn", "Furthest WAL position received, as a number of bytes."),
            confirmed_lsn: gauge("confirmed_lsn", "WAL position confirmed to the server, as a number of bytes."),
            in_flight_events: gauge("in_flight_events", "Events handed to the producer and not yet acknowledged."),
            in_flight_bytes: gauge("in_flight_bytes", "Bytes of the events not yet acknowledged."),
            slot_active: gauges("slot_active", "1 while a connection streams from the slot; absent when unknown.", &[]),
            slot_retained_wal_bytes: gauges(
                "slot_retained_wal_bytes",
                "Bytes of WAL that the slot keeps on the server's disk; absent when unknown.",
                &[],
            ),
            slot_safe_wal_bytes: gauges(
                "slot_safe_wal_bytes",
                "Bytes of WAL that can still be written before the slot may be lost (max_slot_wal_keep_size); \
                 0 or less: at risk now; absent when there is no limit.",
                &[],
            ),
            streaming: gauge("streaming", "1 while a replication stream is open, or the tables are polled."),
            paused: gauge("paused", "1 while an operator has it paused: nothing is sent, WAL is retained."),
            slot_wal_status: gauges(
                "slot_wal_status",
                "1 for the slot's present status: reserved, extended, unreserved (at risk), lost or missing.",
                &["status"],
            ),
        }
    }

    fn set(&self, progress: &Progress, seen: &Observation, now_us: i64) {
        self.streaming.set(i64::from(progress.streaming()));
        self.paused.set(i64::from(progress.paused()));
        let (events, bytes) = progress.in_flight();
        set_or_hide(&self.lag_bytes, lag_bytes(progress, seen).map(clamped));
        self.lag_seconds.set(progress.lag_seconds(now_us));
        self.received_lsn.set(clamped(progress.received_lsn().0));
        self.confirmed_lsn.set(clamped(confirmed_lsn(progress, seen).0));
        self.in_flight_events.set(clamped(events));
        self.in_flight_bytes.set(clamped(bytes));
        let slot = seen.slot.reading();
        set_or_hide(&self.slot_active, slot.map(|slot| i64::from(slot.active)));
        set_or_hide(&self.slot_retained_wal_bytes, slot.map(|slot| clamped(slot.retained_wal_bytes)));
        set_or_hide(&self.slot_safe_wal_bytes, slot.and_then(|slot| slot.safe_wal_bytes));
        match &seen.slot {
            SlotState::Unknown => self.slot_wal_status.reset(),
            SlotState::Missing => self.set_wal_status("missing"),
            SlotState::Present(slot) => self.set_wal_status(slot.wal_status.map_or("", WalStatus::as_str)),
        }
    }

    fn set_wal_status(&self, present: &str) {
        for status in WAL_STATUSES {
            self.slot_wal_status.with_label_values(&[status]).set(i64::from(status == present));
        }
    }
}

fn commit_to_ack() -> Histogram {
    let options = HistogramOpts::new(
        "commit_to_ack_seconds",
        "Seconds from an event's commit in Postgres to the brokers' acknowledgement.",
    );
    Histogram::with_opts(options.buckets(COMMIT_TO_ACK_SECONDS.to_vec())).expect("the buckets grow")
}

/// Registers a metric once.
pub(super) fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    registry.register(Box::new(collector.clone())).expect("every metric is registered once");
    collector
}

/// A gauge without labels that is left out while its value is unknown: 0 would be a claim.
fn set_or_hide(gauge: &IntGaugeVec, value: Option<i64>) {
    match value {
        Some(value) => gauge.with_label_values::<&str>(&[]).set(value),
        None => gauge.reset(),
    }
}

fn clamped(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::{super::slot::SlotReading, *};

    fn seen(current: u64, confirmed: u64) -> Observation {
        let slot = SlotReading {
            active: true,
            wal_status: Some(WalStatus::Extended),
            confirmed_lsn: Lsn(confirmed),
            retained_wal_bytes: 77,
            ..SlotReading::default()
        };
        Observation { current_wal: Lsn(current), slot: SlotState::Present(slot) }
    }

    fn line<'a>(text: &'a str, series: &str) -> Option<&'a str> {
        text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
    }

    #[test]
    fn every_metric_of_the_contract_is_there_with_its_help() {
        let metrics = Metrics::new();
        metrics.events_published.with_label_values(&["orders"]).inc();
        metrics.published_bytes.with_label_values(&["orders"]).inc_by(5);
        metrics.delivery_errors.with_label_values(&["orders", "MSG_SIZE_TOO_LARGE"]).inc();
        metrics.dead_lettered.with_label_values(&["orders", "too_large"]).inc();
        metrics.producer_restarts.with_label_values(&["fatal"]).inc();
        metrics.halted.with_label_values(&["poison"]).set(1.0);
        metrics.outbox_rows.with_label_values::<&str>(&[]).set(3);
        let mut observation = seen(100, 90);
        if let SlotState::Present(slot) = &mut observation.slot {
            slot.safe_wal_bytes = Some(-3);
        }
        let text = metrics.render(&Progress::default(), &observation, 0);
        for name in [
            "replication_lag_bytes",
            "replication_lag_seconds",
            "slot_retained_wal_bytes",
            "slot_safe_wal_bytes",
            "slot_active",
            "slot_wal_status",
            "received_lsn",
            "confirmed_lsn",
            "events_published_total",
            "published_bytes_total",
            "transactions_total",
            "in_flight_events",
            "in_flight_bytes",
            "commit_to_ack_seconds",
            "backpressure_seconds_total",
            "delivery_errors_total",
            "dead_lettered_total",
            "ignored_changes_total",
            "other_table_rows_total",
            "reconnects_total",
            "producer_restarts_total",
            "pruned_rows_total",
            "outbox_rows",
            "poll_failures_total",
            "poll_failed_events",
            "trace_spans_dropped_total",
            "halted",
            "streaming",
            "paused",
            "build_info",
        ] {
            assert!(text.contains(&format!("# HELP walpost_{name} ")), "{name} is missing:\n{text}");
            assert!(text.contains(&format!("# TYPE walpost_{name} ")), "{name} has no type");
        }
        assert_eq!(line(&text, "walpost_slot_safe_wal_bytes"), Some("-3"));
        assert_eq!(line(&text, r#"walpost_slot_wal_status{status="extended"}"#), Some("1"));
        assert_eq!(line(&text, r#"walpost_slot_wal_status{status="lost"}"#), Some("0"));
        assert_eq!(line(&text, r#"walpost_reconnects_total{side="sql"}"#), Some("0"));
    }

    /// Case 48, before and amid sessions.
    #[test]
    fn lag_is_never_negative_and_knows_the_slots_position_before_the_first_session() {
        let progress = Progress::default();
        assert_eq!(lag_bytes(&progress, &Observation::default()), None);
        assert_eq!(lag_bytes(&progress, &seen(100, 90)), Some(10), "only the slot knows what is confirmed");
        progress.set(Lsn(500), Lsn(450), (1, 1), 0);
        assert_eq!(lag_bytes(&progress, &seen(100, 90)), Some(50), "the observation is older than the stream");
        progress.set(Lsn(300), Lsn(450), (0, 0), 0);
        assert_eq!(lag_bytes(&progress, &seen(100, 90)), Some(0));
    }

    #[test]
    fn what_is_unknown_is_left_out() {
        let metrics = Metrics::new();
        metrics.render(&Progress::default(), &seen(2, 1), 0);
        let text = metrics.render(&Progress::default(), &Observation::default(), 0);
        assert!(!text.contains("walpost_slot_"), "{text}");
        let missing = Observation { slot: SlotState::Missing, ..Observation::default() };
        let text = metrics.render(&Progress::default(), &missing, 0);
        assert_eq!(line(&text, r#"walpost_slot_wal_status{status="missing"}"#), Some("1"));
        assert_eq!(line(&text, "walpost_slot_active"), None);
    }
}
