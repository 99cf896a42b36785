//! [`Node`]: a value and where it stands, whichever of file, environment and command line it comes from.

use toml::de::{DeTable, DeValue};

use super::fault::{Fault, Origin};

/// A value of the file, or the untyped text of a variable or flag. No `Debug`: it may be a secret.
#[derive(Clone)]
pub(super) enum Value {
    /// From the environment or the command line: its type is what the key wants.
    Raw(String),
    Text(String),
    Integer(i64),
    Boolean(bool),
    /// A type that no key has, as it was written.
    Other(String),
    Array(Vec<Node>),
    Table(Entries),
}

/// A table's entries in the order they were written in.
pub(super) type Entries = Vec<(String, Node)>;

/// A value and where it stands.
#[derive(Clone)]
pub(super) struct Node {
    pub value: Value,
    pub at: Origin,
}

impl Node {
    /// The untyped text of a variable or flag.
    pub fn raw(text: String, at: Origin) -> Self {
        Self { value: Value::Raw(text), at }
    }
}

/// Reads a whole file. Every fault of its syntax is reported, without the line's text: it may hold a password.
pub(super) fn parse_document(name: &str, text: &str) -> Result<Entries, Vec<Fault>> {
    let place = |offset: usize| Origin::File { name: name.into(), line: line_of(text, offset) };
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(entries(table.into_inner(), &place));
    }
    let fault = |error: toml::de::Error| Fault {
        at: place(error.span().map_or(0, |span| span.start)),
        key: String::new(),
        what: format!("not valid TOML: {}", error.message()),
        remedy: "text values go in quotes".into(),
    };
    Err(errors.into_iter().map(fault).collect())
}

/// Reads a variable's or flag's text as one inline TOML value. The error is the parser's message, without the text.
pub(super) fn parse_inline(text: &str, at: &Origin) -> Result<Value, String> {
    match DeValue::parse(text.trim()) {
        Ok(parsed) => Ok(node(parsed.into_inner(), at.clone(), &|_| at.clone()).value),
        Err(error) => Err(error.message().to_owned()),
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.char_indices().take_while(|(at, _)| *at < offset).filter(|(_, c)| *c == '\n').count()
}

fn entries(table: DeTable<'_>, place: &dyn Fn(usize) -> Origin) -> Entries {
    let mut entries: Vec<_> = table
        .into_iter()
        .map(|(key, value)| {
            let offset = key.span().start;
            (offset, key.into_inner().into_owned(), node(value.into_inner(), place(offset), place))
        })
        .collect();
    entries.sort_by_key(|(offset, ..)| *offset);
    entries.into_iter().map(|(_, key, node)| (key, node)).collect()
}

fn node(value: DeValue<'_>, at: Origin, place: &dyn Fn(usize) -> Origin) -> Node {
    let value = match value {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Other(number.to_string()),
        },
        DeValue::Float(number) => Value::Other(number.to_string()),
        DeValue::Boolean(boolean) => Value::Boolean(boolean),
        DeValue::Datetime(datetime) => Value::Other(datetime.to_string()),
        DeValue::Array(items) => {
            let item = |item: toml::Spanned<DeValue<'_>>| {
                let at = place(item.span().start);
                node(item.into_inner(), at, place)
            };
            Value::Array(items.into_iter().map(item).collect())
        }
        DeValue::Table(table) => Value::Table(entries(table, place)),
    };
    Node { value, at }
}
