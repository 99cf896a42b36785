//! The replication source: everything that speaks to the walsender.
//!
//! [`Replication`] is the sole owner of its socket. It yields [`Event`]s in commit order and sends status updates; it knows
//! nothing of Kafka, and decides nothing about what may be confirmed. The hard part is [`Source::peek`]: an event borrows
//! the read buffer and stays there until it is consumed, so that a full sink can leave it where it is while status updates
//! go on.

pub mod feedback;
pub mod pgoutput;
pub mod queue;
pub mod relation;
pub mod rows;
pub mod slot;
pub mod snapshot;
mod startup;
pub mod whereabouts;
mod wire;

use std::{fmt, future::Future, io};

use bytes::BufMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::{backend, frontend};
use tokio::time::Instant;

use crate::{
    clock,
    lsn::Lsn,
    sql::{quote_identifier, quote_literal},
};
use feedback::StatusUpdate;
use pgoutput::{Ignored, Message, ParseError, Relation, Row};
use relation::{Drift, Relations};
pub use startup::{TextRow, WAL_SENDER_TIMEOUT};
pub use wire::{Frame, Wire, frame};

/// What the source yields.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A committed transaction begins.
    Begin {
        /// LSN of its commit record.
        commit_lsn: Lsn,
        /// Commit time, Unix µs by the server's clock.
        commit_us: i64,
        /// When the server sent this, Unix µs by its clock.
        sent_us: i64,
    },
    /// A row was inserted into a published table.
    Insert {
        /// The table, as last described.
        relation: &'a Relation,
        /// The row.
        row: Row<'a>,
    },
    /// The transaction is complete.
    Commit {
        /// The position behind its commit record.
        end_lsn: Lsn,
    },
    /// The server has decoded everything up to here.
    Keepalive {
        /// The position.
        wal_end: Lsn,
        /// When the server sent this, Unix µs by its clock.
        sent_us: i64,
        /// The server wants a status update at once.
        reply_requested: bool,
    },
    /// A table was described, for the first time or anew; what was known of it is void.
    Relation(&'a Relation),
    /// A change that an outbox has no use for.
    Ignored(Ignored),
    /// A logical message (`pg_logical_emit_message`).
    Logical,
}

/// A stream of events that takes status updates: Postgres, or a script in tests.
pub trait Source {
    /// The next event, if it has arrived whole. Stays until [`Self::consume`].
    fn peek(&mut self) -> Result<Option<Event<'_>>, SourceError>;
    /// Drops the event that [`Self::peek`] showed.
    fn consume(&mut self);
    /// Sends what is owed; with `read` returns once more has arrived. Cancel-safe. `behind`: not at the log's end, so
    /// bytes may pile up a moment.
    fn drive(&mut self, read: bool, behind: bool) -> impl Future<Output = Result<(), SourceError>>;
    /// Whether anything waits to be sent.
    fn owes(&self) -> bool;
    /// Puts a status update into the output; [`Self::drive`] sends it.
    fn send_status(&mut self, update: StatusUpdate);
    /// Says goodbye after the last status update and waits for the answer, so that the server has surely read it.
    fn finish(&mut self) -> impl Future<Output = Result<(), SourceError>>;
    /// When anything last arrived.
    fn last_received(&self) -> Instant;
    /// Takes the time in which nothing was read on purpose out of the silence.
    fn forgive_silence(&mut self);
}

/// A replication connection that streams.
pub struct Replication {
    wire: Wire,
    relations: Relations,
}

impl Replication {
    /// Starts the stream at the slot's own confirmed position.
    pub async fn start(mut wire: Wire, slot: &str, publication: &str) -> Result<Self, SourceError> {
        let publication = quote_literal(&quote_identifier(publication));
        let command = format!(
            "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {publication})",
            quote_identifier(slot)
        );
        frontend::query(&command, wire.output()).map_err(SourceError::Io)?;
        wire.send().await?;
        loop {
            match wire.peek().map_err(SourceError::Io)?.map(|frame| (frame.tag, server_error(&frame))) {
                None => wire.drive(true, false).await.map_err(SourceError::Io)?,
                Some((b'W', _)) => break,
                Some((b'E', error)) => return Err(SourceError::Server(error)),
                Some((b'N' | b'S', _)) => wire.consume(),
                Some(_) => return Err(SourceError::Protocol("no CopyBothResponse to START_REPLICATION".into())),
            }
        }
        wire.consume();
        Ok(Self { wire, relations: Relations::default() })
    }

    /// Passes over what is no event; true when a `CopyData` stands in front.
    fn advance_to_data(&mut self) -> Result<bool, SourceError> {
        loop {
            let Some(frame) = self.wire.peek().map_err(SourceError::Io)? else { return Ok(false) };
            match frame.tag {
                b'd' => return Ok(true),
                b'E' => return Err(SourceError::Server(server_error(&frame))),
                b'N' => notice(server_error(&frame))?,
                b'S' => {}
                b'c' | b'C' | b'Z' => return Err(SourceError::EndOfStream),
                tag => {
                    return Err(SourceError::Protocol(format!("unexpected message {:?} in the stream", tag as char)));
                }
            }
            self.wire.consume();
        }
    }
}

impl Source for Replication {
    fn peek(&mut self) -> Result<Option<Event<'_>>, SourceError> {
        if !self.advance_to_data()? {
            return Ok(None);
        }
        let Self { wire, relations } = self;
        let Some(frame) = wire.peek().map_err(SourceError::Io)? else { return Ok(None) };
        copied(frame.body, relations).map(Some)
    }

    fn consume(&mut self) {
        self.wire.consume();
    }

    async fn drive(&mut self, read: bool, behind: bool) -> Result<(), SourceError> {
        self.wire.drive(read, behind).await.map_err(SourceError::Io)
    }

    fn owes(&self) -> bool {
        self.wire.owes()
    }

    fn send_status(&mut self, update: StatusUpdate) {
        let output = self.wire.output();
        output.put_u8(b'd');
        output.put_i32(4 + 1 + 3 * 8 + 8 + 1);
        output.put_u8(b'r');
        output.put_u64(update.received.0); // write
        output.put_u64(update.confirmed.0); // flush: this one moves the slot
        output.put_u64(update.confirmed.0); // apply
        output.put_i64(clock::unix_us() - pgoutput::POSTGRES_EPOCH_US);
        output.put_u8(u8::from(update.request_reply));
    }

    async fn finish(&mut self) -> Result<(), SourceError> {
        frontend::copy_done(self.wire.output());
        self.wire.send().await?;
        // rows that were on their way come first; their transaction will come again
        loop {
            let tag = self.wire.peek().map_err(SourceError::Io)?.map(|frame| frame.tag);
            match tag {
                Some(b'c' | b'C' | b'Z' | b'E') => break,
                Some(_) => self.wire.consume(),
                None => self.wire.drive(true, false).await.map_err(SourceError::Io)?,
            }
        }
        frontend::terminate(self.wire.output());
        self.wire.send().await
    }

    fn last_received(&self) -> Instant {
        self.wire.last_received()
    }

    fn forgive_silence(&mut self) {
        self.wire.forgive_silence();
    }
}

/// What a `CopyData` message of the stream holds.
pub fn copied<'a>(body: &'a [u8], relations: &'a mut Relations) -> Result<Event<'a>, SourceError> {
    match body.split_first() {
        Some((b'w', body)) => xlog_data(body, relations),
        Some((b'k', body)) => keepalive(body),
        _ => Err(SourceError::Protocol("unknown kind of CopyData in the stream".into())),
    }
}

fn xlog_data<'a>(body: &'a [u8], relations: &'a mut Relations) -> Result<Event<'a>, SourceError> {
    // start and end LSN are the item's own, or 0/0; neither says anything that may be confirmed
    let (Some(sent), Some(data)) = (be_u64(body, 16), body.get(24..)) else {
        return Err(SourceError::Protocol("XLogData without its header".into()));
    };
    Ok(match pgoutput::parse(data)? {
        Message::Begin { commit_lsn, commit_us } => Event::Begin { commit_lsn, commit_us, sent_us: unix_us(sent) },
        Message::Commit { end_lsn, .. } => Event::Commit { end_lsn },
        Message::Insert { relation, row } => {
            let Some(relation) = relations.get(relation) else {
                return Err(SourceError::Protocol(format!("a row of relation {relation}, which was not described")));
            };
            Event::Insert { relation, row }
        }
        Message::Relation(relation) => {
            let oid = relation.oid;
            let name = format!("{}.{}", relation.schema, relation.table);
            if let Drift::Changed(what) = relations.replace(relation) {
                tracing::info!(table = name, what, "table changed");
            }
            relations.get(oid).map(Event::Relation).ok_or(SourceError::EndOfStream)?
        }
        Message::Logical { .. } => Event::Logical,
        Message::Ignored(kind) => Event::Ignored(kind),
    })
}

fn keepalive(body: &[u8]) -> Result<Event<'static>, SourceError> {
    let (Some(wal_end), Some(sent), Some(reply)) = (be_u64(body, 0), be_u64(body, 8), body.get(16)) else {
        return Err(SourceError::Protocol("a keepalive that is too short".into()));
    };
    Ok(Event::Keepalive { wal_end: Lsn(wal_end), sent_us: unix_us(sent), reply_requested: *reply != 0 })
}

fn be_u64(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|chunk| u64::from_be_bytes(*chunk))
}

fn unix_us(postgres_us: u64) -> i64 {
    postgres_us.cast_signed().saturating_add(pgoutput::POSTGRES_EPOCH_US)
}

/// From 18 on the server only *warns* that it cannot load a publication, and skips the rows.
fn notice(error: ServerError) -> Result<(), SourceError> {
    if error.routine == "LoadPublications" {
        return Err(SourceError::PublicationMissing(error));
    }
    tracing::warn!(code = error.code, notice = error.message, "notice from the server");
    Ok(())
}

fn server_error(frame: &Frame<'_>) -> ServerError {
    if !matches!(frame.tag, b'E' | b'N') {
        return ServerError::default();
    }
    let mut whole = bytes::BytesMut::with_capacity(frame.body.len() + 5);
    whole.put_u8(frame.tag);
    whole.put_u32(u32::try_from(frame.body.len() + 4).unwrap_or(u32::MAX));
    whole.extend_from_slice(frame.body);
    match backend::Message::parse(&mut whole) {
        Ok(Some(backend::Message::ErrorResponse(body))) => ServerError::from_fields(body.fields()),
        Ok(Some(backend::Message::NoticeResponse(body))) => ServerError::from_fields(body.fields()),
        _ => ServerError::default(),
    }
}

/// What the server said in an `ErrorResponse` or `NoticeResponse`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerError {
    /// The SQLSTATE.
    pub code: String,
    /// The message, in the server's language.
    pub message: String,
    /// More about it; may be empty.
    pub detail: String,
    /// The server's routine that raised it: stable across languages.
    pub routine: String,
}

impl ServerError {
    fn from_fields(mut fields: backend::ErrorFields<'_>) -> Self {
        let mut error = Self::default();
        while let Ok(Some(field)) = fields.next() {
            let text = || String::from_utf8_lossy(field.value_bytes()).into_owned();
            match field.type_() {
                b'C' => error.code = text(),
                b'M' => error.message = text(),
                b'D' => error.detail = text(),
                b'R' => error.routine = text(),
                _ => {}
            }
        }
        error
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.code)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

impl std::error::Error for ServerError {}

/// Why the source cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No connection came about.
    #[error("connect to {host}")]
    Connect {
        /// The host.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error("agree on TLS with {host}")]
    Tls {
        /// The host.
        host: String,
        /// Why.
        source: openssl::ssl::Error,
    },
    /// TLS is demanded and the server has none.
    #[error("{host} does not speak TLS, but sslmode demands it")]
    NoTls {
        /// The host.
        host: String,
    },
    /// The password file cannot be read.
    #[error("read postgres.password_file")]
    PasswordFile(#[source] io::Error),
    /// The server or its demands do not fit our settings.
    #[error("{0}")]
    Refused(String),
    /// No host had the wanted `target_session_attrs`.
    #[error("no host has the wanted target_session_attrs")]
    WrongSessionAttrs,
    /// The link broke.
    #[error("the replication link broke")]
    Io(#[source] io::Error),
    /// The server answered with an error.
    #[error("the server refused")]
    Server(#[source] ServerError),
    /// The server skips rows, since it cannot load the publication.
    #[error("the server cannot load the publication and skips its rows")]
    PublicationMissing(#[source] ServerError),
    /// The server ended the stream.
    #[error("the server ended the replication stream")]
    EndOfStream,
    /// Nothing arrived for too long, though we asked.
    #[error("the replication link is silent: nothing arrived for {} s", feedback::LOST_AFTER.as_secs())]
    Silent,
    /// The session does not publish what was attached to a table while it ran.
    #[error("partitions were attached while the session ran, which on Postgres 14 may go on not publishing them")]
    Outdated,
    /// The server shuts down and waits for what we cannot confirm yet.
    #[error("the server is shutting down")]
    ServerStopping,
    /// The server sent what the protocol does not allow.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A pgoutput message is malformed.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The slot does not exist.
    #[error("replication slot {0:?} does not exist")]
    SlotMissing(String),
    /// Another session is creating the slot, which waits for all running transactions.
    #[error("replication slot {0:?} is still being created")]
    SlotUnfinished(String),
    /// The slot can no longer be read.
    #[error("replication slot {slot:?} is lost: {reason}")]
    SlotLost {
        /// Its name.
        slot: String,
        /// What the server says.
        reason: String,
    },
    /// The address leads to another cluster than before.
    #[error("the server is another one: its system identifier is {now}, that of the one before was {before}")]
    OtherSystem {
        /// The identifier of the cluster that this process has streamed from.
        before: String,
        /// The identifier now.
        now: String,
    },
    /// The slot is not one that walpost can use.
    #[error("replication slot {slot:?} cannot be used: {reason}")]
    SlotForeign {
        /// Its name.
        slot: String,
        /// Why.
        reason: String,
    },
}
