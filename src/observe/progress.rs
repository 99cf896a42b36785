//! [`Progress`]: where the pipeline stands, written by its thread and read by whoever looks.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::lsn::Lsn;

/// What the pipeline does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Stage {
    /// It tries to reach what it needs.
    #[default]
    Connecting,
    /// Another walpost holds the slot; it takes over when that one ends.
    Standby,
    /// It publishes rows that are older than the slot.
    Backfilling,
    /// It streams, or polls.
    Streaming,
}

/// Where the pipeline stands. Single values, each exact; not a consistent snapshot of all of them.
#[derive(Debug, Default)]
pub struct Progress {
    received_lsn: AtomicU64,
    confirmed_lsn: AtomicU64,
    in_flight_events: AtomicU64,
    in_flight_bytes: AtomicU64,
    oldest_commit_us: AtomicI64,
    clock_ahead_us: AtomicI64,
    paused: AtomicBool,
    stage: AtomicU8,
    beat: Mutex<Option<Instant>>,
    turn: Mutex<Option<Instant>>,
}

impl Progress {
    /// Notes where the stream stands. `oldest_commit_us`: commit time (Unix µs, server's clock) of the oldest event that is
    /// received and not confirmed; 0 when there is none.
    pub fn set(&self, received: Lsn, confirmed: Lsn, in_flight: (u64, u64), oldest_commit_us: i64) {
        self.received_lsn.store(received.0, Relaxed);
        self.confirmed_lsn.store(confirmed.0, Relaxed);
        self.in_flight_events.store(in_flight.0, Relaxed);
        self.in_flight_bytes.store(in_flight.1, Relaxed);
        self.oldest_commit_us.store(oldest_commit_us, Relaxed);
        note(&self.turn);
    }

    /// Notes that the pipeline's thread is alive.
    pub fn beat(&self) {
        note(&self.beat);
    }

    /// Whether the pipeline's thread has shown no life for so long; false before its first sign.
    pub fn silent_for(&self, limit: Duration) -> bool {
        elapsed(&self.beat).is_some_and(|elapsed| elapsed > limit)
    }

    /// Whether the loop that should stream has not come round for so long. It does so at least every few seconds, even where
    /// nothing arrives and no broker answers.
    pub fn stuck_for(&self, limit: Duration) -> bool {
        self.streaming() && elapsed(&self.turn).is_some_and(|elapsed| elapsed > limit)
    }

    /// Notes by how many µs the server's clock is ahead of ours.
    pub fn set_clock_ahead_us(&self, ahead: i64) {
        self.clock_ahead_us.store(ahead, Relaxed);
    }

    /// Notes whether a replication stream is open.
    pub fn set_streaming(&self, streaming: bool) {
        self.set_stage(if streaming { Stage::Streaming } else { Stage::Connecting });
    }

    /// Notes what the pipeline does now.
    pub fn set_stage(&self, stage: Stage) {
        note(&self.turn);
        self.stage.store(stage as u8, Relaxed);
    }

    /// What the pipeline does.
    pub fn stage(&self) -> Stage {
        let stages = [Stage::Connecting, Stage::Standby, Stage::Backfilling, Stage::Streaming];
        stages[usize::from(self.stage.load(Relaxed))]
    }

    /// Whether a replication stream is open.
    pub fn streaming(&self) -> bool {
        self.stage() == Stage::Streaming
    }

    /// Notes whether an operator has paused it.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Relaxed);
    }

    /// Whether an operator has paused it.
    pub fn paused(&self) -> bool {
        self.paused.load(Relaxed)
    }

    /// The furthest WAL position received, `0/0` before the first.
    pub fn received_lsn(&self) -> Lsn {
        Lsn(self.received_lsn.load(Relaxed))
    }

    /// The last LSN confirmed to the server, `0/0` before the first.
    pub fn confirmed_lsn(&self) -> Lsn {
        Lsn(self.confirmed_lsn.load(Relaxed))
    }

    /// Events handed to the producer and not yet acknowledged: (count, bytes).
    pub fn in_flight(&self) -> (u64, u64) {
        (self.in_flight_events.load(Relaxed), self.in_flight_bytes.load(Relaxed))
    }

    /// By how many µs the server's clock is ahead of ours (negative: behind).
    pub fn clock_ahead_us(&self) -> i64 {
        self.clock_ahead_us.load(Relaxed)
    }

    /// Age in seconds of the oldest committed, received and unconfirmed event, by the server's clock: 0 when there is none,
    /// never negative.
    pub fn lag_seconds(&self, now_us: i64) -> f64 {
        let oldest = self.oldest_commit_us.load(Relaxed);
        if oldest == 0 {
            return 0.0;
        }
        let age = now_us.saturating_add(self.clock_ahead_us()).saturating_sub(oldest);
        Duration::from_micros(age.max(0).unsigned_abs()).as_secs_f64()
    }
}

fn note(moment: &Mutex<Option<Instant>>) {
    *moment.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

fn elapsed(moment: &Mutex<Option<Instant>>) -> Option<Duration> {
    moment.lock().unwrap_or_else(PoisonError::into_inner).map(|moment| moment.elapsed())
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "whole seconds are exact")]
mod tests {
    use super::*;

    /// Case 48: a server whose clock is ahead.
    #[test]
    fn lag_is_measured_by_the_servers_clock_and_never_negative() {
        let progress = Progress::default();
        assert_eq!(progress.lag_seconds(5_000_000), 0.0, "idle");
        progress.set(Lsn(2), Lsn(1), (1, 10), 3_600_000_000);
        progress.set_clock_ahead_us(3_599_000_000);
        assert_eq!(progress.lag_seconds(3_000_000), 2.0, "a server clock an hour ahead does not hide the lag");
        assert_eq!(progress.lag_seconds(0), 0.0);
    }

    #[test]
    fn only_a_loop_that_should_stream_can_be_stuck() {
        let progress = Progress::default();
        for stage in [Stage::Connecting, Stage::Standby, Stage::Backfilling] {
            progress.set_stage(stage);
            assert_eq!(progress.stage(), stage);
            assert!(!progress.stuck_for(Duration::ZERO), "{stage:?}");
        }
        progress.set_streaming(true);
        assert!(progress.stuck_for(Duration::ZERO) && !progress.stuck_for(Duration::from_mins(1)));
    }
}
