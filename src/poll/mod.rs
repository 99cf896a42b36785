//! `postgres.source = "poll"`: undelivered rows are read from the table itself, for databases that allow no logical replication.
//!
//! One transaction a batch: claim rows, send them, wait until the brokers have them, mark those, commit. So a row is never
//! marked before it is acknowledged, and whoever dies in between has marked nothing. This is no [`crate::source::Source`]:
//! there is no position to confirm, and each row is acknowledged by itself. The stages and the sink are those of the stream.
//! The hard part is a row that fails: it is left with one more attempt, lets the rest go, and holds back its own key. See
//! `docs/decisions/0010-poll.md`.

mod batch;
mod error;
mod retry;
pub mod setup;
mod waiting;

use std::time::Duration;

use tokio::time::Instant;

use self::batch::Batch;
pub use self::{
    error::{PollError, judge},
    retry::Retry,
    waiting::waiting_seconds,
};
use crate::{
    clock,
    config::{Config, PollConfig, RetentionConfig},
    event::Position,
    fault,
    lsn::Lsn,
    observe::{Health, Part},
    pipeline::{Open, Sent, SessionError, Signals, Stages, Telltale, Wish},
    sink::{KafkaSink, Sink, SinkError},
    source::{
        SourceError,
        queue::{Place, Queue, Which},
    },
    trace::Traced,
};

/// After so many rows the loop looks at wishes and reports, however much more has arrived.
const ROWS_PER_TURN: u32 = 512;
/// How often it looks around while nothing happens.
const LOOK: Duration = Duration::from_millis(250);

/// Connects to the tables, and says what they lack.
pub async fn connect(config: &Config) -> Result<Queue, SessionError> {
    let channel = config.poll.notify_channel.as_deref();
    let queue = Queue::connect(&config.postgres.conninfo, &config.outboxes, channel).await.map_err(PollError::of)?;
    Ok(queue.map_err(PollError::Lack)?)
}

/// Whom a session tells how it stands.
#[derive(Clone, Copy)]
pub struct Witnesses<'a> {
    /// Metrics and progress.
    pub telltale: Telltale<'a>,
    /// What is wrong.
    pub health: &'a Health,
}

/// How a batch went.
#[derive(Debug, Default)]
struct Passed {
    /// Rows that were read.
    read: u64,
    delivered: u64,
    failed: u64,
    /// A failure that was the topic's, in words.
    refused: Option<String>,
}

/// State of the loop.
pub struct Session<'a> {
    queue: &'a mut Queue,
    sink: Traced<'a, KafkaSink>,
    stages: &'a mut Stages,
    poll: &'a PollConfig,
    retention: Option<RetentionConfig>,
    witnesses: Witnesses<'a>,
    /// Each record is sent alone, until a round is through.
    isolated: bool,
    /// Of the next row: what the sink counts by.
    number: u64,
    clock_ahead_us: i64,
    /// Of each table: timestamp of the first undelivered row, 0 when there is none.
    oldest_us: Vec<i64>,
    /// Of each table: rows whose delivery failed before.
    failed: Vec<u64>,
    prune_at: Instant,
}

impl<'a> Session<'a> {
    /// A session with a producer that has sent nothing yet. `isolated`: each record is to be sent alone.
    pub fn new(
        queue: &'a mut Queue,
        (sink, stages): (Traced<'a, KafkaSink>, &'a mut Stages),
        (config, isolated): (&'a Config, bool),
        witnesses: Witnesses<'a>,
    ) -> Self {
        let tables = queue.len();
        Self {
            queue,
            sink,
            stages,
            poll: &config.poll,
            retention: config.retention,
            witnesses,
            isolated,
            number: 0,
            clock_ahead_us: 0,
            oldest_us: vec![0; tables],
            failed: vec![0; tables],
            prune_at: Instant::now(),
        }
    }

    /// Polls until something fails or the operator wants the end.
    pub async fn run(&mut self, retries: &mut Vec<Retry>, signals: &mut Signals) -> Result<(), SessionError> {
        self.sink.recover(Lsn::ZERO)?;
        self.stages.forget();
        for relation in self.queue.relations() {
            self.stages.describe(relation, Lsn(u64::MAX))?;
        }
        retries.resize_with(self.queue.len(), || Retry::new(self.poll.interval));
        loop {
            let more = !*signals.pause.borrow_and_update() && self.round(retries, signals).await?;
            if *signals.wish.borrow_and_update() > Wish::Run {
                return Ok(());
            }
            if self.isolated {
                // nothing is in flight: the suspects are through, whatever became of them
                self.sink.seal(Lsn(u64::MAX >> 1));
            }
            self.sink.tick(self.clock_ahead_us)?;
            let pruned_all = self.prune().await?;
            if more || !pruned_all || self.queue.take_notification() {
                continue;
            }
            let soon = retries.iter().zip(&self.failed).filter(|(_, failed)| **failed > 0);
            let wake = soon.map(|(retry, _)| retry.due()).fold(Instant::now() + self.poll.interval, Instant::min);
            // the order: wishes first, the timer last
            tokio::select! {
                biased;
                Ok(()) = signals.wish.changed() => {}
                Ok(()) = signals.pause.changed() => {}
                notified = self.queue.notified() => notified.map_err(PollError::of)?,
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Once through all tables; true when there may be more to send at once.
    async fn round(&mut self, retries: &mut [Retry], signals: &mut Signals) -> Result<bool, SessionError> {
        let (mut more, mut refused) = (false, None);
        for (table, retry) in retries.iter_mut().enumerate() {
            for which in [Which::Fresh, Which::Failed] {
                let due = which == Which::Fresh || self.failed[table] > 0 && retry.is_due();
                if !due || *signals.wish.borrow() > Wish::Run {
                    continue;
                }
                let passed = self.pass((table, which), retry, signals).await?;
                refused = refused.or(passed.refused);
                // behind one that failed before, rows of its key may have waited
                let full = passed.read >= u64::from(self.poll.batch) || which == Which::Failed;
                more |= full && passed.delivered > 0;
            }
        }
        self.tell_refusal(refused.as_deref());
        Ok(more)
    }

    fn tell_refusal(&self, refused: Option<&str>) {
        let health = self.witnesses.health;
        if let Some(refused) = refused {
            let reason = format!("{refused}; create it or grant access: its events are tried again");
            if health.trouble(Part::Topic, &reason) {
                tracing::warn!("{reason}");
            }
        } else if self.failed.iter().all(|failed| *failed == 0) {
            health.well(Part::Topic);
        }
    }

    /// One transaction: claims rows of a table, sends them, marks what became of them.
    async fn pass(
        &mut self,
        (table, which): (usize, Which),
        retry: &mut Retry,
        signals: &mut Signals,
    ) -> Result<Passed, SessionError> {
        let found = self.in_time(async |queue| queue.begin(table).await).await?;
        self.clock_ahead_us = found.now_us - clock::steady_us();
        self.failed[table] = found.failed;
        self.oldest_us[table] = found.oldest_us.unwrap_or(0);
        self.tell();
        self.queue.ask(which, found.failed > 0, self.poll.batch).map_err(PollError::of)?;
        let mut batch = Batch::new(self.number, found.now_us);
        let outcome = self.send(&mut batch, signals).await;
        if let Err(error) = &outcome
            && !matches!(error, SessionError::Sink(_) | SessionError::Poll(PollError::Unacknowledged { .. }))
        {
            return outcome.map(|()| Passed::default());
        }
        // whatever has ended it: what the brokers have is marked, and nothing else
        self.in_time(async |queue| queue.settle().await).await?;
        batch.note(self.sink.take_failures());
        let ahead = self.sink.delivered_ahead().map(|lsn| lsn.0).collect();
        let (delivered, failed) = batch.judge(self.sink.durable().0, &ahead);
        self.mark(&delivered, &failed).await?;
        let (delivered, failed) = (delivered.len() as u64, failed.len() as u64);
        let passed = Passed { read: batch.read(), delivered, failed, refused: batch.into_refusal() };
        self.account(table, which, &passed);
        match which {
            Which::Fresh if failed > 0 => retry.plan_first(self.failed[table] == failed),
            Which::Fresh => {}
            // the next session looks for the record at fault among the same rows, at once
            Which::Failed if matches!(outcome, Err(SessionError::Sink(SinkError::Suspect { .. }))) => {}
            Which::Failed => retry.note(delivered, failed),
        }
        outcome.map(|()| passed)
    }

    async fn mark(&mut self, delivered: &[&Place], failed: &[&Place]) -> Result<(), SessionError> {
        fault::point("poll_before_mark");
        let expected = (delivered.len() + failed.len()) as u64;
        let marked = self.in_time(async |queue| queue.mark(delivered, failed).await).await?;
        if marked != expected {
            self.in_time(async |queue| queue.rollback().await).await?;
            return Err(PollError::Unmarked { expected, marked }.into());
        }
        fault::point("poll_before_commit");
        self.in_time(async |queue| queue.commit().await).await
    }

    /// What a server that has fallen silent does not answer would otherwise be waited for without an end.
    async fn in_time<T>(
        &mut self,
        ask: impl AsyncFnOnce(&mut Queue) -> Result<T, SourceError>,
    ) -> Result<T, SessionError> {
        let answer = tokio::time::timeout(self.poll.ack_timeout, ask(self.queue)).await;
        Ok(answer.unwrap_or(Err(SourceError::Silent)).map_err(PollError::of)?)
    }

    fn account(&mut self, table: usize, which: Which, passed: &Passed) {
        self.witnesses.telltale.metrics.poll_failures.inc_by(passed.failed);
        match which {
            Which::Fresh => self.failed[table] += passed.failed,
            Which::Failed => self.failed[table] -= passed.delivered.min(self.failed[table]),
        }
        let more = passed.read > passed.delivered || passed.read >= u64::from(self.poll.batch);
        if self.failed[table] == 0 && !more {
            self.oldest_us[table] = 0;
        }
        self.tell();
    }

    /// Sends what was asked for and waits for the brokers' answer.
    async fn send(&mut self, batch: &mut Batch, signals: &mut Signals) -> Result<(), SessionError> {
        let mut stopped: Option<Instant> = None;
        let (mut quiet_since, mut seen) = (Instant::now(), (0, 0));
        loop {
            let wish = *signals.wish.borrow_and_update();
            self.sink.tick(self.clock_ahead_us)?;
            batch.note(self.sink.take_failures());
            let mut full = false;
            if wish == Wish::Run {
                full = self.work(batch)?;
            } else {
                let by = *stopped.get_or_insert_with(|| Instant::now() + signals.drain_timeout);
                if wish == Wish::Abort || Instant::now() >= by {
                    return Ok(());
                }
                self.in_time(async |queue| queue.settle().await).await?;
            }
            let in_flight = self.sink.in_flight().0;
            if self.queue.is_exhausted() && in_flight == 0 {
                return Ok(());
            }
            if (batch.read(), in_flight) != seen {
                (quiet_since, seen) = (Instant::now(), (batch.read(), in_flight));
            } else if quiet_since.elapsed() >= self.poll.ack_timeout {
                return Err(PollError::Unacknowledged { waited: self.poll.ack_timeout }.into());
            }
            self.tell();
            let reading = !full && !self.queue.is_exhausted();
            // the order: wishes first, then news that make room or bring work, the timer last
            tokio::select! {
                biased;
                Ok(()) = signals.wish.changed() => {}
                () = self.sink.ready(), if full || in_flight > 0 => {}
                moved = self.queue.drive(), if reading => moved.map_err(PollError::of)?,
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Works through the rows that have arrived; true when the sink has no room for the next.
    fn work(&mut self, batch: &mut Batch) -> Result<bool, SessionError> {
        for _ in 0..ROWS_PER_TURN {
            let Some(claimed) = self.queue.peek().map_err(PollError::of)? else { return Ok(false) };
            if !batch.holds_back(claimed.key) {
                let commit_us = claimed.created_us.unwrap_or(batch.now_us());
                let open = Open { commit_us, position: Position::default(), row: Some(self.number) };
                match self.stages.publish(claimed.relation.oid, claimed.row, open, &mut self.sink) {
                    Ok(Sent::Full) => return Ok(true),
                    Ok(Sent::Yes) => {
                        batch.sent(&claimed);
                        self.number += 1;
                        self.sink.seal(Lsn(self.number));
                    }
                    Ok(Sent::NotOurs { .. }) => {
                        return Err(SourceError::Protocol("a row of another table".into()).into());
                    }
                    Err(SessionError::Poison { source, .. }) => batch.unfit(&claimed, &source, false),
                    Err(SessionError::Sink(error @ SinkError::Poison { .. })) => batch.unfit(&claimed, &error, false),
                    Err(SessionError::Sink(error @ SinkError::Refused { .. })) => batch.unfit(&claimed, &error, true),
                    Err(error) => return Err(error),
                }
            }
            batch.count();
            self.queue.consume();
            fault::point("poll_after_send");
        }
        Ok(false)
    }

    /// Deletes some of the rows that were delivered long ago; true when no more are due now.
    async fn prune(&mut self) -> Result<bool, SessionError> {
        let Some(retention) = self.retention.filter(|_| Instant::now() >= self.prune_at) else { return Ok(true) };
        let mut all = true;
        for table in 0..self.queue.len() {
            let (keep, limit) = (retention.keep.as_micros(), retention.batch);
            let pruned = self.in_time(async |queue| queue.prune(table, keep, limit).await).await?;
            all &= pruned < u64::from(limit);
            self.witnesses.telltale.metrics.pruned_rows.inc_by(pruned);
            if pruned > 0 {
                tracing::debug!(table, pruned, "deleted rows that were delivered");
            }
        }
        if all {
            self.prune_at = Instant::now() + retention.interval;
        }
        Ok(all)
    }

    fn tell(&self) {
        let Telltale { metrics, progress } = self.witnesses.telltale;
        progress.set_clock_ahead_us(self.clock_ahead_us);
        let oldest = self.oldest_us.iter().copied().filter(|oldest| *oldest > 0).min().unwrap_or(0);
        progress.set(Lsn::ZERO, Lsn::ZERO, self.sink.in_flight(), oldest);
        metrics.poll_failed_events.set(i64::try_from(self.failed.iter().sum::<u64>()).unwrap_or(i64::MAX));
    }
}
