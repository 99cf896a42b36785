//! The wall clock, in the unit that everything here counts in.

use std::{
    sync::LazyLock,
    time::{Instant, SystemTime},
};

use crate::fault;

/// Unix time in µs; 0 before 1970.
pub fn unix_us() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX).saturating_add(fault::clock_offset_us())
}

/// Unix time in µs as it was when the process started, and on from there by a clock that nobody sets. Ages are taken by this
/// one: a wall clock that jumps an hour would make every event an hour old.
pub fn steady_us() -> i64 {
    static START: LazyLock<(Instant, i64)> = LazyLock::new(|| (Instant::now(), unix_us()));
    let (since, at_us) = &*START;
    at_us.saturating_add(i64::try_from(since.elapsed().as_micros()).unwrap_or(i64::MAX))
}
