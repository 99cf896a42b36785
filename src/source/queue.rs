//! [`Queue`]: the rows of outbox tables that are not delivered yet, claimed under lock and marked in the same transaction.
//!
//! An SQL connection ([`Rows`]). It decides nothing: what is marked is what it is told.
//! The hard part is who may come when: rows that another process holds are skipped, and rows of a key wait behind one whose
//! delivery failed before.

use super::{
    SourceError,
    pgoutput::{Cell, Relation, Row},
    rows::{self, Rows, describe},
    server_error,
};
use crate::{
    config::OutboxConfig,
    conninfo::ConnInfo,
    sql::{quote_identifier, quote_literal},
};

/// `pg_type.oid` of json, which has no equality.
const JSON: u32 = 114;

/// What the walsender would call columns of a row that are none of the table's: where it lies, and when it was written.
const OWN_CELLS: u16 = 3;

/// Which of the undelivered rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Those that nobody tried to deliver.
    Fresh,
    /// Those whose delivery failed before; the least tried ones first.
    Failed,
}

/// Where a row lies; of a row that is locked this does not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The partition, or the table itself.
    table: u32,
    ctid: String,
}

/// A claimed row.
pub struct Claimed<'a> {
    /// Its table.
    pub relation: &'a Relation,
    /// Its cells.
    pub row: Row<'a>,
    /// Its event's id, as Postgres prints it.
    pub id: Option<&'a [u8]>,
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its timestamp in Unix µs, where the table has one.
    pub created_us: Option<i64>,
    /// Where it lies.
    pub place: Place,
}

/// What a table holds as a transaction begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Found {
    /// Undelivered rows whose delivery failed before; counted to [`COUNTED`].
    pub failed: u64,
    /// Timestamp of the first undelivered row, Unix µs.
    pub oldest_us: Option<i64>,
    /// The server's clock, Unix µs.
    pub now_us: i64,
}

/// So many failed rows are counted.
pub const COUNTED: u64 = 1000;

/// What a column is needed for, where a table lacks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// The table itself.
    Table(String),
    /// A column: table, column, what it is mapped to.
    Column(String, String, &'static str),
}

/// One table.
struct Table {
    relation: Relation,
    name: String,
    delivered_at: String,
    attempts: String,
    /// Quoted columns of the order.
    order: Vec<String>,
    /// Timestamp in µs as an SQL expression.
    created_us: String,
    id: Option<usize>,
    key: Option<usize>,
    /// A condition that no failed row of the same key stands before a row.
    not_held: Option<String>,
}

/// A connection to the tables.
pub struct Queue {
    rows: Rows,
    tables: Vec<Table>,
    /// The table whose rows come now.
    table: usize,
}

impl Queue {
    /// Connects, looks at the tables, and listens on the channel.
    pub async fn connect(
        info: &ConnInfo,
        outboxes: &[OutboxConfig],
        channel: Option<&str>,
    ) -> Result<Result<Self, Lack>, SourceError> {
        let mut rows = Rows::connect(info, "").await?;
        if let Some(channel) = channel {
            rows.wire().query(&format!("LISTEN {}", quote_identifier(channel))).await?;
        }
        let mut tables = Vec::new();
        for outbox in outboxes {
            let Some(relation) = describe(rows.wire(), &outbox.table).await? else {
                return Ok(Err(Lack::Table(outbox.table.to_string())));
            };
            match Table::new(relation, outbox) {
                Ok(table) => tables.push(table),
                Err(lack) => return Ok(Err(lack)),
            }
        }
        Ok(Ok(Self { rows, tables, table: 0 }))
    }

    /// The tables, as they are described, in the order of the configuration.
    pub fn relations(&self) -> impl Iterator<Item = &Relation> {
        self.tables.iter().map(|table| &table.relation)
    }

    /// How many tables there are.
    pub fn len(&self) -> usize {
        self.tables.len()
    }

    /// Never: a configuration has at least one.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Begins a transaction for the rows of a table.
    pub async fn begin(&mut self, table: usize) -> Result<Found, SourceError> {
        self.table = table;
        let of = &self.tables[table];
        let sql = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; \
             SELECT (SELECT count(*) FROM (SELECT FROM {name} WHERE {delivered} IS NULL AND {attempts} > 0 LIMIT {COUNTED}) f), \
             (SELECT {created} FROM {name} t WHERE {delivered} IS NULL ORDER BY {order} LIMIT 1), \
             (extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
            name = of.name,
            delivered = of.delivered_at,
            attempts = of.attempts,
            created = of.created_us,
            order = of.order.join(", "),
        );
        let rows = self.rows.wire().query(&sql).await?;
        let number = |index: usize| rows.last()?.get(index)?.as_deref()?.parse::<i64>().ok();
        Ok(Found {
            failed: number(0).unwrap_or(0).unsigned_abs(),
            oldest_us: number(1),
            now_us: number(2).ok_or_else(|| SourceError::Protocol("no clock".into()))?,
        })
    }

    /// Asks for rows of the table; they come by [`Self::peek`]. `held`: rows may wait behind failed ones of their key.
    pub fn ask(&mut self, which: Which, held: bool, limit: u32) -> Result<(), SourceError> {
        let sql = self.tables[self.table].claim(which, held, limit);
        self.rows.ask(&sql)
    }

    /// The row in front, if it has arrived. Stays until [`Self::consume`].
    pub fn peek(&mut self) -> Result<Option<Claimed<'_>>, SourceError> {
        let table = &self.tables[self.table];
        self.rows.peek()?.map(|(cells, count)| table.claimed(cells, count)).transpose()
    }

    /// Drops the row that [`Self::peek`] showed.
    pub fn consume(&mut self) {
        self.rows.consume();
    }

    /// Whether all rows that were asked for have been read.
    pub fn is_exhausted(&self) -> bool {
        self.rows.is_exhausted()
    }

    /// Sends what is asked, and returns once more has arrived. Cancel-safe.
    pub async fn drive(&mut self) -> Result<(), SourceError> {
        self.rows.drive().await
    }

    /// Reads what is under way to its end.
    pub async fn settle(&mut self) -> Result<(), SourceError> {
        self.rows.settle().await
    }

    /// Marks rows as delivered, and others as tried in vain; the number of rows that were marked.
    pub async fn mark(&mut self, delivered: &[&Place], failed: &[&Place]) -> Result<u64, SourceError> {
        let of = &self.tables[self.table];
        let done = format!("{} = clock_timestamp()", of.delivered_at);
        let tried = format!("{0} = coalesce({0}, 0) + 1", of.attempts);
        let mut statements = of.updates(&done, delivered);
        statements.extend(of.updates(&tried, failed));
        let mut marked = 0;
        for sql in statements {
            let rows = self.rows.wire().query(&sql).await?;
            let count = rows.first().and_then(|row| row.first()?.as_deref()?.parse::<u64>().ok());
            marked += count.ok_or_else(|| SourceError::Protocol("no count".into()))?;
        }
        Ok(marked)
    }

    /// Ends the transaction.
    pub async fn commit(&mut self) -> Result<(), SourceError> {
        self.rows.wire().query("COMMIT").await.map(|_| ())
    }

    /// Ends the transaction as if nothing had been marked.
    pub async fn rollback(&mut self) -> Result<(), SourceError> {
        self.rows.wire().query("ROLLBACK").await.map(|_| ())
    }

    /// Deletes rows that were delivered so many µs ago or earlier, in a transaction of its own; how many.
    pub async fn prune(&mut self, table: usize, keep_us: u128, limit: u32) -> Result<u64, SourceError> {
        let rows = self.rows.wire().query(&self.tables[table].prune(keep_us, limit)).await?;
        let count = rows.first().and_then(|row| row.first()?.as_deref()?.parse().ok());
        count.ok_or_else(|| SourceError::Protocol("no count".into()))
    }

    /// Whether somebody has notified since the last question.
    pub fn take_notification(&mut self) -> bool {
        self.rows.wire().take_notification()
    }

    /// Returns once somebody notifies, outside of a transaction. Cancel-safe.
    pub async fn notified(&mut self) -> Result<(), SourceError> {
        loop {
            let wire = self.rows.wire();
            while let Some(frame) = wire.peek().map_err(SourceError::Io)? {
                if frame.tag == b'E' {
                    return Err(SourceError::Server(server_error(&frame)));
                }
                let tag = frame.tag;
                wire.note_notification(tag);
                wire.consume();
            }
            if wire.take_notification() {
                return Ok(());
            }
            self.drive().await?;
        }
    }
}

impl Table {
    fn new(relation: Relation, outbox: &OutboxConfig) -> Result<Self, Lack> {
        let (columns, poll) = (&outbox.columns, &outbox.poll);
        let place = |name: &str| relation.columns.iter().position(|column| column.name == name);
        let name = outbox.table.to_string();
        let mut needed = vec![(&poll.delivered_at, "delivered_at"), (&poll.attempts, "attempts"), (&columns.id, "id")];
        needed.extend(poll.order.as_ref().map(|order| (order, "order")));
        for (column, role) in needed {
            if place(column).is_none() {
                return Err(Lack::Column(name, column.clone(), role));
            }
        }
        let timestamp = &columns.timestamp.name;
        let has_time = rows::has_time(&relation, timestamp);
        let order = match &poll.order {
            Some(order) => vec![order.as_str()],
            None => rows::order(&relation, &columns.id, timestamp),
        };
        let created_us = match relation.columns.iter().find(|column| column.name == *timestamp && has_time) {
            None => "NULL::bigint".to_owned(),
            Some(column) => created_us(&quote_identifier(timestamp), column.type_oid == 20),
        };
        let order: Vec<String> = order.into_iter().map(quote_identifier).collect();
        let (delivered_at, attempts) = (quote_identifier(&poll.delivered_at), quote_identifier(&poll.attempts));
        let key = place(&columns.key.name);
        let not_held = key.map(|index| {
            let cast = if relation.columns[index].type_oid == JSON { "::text" } else { "" };
            let key = quote_identifier(&columns.key.name);
            let of = |alias: &str| order.iter().map(|it| format!("{alias}.{it}")).collect::<Vec<_>>().join(", ");
            format!(
                "NOT EXISTS (SELECT FROM {name} f WHERE f.{delivered_at} IS NULL AND f.{attempts} > 0 \
                 AND f.{key}{cast} = t.{key}{cast} AND ({}) < ({}))",
                of("f"),
                of("t")
            )
        });
        let id = place(&columns.id);
        Ok(Self { relation, name, delivered_at, attempts, order, created_us, id, key, not_held })
    }

    fn claim(&self, which: Which, held: bool, limit: u32) -> String {
        let columns: Vec<_> =
            self.relation.columns.iter().map(|it| format!("t.{}", quote_identifier(&it.name))).collect();
        let attempts = &self.attempts;
        let (tried, first) = match which {
            Which::Fresh => (format!("(t.{attempts} = 0 OR t.{attempts} IS NULL)"), None),
            Which::Failed => (format!("t.{attempts} > 0"), Some(attempts)),
        };
        let not_held = self.not_held.as_ref().filter(|_| held).map(|sql| format!(" AND {sql}")).unwrap_or_default();
        let order: Vec<_> = first.into_iter().chain(&self.order).map(|it| format!("t.{it}")).collect();
        format!(
            "SELECT {}, t.tableoid, t.ctid, {} FROM {} t WHERE t.{} IS NULL AND {tried}{not_held} ORDER BY {} LIMIT {limit} \
             FOR UPDATE OF t SKIP LOCKED",
            columns.join(", "),
            self.created_us,
            self.name,
            self.delivered_at,
            order.join(", ")
        )
    }

    fn claimed<'a>(&'a self, cells: &'a [u8], count: u16) -> Result<Claimed<'a>, SourceError> {
        let bad = || SourceError::Protocol("a claimed row without its place".into());
        let columns = count.checked_sub(OWN_CELLS).ok_or_else(bad)?;
        let row = Row::of_cells(cells, columns);
        let (mut id, mut key, mut own) = (None, None, [None; OWN_CELLS as usize]);
        for (index, cell) in Row::of_cells(cells, count).cells().enumerate() {
            let Cell::Text(text) = cell else { continue };
            if Some(index) == self.id {
                id = Some(text);
            }
            if Some(index) == self.key {
                key = Some(text);
            }
            if let Some(own) = index.checked_sub(usize::from(columns)).and_then(|index| own.get_mut(index)) {
                *own = std::str::from_utf8(text).ok();
            }
        }
        let [Some(table), Some(ctid), created_us] = own else { return Err(bad()) };
        Ok(Claimed {
            relation: &self.relation,
            row,
            id,
            key,
            created_us: created_us.and_then(|micros| micros.parse().ok()),
            place: Place { table: table.parse().map_err(|_| bad())?, ctid: ctid.to_owned() },
        })
    }

    /// One statement for each partition.
    fn updates(&self, set: &str, places: &[&Place]) -> Vec<String> {
        let mut partitions: Vec<u32> = places.iter().map(|place| place.table).collect();
        partitions.sort_unstable();
        partitions.dedup();
        let update = |partition: u32| {
            let ctids = places.iter().filter(|place| place.table == partition);
            let ctids: Vec<_> = ctids.map(|place| format!("\"{}\"", place.ctid)).collect();
            let ctids = quote_literal(&format!("{{{}}}", ctids.join(",")));
            format!(
                "WITH marked AS (UPDATE {} t SET {set} WHERE t.tableoid = {partition} AND t.ctid = ANY ({ctids}::tid[]) \
                 RETURNING 1) SELECT count(*) FROM marked",
                self.name
            )
        };
        partitions.into_iter().map(update).collect()
    }

    fn prune(&self, keep_us: u128, limit: u32) -> String {
        let (name, delivered_at) = (&self.name, &self.delivered_at);
        format!(
            "WITH pruned AS (DELETE FROM {name} t WHERE (t.tableoid, t.ctid) IN \
             (SELECT tableoid, ctid FROM {name} WHERE {delivered_at} < clock_timestamp() - {keep_us} * interval '1 microsecond' \
             ORDER BY {delivered_at} LIMIT {limit} FOR UPDATE SKIP LOCKED) RETURNING 1) SELECT count(*) FROM pruned"
        )
    }
}

/// A time column as µs since 1970, within what a bigint holds; NULL for infinity.
fn created_us(column: &str, unix_millis: bool) -> String {
    let clamped = |micros: String| format!("least(greatest({micros}, 0), 900000000000000000)::bigint");
    if unix_millis {
        return clamped(format!("t.{column}::numeric * 1000"));
    }
    let micros = clamped(format!("extract(epoch FROM t.{column}) * 1000000"));
    format!("CASE WHEN isfinite(t.{column}) THEN {micros} END")
}
