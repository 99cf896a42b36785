//! [`Lsn`]: a position in the write-ahead log.

use std::{fmt, str::FromStr};

/// A byte position in Postgres' write-ahead log, printed as Postgres prints it (`16/B374D848`).
///
/// See <https://www.postgresql.org/docs/current/datatype-pg-lsn.html>.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `0/0`: no position. Postgres never writes a record there.
    pub const ZERO: Self = Self(0);

    /// Bytes from `earlier` to here; 0 where `earlier` is not earlier.
    pub fn bytes_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// The text was not of the form `XXXXXXXX/XXXXXXXX`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not an LSN: {0:?} (expected two hexadecimal numbers like 16/B374D848)")]
pub struct ParseLsnError(String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let half = |text: &str| {
            let digits = !text.is_empty() && text.len() <= 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
            digits.then(|| u64::from_str_radix(text, 16).ok()).flatten()
        };
        s.split_once('/')
            .and_then(|(high, low)| Some(Self(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| ParseLsnError(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_and_parses_as_postgres_does() {
        for (text, value) in [("0/0", 0), ("16/B374D848", 0x16_B374_D848), ("FFFFFFFF/FFFFFFFF", u64::MAX)] {
            assert_eq!(text.parse(), Ok(Lsn(value)));
            assert_eq!(Lsn(value).to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_no_lsn() {
        for text in ["", "/", "1", "1/", "/1", "1/+2", "1/2/3", "1/123456789", "g/0", " 0/0"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?} was taken for an LSN");
        }
    }
}
