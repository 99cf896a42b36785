//! [`TableName`]: a table's name, written as in SQL, kept as in the catalog.
//!
//! <https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-IDENTIFIERS>

use std::fmt;

/// Longest name in the catalog, in bytes (`NAMEDATALEN` - 1).
pub(crate) const MAX_NAME_BYTES: usize = 63;

/// A table's name as the catalog has it (already unquoted and folded). Displays as SQL, always quoted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableName {
    /// Schema (namespace).
    pub schema: String,
    /// Table.
    pub table: String,
}

impl TableName {
    /// Reads `table` or `schema.table`, each part bare (folded to lower case) or in double quotes. Without a schema it is
    /// `public`. The error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let (first, rest) = identifier(text.trim())?;
        let Some(rest) = rest.trim_start().strip_prefix('.') else {
            if rest.trim().is_empty() {
                return Ok(Self { schema: "public".into(), table: first });
            }
            return Err("has something behind the name");
        };
        let (second, rest) = identifier(rest.trim_start())?;
        match rest.trim() {
            "" => Ok(Self { schema: first, table: second }),
            rest if rest.starts_with('.') => Err("has more than two parts: a schema and a table will do"),
            _ => Err("has something behind the name"),
        }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", quote_identifier(&self.schema), quote_identifier(&self.table))
    }
}

/// Quotes an identifier as SQL does.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A column's name: as written, unless it is in double quotes, which are then read as in SQL. Not folded.
pub(crate) fn column_name(text: &str) -> Result<String, &'static str> {
    if text.starts_with('"') {
        return match identifier(text)? {
            (name, "") => Ok(name),
            _ => Err("has something behind the closing quote"),
        };
    }
    checked(text.into())
}

fn checked(name: String) -> Result<String, &'static str> {
    match name.len() {
        0 => Err("is empty"),
        1..=MAX_NAME_BYTES if name.contains('\0') => Err("contains a NUL character"),
        1..=MAX_NAME_BYTES => Ok(name),
        _ => Err("is longer than the 63 bytes that Postgres keeps of a name"),
    }
}

/// The identifier at the start, and what follows it.
fn identifier(text: &str) -> Result<(String, &str), &'static str> {
    if let Some(quoted) = text.strip_prefix('"') {
        return quoted_identifier(quoted);
    }
    // Postgres folds ASCII only (in any multi-byte encoding), so we must not fold more.
    let continues = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$' || !c.is_ascii();
    let end = text.find(|c| !continues(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if name.starts_with(|c: char| c.is_ascii_digit() || c == '$') {
        return Err("begins with a digit or $; such a name goes in double quotes");
    }
    if name.is_empty() {
        return Err(match rest.chars().next() {
            None | Some('.') => "lacks a name",
            Some(_) => "has a character that must be in double quotes",
        });
    }
    Ok((checked(name.to_ascii_lowercase())?, rest))
}

fn quoted_identifier(text: &str) -> Result<(String, &str), &'static str> {
    let mut name = String::new();
    let mut rest = text;
    loop {
        let (part, after) = rest.split_once('"').ok_or("has an opening double quote that is not closed")?;
        name.push_str(part);
        match after.strip_prefix('"') {
            Some(after) => {
                name.push('"');
                rest = after;
            }
            None => return Ok((checked(name)?, after)),
        }
    }
}
