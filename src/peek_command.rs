//! `walpost peek`: the records that would be published next, without moving the slot.
//!
//! The slot is copied into a temporary one that vanishes with the connection, so this works beside a walpost that streams. The
//! rows go through the same stages as in the stream; what they make is printed and sent nowhere.

#[path = "peek_table.rs"]
mod peek_table;

use serde::Serialize;
use serde_json::{Map, Value};
use tokio_postgres::{Client, error::SqlState};

use crate::{
    backfill::BackfillError,
    cli::Peek,
    config::Config,
    encode::Record,
    event::Position,
    lsn::Lsn,
    pipeline::{Open, Sent, SessionError, Stages},
    prepare,
    route::{RouteError, Router},
    sink::{Queued, Sink, SinkError},
    source::{
        SourceError,
        pgoutput::{self, Message, ParseError},
    },
    sql::{self, SqlError, quote_identifier},
};

/// The temporary copy of the slot; the process id of the server makes it the session's own.
const COPY: &str = "
    SELECT slot_name::text FROM pg_copy_logical_replication_slot($1, 'walpost_peek_' || pg_backend_pid(), true)";
/// How many changes are decoded at first. The server stops behind the transaction that reaches this.
const FIRST_STEP: i32 = 1000;

/// Why nothing can be shown.
#[derive(Debug, thiserror::Error)]
pub enum PeekError {
    /// No SQL link.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// There is no slot.
    #[error("replication slot {0} does not exist; create it with `walpost init`")]
    NoSlot(String),
    /// There is no room for the copy.
    #[error(
        "copy replication slot {slot}: all replication slots of the server are in use; raise max_replication_slots"
    )]
    NoRoom {
        /// The slot.
        slot: String,
    },
    /// The server refused.
    #[error("{attempt}")]
    Statement {
        /// What was tried.
        attempt: String,
        /// Why it failed.
        source: tokio_postgres::Error,
    },
    /// The server sent what is no pgoutput.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The routes do not compile.
    #[error(transparent)]
    Routes(#[from] RouteError),
    /// The table cannot be read.
    #[error("read the rows of {table}; a condition is what stands behind WHERE")]
    Rows {
        /// The table.
        table: String,
        /// Why.
        source: SourceError,
    },
    /// There is no such table.
    #[error(transparent)]
    Table(#[from] BackfillError),
    /// A table does not fit, or the like.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// One record, or why there would be none.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peeked {
    /// Where it would go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// `<commit LSN>/<ordinal>`.
    pub position: String,
    /// Null, a string, or `{"base64": …}` for what is no UTF-8.
    pub key: Value,
    /// Null, a string, or `{"base64": …}` for what is no UTF-8.
    pub value: Value,
    /// In their order.
    pub headers: Map<String, Value>,
    /// Unix ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<i64>,
    /// Size of the value in bytes.
    pub value_bytes: usize,
    /// Where asked for: how it came to its topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explained>,
    /// Why it cannot be published as it is: walpost would halt here, or send it to the dead-letter topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How a record came to its topic, and what it weighs.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// Number of the rule in `route.rules`, from 1; null where none matched and `route.topic` decides.
    pub rule: Option<usize>,
    /// Its glob over the event type.
    pub matches: Option<String>,
    /// The template that made the topic.
    pub template: String,
    /// Size of the key in bytes.
    pub key_bytes: usize,
    /// Size of names and values of the headers in bytes.
    pub headers_bytes: usize,
    /// Key, value and headers: what counts against `limits.in_flight_bytes`, but for what the producer keeps beside them.
    pub record_bytes: usize,
}

/// At most `limit` of the records that would be published next, or that rows of the table would make.
pub async fn run(config: &Config, wanted: &Peek) -> Result<Vec<Peeked>, PeekError> {
    let mut stages = Stages::new(config)?;
    let explains = wanted.explain.then(|| Router::new(&config.route)).transpose()?;
    let window = ShopWindow { shown: Vec::new(), explains, limit: wanted.limit };
    match &wanted.from_table {
        Some(condition) => peek_table::run(config, condition, stages, window).await,
        None => behind_the_slot(config, &mut stages, window).await,
    }
}

async fn behind_the_slot(
    config: &Config,
    stages: &mut Stages,
    mut window: ShopWindow,
) -> Result<Vec<Peeked>, PeekError> {
    let client = sql::connect(&config.postgres.conninfo).await?;
    let statement = |attempt: &str, source| PeekError::Statement { attempt: attempt.to_owned(), source };
    let catalog =
        prepare::look(&client, config).await.map_err(|error| statement("look for the outbox tables", error))?;
    let slot = copy_slot(&client, &config.postgres.slot).await?;
    let mut step = FIRST_STEP;
    loop {
        let changes = changes(&client, &slot, &config.postgres.publication, step)
            .await
            .map_err(|error| statement("read the changes behind the slot", error))?;
        stages.forget();
        stages.know(catalog.clone());
        window.shown.clear();
        show(&changes, stages, &mut window)?;
        let more = i32::try_from(changes.len()).unwrap_or(i32::MAX) >= step;
        if window.is_full() || !more || step == i32::MAX {
            return Ok(window.shown);
        }
        step = step.saturating_mul(10);
    }
}

pub(crate) async fn copy_slot(client: &Client, slot: &str) -> Result<String, PeekError> {
    match client.query_one(COPY, &[&slot]).await {
        Ok(row) => Ok(row.get(0)),
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_OBJECT) => Err(PeekError::NoSlot(slot.to_owned())),
        Err(error) if error.code() == Some(&SqlState::CONFIGURATION_LIMIT_EXCEEDED) => {
            Err(PeekError::NoRoom { slot: slot.to_owned() })
        }
        Err(source) => Err(PeekError::Statement { attempt: format!("copy replication slot {slot}"), source }),
    }
}

async fn changes(
    client: &Client,
    slot: &str,
    publication: &str,
    step: i32,
) -> Result<Vec<Vec<u8>>, tokio_postgres::Error> {
    let sql = "SELECT data FROM pg_logical_slot_peek_binary_changes($1, NULL, $2, 'proto_version', '1', \
               'publication_names', $3)";
    let rows = client.query(sql, &[&slot, &step, &quote_identifier(publication)]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

fn show(changes: &[Vec<u8>], stages: &mut Stages, window: &mut ShopWindow) -> Result<(), PeekError> {
    let mut open = None::<Open>;
    for change in changes {
        if window.is_full() {
            break;
        }
        match pgoutput::parse(change)? {
            Message::Begin { commit_lsn, commit_us } => {
                open = Some(Open { commit_us, position: Position { commit_lsn, ordinal: 0 }, row: None });
            }
            Message::Relation(relation) => {
                let commit_lsn = open.map_or(Lsn(u64::MAX), |open| open.position.commit_lsn);
                stages.describe(&relation, commit_lsn)?;
            }
            Message::Insert { relation, row } => {
                let Some(open) = &mut open else { continue };
                let outcome = stages.publish(relation, row, *open, window);
                if window.show(outcome, open.position)? {
                    open.position.ordinal += 1;
                }
            }
            Message::Commit { .. } | Message::Logical { .. } | Message::Ignored(_) => {}
        }
    }
    Ok(())
}

/// A sink that only shows.
#[derive(Debug)]
struct ShopWindow {
    shown: Vec<Peeked>,
    /// The routes, where they are to be explained.
    explains: Option<Router>,
    limit: usize,
}

impl ShopWindow {
    fn is_full(&self) -> bool {
        self.shown.len() >= self.limit
    }

    /// Shows why a row could not be published; false where it is none of an outbox.
    fn show(&mut self, outcome: Result<Sent, SessionError>, position: Position) -> Result<bool, SessionError> {
        match outcome {
            Ok(sent) => return Ok(!matches!(sent, Sent::NotOurs { .. })),
            Err(error @ SessionError::Poison { .. }) => self.show_poison(position, &error),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn explain(&self, record: &Record<'_>) -> Option<Explained> {
        let event_type = String::from_utf8_lossy(record.headers.get(b"event_type").unwrap_or_default());
        let (rule, matches, template) = self.explains.as_ref()?.explain(&event_type);
        Some(Explained {
            rule,
            matches,
            template: template.to_owned(),
            key_bytes: record.key.map_or(0, <[u8]>::len),
            headers_bytes: record.headers.iter().map(|(name, value)| name.len() + value.len()).sum(),
            record_bytes: record.weight() - Record::OVERHEAD,
        })
    }

    fn show_poison(&mut self, position: Position, error: &SessionError) {
        let error = Some(crate::error::chain(error));
        self.shown.push(Peeked { position: position.to_string(), error, ..Peeked::default() });
    }
}

impl Sink for ShopWindow {
    fn recover(&mut self, _confirmed: Lsn) -> Result<(), SinkError> {
        Ok(())
    }

    fn enqueue(&mut self, position: Position, _commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        self.shown.push(Peeked {
            topic: Some(record.topic.to_owned()),
            position: position.to_string(),
            key: record.key.map_or(Value::Null, shown),
            value: record.value.map_or(Value::Null, shown),
            headers: record.headers.iter().map(|(name, value)| (text(name), shown(value))).collect(),
            timestamp: Some(record.timestamp_ms),
            value_bytes: record.value.map_or(0, <[u8]>::len),
            explain: self.explain(record),
            error: record.headers.get(b"walpost_error").map(text),
        });
        Ok(Queued::Accepted)
    }

    fn seal(&mut self, _end: Lsn) {}

    fn durable(&self) -> Lsn {
        Lsn::ZERO
    }

    fn tick(&mut self, _clock_ahead_us: i64) -> Result<(), SinkError> {
        Ok(())
    }

    async fn ready(&self) {}

    fn in_flight(&self) -> (u64, u64) {
        (0, 0)
    }

    fn oldest_commit_us(&self) -> i64 {
        0
    }
}

fn shown(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => serde_json::json!({ "base64": openssl::base64::encode_block(bytes) }),
    }
}
