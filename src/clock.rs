//! The wall clock, in the unit that everything here counts in.

use std::time::SystemTime;

/// Unix time in µs; 0 before 1970.
pub fn unix_us() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
