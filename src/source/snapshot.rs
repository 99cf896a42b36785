//! [`Snapshot`]: the rows of tables as one snapshot of the database has them, in the form in which the walsender sends rows.
//!
//! An SQL connection ([`Rows`]) with one read-only transaction. Rows come through a cursor, in chunks.

use super::{
    SourceError, TextRow, Wire,
    pgoutput::{Relation, Row},
    rows::{self, Rows, describe},
};
use crate::{
    config::TableName,
    conninfo::ConnInfo,
    lsn::Lsn,
    sql::{WAL_END, quote_identifier, quote_literal},
};

/// Rows of one FETCH: what has to be read to its end when the reader begins anew elsewhere.
const CHUNK: u64 = 2000;

/// The plan is for all rows, not for the first ones.
const SETTINGS: &str = "SET cursor_tuple_fraction = 1;";

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
    rows: Rows,
    tables: Vec<Table>,
    /// The table whose rows come now.
    table: usize,
    /// Rows of the present chunk so far.
    in_chunk: u64,
}

impl Snapshot {
    /// Connects; there is no snapshot before [`Self::begin`].
    pub async fn connect(info: &ConnInfo) -> Result<Self, SourceError> {
        Ok(Self { rows: Rows::connect(info, SETTINGS).await?, tables: Vec::new(), table: 0, in_chunk: 0 })
    }

    /// Takes a lock of this name that lasts as long as the connection; false when another process has it.
    pub async fn lock(&mut self, name: &str) -> Result<bool, SourceError> {
        let sql = format!("SELECT pg_try_advisory_lock(hashtext('walpost'), hashtext({}))", quote_literal(name));
        Ok(first(&self.rows.wire().query(&sql).await?) == Some("t"))
    }

    /// The connection, for questions outside of the transaction.
    pub fn wire(&mut self) -> &mut Wire {
        self.rows.wire()
    }

    /// Begins the transaction: in a snapshot that another connection exports, else in one of its own.
    pub async fn begin(&mut self, exported: Option<&str>) -> Result<(), SourceError> {
        self.rows.wire().query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        if let Some(snapshot) = exported {
            self.rows.wire().query(&format!("SET TRANSACTION SNAPSHOT {}", quote_literal(snapshot))).await?;
        }
        Ok(())
    }

    /// Counts rows in the snapshot.
    pub async fn count(&mut self, selection: &Selection) -> Result<u64, SourceError> {
        let rows = self.rows.wire().query(&format!("SELECT count(*) {}", selection.from())).await?;
        first(&rows).and_then(|count| count.parse().ok()).ok_or_else(|| SourceError::Protocol("no count".into()))
    }

    /// Where the WAL ends now.
    pub async fn wal_end(&mut self) -> Result<Lsn, SourceError> {
        let rows = self.rows.wire().query(&format!("SELECT {WAL_END}")).await?;
        first(&rows).and_then(|lsn| lsn.parse().ok()).ok_or_else(|| SourceError::Protocol("no position".into()))
    }

    /// Adds rows to what is read, `count` of them; false when there is no such table.
    pub async fn add(&mut self, selection: &Selection, count: u64) -> Result<bool, SourceError> {
        let Some(relation) = describe(self.rows.wire(), &selection.table).await? else { return Ok(false) };
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
        self.rows.settle().await?;
        self.rows.wire().query("CLOSE ALL").await?;
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

    /// The row in front, if it has arrived, with its table. Stays until [`Self::consume`].
    pub fn peek(&mut self) -> Result<Option<(&Relation, Row<'_>)>, SourceError> {
        while self.rows.peek()?.is_none() && self.rows.is_exhausted() && !self.is_exhausted() {
            self.ask_for_more()?;
        }
        let Some(table) = self.tables.get(self.table) else { return Ok(None) };
        let front = self.rows.peek()?;
        Ok(front.map(|(cells, count)| (&table.relation, Row::of_cells(cells, count))))
    }

    /// Drops the row that [`Self::peek`] showed.
    pub fn consume(&mut self) {
        self.in_chunk += u64::from(self.rows.consume());
    }

    /// Whether all rows were read.
    pub fn is_exhausted(&self) -> bool {
        self.table >= self.tables.len()
    }

    /// Sends what is asked, and returns once more has arrived. Cancel-safe.
    pub async fn drive(&mut self) -> Result<(), SourceError> {
        self.rows.drive().await
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
        self.in_chunk = 0;
        self.rows.ask(sql)
    }
}

fn first(rows: &[TextRow]) -> Option<&str> {
    rows.first()?.first()?.as_deref()
}

/// The last two make the order the same each time.
fn order(relation: &Relation, selection: &Selection) -> String {
    let columns = rows::order(relation, &selection.id, &selection.timestamp).into_iter().map(quote_identifier);
    columns.chain(["tableoid", "ctid"].map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::pgoutput::Column;

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
