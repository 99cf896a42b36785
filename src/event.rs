//! [`OutboxEvent`]: one event as the application wrote it, and its [`Position`] in the log.

use std::fmt;

use crate::lsn::Lsn;

/// Where an event stands: the commit LSN of its transaction, and the event's place among the transaction's events (from 0).
/// The same at every re-send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Position {
    /// LSN of the commit record; grows from transaction to transaction.
    pub commit_lsn: Lsn,
    /// Place in the transaction, from 0.
    pub ordinal: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.commit_lsn, self.ordinal)
    }
}

/// One row of an outbox table, decoded. Borrows the bytes that came from the server.
#[derive(Debug, Clone, Copy)]
pub struct OutboxEvent<'a> {
    /// The event's id, as Postgres prints it.
    pub id: &'a [u8],
    /// The event's type, as Postgres prints it.
    pub event_type: &'a [u8],
    /// The record key; `None` for NULL or no such column.
    pub key: Option<&'a [u8]>,
    /// The payload; `None` for NULL.
    pub payload: Option<&'a [u8]>,
    /// The text of a JSON object whose members become headers.
    pub headers: Option<&'a [u8]>,
    /// Record timestamp, Unix ms, at least 1.
    pub timestamp_ms: i64,
    /// Where it stands.
    pub position: Position,
}
