//! [`PollError`], and what is done about it.

use std::time::Duration;

use crate::{
    error::{Verdict, judge_source},
    source::{SourceError, queue::Lack},
};

/// Why polling cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PollError {
    /// The link to Postgres failed.
    #[error(transparent)]
    Source(SourceError),
    /// A right is missing.
    #[error("the role may not read or mark the outbox")]
    Denied(#[source] SourceError),
    /// A table lacks what polling needs.
    #[error("{}", lack(.0))]
    Lack(Lack),
    /// The brokers are away, or slow.
    #[error("kafka has acknowledged nothing for {}: the transaction is not held open any longer", humantime::format_duration(*.waited))]
    Unacknowledged {
        /// How long walpost waited.
        waited: Duration,
    },
    /// Locked rows were not where they were: nothing is marked, and the events come again.
    #[error("{marked} of {expected} rows could be marked, so none is")]
    Unmarked {
        /// How many were to be marked.
        expected: u64,
        /// How many were.
        marked: u64,
    },
}

impl From<Lack> for PollError {
    fn from(lack: Lack) -> Self {
        Self::Lack(lack)
    }
}

impl PollError {
    /// An error of the link, or of the role.
    pub(super) fn of(error: SourceError) -> Self {
        match error {
            SourceError::Server(server) if server.code == "42501" => Self::Denied(SourceError::Server(server)),
            error => Self::Source(error),
        }
    }
}

fn lack(lack: &Lack) -> String {
    match lack {
        Lack::Table(table) => format!("table {table} does not exist"),
        Lack::Column(table, column, role) => {
            format!("table {table} has no column {column:?}, which is mapped to {role}")
        }
    }
}

/// What is done about it.
pub fn judge(error: &PollError) -> Verdict {
    match error {
        PollError::Source(error) => judge_source(error),
        PollError::Denied(_) => Verdict::Halt(
            "run `walpost init` once as the table's owner, then grant the role SELECT on the table and UPDATE of the columns \
             delivered_at and attempts (DELETE too where [retention] is set): `walpost init --print` lists it (and a table with \
             row-level security needs a role with BYPASSRLS)",
        ),
        PollError::Lack(_) => Verdict::Halt(
            "create it with `walpost init`, run once as the table's owner, or map the columns in [outbox.columns]",
        ),
        PollError::Unacknowledged { .. } => Verdict::Retry,
        PollError::Unmarked { .. } => Verdict::RetrySlowly(
            "something keeps walpost from marking rows: look for triggers and rules on the table that turn updates away",
        ),
    }
}
