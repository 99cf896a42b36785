//! What the operator says: loaded once, file < environment < flags, every fault reported at once.
//!
//! Owns the only reads of the environment. Must never print a secret: everything secret is a [`Secret`].

use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// A complete, valid configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The database and its replication slot.
    pub postgres: PostgresConfig,
    /// The outbox tables; at least one.
    pub outboxes: Vec<OutboxConfig>,
    /// Event type → topic.
    pub route: RouteConfig,
    /// The brokers and the producer.
    pub kafka: KafkaConfig,
    /// Bounds on what is in flight.
    pub limits: LimitsConfig,
    /// How a stop drains.
    pub shutdown: ShutdownConfig,
    /// The HTTP listener for metrics and health.
    pub http: HttpConfig,
    /// Logging.
    pub log: LogConfig,
}

/// `[postgres]`
#[derive(Debug, Clone)]
pub struct PostgresConfig {
    /// Where and how to connect; holds the password as a secret.
    pub conninfo: crate::conninfo::ConnInfo,
    /// Name of the replication slot, `[a-z0-9_]{1,63}`.
    pub slot: String,
    /// Name of the publication, exactly as in the catalog.
    pub publication: String,
    /// Create publication and slot when they are missing.
    pub auto_create: bool,
}

/// A table's name as the catalog has it (already unquoted and folded).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableName {
    /// Schema (namespace).
    pub schema: String,
    /// Table.
    pub table: String,
}

/// What becomes of rows that are older than the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backfill {
    /// Leave them alone.
    None,
    /// Publish all of them.
    All,
    /// Publish those that fulfil an SQL condition.
    Where(String),
}

/// `[outbox]` or one `[[outbox]]`
#[derive(Debug, Clone)]
pub struct OutboxConfig {
    /// The table.
    pub table: TableName,
    /// `None`: unset, so refuse to start when there are such rows.
    pub backfill: Option<Backfill>,
    /// Which column holds what; names exactly as in the catalog.
    pub columns: ColumnsConfig,
    /// Further columns as headers: (header, column), in file order.
    pub header_columns: Vec<(String, String)>,
}

/// `[outbox.columns]`. The `Option`s are `Some(name)` when the operator named the column (it must exist) and fall back to
/// the default name when `explicit` says it was not named (then it may be missing from the table).
#[derive(Debug, Clone)]
pub struct ColumnsConfig {
    /// The event's id; must exist.
    pub id: String,
    /// The event's type; must exist.
    pub event_type: String,
    /// The payload; must exist.
    pub payload: String,
    /// The record key.
    pub key: OptionalColumn,
    /// A json(b) object whose members become headers.
    pub headers: OptionalColumn,
    /// The record timestamp.
    pub timestamp: OptionalColumn,
}

/// A column that need not exist unless it was named by the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionalColumn {
    /// The name looked for.
    pub name: String,
    /// True when the operator named it: then its absence is an error.
    pub explicit: bool,
}

/// What to do with an event whose topic name Kafka would not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnIllegalTopic {
    /// Treat the event as poison: dead-letter it where a dead-letter topic is set, else halt.
    Park,
    /// Stop with an error.
    Halt,
    /// Replace what is illegal; a hash suffix keeps different names apart.
    Sanitize,
}

/// `[route]`
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// Template over columns of the row, for example `outbox.{event_type}`.
    pub topic: String,
    /// Policy for names that Kafka would refuse.
    pub on_illegal_topic: OnIllegalTopic,
    /// First match wins, before the template.
    pub rules: Vec<RouteRule>,
}

/// `[[route.rules]]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteRule {
    /// Glob over the event type (`*` and `?`).
    pub event_type: String,
    /// Topic template.
    pub topic: String,
}

/// `[kafka]`
#[derive(Debug, Clone)]
pub struct KafkaConfig {
    /// Bootstrap servers, comma-separated.
    pub brokers: String,
    /// Create missing topics.
    pub create_topics: bool,
    /// Partitions of created topics; -1: the broker's default.
    pub partitions: i32,
    /// Replication factor of created topics; -1: the broker's default.
    pub replication_factor: i32,
    /// Where poison goes; unset: a poison event halts.
    pub dead_letter_topic: Option<String>,
    /// Further librdkafka properties, checked against the refused ones. Values may be secrets.
    pub properties: Vec<(String, Secret)>,
}

/// `[limits]`
#[derive(Debug, Clone, Copy)]
pub struct LimitsConfig {
    /// Events handed to the producer and not yet acknowledged, at most.
    pub in_flight_events: usize,
    /// Their bytes, at most.
    pub in_flight_bytes: usize,
}

/// `[shutdown]`
#[derive(Debug, Clone, Copy)]
pub struct ShutdownConfig {
    /// How long a stop waits for acknowledgements (`drain_timeout_ms`).
    pub drain_timeout: Duration,
}

/// `[http]`
#[derive(Debug, Clone, Copy)]
pub struct HttpConfig {
    /// Listen address; `None` when set to the empty string: no listener.
    pub listen: Option<SocketAddr>,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// Text or JSON lines.
    pub format: LogFormat,
    /// `error` … `trace`, or a tracing filter such as `walpost=debug,info`.
    pub level: String,
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// A value that prints as `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, for the one place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

#[doc(hidden)]
pub type _Unused = PathBuf;
