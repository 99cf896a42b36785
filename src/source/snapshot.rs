//! [`Snapshot`]: the rows of tables as one snapshot of the database has them, in the form in which the walsender sends rows.
//!
//! An SQL connection with one read-only transaction. It owns a [`Wire`] and not the driver of `tokio-postgres`, since that
//! asks for values in binary form, and decodes text as UTF-8; a backfilled record is to hold the same bytes as a streamed one.
//! Rows come through a cursor, in chunks, and from the socket only as they are asked for, so memory is that of one row.

use postgres_protocol::message::frontend;

use super::{
    SourceError, TextRow, Wire,
    pgoutput::{Column, Relation, Row},
    server_error,
};
use crate::{
    config::TableName,
    conninfo::ConnInfo,
    lsn::Lsn,
    sql::{WAL_END, quote_identifier, quote_literal},
};

/// Rows of one FETCH: what has to be read to its end when the reader begins anew elsewhere.
const CHUNK: u64 = 2000;

/// Type oids (`pg_type.dat`) of numbers, and of what a timestamp column may hold.
pub(super) const NUMBERS: [u32; 4] = [20, 21, 23, 1700];
pub(super) const TIMES: [u32; 4] = [20, 1082, 1114, 1184];

/// A policy on rows would hide some without a word, so it has to be an error; the plan is for all rows, not for the first
/// ones; and since 17 a timeout might end the transaction.
const SETTINGS: &str = "SET row_security = off; SET cursor_tuple_fraction = 1; \
     SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'";

/// Which rows of a table.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The table.
    pub table: TableName,
    /// Its id column: the order, where it counts up.
    pub id: String,
    /// Its timestamp column, if it has one: the order before the id, where that does not count up.
    pub timestamp: String,
    /// An SQL condition; `None` for all rows.
    pub condition: Option<String>,
}

impl Selection {
    /// `FROM … WHERE …`
    pub fn from(&self) -> String {
        match &self.condition {
            None => format!("FROM {}", self.table),
            // the line break ends a comment in the condition
            Some(condition) => format!("FROM {} WHERE ({condition}\n)", self.table),
        }
    }
}

/// A table whose rows are read.
struct Table {
    relation: Relation,
    /// The rows in their order.
    query: String,
    count: u64,
}

/// A connection that holds a snapshot, and its place among the rows of all tables.
pub struct Snapshot {
    wire: Wire,
    tables: Vec<Table>,
    /// The table whose rows come now.
    table: usize,
    /// A query is under way.
    asked: bool,
    /// Rows of the present chunk so far.
    in_chunk: u64,
    /// The row in front, as pgoutput writes it; its number of cells.
    front: Option<u16>,
    row: Vec<u8>,
}

impl Snapshot {
    /// Connects; there is no snapshot before [`Self::begin`].
    pub async fn connect(info: &ConnInfo) -> Result<Self, SourceError> {
        let mut wire = Wire::connect_for_sql(info).await?;
        wire.query(SETTINGS).await?;
        Ok(Self { wire, tables: Vec::new(), table: 0, asked: false, in_chunk: 0, front: None, row: Vec::new() })
    }

    /// Takes a lock of this name that lasts as long as the connection; false when another process has it.
    pub async fn lock(&mut self, name: &str) -> Result<bool, SourceError> {
        let sql = format!("SELECT pg_try_advisory_lock(hashtext('walpost'), hashtext({}))", quote_literal(name));
        Ok(first(&self.wire.query(&sql).await?) == Some("t"))
    }

    /// The connection, for questions outside of the transaction.
    pub fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Begins the transaction: in a snapshot that another connection exports, else in one of its own.
    pub async fn begin(&mut self, exported: Option<&str>) -> Result<(), SourceError> {
        self.wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        if let Some(snapshot) = exported {
            self.wire.query(&format!("SET TRANSACTION SNAPSHOT {}", quote_literal(snapshot))).await?;
        }
        Ok(())
    }

    /// Counts rows in the snapshot.
    pub async fn count(&mut self, selection: &Selection) -> Result<u64, SourceError> {
        let rows = self.wire.query(&format!("SELECT count(*) {}", selection.from())).await?;
        first(&rows).and_then(|count| count.parse().ok()).ok_or_else(|| SourceError::Protocol("no count".into()))
    }

    /// Where the WAL ends now.
    pub async fn wal_end(&mut self) -> Result<Lsn, SourceError> {
        let rows = self.wire.query(&format!("SELECT {WAL_END}")).await?;
        first(&rows).and_then(|lsn| lsn.parse().ok()).ok_or_else(|| SourceError::Protocol("no position".into()))
    }

    /// Adds rows to what is read, `count` of them; false when there is no such table.
    pub async fn add(&mut self, selection: &Selection, count: u64) -> Result<bool, SourceError> {
        let Some(relation) = describe(&mut self.wire, &selection.table).await? else { return Ok(false) };
        let columns: Vec<_> = relation.columns.iter().map(|column| quote_identifier(&column.name)).collect();
        let order = order(&relation, selection);
        let query = format!("SELECT {} {} ORDER BY {order}", columns.join(", "), selection.from());
        self.tables.push(Table { relation, query, count });
        Ok(true)
    }

    /// The tables, as they are described.
    pub fn relations(&self) -> impl Iterator<Item = &Relation> {
        self.tables.iter().map(|table| &table.relation)
    }

    /// How many rows there are of each table.
    pub fn counts(&self) -> Vec<(String, u64)> {
        let name = |relation: &Relation| format!("{}.{}", relation.schema, relation.table);
        self.tables.iter().map(|table| (name(&table.relation), table.count)).collect()
    }

    /// How many rows there are in all.
    pub fn total(&self) -> u64 {
        self.tables.iter().map(|table| table.count).sum()
    }

    /// Goes to the row of this number, counted from 0 through all tables.
    pub async fn seek(&mut self, number: u64) -> Result<(), SourceError> {
        self.settle().await?;
        self.wire.query("CLOSE ALL").await?;
        let mut offset = number;
        self.table = 0;
        while let Some(table) = self.tables.get(self.table)
            && offset >= table.count
        {
            offset -= table.count;
            self.table += 1;
        }
        self.ask_for_table(offset)
    }

    /// Reads what is under way to its end.
    async fn settle(&mut self) -> Result<(), SourceError> {
        self.front = None;
        while self.asked {
            match self.wire.peek().map_err(SourceError::Io)?.map(|frame| (frame.tag, server_error(&frame))) {
                None => self.drive().await?,
                Some((b'E', error)) => return Err(SourceError::Server(error)),
                Some((tag, _)) => {
                    self.wire.consume();
                    self.asked = tag != b'Z';
                }
            }
        }
        Ok(())
    }

    /// The row in front, if it has arrived, with its table. Stays until [`Self::consume`].
    pub fn peek(&mut self) -> Result<Option<(&Relation, Row<'_>)>, SourceError> {
        while self.front.is_none() {
            let Some(frame) = self.wire.peek().map_err(SourceError::Io)? else { return Ok(None) };
            match frame.tag {
                b'D' => self.front = Some(write_cells(frame.body, &mut self.row)?),
                b'E' => return Err(SourceError::Server(server_error(&frame))),
                tag => {
                    self.wire.consume();
                    if tag == b'Z' {
                        self.asked = false;
                        self.ask_for_more()?;
                    }
                }
            }
        }
        let Some(table) = self.tables.get(self.table) else { return Ok(None) };
        Ok(self.front.map(|count| (&table.relation, Row::of_cells(&self.row, count))))
    }

    /// Drops the row that [`Self::peek`] showed.
    pub fn consume(&mut self) {
        if self.front.take().is_some() {
            self.wire.consume();
            self.in_chunk += 1;
        }
    }

    /// Whether all rows were read.
    pub fn is_exhausted(&self) -> bool {
        self.table >= self.tables.len()
    }

    /// Sends what is asked, and returns once more has arrived. Cancel-safe.
    pub async fn drive(&mut self) -> Result<(), SourceError> {
        self.wire.drive(true, false).await.map_err(SourceError::Io)
    }

    fn ask_for_more(&mut self) -> Result<(), SourceError> {
        if self.in_chunk >= CHUNK {
            return self.ask(&format!("FETCH {CHUNK} FROM walpost"));
        }
        self.table += 1;
        self.ask_for_table(0)
    }

    fn ask_for_table(&mut self, offset: u64) -> Result<(), SourceError> {
        let Some(table) = self.tables.get(self.table) else { return Ok(()) };
        let skip = if offset > 0 { format!("MOVE FORWARD {offset} IN walpost; ") } else { String::new() };
        let declare = format!("DECLARE walpost NO SCROLL CURSOR FOR {}", table.query);
        self.ask(&format!("CLOSE ALL; {declare}; {skip}FETCH {CHUNK} FROM walpost"))
    }

    fn ask(&mut self, sql: &str) -> Result<(), SourceError> {
        (self.asked, self.in_chunk) = (true, 0);
        frontend::query(sql, self.wire.output()).map_err(SourceError::Io)
    }
}

fn first(rows: &[TextRow]) -> Option<&str> {
    rows.first()?.first()?.as_deref()
}

/// The table as pgoutput describes it: types of columns as they are declared, and no generated ones.
pub(super) async fn describe(wire: &mut Wire, table: &TableName) -> Result<Option<Relation>, SourceError> {
    let sql = format!(
        "SELECT c.oid, a.attname, a.atttypid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' \
         WHERE n.nspname = {} AND c.relname = {} ORDER BY a.attnum",
        quote_literal(&table.schema),
        quote_literal(&table.table)
    );
    let rows = wire.query(&sql).await?;
    let number = |row: &TextRow, index: usize| row.get(index)?.as_deref()?.parse::<u32>().ok();
    let column = |row: &TextRow| Some(Column { name: row.get(1)?.clone()?, type_oid: number(row, 2)? });
    let Some(oid) = rows.first().and_then(|row| number(row, 0)) else { return Ok(None) };
    let columns = rows.iter().filter_map(column).collect();
    Ok(Some(Relation { oid, schema: table.schema.clone(), table: table.table.clone(), columns }))
}

/// By id where ids are numbers, since those count up; else by time, then id. The last two make the order the same each time.
fn order(relation: &Relation, selection: &Selection) -> String {
    let is = |name: &str, types: &[u32]| {
        relation.columns.iter().any(|column| column.name == name && types.contains(&column.type_oid))
    };
    let mut columns = vec![quote_identifier(&selection.id)];
    if !is(&selection.id, &NUMBERS) && is(&selection.timestamp, &TIMES) {
        columns.insert(0, quote_identifier(&selection.timestamp));
    }
    columns.extend(["tableoid", "ctid"].map(str::to_owned));
    columns.join(", ")
}

/// Writes a `DataRow` as pgoutput writes a row; the number of its cells.
pub(super) fn write_cells(body: &[u8], cells: &mut Vec<u8>) -> Result<u16, SourceError> {
    let bad = || SourceError::Protocol("malformed DataRow".into());
    cells.clear();
    cells.shrink_to(64 * 1024);
    let (count, mut rest) = body.split_first_chunk::<2>().ok_or_else(bad)?;
    let count = u16::from_be_bytes(*count);
    for _ in 0..count {
        let (length, behind) = rest.split_first_chunk::<4>().ok_or_else(bad)?;
        rest = behind;
        let Ok(size) = usize::try_from(i32::from_be_bytes(*length)) else {
            cells.push(b'n');
            continue;
        };
        let value;
        (value, rest) = rest.split_at_checked(size).ok_or_else(bad)?;
        cells.push(b't');
        cells.extend_from_slice(length);
        cells.extend_from_slice(value);
    }
    if rest.is_empty() { Ok(count) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::pgoutput::Cell;

    #[test]
    fn a_row_of_sql_reads_as_one_of_the_stream() {
        let mut cells = Vec::new();
        let body = b"\0\x03\xff\xff\xff\xff\0\0\0\0\0\0\0\x02\xff\0";
        let count = write_cells(body, &mut cells).unwrap();
        let row: Vec<_> = Row::of_cells(&cells, count).cells().collect();
        assert_eq!(row, [Cell::Null, Cell::Text(b""), Cell::Text(b"\xff\0")]);
    }

    #[test]
    fn a_malformed_row_is_an_error() {
        for body in [&b""[..], b"\0", b"\0\x01", b"\0\x01\0\0\0\x02a", b"\0\x01\0\0\0\x01ab", b"\0\x01\x7f\xff\xff\xff"]
        {
            assert!(write_cells(body, &mut Vec::new()).is_err(), "{body:?}");
        }
    }

    #[test]
    fn ids_that_are_numbers_are_the_order_and_others_come_after_the_time() {
        let column = |name: &str, type_oid| Column { name: name.into(), type_oid };
        let order_of = |id, time| {
            let columns = vec![column("id", id), column("at", time)];
            let relation = Relation { oid: 1, schema: "s".into(), table: "t".into(), columns };
            let table = TableName { schema: "s".into(), table: "t".into() };
            let selection = Selection { table, id: "id".into(), timestamp: "at".into(), condition: None };
            order(&relation, &selection)
        };
        assert_eq!(order_of(20, 1184), r#""id", tableoid, ctid"#);
        assert_eq!(order_of(2950, 1184), r#""at", "id", tableoid, ctid"#);
        assert_eq!(order_of(2950, 25), r#""id", tableoid, ctid"#);
    }
}
