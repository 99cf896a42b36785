//! What the operator says: loaded once, file < environment < flags, every fault reported at once.
//!
//! Owns the only reads of the environment. Must never print a secret: everything secret is a [`Secret`].

mod fault;
mod nearest;
mod reader;
mod reference;
mod refused;
mod sections;
#[cfg(test)]
mod tests;
mod value;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

pub use self::fault::{Fault, Faults, Origin};
pub use self::reference::reference;
use self::{reader::Reader, value::Entries};
pub use crate::{admin::AdminToken, table_name::TableName, trace::Endpoint};

/// The file that is read when none is named and it exists.
pub const DEFAULT_FILE: &str = "walpost.toml";

/// Reads the configuration: `file`, else [`DEFAULT_FILE`] where it exists; over it the environment's `WALPOST_*`; over
/// that `flags`, pairs of a dotted key such as `postgres.slot` and its value.
///
/// Every fault is returned at once. Files that hold certificates and passwords are opened to see whether they can be used;
/// nothing else is contacted.
pub fn load(file: Option<&Path>, flags: &[(String, String)]) -> Result<Config, Faults> {
    let document = read_file(file).map_err(|fault| Faults(vec![fault]))?;
    let document = document.as_ref().map(|(name, text)| (name.as_str(), text.as_str()));
    load_from(document, std::env::vars_os(), flags)
}

/// As [`load`], for commands that contact no database: `postgres.url` may be missing, and then leads nowhere.
pub fn load_without_database(file: Option<&Path>, flags: &[(String, String)]) -> Result<Config, Faults> {
    load(file, flags).or_else(|faults| {
        let is_missing = |fault: &Fault| fault.key == "postgres.url" && fault.what == reader::MISSING;
        if !faults.0.iter().any(is_missing) {
            return Err(faults);
        }
        let nowhere = ("postgres.url".to_owned(), "host=localhost".to_owned());
        load(file, &[flags, &[nowhere]].concat())
    })
}

/// As [`load`], with the file's name and text and the environment given.
pub fn load_from(
    document: Option<(&str, &str)>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[(String, String)],
) -> Result<Config, Faults> {
    read(document, environment, flags).0
}

/// The configuration, and every key that was looked for.
fn read(
    document: Option<(&str, &str)>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[(String, String)],
) -> (Result<Config, Faults>, Vec<String>) {
    let entries: Entries = match document.map(|(name, text)| value::parse_document(name, text)) {
        None => Entries::new(),
        Some(Ok(entries)) => entries,
        Some(Err(faults)) => return (Err(Faults(faults)), Vec::new()),
    };
    let (environment, pgpassword, faults) = split_environment(environment);
    let mut reader = Reader::new(environment, flags);
    for fault in faults {
        reader.add(fault);
    }
    let mut root = reader.root(entries);
    let config = sections::config(&mut root, pgpassword);
    root.close();
    let (faults, known) = reader.finish();
    match config {
        Some(config) if faults.is_empty() => (Ok(config), known),
        _ => (Err(Faults(faults)), known),
    }
}

fn read_file(file: Option<&Path>) -> Result<Option<(String, String)>, Fault> {
    let path = file.unwrap_or(Path::new(DEFAULT_FILE));
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some((name, text))),
        Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Fault {
            at: Origin::File { name, line: 1 },
            key: String::new(),
            what: format!("cannot be read: {error}"),
            remedy: "name a readable file with --config, or leave it out to use the environment alone".into(),
        }),
    }
}

/// Ours out of the environment, and `PGPASSWORD`.
fn split_environment(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> (BTreeMap<String, String>, Option<Secret>, Vec<Fault>) {
    let mut ours = BTreeMap::new();
    let mut pgpassword = None;
    let mut faults = Vec::new();
    for (name, value) in environment {
        let Ok(name) = name.into_string() else { continue };
        let wanted = name == "PGPASSWORD" || (name.starts_with("WALPOST_") && !nearest::set_by_kubernetes(&name));
        if !wanted {
            continue;
        }
        match value.into_string() {
            Ok(value) if name == "PGPASSWORD" => pgpassword = Some(value).filter(|value| !value.is_empty()),
            Ok(value) => {
                ours.insert(name, value);
            }
            Err(_) => faults.push(Fault {
                at: Origin::Variable(name),
                key: String::new(),
                what: "is not UTF-8".into(),
                remedy: "encode it as UTF-8".into(),
            }),
        }
    }
    (ours, pgpassword.map(Secret::new), faults)
}

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
    /// How the table is read where `postgres.source` is `poll`.
    pub poll: PollConfig,
    /// Deletion of delivered rows; `None`: they stay.
    pub retention: Option<RetentionConfig>,
    /// How a stop drains.
    pub shutdown: ShutdownConfig,
    /// The HTTP listener for metrics and health.
    pub http: HttpConfig,
    /// Logging.
    pub log: LogConfig,
    /// Spans.
    pub trace: TraceConfig,
}

/// `[postgres]`
#[derive(Debug, Clone)]
pub struct PostgresConfig {
    /// `url` and `password_file`: where and how to connect; holds the password as a secret. Required.
    pub conninfo: crate::conninfo::ConnInfo,
    /// Name of the replication slot, `[a-z0-9_]{1,63}`. Default `walpost`.
    pub slot: String,
    /// Name of the publication, exactly as in the catalog, at most 63 bytes. Default `walpost`.
    pub publication: String,
    /// Create publication and slot when they are missing. Default true.
    pub auto_create: bool,
    /// Where events are read. Default `wal`.
    pub source: SourceKind,
}

/// Where events are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// The write-ahead log, through a replication slot.
    Wal,
    /// The table itself, which holds a mark for what was delivered.
    Poll,
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

impl Backfill {
    /// `all`, `none` or a condition.
    pub fn parse(text: &str) -> Self {
        match text.trim() {
            word if word.eq_ignore_ascii_case("none") => Self::None,
            word if word.eq_ignore_ascii_case("all") => Self::All,
            _ => Self::Where(text.to_owned()),
        }
    }
}

/// `[outbox]` or one `[[outbox]]`
#[derive(Debug, Clone)]
pub struct OutboxConfig {
    /// The table, quoted as in SQL. Default `public.outbox`; required in `[[outbox]]`.
    pub table: TableName,
    /// `None`: unset, so refuse to start when there are such rows.
    pub backfill: Option<Backfill>,
    /// Which column holds what; names exactly as in the catalog, unless in double quotes: then quoted as in SQL.
    pub columns: ColumnsConfig,
    /// Further columns as headers: (header, column), in file order.
    pub header_columns: Vec<(String, String)>,
    /// The columns that polling needs beside them; keys of `[outbox.columns]` as well.
    pub poll: PollColumns,
}

/// The columns of a table that is polled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollColumns {
    /// When the brokers had it: a `timestamptz` that may be NULL. Default `delivered_at`.
    pub delivered_at: String,
    /// How often its delivery failed: a whole number. Default `attempts`.
    pub attempts: String,
    /// The order in which rows are published; unset: the id where it is a number, else the timestamp and then the id.
    pub order: Option<String>,
}

impl Default for PollColumns {
    fn default() -> Self {
        Self { delivered_at: "delivered_at".into(), attempts: "attempts".into(), order: None }
    }
}

/// `[outbox.columns]`. The `Option`s are `Some(name)` when the operator named the column (it must exist) and fall back to
/// the default name when `explicit` says it was not named (then it may be missing from the table).
#[derive(Debug, Clone)]
pub struct ColumnsConfig {
    /// The event's id; must exist. Default `id`.
    pub id: String,
    /// The event's type; must exist. Default `event_type`.
    pub event_type: String,
    /// The payload; must exist. Default `payload`.
    pub payload: String,
    /// The record key. Default `key`.
    pub key: OptionalColumn,
    /// A json(b) object whose members become headers. Default `headers`.
    pub headers: OptionalColumn,
    /// The record timestamp. Default `created_at`.
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
    /// Template over columns of the row. Default `outbox.{event_type}`.
    pub topic: String,
    /// Policy for names that Kafka would refuse. Default `park`.
    pub on_illegal_topic: OnIllegalTopic,
    /// First match wins, before the template. Default none.
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
    /// Bootstrap servers, comma-separated. Default `localhost:9092`.
    pub brokers: String,
    /// Create missing topics. Default false.
    pub create_topics: bool,
    /// Partitions of created topics, 1 to 10,000; -1: the broker's default. Default -1.
    pub partitions: i32,
    /// Replication factor of created topics, 1 to 100; -1: the broker's default. Default -1.
    pub replication_factor: i32,
    /// Where poison goes, a legal topic name; unset (the default): a poison event halts.
    pub dead_letter_topic: Option<String>,
    /// What a consumer sees of a repetition. Default `at_least_once`.
    pub delivery: Delivery,
    /// `commit_interval_ms`: how often a Kafka transaction is committed under `exactly_once`, 20 to 10,000. Default 100.
    pub commit_interval: Duration,
    /// `transaction_timeout_ms`: after so long the brokers abort a transaction that walpost left open, 5,000 to 900,000.
    /// Default 30,000.
    pub transaction_timeout: Duration,
    /// Where walpost keeps its position under `exactly_once`, a topic of this slot alone; also the producer's
    /// `transactional.id`. Default `walpost.progress.<slot>`.
    pub progress_topic: String,
    /// Further librdkafka properties, checked against the refused ones. Values may be secrets.
    pub properties: Vec<(String, Secret)>,
    /// Where `sasl.password` stands; read anew for each client. Then `properties` has that of the start.
    pub sasl_password_file: Option<PathBuf>,
}

/// librdkafka's name of the password.
pub(crate) const SASL_PASSWORD: &str = "sasl.password";

/// The password that a file holds.
fn password_from(file: &Path) -> io::Result<Secret> {
    std::fs::read_to_string(file).map(|text| Secret::new(text.trim_end_matches(['\n', '\r'])))
}

impl KafkaConfig {
    /// The password that its file holds now; `None` where there is no file, or it cannot be read.
    pub fn password_in_file(&self) -> Option<Secret> {
        password_from(self.sasl_password_file.as_ref()?).ok()
    }

    /// The properties, with the password that its file holds now.
    pub fn present_properties(&self) -> Vec<(String, Secret)> {
        let mut properties = self.properties.clone();
        if let Some(password) = self.password_in_file() {
            properties.retain(|(name, _)| name != SASL_PASSWORD);
            properties.push((SASL_PASSWORD.to_owned(), password));
        }
        properties
    }
}

/// What a consumer sees of a repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// After a crash events may come twice.
    AtLeastOnce,
    /// Position and events are written in the same Kafka transaction: who reads committed records sees each event once.
    ExactlyOnce,
}

/// `[limits]`
#[derive(Debug, Clone, Copy)]
pub struct LimitsConfig {
    /// Events handed to the producer and not yet acknowledged, at most; 1 to 1,000,000. Default 20,000.
    pub in_flight_events: usize,
    /// Their bytes, at most; 64 KiB to 16 GiB. Default 64 MiB.
    pub in_flight_bytes: usize,
    /// Rows a second that a backfill publishes at most; 0 (the default), as fast as they are taken.
    pub backfill_rate: u32,
}

/// `[poll]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollConfig {
    /// Rows of one transaction at most, 1 to 10,000. Default 1,000.
    pub batch: u32,
    /// `interval_ms`: how long to wait where there is nothing to send and nobody notifies, 10 to 3,600,000. Default 1,000.
    pub interval: Duration,
    /// `ack_timeout_ms`: how long a transaction stays open for the brokers' answer, 1,000 to 600,000. Default 30,000.
    pub ack_timeout: Duration,
    /// The channel on which a trigger notifies, at most 63 bytes; `None` (the default): only the interval counts.
    pub notify_channel: Option<String>,
}

/// `[retention]`: rows that were delivered and are older than `keep` are deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionConfig {
    /// How long rows are kept, 0 s to 10 years. No default: without it there is no deletion.
    pub keep: Duration,
    /// Rows a statement deletes at most, 1 to 100,000. Default 1,000.
    pub batch: u32,
    /// Time from one pass to the next, 1 s to 1 day. Default 1 minute.
    pub interval: Duration,
    /// How long rows of dead-lettered events are kept, at least `keep`. Default `None`: for ever.
    pub keep_dead_lettered: Option<Duration>,
    /// `drop_partitions`: partitions whose rows were all delivered are dropped whole. Default false.
    pub drop_partitions: bool,
    /// `partitions_ahead`: so many partitions behind the present one are created in time, each as wide as the newest ones,
    /// up to 366. Default 0, which is `None` here: none is created.
    pub partitions_ahead: Option<u32>,
}

/// `[shutdown]`
#[derive(Debug, Clone, Copy)]
pub struct ShutdownConfig {
    /// `drain_timeout_ms`: how long a stop waits for acknowledgements, 0 to 3,600,000. Default 10,000.
    pub drain_timeout: Duration,
}

/// `[http]`
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Listen address, IP and port. Default `127.0.0.1:9465`; `None` when set to the empty string: no listener.
    pub listen: Option<SocketAddr>,
    /// `admin_token_file`, or `admin_token`: what lets an operator pause, resume and stop by HTTP, at least 16 characters. The
    /// file is read for each request. Default `None`: nobody can.
    pub admin_token: Option<AdminToken>,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// Text or JSON lines. Default text.
    pub format: LogFormat,
    /// `error` … `trace`, or a tracing filter such as `walpost=debug,info`. Default `info`.
    pub level: String,
}

/// `[trace]`
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// `otlp_endpoint`: the collector that spans are sent to, an `http://` URL with a port. Default `None`: there are none.
    pub otlp_endpoint: Option<Endpoint>,
    /// What the spans' resource is called, `service.name`. Default `walpost`.
    pub service_name: String,
    /// Of so many batches one has a span, 1 to 1,000,000; one that fails always has. Default 1.
    pub one_in: u32,
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
