//! [`Rows`]: the rows of SQL queries in the form in which the walsender sends rows, one at a time.
//!
//! It owns a [`Wire`] and not the driver of `tokio-postgres`, since that asks for values in binary form, and decodes text as
//! UTF-8; a record made of such a row is to hold the same bytes as a streamed one. Rows come from the socket only as they are
//! asked for, so memory is that of one row.

use postgres_protocol::message::frontend;

use super::{
    SourceError, TextRow, Wire,
    pgoutput::{Column, Relation},
    server_error,
};
use crate::{config::TableName, conninfo::ConnInfo, sql::quote_literal};

/// A policy on rows would hide some without a word, so it has to be an error; and since 17 a timeout might end the
/// transaction.
const SETTINGS: &str = "SET row_security = off; \
     SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'";

/// Type oids (`pg_type.dat`) of numbers, and of what a timestamp column may hold.
const NUMBERS: [u32; 4] = [20, 21, 23, 1700];
const TIMES: [u32; 4] = [20, 1082, 1114, 1184];

/// A connection with a query under way.
pub struct Rows {
    wire: Wire,
    asked: bool,
    /// The row in front, as pgoutput writes it; its number of cells.
    front: Option<u16>,
    cells: Vec<u8>,
}

impl Rows {
    /// Connects; `settings` are statements that end with a semicolon.
    pub async fn connect(info: &ConnInfo, settings: &str) -> Result<Self, SourceError> {
        let mut wire = Wire::connect_for_sql(info).await?;
        wire.query(&format!("{settings} {SETTINGS}")).await?;
        Ok(Self { wire, asked: false, front: None, cells: Vec::new() })
    }

    /// The connection, while nothing is under way.
    pub fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Sends a query; its rows come by [`Self::peek`].
    pub fn ask(&mut self, sql: &str) -> Result<(), SourceError> {
        self.asked = true;
        frontend::query(sql, self.wire.output()).map_err(SourceError::Io)
    }

    /// The cells of the row in front and their number, if it has arrived. Stays until [`Self::consume`].
    pub fn peek(&mut self) -> Result<Option<(&[u8], u16)>, SourceError> {
        while self.front.is_none() && self.asked {
            let Some(frame) = self.wire.peek().map_err(SourceError::Io)? else { return Ok(None) };
            match frame.tag {
                b'D' => self.front = Some(write_cells(frame.body, &mut self.cells)?),
                b'E' => return Err(SourceError::Server(server_error(&frame))),
                tag => self.pass_over(tag),
            }
        }
        Ok(self.front.map(|count| (&self.cells[..], count)))
    }

    /// Drops the row that [`Self::peek`] showed; false when there was none.
    pub fn consume(&mut self) -> bool {
        let shown = self.front.take().is_some();
        if shown {
            self.wire.consume();
        }
        shown
    }

    /// Whether all rows that were asked for have been read.
    pub fn is_exhausted(&self) -> bool {
        !self.asked && self.front.is_none()
    }

    /// Sends what is asked, and returns once more has arrived. Cancel-safe.
    pub async fn drive(&mut self) -> Result<(), SourceError> {
        self.wire.drive(true, false).await.map_err(SourceError::Io)
    }

    /// Reads what is under way to its end. Cancel-safe.
    pub async fn settle(&mut self) -> Result<(), SourceError> {
        self.front = None;
        while self.asked {
            match self.wire.peek().map_err(SourceError::Io)?.map(|frame| (frame.tag, server_error(&frame))) {
                None => self.drive().await?,
                Some((b'E', error)) => return Err(SourceError::Server(error)),
                Some((tag, _)) => self.pass_over(tag),
            }
        }
        Ok(())
    }

    fn pass_over(&mut self, tag: u8) {
        self.wire.note_notification(tag);
        self.wire.consume();
        self.asked = tag != b'Z';
    }
}

/// The table as pgoutput describes it: types of columns as they are declared, and no generated ones.
pub async fn describe(wire: &mut Wire, table: &TableName) -> Result<Option<Relation>, SourceError> {
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

/// The columns that rows stand in order by: the id where ids are numbers, since those count up; else the time, then the id.
pub fn order<'a>(relation: &Relation, id: &'a str, timestamp: &'a str) -> Vec<&'a str> {
    let counts_up = has(relation, id, &NUMBERS);
    if counts_up || !has_time(relation, timestamp) { vec![id] } else { vec![timestamp, id] }
}

/// Whether a column is there and tells a time.
pub fn has_time(relation: &Relation, column: &str) -> bool {
    has(relation, column, &TIMES)
}

fn has(relation: &Relation, column: &str, types: &[u32]) -> bool {
    relation.columns.iter().any(|it| it.name == column && types.contains(&it.type_oid))
}

/// Writes a `DataRow` as pgoutput writes a row; the number of its cells.
fn write_cells(body: &[u8], cells: &mut Vec<u8>) -> Result<u16, SourceError> {
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
    use crate::source::pgoutput::{Cell, Row};

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
}
