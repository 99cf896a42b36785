//! [`Stages`]: decode, route, encode and enqueue, bound to the tables as last described.
//!
//! Pure but for the sink it hands records to. A description of a table replaces the binding of that table whole.

use std::collections::HashSet;

use super::{Open, SessionError};
use crate::{
    config::{Config, OnIllegalTopic, OutboxConfig, TableName},
    decode::{DecodeError, Decoder, missing},
    encode::{BadHeaders, Dead, Headers, Record, Unfit},
    fault,
    lsn::Lsn,
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
    /// Its name.
    #[error(transparent)]
    Renamed(#[from] Renamed),
}

/// An outbox table has another name now, and no outbox has that name.
#[derive(Debug, thiserror::Error)]
#[error("it was renamed to {new}, which is no outbox of the configuration, and rows are written to it")]
pub struct Renamed {
    new: String,
}

/// Which tables are the outboxes, as the catalog has it.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    /// Oid and name of each.
    pub outboxes: Vec<(u32, TableName)>,
    /// When: at this position of the WAL.
    pub as_of: Lsn,
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
    at_start: Catalog,
    /// Every table that was an outbox in this process, by oid, with its name then. A description belongs to a connection, an
    /// oid to the database: a session that begins after a renaming hears of the new name only.
    were_outboxes: Vec<(u32, String)>,
    /// Those of them that have another name now: oid, name before, name now.
    renamed: Vec<(u32, String, String)>,
    /// Tables that are no outbox and had a row.
    strangers: HashSet<u32>,
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
        Ok(Self {
            config: config.clone(),
            router,
            tables: Vec::new(),
            at_start: Catalog::default(),
            were_outboxes: Vec::new(),
            renamed: Vec::new(),
            strangers: HashSet::new(),
            headers: Headers::default(),
        })
    }

    /// Forgets all descriptions: they belong to a connection.
    pub fn forget(&mut self) {
        self.tables.clear();
        self.renamed.clear();
    }

    /// Takes in what the catalog says before the first stream.
    pub fn know(&mut self, catalog: Catalog) {
        self.at_start = catalog;
    }

    /// Binds a table by the name that it had when the rows were written, since the server decodes with the catalog of that
    /// time; so a table that was swapped in is followed from its first row on. Rows that were written before the start are
    /// also ours when their table is an outbox by now: whoever renames a table back, or names its new name in the
    /// configuration, means all of its rows. At worst some of a table that was filled before it was swapped in come twice.
    pub(crate) fn describe(&mut self, relation: &Relation, commit_lsn: Lsn) -> Result<(), SessionError> {
        self.tables.retain(|table| table.oid != relation.oid);
        let name = format!("{}.{}", relation.schema, relation.table);
        let failed = |source: TableError| SessionError::Table { table: name.clone(), source };
        self.renamed.retain(|(oid, ..)| *oid != relation.oid);
        let Some(outbox) = self.outbox(relation, commit_lsn) else {
            // no error yet: a table that was swapped out may be emptied or altered, only new rows in it would be missed
            let before = self.were_outboxes.iter().find(|(oid, _)| *oid == relation.oid);
            self.renamed.extend(before.map(|(oid, before)| (*oid, before.clone(), name)));
            return Ok(());
        };
        let decoder = Decoder::new(relation, outbox).map_err(|error| failed(error.into()))?;
        let routes = self.router.bind(&decoder, &name).map_err(|error| failed(error.into()))?;
        let index = |(header, column): &(String, String)| {
            let absent = || missing(relation, column, &format!("header {header:?}"));
            decoder.index_of(column).map(|index| (header.clone(), index)).ok_or_else(|| failed(absent().into()))
        };
        let header_columns = outbox.header_columns.iter().map(index).collect::<Result<_, _>>()?;
        self.were_outboxes.retain(|(oid, _)| *oid != relation.oid);
        self.were_outboxes.push((relation.oid, name));
        self.tables.push(Table { oid: relation.oid, decoder, routes, header_columns });
        Ok(())
    }

    fn outbox(&self, relation: &Relation, commit_lsn: Lsn) -> Option<&OutboxConfig> {
        let outbox = |schema: &str, table: &str| {
            self.config.outboxes.iter().find(|outbox| outbox.table.schema == schema && outbox.table.table == table)
        };
        outbox(&relation.schema, &relation.table).or_else(|| {
            let known = self.at_start.outboxes.iter().filter(|_| commit_lsn < self.at_start.as_of);
            let (_, name) = known.into_iter().find(|(oid, _)| *oid == relation.oid)?;
            outbox(&name.schema, &name.table)
        })
    }

    pub(crate) fn publish<S: Sink>(
        &mut self,
        oid: u32,
        row: Row<'_>,
        open: Open,
        sink: &mut S,
    ) -> Result<Sent, SessionError> {
        let Some(table) = self.tables.iter_mut().find(|table| table.oid == oid) else {
            let renamed = self.renamed.iter().find(|(renamed, ..)| *renamed == oid);
            let Some((_, before, new)) = renamed else {
                return Ok(Sent::NotOurs { first: self.strangers.insert(oid) });
            };
            return Err(SessionError::Table { table: before.clone(), source: Renamed { new: new.clone() }.into() });
        };
        let (position, commit_us, place) = (open.position, open.commit_us, open.place());
        let buries = |error: &PoisonError| {
            let halts =
                matches!(error, PoisonError::Topic(_)) && self.config.route.on_illegal_topic == OnIllegalTopic::Halt;
            self.config.kafka.dead_letter_topic.as_deref().filter(|_| !halts)
        };
        let poison = |event_id: Option<&[u8]>, source: PoisonError| SessionError::Poison {
            event_id: String::from_utf8_lossy(event_id.unwrap_or_default()).into_owned(),
            position,
            source,
        };
        let headers = &mut self.headers;
        let error = match table.decoder.decode(row, position, commit_us) {
            Err(error) => PoisonError::from(error),
            Ok((event, cells)) => {
                let filled = headers.fill(&event, &cells, &table.header_columns).map_err(PoisonError::from);
                let topic = table.routes.topic(event.event_type, &cells);
                let (topic, dead) = match filled.and_then(|()| topic.clone().map_err(PoisonError::from)) {
                    Ok(topic) => (topic, None),
                    Err(error) => match buries(&error) {
                        Some(dead_letter_topic) => (dead_letter_topic, Some(mark(headers, &error, topic.ok()))),
                        None => return Err(poison(Some(event.id), error)),
                    },
                };
                let record = Record {
                    topic,
                    key: event.key,
                    value: event.payload,
                    headers,
                    timestamp_ms: event.timestamp_ms,
                    event_id: event.id,
                    dead,
                };
                fault::point("after_decode");
                return Ok(sink.enqueue(place, commit_us, &record)?.into());
            }
        };
        let rest = table.decoder.rest(row);
        let Some(topic) = buries(&error) else { return Err(poison(rest.id, error)) };
        headers.fill_partly(rest.id, rest.event_type, position);
        let dead = Some(mark(headers, &error, None));
        let record = Record {
            topic,
            key: rest.key,
            value: rest.payload,
            headers,
            timestamp_ms: (commit_us / 1000).max(1),
            event_id: rest.id.unwrap_or_default(),
            dead,
        };
        Ok(sink.enqueue(place, commit_us, &record)?.into())
    }
}

/// Says in the headers of a record why it is dead; `topic` is the one that it was meant for, where that is a legal one.
fn mark<'a>(headers: &mut Headers, error: &PoisonError, topic: Option<&'a str>) -> Dead<'a> {
    let (reason, illegal) = match error {
        PoisonError::Row(_) => ("undecodable", ""),
        PoisonError::Headers(_) => ("bad_headers", ""),
        PoisonError::Topic(RouteError::IllegalTopic { topic, .. }) => ("illegal_topic", topic.as_str()),
        PoisonError::Topic(_) => ("illegal_topic", ""),
    };
    let meant_for = topic.unwrap_or(illegal).as_bytes();
    headers.mark_dead(&Unfit { error: &error.to_string(), topic: meant_for, attempts: 0 });
    Dead { topic: topic.unwrap_or_default(), reason }
}

impl From<Queued> for Sent {
    fn from(queued: Queued) -> Self {
        match queued {
            Queued::Accepted => Self::Yes,
            Queued::Full => Self::Full,
        }
    }
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    Full,
    /// `first`: in this process, of its table.
    NotOurs {
        first: bool,
    },
}
