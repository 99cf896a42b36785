//! [`Stages`]: decode, route, encode and enqueue, bound to the tables as last described.
//!
//! Pure but for the sink it hands records to. A description of a table replaces the binding of that table whole.

use super::{Open, SessionError};
use crate::{
    config::{Config, OutboxConfig},
    decode::{DecodeError, Decoder, missing},
    encode::{BadHeaders, Headers, Record},
    route::{RouteError, Router, Routes},
    sink::{Queued, Sink},
    source::pgoutput::{Relation, Row},
};

/// Why a table does not fit.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Its columns.
    #[error(transparent)]
    Columns(#[from] DecodeError),
    /// Its routes.
    #[error(transparent)]
    Routes(#[from] RouteError),
}

/// Why an event cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum PoisonError {
    /// Its row.
    #[error(transparent)]
    Row(#[from] DecodeError),
    /// Its topic.
    #[error(transparent)]
    Topic(#[from] RouteError),
    /// Its headers.
    #[error(transparent)]
    Headers(#[from] BadHeaders),
}

/// The pure stages between source and sink, bound to the tables as last described.
pub struct Stages {
    config: Config,
    router: Router,
    tables: Vec<Table>,
    headers: Headers,
}

/// One outbox table as last described.
struct Table {
    oid: u32,
    decoder: Decoder,
    routes: Routes,
    header_columns: Vec<(String, usize)>,
}

impl Stages {
    /// Compiles the routes. Tables are bound when the server describes them.
    pub fn new(config: &Config) -> Result<Self, RouteError> {
        let router = Router::new(&config.route)?;
        Ok(Self { config: config.clone(), router, tables: Vec::new(), headers: Headers::default() })
    }

    /// Forgets all descriptions: they belong to a connection.
    pub fn forget(&mut self) {
        self.tables.clear();
    }

    pub(super) fn describe(&mut self, relation: &Relation) -> Result<(), SessionError> {
        self.tables.retain(|table| table.oid != relation.oid);
        let name = format!("{}.{}", relation.schema, relation.table);
        let failed = |source: TableError| SessionError::Table { table: name.clone(), source };
        let ours =
            |outbox: &&OutboxConfig| outbox.table.schema == relation.schema && outbox.table.table == relation.table;
        let Some(outbox) = self.config.outboxes.iter().find(ours) else { return Ok(()) };
        let decoder = Decoder::new(relation, outbox).map_err(|error| failed(error.into()))?;
        let routes = self.router.bind(&decoder, &name).map_err(|error| failed(error.into()))?;
        let index = |(header, column): &(String, String)| {
            let absent = || missing(relation, column, &format!("header {header:?}"));
            decoder.index_of(column).map(|index| (header.clone(), index)).ok_or_else(|| failed(absent().into()))
        };
        let header_columns = outbox.header_columns.iter().map(index).collect::<Result<_, _>>()?;
        self.tables.push(Table { oid: relation.oid, decoder, routes, header_columns });
        Ok(())
    }

    pub(super) fn publish<S: Sink>(
        &mut self,
        oid: u32,
        row: Row<'_>,
        open: Open,
        sink: &mut S,
    ) -> Result<Sent, SessionError> {
        let Some(table) = self.tables.iter_mut().find(|table| table.oid == oid) else { return Ok(Sent::NotOurs) };
        let position = open.position;
        let poison = |event_id: &[u8], source: PoisonError| SessionError::Poison {
            event_id: String::from_utf8_lossy(event_id).into_owned(),
            position,
            source,
        };
        let (event, cells) =
            table.decoder.decode(row, position, open.commit_us).map_err(|error| poison(b"", error.into()))?;
        let topic = table.routes.topic(event.event_type, &cells).map_err(|error| poison(event.id, error.into()))?;
        self.headers.fill(&event, &cells, &table.header_columns).map_err(|error| poison(event.id, error.into()))?;
        let record = Record {
            topic,
            key: event.key,
            value: event.payload,
            headers: &self.headers,
            timestamp_ms: event.timestamp_ms,
            event_id: event.id,
        };
        Ok(match sink.enqueue(position, open.commit_us, &record)? {
            Queued::Accepted => Sent::Yes,
            Queued::Full => Sent::Full,
        })
    }
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    Yes,
    Full,
    NotOurs,
}
