//! [`Overview`]: what the status page shows beside the status: the last half hour, topics, dead letters, errors.

use serde::Serialize;

use super::{
    View,
    health::Noted,
    history::{self, Columns},
    metrics::TopicCount,
    status::Status,
};
use crate::clock;

/// So many topics are listed; the rest is only counted.
const MOST_TOPICS: usize = 25;

/// The JSON of `/status/history`.
#[derive(Debug, Serialize)]
pub struct Overview {
    /// Unix ms, our clock.
    now_ms: i64,
    /// Time between two samples.
    period_seconds: u64,
    /// As `/status`.
    status: Status,
    /// Bounds on what is in flight: events, bytes.
    in_flight_limits: (usize, usize),
    samples: Columns,
    /// By events, most first.
    topics: Vec<TopicCount>,
    more_topics: usize,
    dead_letters: Vec<TopicCount>,
    /// Latest first.
    errors: Vec<Noted>,
}

impl Overview {
    /// How it stands now.
    pub fn of(view: &View) -> Self {
        let mut topics = view.metrics.topics();
        let more_topics = topics.len().saturating_sub(MOST_TOPICS);
        topics.truncate(MOST_TOPICS);
        Self {
            now_ms: clock::unix_us() / 1000,
            period_seconds: history::PERIOD.as_secs(),
            status: view.status(),
            in_flight_limits: view.in_flight_limits,
            samples: view.history.columns(),
            topics,
            more_topics,
            dead_letters: view.metrics.dead_letters(),
            errors: view.health.noted(),
        }
    }
}
