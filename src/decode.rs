//! (relation, row) → [`OutboxEvent`].
//!
//! Columns are found by name, once per description of the table; rows are then read by index. The buffers are kept from
//! row to row, so that in steady state nothing is allocated. Values are bytes: UTF-8 is never assumed.

use crate::{
    config::{OptionalColumn, OutboxConfig},
    event::{OutboxEvent, Position},
    source::pgoutput::{Cell, Relation, Row},
};

/// Type oids whose text form is not the value itself (`pg_type.dat`).
mod oid {
    pub const BYTEA: u32 = 17;
    pub const INT8: u32 = 20;
    pub const DATE: u32 = 1082;
    pub const TIMESTAMP: u32 = 1114;
    pub const TIMESTAMPTZ: u32 = 1184;
}

/// Why a table or row is no outbox event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A mapped column does not exist.
    #[error(
        "table {table} has no column {column:?}, which the configuration maps to {role}; its columns are: {columns}"
    )]
    MissingColumn {
        /// The table.
        table: String,
        /// The column.
        column: String,
        /// What it is mapped to.
        role: String,
        /// What there is.
        columns: String,
    },
    /// The timestamp column is of a type that holds no time.
    #[error(
        "column {column:?} of {table} is mapped to timestamp, but is no timestamptz, timestamp, date or bigint (Unix ms)"
    )]
    NoTimestamp {
        /// The table.
        table: String,
        /// The column.
        column: String,
    },
    /// A required value is NULL.
    #[error("the column {column:?}, mapped to {role}, is NULL")]
    RequiredNull {
        /// The column.
        column: String,
        /// What it is mapped to.
        role: &'static str,
    },
    /// The value was not sent, or not in the form it must have.
    #[error("the value of column {column:?} is not {expected}")]
    BadValue {
        /// The column.
        column: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// Where the cells of a row are.
#[derive(Debug, Clone, Copy)]
enum Span {
    Null,
    Value { start: usize, end: usize },
}

/// How the timestamp column is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimeKind {
    Calendar,
    UnixMillis,
}

/// A column of one relation by index, remembered with its name for error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnIndex {
    index: usize,
    name: String,
}

/// The mapping of one relation, as last described.
#[derive(Debug)]
pub struct Decoder {
    id: ColumnIndex,
    event_type: ColumnIndex,
    payload: ColumnIndex,
    key: Option<ColumnIndex>,
    headers: Option<ColumnIndex>,
    timestamp: Option<(ColumnIndex, TimeKind)>,
    binary: BinaryColumns,
    names: Vec<String>,
    spans: Vec<Span>,
    payload_bytes: Vec<u8>,
    key_bytes: Vec<u8>,
}

/// Which of the columns are bytea, published raw.
#[derive(Debug)]
struct BinaryColumns {
    payload: bool,
    key: bool,
}

/// The cells of the row that was decoded last.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cells<'a> {
    spans: &'a [Span],
    bytes: &'a [u8],
}

/// The cells of a row that is no event, as Postgres prints them; `None` for NULL and for what cannot be read.
#[derive(Debug, Clone, Copy)]
pub struct Rest<'a> {
    /// The event's id.
    pub id: Option<&'a [u8]>,
    /// The event's type.
    pub event_type: Option<&'a [u8]>,
    /// The record key.
    pub key: Option<&'a [u8]>,
    /// The payload; bytea in hex form.
    pub payload: Option<&'a [u8]>,
}

impl<'a> Cells<'a> {
    /// The text of a column; `None` for NULL.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        match self.spans.get(index)? {
            Span::Null => None,
            Span::Value { start, end } => self.bytes.get(*start..*end),
        }
    }
}

impl Decoder {
    /// Maps the columns of a relation by name.
    pub fn new(relation: &Relation, config: &OutboxConfig) -> Result<Self, DecodeError> {
        let columns = &config.columns;
        let timestamp = match optional(relation, &columns.timestamp, "timestamp")? {
            None => None,
            Some(column) => time_kind(relation, &column, columns.timestamp.explicit)?.map(|kind| (column, kind)),
        };
        let payload = column(relation, &columns.payload, "payload")?;
        let key = optional(relation, &columns.key, "key")?;
        let is_bytea = |column: &ColumnIndex| relation.columns[column.index].type_oid == oid::BYTEA;
        Ok(Self {
            id: column(relation, &columns.id, "id")?,
            event_type: column(relation, &columns.event_type, "event_type")?,
            binary: BinaryColumns { payload: is_bytea(&payload), key: key.as_ref().is_some_and(is_bytea) },
            payload,
            key,
            headers: optional(relation, &columns.headers, "headers")?,
            timestamp,
            names: relation.columns.iter().map(|column| column.name.clone()).collect(),
            spans: Vec::new(),
            payload_bytes: Vec::new(),
            key_bytes: Vec::new(),
        })
    }

    /// The index of a column by its name or, where there is no such column, by what it is mapped to (`event_type`, `key`, `id`).
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|column| column == name).or_else(|| match name {
            "id" => Some(self.id.index),
            "event_type" => Some(self.event_type.index),
            "key" => self.key.as_ref().map(|column| column.index),
            _ => None,
        })
    }

    /// Decodes a row. `commit_us` is the record timestamp where the row has none.
    pub fn decode<'a>(
        &'a mut self,
        row: Row<'a>,
        position: Position,
        commit_us: i64,
    ) -> Result<(OutboxEvent<'a>, Cells<'a>), DecodeError> {
        self.read_spans(row)?;
        let cells = Cells { spans: &self.spans, bytes: row.bytes() };
        let required = |column: &ColumnIndex, role| {
            cells.get(column.index).ok_or_else(|| DecodeError::RequiredNull { column: column.name.clone(), role })
        };
        let (id, event_type) = (required(&self.id, "id")?, required(&self.event_type, "event_type")?);
        let mut payload = cells.get(self.payload.index);
        if let (true, Some(text)) = (self.binary.payload, payload) {
            payload = Some(from_hex(text, &mut self.payload_bytes, &self.payload)?);
        }
        let mut key = self.key.as_ref().and_then(|column| cells.get(column.index));
        if let (true, Some(text), Some(column)) = (self.binary.key, key, &self.key) {
            key = Some(from_hex(text, &mut self.key_bytes, column)?);
        }
        let headers = self.headers.as_ref().and_then(|column| cells.get(column.index));
        let timestamp_ms = match &self.timestamp {
            Some((column, kind)) => cells.get(column.index).map_or(Ok(None), |text| parse_time(text, *kind, column))?,
            None => None,
        };
        // Kafka knows no time before 1970, and librdkafka takes 0 for "now"
        let timestamp_ms = timestamp_ms.unwrap_or(commit_us / 1000).max(1);
        Ok((OutboxEvent { id, event_type, key, payload, headers, timestamp_ms, position }, cells))
    }

    /// What can be read of a row that [`Self::decode`] refused.
    pub fn rest<'a>(&'a mut self, row: Row<'a>) -> Rest<'a> {
        // the error was told already
        let _ = self.read_spans(row);
        let cells = Cells { spans: &self.spans, bytes: row.bytes() };
        Rest {
            id: cells.get(self.id.index),
            event_type: cells.get(self.event_type.index),
            key: self.key.as_ref().and_then(|column| cells.get(column.index)),
            payload: cells.get(self.payload.index),
        }
    }

    /// Reads on behind a cell that cannot be read: the id may stand there, and an error is to name it.
    fn read_spans(&mut self, row: Row<'_>) -> Result<(), DecodeError> {
        self.spans.clear();
        let base = row.bytes().as_ptr().addr();
        let mut unreadable = None;
        for (index, cell) in row.cells().enumerate() {
            self.spans.push(match cell {
                Cell::Null => Span::Null,
                Cell::Text(value) => {
                    let start = value.as_ptr().addr() - base;
                    Span::Value { start, end: start + value.len() }
                }
                Cell::Unchanged | Cell::Binary(_) => {
                    unreadable.get_or_insert(index);
                    Span::Null
                }
            });
        }
        let Some(index) = unreadable else { return Ok(()) };
        let column = self.names.get(index).cloned().unwrap_or_default();
        Err(DecodeError::BadValue { column, expected: "in text form" })
    }
}

fn column(relation: &Relation, name: &str, role: &str) -> Result<ColumnIndex, DecodeError> {
    let index = relation.columns.iter().position(|column| column.name == name);
    index.map(|index| ColumnIndex { index, name: name.to_owned() }).ok_or_else(|| missing(relation, name, role))
}

fn optional(relation: &Relation, wanted: &OptionalColumn, role: &str) -> Result<Option<ColumnIndex>, DecodeError> {
    match column(relation, &wanted.name, role) {
        Err(_) if !wanted.explicit => Ok(None),
        found => found.map(Some),
    }
}

/// The error for a mapped column that the relation lacks.
pub fn missing(relation: &Relation, name: &str, role: &str) -> DecodeError {
    let columns: Vec<_> = relation.columns.iter().map(|column| column.name.as_str()).collect();
    DecodeError::MissingColumn {
        table: format!("{}.{}", relation.schema, relation.table),
        column: name.to_owned(),
        role: role.to_owned(),
        columns: columns.join(", "),
    }
}

fn time_kind(relation: &Relation, column: &ColumnIndex, explicit: bool) -> Result<Option<TimeKind>, DecodeError> {
    match relation.columns[column.index].type_oid {
        oid::TIMESTAMPTZ | oid::TIMESTAMP | oid::DATE => Ok(Some(TimeKind::Calendar)),
        oid::INT8 => Ok(Some(TimeKind::UnixMillis)),
        // a column that merely has the default name
        _ if !explicit => Ok(None),
        _ => Err(DecodeError::NoTimestamp {
            table: format!("{}.{}", relation.schema, relation.table),
            column: column.name.clone(),
        }),
    }
}

/// bytea comes as `\x` and hex digits, which walpost pins.
fn from_hex<'a>(text: &[u8], bytes: &'a mut Vec<u8>, column: &ColumnIndex) -> Result<&'a [u8], DecodeError> {
    let bad = || DecodeError::BadValue { column: column.name.clone(), expected: "bytea in hex form" };
    let digits = text.strip_prefix(b"\\x").ok_or_else(bad)?;
    bytes.resize(digits.len() / 2, 0);
    bytes.shrink_to(64 * 1024);
    hex::decode_to_slice(digits, bytes).map_err(|_| bad())?;
    Ok(bytes)
}

/// `None` for infinity, which no record can carry.
fn parse_time(text: &[u8], kind: TimeKind, column: &ColumnIndex) -> Result<Option<i64>, DecodeError> {
    let parsed = match kind {
        _ if matches!(text, b"infinity" | b"-infinity") => return Ok(None),
        TimeKind::UnixMillis => std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
        TimeKind::Calendar => calendar_ms(text),
    };
    let bad = || DecodeError::BadValue { column: column.name.clone(), expected: "a time in ISO form" };
    parsed.map(Some).ok_or_else(bad)
}

/// `2024-01-31[ 12:04:05[.678901][+00[:30]]][ BC]` → Unix ms. Without a zone: UTC, the session's.
fn calendar_ms(text: &[u8]) -> Option<i64> {
    let (text, before_christ) = match text.strip_suffix(b" BC") {
        Some(text) => (text, true),
        None => (text, false),
    };
    let mut rest = text;
    let year = number(&mut rest)?;
    let year = if before_christ { 1 - year } else { year };
    expect(&mut rest, b'-')?;
    let month = number(&mut rest)?;
    expect(&mut rest, b'-')?;
    let day = number(&mut rest)?;
    let mut millis = days_from_civil(year, month, day).checked_mul(86_400_000)?;
    if rest.split_off_first().is_none() {
        return Some(millis);
    }
    for unit in [3_600_000, 60_000, 1000] {
        millis += number(&mut rest)? * unit;
        if unit > 1000 {
            expect(&mut rest, b':')?;
        }
    }
    if rest.first() == Some(&b'.') {
        let digits = rest[1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let value = |place: usize| rest[1..=digits].get(place).map_or(0, |byte| i64::from(byte - b'0'));
        millis += value(0) * 100 + value(1) * 10 + value(2);
        rest = &rest[1 + digits..];
    }
    Some(millis - zone_ms(rest)?)
}

fn zone_ms(mut text: &[u8]) -> Option<i64> {
    let sign = match text.split_off_first() {
        None => return Some(0),
        Some(b'+') => 1,
        Some(b'-') => -1,
        Some(_) => return None,
    };
    let mut millis = 0;
    for unit in [3_600_000, 60_000, 1000] {
        millis += number(&mut text)? * unit;
        if text.split_off_first().is_none() {
            break;
        }
    }
    Some(sign * millis)
}

fn expect(text: &mut &[u8], byte: u8) -> Option<()> {
    text.split_off_first().filter(|first| **first == byte).map(|_| ())
}

fn number(text: &mut &[u8]) -> Option<i64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let taken = text.split_off(..digits)?;
    (1..=9).contains(&digits).then(|| taken.iter().fold(0, |value, byte| value * 10 + i64::from(byte - b'0')))
}

/// Days since 1970-01-01 of a date in the proleptic Gregorian calendar, counted in years that begin in March.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let shifted = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (shifted.div_euclid(400), shifted.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{ColumnsConfig, TableName},
        lsn::Lsn,
        source::pgoutput::{self, Column, Message},
    };

    fn outbox(timestamp: Option<&str>) -> OutboxConfig {
        let named = |name: &str, explicit| OptionalColumn { name: name.into(), explicit };
        OutboxConfig {
            table: TableName { schema: "public".into(), table: "outbox".into() },
            backfill: None,
            columns: ColumnsConfig {
                id: "id".into(),
                event_type: "event_type".into(),
                payload: "payload".into(),
                key: named("key", false),
                headers: named("headers", false),
                timestamp: named(timestamp.unwrap_or("created_at"), timestamp.is_some()),
            },
            header_columns: Vec::new(),
            poll: crate::config::PollColumns::default(),
        }
    }

    fn relation(columns: &[(&str, u32)]) -> Relation {
        let columns = columns.iter().map(|(name, type_oid)| Column { name: (*name).into(), type_oid: *type_oid });
        Relation { oid: 1, schema: "public".into(), table: "outbox".into(), columns: columns.collect() }
    }

    fn insert(cells: &[Option<&[u8]>]) -> Vec<u8> {
        let mut bytes = b"I\0\0\0\x01N".to_vec();
        bytes.extend(u16::try_from(cells.len()).unwrap().to_be_bytes());
        for cell in cells {
            bytes.push(if cell.is_some() { b't' } else { b'n' });
            let Some(value) = cell else { continue };
            bytes.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
            bytes.extend(*value);
        }
        bytes
    }

    fn row(bytes: &[u8]) -> Row<'_> {
        let Ok(Message::Insert { row, .. }) = pgoutput::parse(bytes) else { panic!("no insert") };
        row
    }

    const POSITION: Position = Position { commit_lsn: Lsn(1), ordinal: 0 };

    #[test]
    fn columns_are_found_by_name_wherever_they_stand() {
        let relation = relation(&[("x", 25), ("payload", 25), ("event_type", 25), ("id", 25)]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        let bytes = insert(&[None, Some(b"{}"), Some(b"t"), Some(b"7")]);
        let (event, _) = decoder.decode(row(&bytes), POSITION, 5_000_999).unwrap();
        assert_eq!((event.id, event.event_type, event.payload), (&b"7"[..], &b"t"[..], Some(&b"{}"[..])));
        assert_eq!((event.key, event.headers, event.timestamp_ms), (None, None, 5000));
    }

    #[test]
    fn null_empty_and_the_four_letters_stay_apart() {
        let relation = relation(&[("id", 25), ("event_type", 25), ("payload", 114), ("key", 25)]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        for value in [None, Some(&b""[..]), Some(b"null"), Some(b"\"\"")] {
            let bytes = insert(&[Some(b"1"), Some(b"t"), value, value]);
            let (event, _) = decoder.decode(row(&bytes), POSITION, 0).unwrap();
            assert_eq!((event.payload, event.key), (value, value));
        }
    }

    #[test]
    fn bytea_is_raw_for_payload_and_key() {
        let relation = relation(&[("id", 25), ("event_type", 25), ("payload", 17), ("key", 17)]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        let bytes = insert(&[Some(b"1"), Some(b"t"), Some(b"\\x00ff5c41"), Some(b"\\x")]);
        let (event, _) = decoder.decode(row(&bytes), POSITION, 0).unwrap();
        assert_eq!((event.payload, event.key), (Some(&b"\0\xff\\A"[..]), Some(&b""[..])));
        let bytes = insert(&[Some(b"1"), Some(b"t"), Some(b"\\000"), None]);
        assert!(decoder.decode(row(&bytes), POSITION, 0).is_err());
    }

    #[test]
    fn the_id_is_read_wherever_the_unreadable_cell_stands() {
        let relation = relation(&[("event_type", 25), ("payload", 25), ("id", 25)]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        // an unchanged TOAST value, which an insert cannot have, and a cell in binary form
        for unreadable in [&b"u"[..], b"b\0\0\0\x01\xff"] {
            let bytes = [b"I\0\0\0\x01N\0\x03t\0\0\0\x01e", unreadable, b"t\0\0\0\x027\x38"].concat();
            let error = decoder.decode(row(&bytes), POSITION, 0).unwrap_err();
            assert_eq!(error, DecodeError::BadValue { column: "payload".into(), expected: "in text form" });
            let rest = decoder.rest(row(&bytes));
            assert_eq!((rest.id, rest.event_type, rest.payload), (Some(&b"78"[..]), Some(&b"e"[..]), None));
        }
    }

    #[test]
    fn missing_columns_and_nulls_are_named() {
        let error =
            Decoder::new(&relation(&[("id", 25), ("event_type", 25), ("body", 25)]), &outbox(None)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("\"payload\"") && text.contains("id, event_type, body"), "{text}");
        let relation = relation(&[("id", 25), ("event_type", 25), ("payload", 25)]);
        let error = Decoder::new(&relation, &outbox(Some("at"))).unwrap_err();
        assert!(error.to_string().contains("\"at\""), "an explicitly named column must exist");
        let bytes = insert(&[Some(b"1"), None, None]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        let error = decoder.decode(row(&bytes), POSITION, 0).unwrap_err();
        assert_eq!(error, DecodeError::RequiredNull { column: "event_type".into(), role: "event_type" });
    }

    #[test]
    fn timestamps_are_unix_milliseconds() {
        for (text, millis) in [
            ("1970-01-01 00:00:00+00", Some(0)),
            ("2024-02-29 12:04:05.678901+00", Some(1_709_208_245_678)),
            ("2024-02-29 12:04:05.6+05:30", Some(1_709_208_245_600 - 19_800_000)),
            ("2024-02-29 12:04:05-03", Some(1_709_208_245_000 + 10_800_000)),
            ("2000-03-01", Some(951_868_800_000)),
            ("0001-01-01 00:00:00 BC", Some(-62_167_219_200_000)),
            ("294276-12-31 23:59:59.999999+00", Some(9_224_318_015_999_999)),
            ("29.02.2024 12:04:05", None),
            ("", None),
            ("2024-02-29 12:04", None),
        ] {
            assert_eq!(calendar_ms(text.as_bytes()), millis, "{text}");
        }
    }

    #[test]
    fn times_that_no_record_can_carry_become_the_nearest_that_it_can() {
        let relation = relation(&[("id", 25), ("event_type", 25), ("payload", 25), ("created_at", 1184)]);
        let mut decoder = Decoder::new(&relation, &outbox(None)).unwrap();
        for (text, millis) in [("infinity", 9), ("1970-01-01 00:00:00+00", 1), ("1812-06-24 00:00:00+00", 1)] {
            let bytes = insert(&[Some(b"1"), Some(b"t"), None, Some(text.as_bytes())]);
            assert_eq!(decoder.decode(row(&bytes), POSITION, 9000).unwrap().0.timestamp_ms, millis, "{text}");
        }
    }
}
