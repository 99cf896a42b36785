//! [`run_session`]: the one loop that joins source, stages, sink and confirms.
//!
//! One task, one socket, one producer. The loop works through what has arrived, takes in what was delivered, tells the
//! server what is due, and waits. What the server is told is [`Sink::durable`] and nothing else. The hard part is a sink
//! that is full: the event stays in the source's buffer and the socket is not read, but status updates go on, however long.

mod stages;
#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::{sync::watch, time::Instant};

use crate::{
    backfill::BackfillError,
    clock,
    event::Position,
    fault::{self, Bug},
    init::InitError,
    lsn::Lsn,
    observe::{Metrics, Progress, ServerState},
    poll::PollError,
    sink::{Sink, SinkError},
    source::{
        Event, Source, SourceError,
        feedback::{Feedback, LOST_AFTER, SHUTDOWN_PATIENCE},
        pgoutput::{Ignored, Relation},
    },
};
pub(crate) use stages::Sent;
pub use stages::{Catalog, PoisonError, Stages, TableError};

/// After so many events the loop looks at the clock, however much more has arrived.
const EVENTS_PER_TURN: u32 = 512;
/// A commit older than this when the server sent it: the stream is behind, bytes may pile up.
const BEHIND_US: i64 = 20_000;
/// How far the two clocks may drift apart from one message to the next.
const CLOCK_DRIFT_US: i64 = 1_000;
/// How long the server may take to answer the goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
/// How often the gauges are brought up to date while nothing else happens.
const REFRESH: Duration = Duration::from_millis(250);

/// What the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// Go on.
    Run,
    /// Read no more, wait for what is in flight (bounded), confirm, end.
    Drain,
    /// End now; what is not confirmed comes again.
    Abort,
}

/// Wishes and news from outside of the loop.
#[derive(Debug, Clone)]
pub struct Signals {
    /// What the operator wants.
    pub wish: watch::Receiver<Wish>,
    /// What the SQL link knows.
    pub server: watch::Receiver<ServerState>,
    /// While it is true, no transaction is begun.
    pub pause: watch::Receiver<bool>,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}

/// Where the loop tells how it stands.
#[derive(Clone, Copy)]
pub struct Telltale<'a> {
    /// Metrics.
    pub metrics: &'a Metrics,
    /// Positions.
    pub progress: &'a Progress,
}

/// Why a session ended before it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// What must exist before the stream does not, or does not fit.
    #[error("prepare the database")]
    Prepare(#[source] Box<InitError>),
    /// Rows that are older than the slot cannot be read.
    #[error(transparent)]
    Backfill(#[from] BackfillError),
    /// The table cannot be polled.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// The sink failed.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// A table does not fit its mapping or routes.
    #[error("table {table} does not fit the configuration")]
    Table {
        /// The table.
        table: String,
        /// Why.
        #[source]
        source: TableError,
    },
    /// An event cannot be published.
    #[error("event {event_id} at {position} cannot be published")]
    Poison {
        /// The event; empty where the id itself is missing.
        event_id: String,
        /// Where it stands.
        position: Position,
        /// Why.
        #[source]
        source: PoisonError,
    },
}

/// The transaction that is being received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Open {
    pub(crate) commit_us: i64,
    /// Of the next event.
    pub(crate) position: Position,
    /// In a backfill: the number of the row, which the sink counts by.
    pub(crate) row: Option<u64>,
}

impl Open {
    /// Where the event stands for the sink.
    fn place(&self) -> Position {
        self.row.map_or(self.position, |number| Position { commit_lsn: Lsn(number), ordinal: 0 })
    }
}

/// For how long the SQL link has seen the server stopping, in this session.
#[derive(Debug, Clone, Copy)]
enum Stopping {
    /// It has not, or only before.
    No {
        /// It said so before this session began, which shows that it is over.
        stale: bool,
    },
    /// Since then.
    Since(Instant),
}

impl Stopping {
    fn at_start(state: ServerState) -> Self {
        Self::No { stale: state == ServerState::Stopping }
    }

    /// Takes in the present state; true when the server has been stopping long enough to be left alone.
    fn for_long(&mut self, state: ServerState, now: Instant) -> bool {
        match *self {
            _ if state != ServerState::Stopping => *self = Self::No { stale: false },
            Self::No { stale: false } => *self = Self::Since(now),
            Self::No { stale: true } => {}
            Self::Since(since) => return now.duration_since(since) >= SHUTDOWN_PATIENCE,
        }
        false
    }
}

/// State of the loop.
struct Session<'a> {
    open: Option<Open>,
    received: Lsn,
    /// Of the last keepalive outside a transaction.
    keepalive: Lsn,
    behind: bool,
    /// The operator wants the end: read on to the end of the open transaction, no further, and no longer than this.
    drain_by: Option<Instant>,
    full_since: Option<Instant>,
    paused: bool,
    /// When the transaction was committed that a pause holds back; 0 for none.
    held_commit_us: i64,
    clock_ahead_us: i64,
    stopping: Stopping,
    feedback: Feedback,
    telltale: Telltale<'a>,
}

/// Runs one session from the slot's confirmed position until it fails or the operator wants it to end.
pub async fn run_session<So: Source, Si: Sink>(
    source: &mut So,
    sink: &mut Si,
    (stages, confirmed): (&mut Stages, Lsn),
    signals: &mut Signals,
    telltale: Telltale<'_>,
) -> Result<(), SessionError> {
    stages.forget();
    sink.recover(confirmed)?;
    let mut session = Session {
        open: None,
        received: confirmed,
        keepalive: Lsn::ZERO,
        behind: false,
        drain_by: None,
        full_since: None,
        paused: false,
        held_commit_us: 0,
        clock_ahead_us: i64::MIN / 2,
        stopping: Stopping::at_start(*signals.server.borrow()),
        feedback: Feedback::new(Instant::now(), confirmed),
        telltale,
    };
    let outcome = session.stream(source, sink, stages, signals).await;
    let outcome = match outcome {
        // the link is well, so what is delivered can still be confirmed and need not come again
        Err(error @ (SessionError::Poison { .. } | SessionError::Table { .. })) => {
            let by = Instant::now() + signals.drain_timeout;
            session.drain(source, sink, signals, by).await.and(Err(error))
        }
        Err(error @ SessionError::Sink(_)) => {
            session.goodbye(source, sink).await;
            Err(error)
        }
        outcome => outcome,
    };
    session.tell(sink);
    outcome
}

impl Session<'_> {
    async fn stream<So: Source, Si: Sink>(
        &mut self,
        source: &mut So,
        sink: &mut Si,
        stages: &mut Stages,
        signals: &mut Signals,
    ) -> Result<(), SessionError> {
        let mut refreshed = Instant::now();
        loop {
            let wish = *signals.wish.borrow_and_update();
            if wish > Wish::Run {
                let by = *self.drain_by.get_or_insert_with(|| Instant::now() + signals.drain_timeout);
                if self.open.is_none() || wish == Wish::Abort || Instant::now() >= by {
                    return self.drain(source, sink, signals, by).await;
                }
            }
            // a stop finishes what has begun, also in a pause
            self.set_paused(*signals.pause.borrow_and_update() && self.drain_by.is_none());
            // reports first: the room that they make is used at once, and no other report may follow to wake the loop
            sink.tick(self.clock_ahead_us)?;
            let more = self.work(source, sink, stages)?;
            if fault::bug(Bug::StandingLoop) && sink.in_flight().0 > 0 {
                std::future::pending::<()>().await;
            }
            let now = Instant::now();
            self.check_link(source, sink, now, signals)?;
            if let Some(update) = self.feedback.due(now, self.received, self.durable(sink)) {
                fault::point("before_status");
                source.send_status(update);
            }
            if now.duration_since(refreshed) >= REFRESH || sink.in_flight().0 == 0 {
                self.tell(sink);
                refreshed = now;
            }
            let full = self.full_since.is_some();
            let deadline =
                sink.deadline().map_or(self.feedback.deadline(now), |due| due.min(self.feedback.deadline(now)));
            if more {
                // only what is owed to the server; the rest waits in the buffer already
                if source.owes() {
                    tokio::select! {
                        biased;
                        sent = source.drive(false, false) => sent?,
                        () = std::future::ready(()) => {}
                    }
                }
                continue;
            }
            // the order: wishes first, then news that make room or bring work, the timer last
            tokio::select! {
                biased;
                Ok(()) = signals.wish.changed() => {}
                Ok(()) = signals.server.changed() => {}
                Ok(()) = signals.pause.changed() => {}
                () = sink.ready(), if full => {}
                moved = source.drive(!full, self.behind), if !full || source.owes() => {
                    moved?;
                    fault::point("after_receive");
                }
                () = tokio::time::sleep_until(deadline) => {}
            }
            if full {
                source.forgive_silence();
            }
        }
    }

    /// Works through what has arrived. True when it stopped to look at the clock and not for want of events or room.
    fn work<So: Source, Si: Sink>(
        &mut self,
        source: &mut So,
        sink: &mut Si,
        stages: &mut Stages,
    ) -> Result<bool, SessionError> {
        for _ in 0..EVENTS_PER_TURN {
            let Some(event) = source.peek()? else {
                self.has_room();
                return Ok(false);
            };
            if !self.take(event, sink, stages)? {
                self.full_since.get_or_insert_with(Instant::now);
                return Ok(false);
            }
            source.consume();
            if self.drain_by.is_some() && self.open.is_none() {
                break;
            }
        }
        self.has_room();
        Ok(true)
    }

    /// Takes one event in; false when the sink has no room for it.
    fn take<Si: Sink>(&mut self, event: Event<'_>, sink: &mut Si, stages: &mut Stages) -> Result<bool, SessionError> {
        match event {
            Event::Begin { commit_us, sent_us, .. } if self.paused => {
                self.held_commit_us = commit_us;
                self.set_clock(sent_us);
                return Ok(false);
            }
            Event::Begin { commit_lsn, commit_us, sent_us } => {
                self.held_commit_us = 0;
                self.open = Some(Open { commit_us, position: Position { commit_lsn, ordinal: 0 }, row: None });
                self.behind = sent_us - commit_us > BEHIND_US;
                self.set_clock(sent_us);
            }
            Event::Insert { relation, row } => {
                let Some(open) = self.open else { return Err(outside("a row")) };
                match stages.publish(relation.oid, row, open, sink)? {
                    Sent::Full => return Ok(false),
                    Sent::NotOurs { first } => {
                        self.telltale.metrics.other_table_rows.inc();
                        if first {
                            tell_other_table(relation);
                        }
                    }
                    Sent::Yes => {
                        fault::point("after_enqueue");
                        self.count_event();
                    }
                }
            }
            Event::Commit { end_lsn } => {
                let Some(open) = self.open.take() else { return Err(outside("a commit")) };
                if open.position.ordinal > 0 {
                    self.telltale.metrics.transactions.inc();
                }
                self.received = self.received.max(end_lsn);
                sink.seal(end_lsn);
            }
            Event::Keepalive { wal_end, sent_us, reply_requested } => {
                self.set_clock(sent_us);
                self.feedback.keepalive(Instant::now(), wal_end, reply_requested);
                // outside a transaction it is an empty one; inside, what it says may lie behind rows still to come
                if self.open.is_none() {
                    self.received = self.received.max(wal_end);
                    self.keepalive = wal_end;
                    self.behind = false;
                    sink.seal(wal_end);
                }
            }
            Event::Relation(relation) => {
                let commit_lsn = self.open.map_or(Lsn(u64::MAX), |open| open.position.commit_lsn);
                stages.describe(relation, commit_lsn)?;
            }
            Event::Ignored(Ignored::Update) => self.ignored("update"),
            Event::Ignored(Ignored::Delete) => self.ignored("delete"),
            Event::Ignored(Ignored::Truncate) => self.ignored("truncate"),
            Event::Ignored(Ignored::Type | Ignored::Origin) => {}
            Event::Logical => self.ignored("message"),
        }
        Ok(true)
    }

    fn count_event(&mut self) {
        if let Some(open) = &mut self.open {
            open.position.ordinal += 1;
        }
    }

    fn ignored(&self, kind: &str) {
        self.telltale.metrics.ignored_changes.with_label_values(&[kind]).inc();
    }

    fn set_clock(&mut self, sent_us: i64) {
        // what waited in a buffer looks as if the server's clock were behind; so the highest of late counts
        self.clock_ahead_us = (sent_us - clock::steady_us()).max(self.clock_ahead_us - CLOCK_DRIFT_US);
    }

    /// What may be confirmed: what the sink says, and nothing else.
    fn durable<Si: Sink>(&self, sink: &Si) -> Lsn {
        match sink.durable() {
            _ if fault::bug(Bug::ConfirmOnReceipt) => self.received,
            durable if fault::bug(Bug::KeepalivePlusOne) => durable.max(Lsn(self.keepalive.0 + 1)),
            durable => durable,
        }
    }

    /// A pause looks to the source like a sink that has no room for the next transaction. What has begun goes on to its end,
    /// so that behind a pause nothing comes twice.
    fn set_paused(&mut self, paused: bool) {
        if std::mem::replace(&mut self.paused, paused) != paused {
            self.full_since = None;
        }
    }

    fn has_room(&mut self) {
        if let Some(since) = self.full_since.take()
            && !self.paused
        {
            self.telltale.metrics.backpressure.inc_by(since.elapsed().as_secs_f64());
        }
    }

    fn check_link<So: Source, Si: Sink>(
        &mut self,
        source: &So,
        sink: &Si,
        now: Instant,
        signals: &mut Signals,
    ) -> Result<(), SourceError> {
        let reading = self.full_since.is_none();
        if reading && now.duration_since(source.last_received()) >= LOST_AFTER {
            return Err(SourceError::Silent);
        }
        // a server that stops waits for our confirm; one that cannot come must not hold it up
        let stopping = self.stopping.for_long(*signals.server.borrow_and_update(), now);
        let held_up = stopping && (!reading || sink.in_flight().0 > 0);
        if held_up || self.feedback.blocks_shutdown(now) && sink.in_flight().0 > 0 {
            return Err(SourceError::ServerStopping);
        }
        Ok(())
    }

    /// Waits for what is in flight, as long as the drain may take, then confirms once more.
    async fn drain<So: Source, Si: Sink>(
        &mut self,
        source: &mut So,
        sink: &mut Si,
        signals: &mut Signals,
        end: Instant,
    ) -> Result<(), SessionError> {
        loop {
            match sink.tick(self.clock_ahead_us) {
                Ok(()) | Err(SinkError::Cleared { .. }) => {}
                Err(error) => {
                    self.goodbye(source, sink).await;
                    return Err(error.into());
                }
            }
            let now = Instant::now();
            let finished = sink.in_flight().0 == 0 || now >= end || *signals.wish.borrow_and_update() == Wish::Abort;
            if finished {
                break;
            }
            if let Some(update) = self.feedback.due(now, self.received, sink.durable()) {
                source.send_status(update);
            }
            let deadline = sink.deadline().unwrap_or(end).min(self.feedback.deadline(now)).min(end);
            tokio::select! {
                biased;
                Ok(()) = signals.wish.changed() => {}
                () = sink.ready() => {}
                moved = source.drive(false, false), if source.owes() => moved?,
                () = tokio::time::sleep_until(deadline) => {}
            }
        }
        self.goodbye(source, sink).await;
        Ok(())
    }

    /// Confirms what is delivered, and ends the stream properly.
    async fn goodbye<So: Source, Si: Sink>(&mut self, source: &mut So, sink: &Si) {
        fault::point("in_shutdown");
        source.send_status(self.feedback.force(Instant::now(), self.received, self.durable(sink), false));
        // a server that does not answer in time, or at all, has most likely read it none the less; at worst events come twice
        if let Ok(Err(error)) = tokio::time::timeout(GOODBYE, source.finish()).await {
            tracing::debug!(%error, "no proper end of the stream");
        }
    }

    fn tell<Si: Sink>(&mut self, sink: &Si) {
        let progress = self.telltale.progress;
        if self.clock_ahead_us > i64::MIN / 4 {
            progress.set_clock_ahead_us(self.clock_ahead_us);
        }
        // an event that the sink does not take is stuck as well
        let waiting = self.full_since.map_or(0, |_| self.open.map_or(self.held_commit_us, |open| open.commit_us));
        let oldest = if sink.oldest_commit_us() == 0 { waiting } else { sink.oldest_commit_us() };
        progress.set(self.received, self.feedback.confirmed(), sink.in_flight(), oldest);
        if let Some(since) = &mut self.full_since
            && !self.paused
        {
            self.telltale.metrics.backpressure.inc_by(since.elapsed().as_secs_f64());
            *since = Instant::now();
        }
    }
}

/// Once a table: it may be meant so, or be an outbox that was renamed before walpost started.
fn tell_other_table(relation: &Relation) {
    let (schema, table) = (&relation.schema, &relation.table);
    tracing::warn!(
        schema,
        table,
        "rows of a table that is published and is no outbox are skipped; name it in [[outbox]], or take it out of the publication"
    );
}

fn outside(what: &str) -> SessionError {
    SourceError::Protocol(format!("{what} outside of a transaction")).into()
}
