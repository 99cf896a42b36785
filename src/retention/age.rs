//! [`TimeKind`]: the ages of rows, by whatever type their timestamp has. Makes SQL and runs none.

use std::time::Duration;

/// How the timestamp column is compared with the clock of the server. Its text form in the session is UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeKind {
    Timestamptz,
    Timestamp,
    Date,
    UnixMillis,
}

impl TimeKind {
    pub(super) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "timestamptz" => Self::Timestamptz,
            "timestamp" => Self::Timestamp,
            "date" => Self::Date,
            "int8" => Self::UnixMillis,
            _ => return None,
        })
    }

    /// The newest time that is old enough, as the column has it. A date is over when its day is.
    pub(super) fn cutoff(self, keep: Duration) -> String {
        let then = format!("now() - make_interval(secs => {})", keep.as_secs_f64());
        match self {
            Self::Timestamptz => format!("({then})"),
            Self::Timestamp => format!("(({then}) AT TIME ZONE 'UTC')"),
            Self::Date => format!("((({then}) AT TIME ZONE 'UTC')::date)"),
            Self::UnixMillis => format!("((extract(epoch FROM {then}) * 1000)::bigint)"),
        }
    }

    /// A parameter of type text, as the column has it.
    pub(super) fn parameter(self, number: u8) -> String {
        let kind = match self {
            Self::Timestamptz => "timestamptz",
            Self::Timestamp => "timestamp",
            Self::Date => "date",
            Self::UnixMillis => "bigint",
        };
        format!("(${number}::text)::{kind}")
    }

    /// The column as `timestamptz`.
    pub(super) fn instant(self, column: &str) -> String {
        match self {
            Self::Timestamptz => column.to_owned(),
            Self::Timestamp => format!("({column} AT TIME ZONE 'UTC')"),
            Self::Date => format!("(({column} + 1)::timestamp AT TIME ZONE 'UTC')"),
            Self::UnixMillis => format!("to_timestamp({column} / 1000.0)"),
        }
    }

    pub(super) fn beginning(self) -> &'static str {
        if self == Self::UnixMillis { "-9223372036854775808" } else { "-infinity" }
    }
}
