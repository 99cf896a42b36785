//! [`History`]: the last half hour in memory, so that whoever opens the status page sees what came before.
//!
//! Bounded by `KEPT` samples of a few words each. Lost with the process: for longer there is Prometheus.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::Serialize;

use super::View;
use crate::clock;

/// Time between two samples.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Half an hour.
const KEPT: usize = 30 * 60 / 5;

/// How walpost stood at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Unix ms, our clock.
    pub at_ms: i64,
    /// Bytes of WAL that are not confirmed; `None` while unknown.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest event that is not confirmed.
    pub lag_seconds: f64,
    /// Events that the brokers acknowledged since the start.
    pub events: u64,
    /// Nothing was wrong.
    pub ready: bool,
}

/// The last half hour.
#[derive(Debug, Default)]
pub struct History {
    samples: Mutex<VecDeque<Sample>>,
}

/// The samples column by column, oldest first: a third of the bytes that one object each would take.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Columns {
    /// Unix ms.
    pub at_ms: Vec<i64>,
    /// Null while unknown.
    pub lag_bytes: Vec<Option<u64>>,
    /// To the millisecond.
    pub lag_seconds: Vec<f64>,
    /// Since the start of the process.
    pub events: Vec<u64>,
    /// Whether nothing was wrong.
    pub ready: Vec<bool>,
}

impl History {
    /// Takes a sample in; the oldest goes where there are enough.
    pub fn push(&self, sample: Sample) {
        let mut samples = self.lock();
        if samples.len() == KEPT {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// All samples.
    pub fn columns(&self) -> Columns {
        let mut columns = Columns::default();
        for sample in &*self.lock() {
            columns.at_ms.push(sample.at_ms);
            columns.lag_bytes.push(sample.lag_bytes);
            columns.lag_seconds.push((sample.lag_seconds * 1000.0).round() / 1000.0);
            columns.events.push(sample.events);
            columns.ready.push(sample.ready);
        }
        columns
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Sample>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes samples for ever.
pub async fn record(view: View) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        view.history.push(sample(&view));
    }
}

fn sample(view: &View) -> Sample {
    Sample {
        at_ms: clock::unix_us() / 1000,
        lag_bytes: view.lag_bytes(),
        lag_seconds: view.progress.lag_seconds(clock::steady_us()),
        events: view.metrics.events(),
        ready: view.troubles().is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::status::tests::view, *};

    #[test]
    fn memory_is_bounded_and_the_oldest_go_first() {
        let history = History::default();
        let (view, _sender) = view();
        for at_ms in 0..1000 {
            history.push(Sample { at_ms, ..sample(&view) });
        }
        let columns = history.columns();
        assert_eq!((columns.at_ms.len(), columns.at_ms[0]), (KEPT, 640));
        assert_eq!((columns.lag_bytes[0], columns.ready[0]), (None, false), "unknown is not 0");
    }
}
