//! Every metric: its name, type and help text.

use prometheus::{Counter, CounterVec, Gauge, GaugeVec, Histogram, IntCounter, IntCounterVec, IntGauge};

/// The metrics, each registered once in its own registry.
pub struct Metrics {
    /// Where they are registered.
    pub registry: prometheus::Registry,
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
    /// `walpost_ignored_changes_total{kind}`: update, delete, truncate, message
    pub ignored_changes: IntCounterVec,
    /// `walpost_reconnects_total{side}`: postgres, sql
    pub reconnects: IntCounterVec,
    /// `walpost_producer_restarts_total{reason}`
    pub producer_restarts: IntCounterVec,
    /// `walpost_halted{reason}`
    pub halted: GaugeVec,
    /// unused placeholders so the skeleton compiles
    pub slot_active: IntGauge,
    /// see above
    pub lag_bytes: Gauge,
    /// see above
    pub slot_wal_status: GaugeVec,
    /// see above
    pub other: CounterVec,
}
