//! Metrics of exactly-once delivery.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry};

use super::metrics::register;

/// Bounds of `kafka_commit_seconds`.
const COMMIT_SECONDS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

/// What is told of Kafka transactions.
pub struct Once {
    /// `walpost_kafka_transactions_total{outcome}`: committed, aborted
    pub transactions: IntCounterVec,
    /// `walpost_kafka_commit_seconds`
    pub commit_seconds: Histogram,
    /// `walpost_skipped_events_total`
    pub skipped_events: IntCounter,
}

impl Once {
    /// Registers them, at zero.
    pub(super) fn new(registry: &Registry) -> Self {
        let transactions = IntCounterVec::new(
            Opts::new("kafka_transactions_total", "Kafka transactions under kafka.delivery exactly_once, by outcome."),
            &["outcome"],
        );
        let commit_seconds = HistogramOpts::new(
            "kafka_commit_seconds",
            "Seconds from the last record of a Kafka transaction to its end.",
        );
        let skipped_events = IntCounter::new(
            "skipped_events_total",
            "Events that came again from the log and were in Kafka already, under kafka.delivery exactly_once.",
        );
        let transactions = register(registry, transactions.expect("the name is legal"));
        for outcome in ["committed", "aborted"] {
            transactions.with_label_values(&[outcome]);
        }
        let commit_seconds = Histogram::with_opts(commit_seconds.buckets(COMMIT_SECONDS.to_vec()));
        Self {
            transactions,
            commit_seconds: register(registry, commit_seconds.expect("the name is legal")),
            skipped_events: register(registry, skipped_events.expect("the name is legal")),
        }
    }
}
