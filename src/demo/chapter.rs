//! [`Chapter`]: what a part of the demo came to, as numbers that must be something.

use serde::{Serialize, Serializer};

/// What a number must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// This.
    Exactly(usize),
    /// This or more.
    AtLeast(usize),
    /// Whatever it is.
    Any,
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exactly(number) => write!(f, "{number}"),
            Self::AtLeast(number) => write!(f, "at least {number}"),
            Self::Any => f.write_str("any"),
        }
    }
}

impl Serialize for Expected {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A number that was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// What was counted.
    pub what: String,
    /// How many.
    pub measured: usize,
    /// How many there must be.
    pub expected: Expected,
    /// Whether it is so.
    pub holds: bool,
}

impl Row {
    /// A measurement.
    pub fn new(what: &str, measured: usize, expected: Expected) -> Self {
        let holds = match expected {
            Expected::Exactly(number) => measured == number,
            Expected::AtLeast(number) => measured >= number,
            Expected::Any => true,
        };
        Self { what: what.to_owned(), measured, expected, holds }
    }
}

/// What a chapter came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chapter {
    /// Its number.
    #[serde(rename = "chapter")]
    pub number: u8,
    /// Its heading.
    pub title: &'static str,
    /// Its numbers.
    pub rows: Vec<Row>,
}

impl Chapter {
    /// Whether all came as it had to.
    pub fn holds(&self) -> bool {
        self.rows.iter().all(|row| row.holds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chapter_holds_only_when_every_number_does() {
        let right = Row::new("a", 100, Expected::Exactly(100));
        let more = Row::new("b", 102, Expected::AtLeast(101));
        let wrong = Row::new("c", 100, Expected::AtLeast(101));
        let chapter = |rows: &[&Row]| Chapter { number: 1, title: "", rows: rows.iter().copied().cloned().collect() };
        assert!(chapter(&[&right, &more]).holds());
        assert!(!chapter(&[&right, &wrong]).holds());
        assert!(!Row::new("d", 99, Expected::Exactly(100)).holds);
    }
}
