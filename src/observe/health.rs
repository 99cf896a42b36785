//! [`Health`]: why walpost is not ready, part by part.

use std::{collections::VecDeque, sync::Mutex};

use serde::Serialize;

use crate::clock;

/// So many errors are kept for the status page.
const NOTED: usize = 10;

/// A part whose trouble makes walpost unready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// An operator paused it.
    Pause,
    /// The replication stream.
    Stream,
    /// The slot, as the SQL link sees it.
    Slot,
    /// The publication, as the SQL link sees it.
    Publication,
    /// The brokers.
    Kafka,
    /// A topic that is missing or denied; events are held for it.
    Topic,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Pause, Self::Stream, Self::Slot, Self::Publication, Self::Kafka, Self::Topic];
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pause => "pause",
            Self::Stream => "stream",
            Self::Slot => "slot",
            Self::Publication => "publication",
            Self::Kafka => "kafka",
            Self::Topic => "topic",
        })
    }
}

/// The present troubles: at most one reason a part. Ready when there is none.
#[derive(Debug, Default)]
pub struct Health {
    troubles: Mutex<std::collections::BTreeMap<Part, String>>,
    last_error: Mutex<Option<String>>,
    /// Latest first.
    noted: Mutex<VecDeque<Noted>>,
}

/// Something that went wrong, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Noted {
    /// The last time, Unix ms.
    pub at_ms: i64,
    /// Which part; empty where it is none.
    pub part: String,
    /// Cause and remedy.
    pub reason: String,
    /// How often in a row.
    pub times: u64,
}

/// Until a broker has answered for the first time.
pub const NOT_REACHED_YET: &str = "no broker has answered yet";
/// Until slot and publication were looked at for the first time.
pub const NOT_SEEN_YET: &str = "nobody has looked at it yet";

impl Health {
    /// That of a process that has reached nothing yet: not ready. (The stream is told by what streams.)
    pub fn starting() -> Self {
        let unknown = [(Part::Kafka, NOT_REACHED_YET), (Part::Slot, NOT_SEEN_YET), (Part::Publication, NOT_SEEN_YET)];
        let troubles = unknown.map(|(part, reason)| (part, reason.to_owned())).into();
        Self { troubles: Mutex::new(troubles), ..Self::default() }
    }

    /// Notes a trouble. Returns true when it is new or its reason changed (so that it is logged once).
    pub fn trouble(&self, part: Part, reason: impl Into<String>) -> bool {
        let reason = reason.into();
        *lock(&self.last_error) = Some(reason.clone());
        self.note(part.to_string(), &reason);
        lock(&self.troubles).insert(part, reason.clone()).as_deref() != Some(reason.as_str())
    }

    /// Notes a reason for not being ready that is no error.
    pub fn hold(&self, part: Part, reason: impl Into<String>) {
        lock(&self.troubles).insert(part, reason.into());
    }

    /// Keeps something that went wrong as the last error, though it is no present trouble.
    pub fn remember(&self, error: impl Into<String>) {
        let error = error.into();
        self.note(String::new(), &error);
        *lock(&self.last_error) = Some(error);
    }

    fn note(&self, part: String, reason: &str) {
        let (mut noted, at_ms) = (lock(&self.noted), clock::unix_us() / 1000);
        if let Some(again) = noted.iter_mut().find(|noted| noted.part == part && noted.reason == reason) {
            (again.at_ms, again.times) = (at_ms, again.times + 1);
        } else {
            noted.push_front(Noted { at_ms, part, reason: reason.to_owned(), times: 1 });
            noted.truncate(NOTED);
        }
        noted.make_contiguous().sort_by_key(|noted| std::cmp::Reverse(noted.at_ms));
    }

    /// The last errors, latest first, also those that are over.
    pub fn noted(&self) -> Vec<Noted> {
        lock(&self.noted).iter().cloned().collect()
    }

    /// Notes that a part is well. Returns the trouble that is over, if there was one.
    pub fn well(&self, part: Part) -> Option<String> {
        lock(&self.troubles).remove(&part)
    }

    /// The present troubles; empty when ready.
    pub fn troubles(&self) -> Vec<(Part, String)> {
        lock(&self.troubles).iter().map(|(part, reason)| (*part, reason.clone())).collect()
    }

    /// The last trouble, also when it is over.
    pub fn last_error(&self) -> Option<String> {
        lock(&self.last_error).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_not_ready_before_everything_was_seen_once() {
        let health = Health::starting();
        for part in [Part::Kafka, Part::Slot, Part::Publication] {
            assert!(health.troubles().iter().any(|(troubled, _)| *troubled == part), "{part}");
            assert!(health.well(part).is_some());
        }
        assert_eq!(health.troubles(), []);
        assert_eq!(health.last_error(), None, "a start is no error");
    }
}
