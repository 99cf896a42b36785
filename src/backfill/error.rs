//! [`BackfillError`], and what is done about it.

use std::error::Error;

use tokio_postgres::error::SqlState;

use crate::{
    config::OutboxConfig,
    error::{Verdict, judge_code, judge_source},
    source::SourceError,
    sql::SqlError,
};

/// Why there is no slot yet, or why rows cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BackfillError {
    /// A link failed or was refused.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// No SQL link.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// The slots could not be looked at.
    #[error("look for the replication slot")]
    Slots(#[source] tokio_postgres::Error),
    /// Rows could not be counted before the slot was there.
    #[error("count the rows that are older than the slot")]
    Count(#[source] tokio_postgres::Error),
    /// Rows could not be counted in the snapshot.
    #[error("count the rows of {table}")]
    Rows {
        /// The outbox.
        table: String,
        /// Why.
        source: SourceError,
    },
    /// A condition is no condition.
    #[error("the backfill condition of {table} cannot be used")]
    Condition {
        /// The outbox.
        table: String,
        /// What the server says.
        source: Box<dyn Error + Send + Sync>,
    },
    /// There are older rows and nobody said what shall become of them.
    #[error(
        "{table} holds {count} rows that are older than the replication slot and so would never be published; say what shall \
         become of them: outbox.backfill = \"all\" publishes them, \"none\" leaves them unpublished, and an SQL condition \
         publishes those that fulfil it"
    )]
    OlderRows {
        /// The outbox.
        table: String,
        /// How many rows.
        count: u64,
    },
    /// Another process works at the same slot.
    #[error("another walpost creates replication slot {0:?} or publishes the rows that are older")]
    Busy(String),
    /// The slot could not get its name.
    #[error("a backfill needs two free replication slots, one of them for a moment, and the server has {0}")]
    TooFewSlots(i64),
    /// The slot's name leaves no room.
    #[error(
        "a backfill needs room in the slot's name: {marker:?} is longer than the 63 characters that Postgres allows; name \
         a shorter one than {slot:?} in postgres.slot"
    )]
    NameTooLong {
        /// The slot.
        slot: String,
        /// What it would be called first.
        marker: String,
    },
    /// Somebody made the slot by hand, though its backfill is not complete.
    #[error(
        "replication slot {slot:?} exists, and so does {marker:?}: its backfill was not completed, and they stand at \
         different positions; to complete it drop {slot:?}, to leave the older rows unpublished drop {marker:?}, with SELECT \
         pg_drop_replication_slot('…')"
    )]
    TwoSlots {
        /// The slot.
        slot: String,
        /// Its name until the backfill is complete.
        marker: String,
    },
    /// There is no such table.
    #[error("table {0} does not exist")]
    NoSuchTable(String),
    /// The configuration has no such outbox.
    #[error("{0} is no outbox of the configuration")]
    NoSuchOutbox(String),
}

impl BackfillError {
    /// An error while rows of an outbox were read: of its condition, where it is one of the SQL in it.
    pub(super) fn rows(outbox: &OutboxConfig, source: SourceError) -> Self {
        let table = outbox.table.to_string();
        match source {
            SourceError::Server(error) if of_the_statement(&error.code) => {
                Self::Condition { table, source: Box::new(error) }
            }
            source => Self::Rows { table, source },
        }
    }
}

/// Syntax, names and values, but not rights: what no retry mends.
fn of_the_statement(code: &str) -> bool {
    (code.starts_with("42") && code != SqlState::INSUFFICIENT_PRIVILEGE.code()) || code.starts_with("22")
}

const GRANT: &str = "run `walpost init` once as the table's owner, or grant what is denied: `walpost init --print` lists it \
     (and a table with row-level security needs a role with BYPASSRLS, since the stream knows no such policies)";

/// What is done about it.
pub fn judge(error: &BackfillError) -> Verdict {
    match error {
        BackfillError::Count(error) | BackfillError::Slots(error)
            if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) =>
        {
            Verdict::Halt(GRANT)
        }
        BackfillError::Rows { source: SourceError::Server(error), .. }
            if error.code == SqlState::INSUFFICIENT_PRIVILEGE.code() =>
        {
            Verdict::Halt(GRANT)
        }
        BackfillError::Source(source) | BackfillError::Rows { source, .. } => judge_source(source),
        BackfillError::Sql(error) => judge_code(error.code()),
        BackfillError::Slots(error) | BackfillError::Count(error) => judge_code(error.code()),
        BackfillError::Busy(_) => Verdict::Retry,
        BackfillError::TooFewSlots(_) => {
            Verdict::RetrySlowly("raise max_replication_slots, or drop slots that nobody reads")
        }
        BackfillError::Condition { .. } => {
            Verdict::Halt("write outbox.backfill as what could stand behind WHERE in a query of that table")
        }
        BackfillError::OlderRows { .. } => Verdict::Halt(
            "set outbox.backfill = \"all\" to publish them first, \"none\" to leave them unpublished, or an SQL condition",
        ),
        BackfillError::NameTooLong { .. }
        | BackfillError::TwoSlots { .. }
        | BackfillError::NoSuchTable(_)
        | BackfillError::NoSuchOutbox(_) => {
            Verdict::Halt("mend it as the error says, then start again; `walpost check` shows everything at once")
        }
    }
}
