//! The parser of pgoutput, `proto_version` 1.
//!
//! Owns the byte layout of <https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html> and nothing
//! else: no I/O, no state between messages. A message borrows the bytes it was parsed from; in steady state nothing is
//! allocated. Whatever the bytes are, the result is a message or an error that says where, never a panic, and never an
//! allocation that the bytes themselves do not pay for.

use crate::lsn::Lsn;

/// Microseconds between the Unix epoch and Postgres' epoch, 2000-01-01.
pub const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;

/// Why bytes are no pgoutput message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed pgoutput message {message} at byte {offset}: {problem}")]
pub struct ParseError {
    /// The kind of message, by its name in the manual.
    pub message: &'static str,
    /// Offset into the message.
    pub offset: usize,
    /// What is wrong there.
    pub problem: &'static str,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message<'a> {
    /// A transaction begins; it is committed already.
    Begin {
        /// LSN of the commit record.
        commit_lsn: Lsn,
        /// Commit time, Unix µs by the server's clock.
        commit_us: i64,
    },
    /// The transaction is complete.
    Commit {
        /// LSN of the commit record.
        commit_lsn: Lsn,
        /// LSN behind the commit record: what to confirm.
        end_lsn: Lsn,
    },
    /// A table, described before its first row and anew after each change.
    Relation(Relation),
    /// A row was inserted.
    Insert {
        /// Which relation, by its oid.
        relation: u32,
        /// The new row.
        row: Row<'a>,
    },
    /// `pg_logical_emit_message`.
    Logical {
        /// False: it stands outside of any transaction, and survives a rollback.
        transactional: bool,
        /// Its end in the log.
        lsn: Lsn,
        /// The prefix, NUL excluded.
        prefix: &'a [u8],
        /// The content.
        content: &'a [u8],
    },
    /// A change that an outbox has no use for.
    Ignored(Ignored),
}

/// Messages that are parsed, counted and passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    /// A row was updated.
    Update,
    /// A row was deleted.
    Delete,
    /// Tables were truncated.
    Truncate,
    /// A type was described.
    Type,
    /// The transaction came from another node.
    Origin,
}

/// A table as the server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    /// Its oid.
    pub oid: u32,
    /// Its schema.
    pub schema: String,
    /// Its name.
    pub table: String,
    /// Its published columns, in the order of the rows to come.
    pub columns: Vec<Column>,
}

/// A column of a [`Relation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The oid of its type.
    pub type_oid: u32,
}

/// A row: its cells are parsed as they are asked for, having been checked already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row<'a> {
    bytes: &'a [u8],
    count: u16,
}

/// One value of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell<'a> {
    /// NULL.
    Null,
    /// A value stored out of line (TOAST) that the server did not send, since it did not change. Not in an INSERT.
    Unchanged,
    /// The value as text.
    Text(&'a [u8]),
    /// The value in binary form.
    Binary(&'a [u8]),
}

impl<'a> Row<'a> {
    /// A row of so many cells, written as pgoutput writes them.
    pub(super) fn of_cells(bytes: &'a [u8], count: u16) -> Self {
        Self { bytes, count }
    }

    /// Number of cells.
    pub fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// True for a row of a table without columns.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The bytes that all cells lie in.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The cells, in the order of the relation's columns.
    pub fn cells(self) -> impl Iterator<Item = Cell<'a>> {
        let mut reader = Reader { bytes: self.bytes, offset: 0, message: "Insert" };
        (0..self.count).map_while(move |_| reader.cell().ok())
    }
}

/// Parses one message.
pub fn parse(bytes: &[u8]) -> Result<Message<'_>, ParseError> {
    let mut reader = Reader { bytes, offset: 0, message: "(empty)" };
    let tag = reader.u8()?;
    reader.message = name(tag);
    let message = match tag {
        b'B' => begin(&mut reader)?,
        b'C' => commit(&mut reader)?,
        b'R' => Message::Relation(relation(&mut reader)?),
        b'I' => insert(&mut reader)?,
        b'M' => logical(&mut reader)?,
        b'U' => update(&mut reader)?,
        b'D' => delete(&mut reader)?,
        b'T' => truncate(&mut reader)?,
        b'Y' => {
            reader.u32()?;
            reader.string()?;
            reader.string()?;
            Message::Ignored(Ignored::Type)
        }
        b'O' => {
            reader.u64()?;
            reader.string()?;
            Message::Ignored(Ignored::Origin)
        }
        _ => return Err(ParseError { message: reader.message, offset: 0, problem: "unknown kind of message" }),
    };
    if reader.offset == bytes.len() { Ok(message) } else { reader.fail("bytes left over behind the message") }
}

fn name(tag: u8) -> &'static str {
    match tag {
        b'B' => "Begin",
        b'C' => "Commit",
        b'R' => "Relation",
        b'I' => "Insert",
        b'M' => "Message",
        b'U' => "Update",
        b'D' => "Delete",
        b'T' => "Truncate",
        b'Y' => "Type",
        b'O' => "Origin",
        _ => "(unknown)",
    }
}

fn begin<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    let commit_lsn = Lsn(reader.u64()?);
    let commit_us = reader.i64()?.saturating_add(POSTGRES_EPOCH_US);
    reader.u32()?; // xid
    Ok(Message::Begin { commit_lsn, commit_us })
}

fn commit<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    reader.u8()?; // flags, unused
    let commit_lsn = Lsn(reader.u64()?);
    let end_lsn = Lsn(reader.u64()?);
    reader.i64()?; // commit time, known since Begin
    Ok(Message::Commit { commit_lsn, end_lsn })
}

fn relation(reader: &mut Reader<'_>) -> Result<Relation, ParseError> {
    let oid = reader.u32()?;
    let schema = match reader.string()? {
        b"" => "pg_catalog".to_owned(),
        schema => String::from_utf8_lossy(schema).into_owned(),
    };
    let table = String::from_utf8_lossy(reader.string()?).into_owned();
    reader.u8()?; // replica identity
    let count = reader.u16()?;
    let mut columns = Vec::new();
    for _ in 0..count {
        reader.u8()?; // flags: part of the key
        let name = String::from_utf8_lossy(reader.string()?).into_owned();
        let type_oid = reader.u32()?;
        reader.u32()?; // type modifier
        columns.push(Column { name, type_oid });
    }
    Ok(Relation { oid, schema, table, columns })
}

fn insert<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    let relation = reader.u32()?;
    reader.expect(b'N', "expected N, the new row")?;
    Ok(Message::Insert { relation, row: reader.row()? })
}

fn logical<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    let transactional = reader.u8()? & 1 == 1;
    let lsn = Lsn(reader.u64()?);
    let prefix = reader.string()?;
    let length = reader.u32()?;
    Ok(Message::Logical { transactional, lsn, prefix, content: reader.take(length)? })
}

fn update<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    reader.u32()?;
    let mut part = reader.u8()?;
    if part == b'K' || part == b'O' {
        reader.row()?;
        part = reader.u8()?;
    }
    if part != b'N' {
        return reader.fail("expected N, the new row");
    }
    reader.row()?;
    Ok(Message::Ignored(Ignored::Update))
}

fn delete<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    reader.u32()?;
    if !matches!(reader.u8()?, b'K' | b'O') {
        return reader.fail("expected K or O, the old row");
    }
    reader.row()?;
    Ok(Message::Ignored(Ignored::Delete))
}

fn truncate<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, ParseError> {
    let count = reader.u32()?;
    reader.u8()?; // options
    for _ in 0..count {
        reader.u32()?;
    }
    Ok(Message::Ignored(Ignored::Truncate))
}

/// Takes values off the front of a message.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
    message: &'static str,
}

impl<'a> Reader<'a> {
    fn fail<T>(&self, problem: &'static str) -> Result<T, ParseError> {
        Err(ParseError { message: self.message, offset: self.offset, problem })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        let Some(array) = self.bytes[self.offset..].first_chunk::<N>() else {
            return self.fail("the message ends too early");
        };
        self.offset += N;
        Ok(*array)
    }

    fn u8(&mut self) -> Result<u8, ParseError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, ParseError> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, ParseError> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, ParseError> {
        self.array().map(u64::from_be_bytes)
    }

    fn i64(&mut self) -> Result<i64, ParseError> {
        self.array().map(i64::from_be_bytes)
    }

    fn expect(&mut self, byte: u8, problem: &'static str) -> Result<(), ParseError> {
        if self.bytes.get(self.offset) != Some(&byte) {
            return self.fail(problem);
        }
        self.offset += 1;
        Ok(())
    }

    fn take(&mut self, length: u32) -> Result<&'a [u8], ParseError> {
        let rest = &self.bytes[self.offset..];
        let Some(taken) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            return self.fail("a length points behind the message's end");
        };
        self.offset += taken.len();
        Ok(taken)
    }

    fn string(&mut self) -> Result<&'a [u8], ParseError> {
        let rest = &self.bytes[self.offset..];
        let Some(end) = rest.iter().position(|byte| *byte == 0) else {
            return self.fail("a name without its closing NUL");
        };
        self.offset += end + 1;
        Ok(&rest[..end])
    }

    fn cell(&mut self) -> Result<Cell<'a>, ParseError> {
        match self.u8()? {
            b'n' => Ok(Cell::Null),
            b'u' => Ok(Cell::Unchanged),
            b't' => {
                let length = self.u32()?;
                self.take(length).map(Cell::Text)
            }
            b'b' => {
                let length = self.u32()?;
                self.take(length).map(Cell::Binary)
            }
            _ => {
                self.offset -= 1;
                self.fail("unknown kind of column value")
            }
        }
    }

    fn row(&mut self) -> Result<Row<'a>, ParseError> {
        let count = self.u16()?;
        let start = self.offset;
        for _ in 0..count {
            self.cell()?;
        }
        Ok(Row { bytes: &self.bytes[start..self.offset], count })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn insert_of(cells: &[Option<&[u8]>]) -> Vec<u8> {
        let mut bytes = b"I\0\0\0\x07N".to_vec();
        bytes.extend((u16::try_from(cells.len()).unwrap()).to_be_bytes());
        for cell in cells {
            match cell {
                None => bytes.push(b'n'),
                Some(value) => {
                    bytes.push(b't');
                    bytes.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
                    bytes.extend(*value);
                }
            }
        }
        bytes
    }

    #[test]
    fn begin_and_commit_carry_their_lsns() {
        let begin = [&b"B"[..], &0x10_u64.to_be_bytes(), &5_i64.to_be_bytes(), &9_u32.to_be_bytes()].concat();
        assert_eq!(parse(&begin), Ok(Message::Begin { commit_lsn: Lsn(0x10), commit_us: POSTGRES_EPOCH_US + 5 }));
        let commit = [&b"C\0"[..], &0x10_u64.to_be_bytes(), &0x20_u64.to_be_bytes(), &5_i64.to_be_bytes()].concat();
        assert_eq!(parse(&commit), Ok(Message::Commit { commit_lsn: Lsn(0x10), end_lsn: Lsn(0x20) }));
    }

    #[test]
    fn relation_names_its_columns_in_order() {
        let bytes = b"R\0\0\0\x07public\0outbox\0d\0\x02\x01id\0\0\0\x0b\x86\xff\xff\xff\xff\0payload\0\0\0\0\x72\xff\xff\xff\xff";
        let Ok(Message::Relation(relation)) = parse(bytes) else { panic!("no relation") };
        assert_eq!((relation.oid, &*relation.schema, &*relation.table), (7, "public", "outbox"));
        let columns: Vec<_> = relation.columns.iter().map(|column| (&*column.name, column.type_oid)).collect();
        assert_eq!(columns, [("id", 2950), ("payload", 114)]);
    }

    #[test]
    fn insert_keeps_null_and_empty_apart() {
        let bytes = insert_of(&[None, Some(b""), Some(b"\xff\0")]);
        let Ok(Message::Insert { relation: 7, row }) = parse(&bytes) else { panic!("no insert") };
        let cells: Vec<_> = row.cells().collect();
        assert_eq!(cells, [Cell::Null, Cell::Text(b""), Cell::Text(b"\xff\0")]);
    }

    /// Case 24.
    #[test]
    fn other_kinds_are_parsed_whole_and_ignored() {
        let row = &insert_of(&[Some(b"v"), None])[6..];
        let kinds: [(Vec<u8>, Ignored); 7] = [
            ([b"U\0\0\0\x07N", row].concat(), Ignored::Update),
            ([b"U\0\0\0\x07K", row, b"N", row].concat(), Ignored::Update),
            ([b"U\0\0\0\x07O", row, b"N", row].concat(), Ignored::Update),
            ([b"D\0\0\0\x07K", row].concat(), Ignored::Delete),
            (b"T\0\0\0\x02\0\0\0\0\x01\0\0\0\x02".to_vec(), Ignored::Truncate),
            (b"Y\0\0\0\x07public\0mood\0".to_vec(), Ignored::Type),
            (b"O\0\0\0\0\0\0\0\x01elsewhere\0".to_vec(), Ignored::Origin),
        ];
        for (bytes, kind) in kinds {
            assert_eq!(parse(&bytes), Ok(Message::Ignored(kind)));
        }
    }

    /// Case 25.
    #[test]
    fn logical_messages_are_consumed_to_their_end() {
        let bytes = b"M\x01\0\0\0\0\0\0\0\x10my prefix\0\0\0\0\x03abc";
        assert_eq!(
            parse(bytes),
            Ok(Message::Logical { transactional: true, lsn: Lsn(0x10), prefix: b"my prefix", content: b"abc" })
        );
    }

    #[test]
    fn errors_name_message_and_offset() {
        let error = parse(b"I\0\0\0\x07N\0\x01t\x7f\xff\xff\xffab").unwrap_err();
        assert_eq!((error.message, error.offset), ("Insert", 13));
        assert_eq!(parse(b"?").unwrap_err().problem, "unknown kind of message");
        assert_eq!(parse(b"").unwrap_err().offset, 0);
        let mut long = insert_of(&[None]);
        long.push(0);
        assert_eq!(parse(&long).unwrap_err().problem, "bytes left over behind the message");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_usize..10) {
            if let Some(first) = bytes.first_mut() {
                *first = b"BCRIMUDTYO"[kind];
            }
            if let Ok(Message::Insert { row, .. }) = parse(&bytes) {
                prop_assert_eq!(row.cells().count(), row.len());
            }
        }

        #[test]
        fn every_truncation_is_an_error(values in proptest::collection::vec(proptest::option::of(proptest::collection::vec(any::<u8>(), 0..20)), 0..8)) {
            let cells: Vec<_> = values.iter().map(Option::as_deref).collect();
            let bytes = insert_of(&cells);
            prop_assert!(parse(&bytes).is_ok());
            for end in 0..bytes.len() {
                prop_assert!(parse(&bytes[..end]).is_err());
            }
        }
    }
}
