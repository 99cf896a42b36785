//! [`ExactlyOnceSink`]: events and the position behind them, in the same Kafka transaction.
//!
//! One transaction is open at a time. It takes records until it is due, then the position is added and all of it is committed
//! by the `Worker`'s thread; while that lasts nothing is taken, and the stream's keepalives are answered. Only what is
//! committed is durable, so the slot never stands beyond the stored position: a slot that does is not ours. What is stored is
//! skipped when the stream brings it again, to the event. Whatever fails, the transaction fails as a whole, and the next
//! session begins with what is stored. See `docs/decisions/0011-exactly-once.md`.

mod announce;
mod batch;
mod convicts;
mod ledger;
mod progress;
mod trouble;
mod writer;

use std::{
    sync::{
        Arc, Once,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use prometheus::local::LocalHistogram;
use rdkafka::producer::Producer;
use tokio::time::Instant;

pub use self::{
    announce::announce,
    convicts::Convicts,
    progress::{Accepted, Refusal},
};
use self::{
    batch::Batch,
    progress::{Mark, Progress},
    writer::{Job, Outcome, Stored, Worker, Writer},
};
use super::{
    Buried, Mode, Queued, Sending, Sink, SinkError,
    dead_letter::DeadLetter,
    isolation::Isolation,
    known_topics::Topics,
    produce::SessionProducer,
    producer::{self, no_thread},
    reports::{Report, Reports},
    settings::transactional_config,
    topics::STALLED_AFTER,
};
use crate::{
    clock,
    config::Config,
    encode::Record,
    event::Position,
    fault,
    lsn::Lsn,
    observe::{Health, Metrics, Part},
    source::whereabouts::Whereabouts,
};

/// How often a position that is behind no event is written: the slot may then let go of the log.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// A transaction of Postgres that is not through after this part of the transaction's timeout is split.
const SPLIT_AT: u32 = 3;
/// In isolation each record is a request, so a transaction has fewer.
const ISOLATED_EVENTS: u64 = 1000;
/// So many refused records are dead letters together; more would be too many to find and to keep.
const MOST_CONVICTS: usize = 64;

/// Said at each start, until it is not true any more.
const EXPERIMENTAL: &str = "kafka.delivery = \"exactly_once\" is experimental: brokers that crash can leave out the end of a \
     transaction in topics that were created shortly before (docs/exactly-once.md)";

/// Where the sink stands.
#[derive(Debug, Clone, PartialEq)]
enum State {
    /// No session has begun.
    New,
    /// What is stored is being read.
    Recovering,
    /// No transaction is open.
    Idle,
    /// One is.
    Open,
    /// It is being committed, with this position.
    Committing(Mark),
}

/// What lasts from session to session.
#[derive(Debug, Default)]
pub struct Learned {
    /// Events that were refused.
    pub convicts: Convicts,
    /// What the operator has accepted, until a session has begun with it.
    pub accepted: Accepted,
    /// The topic that took no records.
    pub refused: Option<String>,
}

/// Sends records to Kafka in transactions.
pub struct ExactlyOnceSink {
    producer: Arc<SessionProducer>,
    reports: Arc<Reports>,
    given_up: Arc<AtomicBool>,
    topics: Topics,
    worker: Worker,
    state: State,
    /// Since when a job is under way, or nothing is in flight.
    since: Instant,
    here: Whereabouts,
    slot: String,
    progress_topic: String,
    dead_letter_topic: Option<String>,
    /// The slot's position at the start of the session.
    confirmed: Lsn,
    /// What the stream has got to.
    sealed: Lsn,
    /// What was stored when the session began, and is skipped.
    skip: Mark,
    /// What will be stored with the next commit.
    target: Mark,
    /// What is stored.
    stored: Mark,
    /// What is stored is not what the session begins with: the first commit is due at once.
    must_write: bool,
    /// A transaction of Postgres is written in part.
    in_transaction: bool,
    /// The furthest position that anything handed over belongs to.
    furthest: Lsn,
    batch: Batch,
    next_commit: Instant,
    interval: Duration,
    split_after: Duration,
    most: (u64, u64),
    isolation: Option<Isolation>,
    learned: Learned,
    failure: Option<SinkError>,
    fatal: bool,
    buried: Arc<Buried>,
    taken: Vec<Report>,
    clock_ahead_us: i64,
    metrics: Arc<Metrics>,
    commit_to_ack: LocalHistogram,
    health: Arc<Health>,
}

impl ExactlyOnceSink {
    /// Makes a producer and lets it connect. Brokers that are away are no error.
    pub fn start(
        config: &Config,
        sending: Sending,
        client_id: &str,
        (metrics, health): (Arc<Metrics>, Arc<Health>),
    ) -> Result<Self, SinkError> {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| tracing::warn!("{EXPERIMENTAL}"));
        let kafka = &config.kafka;
        let settings = transactional_config(kafka, sending, client_id);
        let (reports, given_up, stop) = (Arc::new(Reports::default()), Arc::default(), Arc::default());
        let alone = sending.mode != Mode::Normal;
        let producer = producer::start(&settings, alone, (&reports, &health, &metrics), &stop)?;
        let slot = config.postgres.slot.clone();
        let writer = Writer::new(kafka, &slot, Arc::clone(&producer), Arc::clone(&given_up));
        let worker = Worker::start(writer, Arc::clone(&reports), stop).map_err(no_thread)?;
        let events = config.limits.in_flight_events as u64;
        let events = if alone { events.min(ISOLATED_EVENTS) } else { events };
        let now = Instant::now();
        Ok(Self {
            topics: Topics::start(kafka, (&producer, &reports), (&metrics, &health))?,
            producer,
            reports,
            given_up,
            worker,
            state: State::New,
            since: now,
            here: Whereabouts::default(),
            slot,
            progress_topic: kafka.progress_topic.clone(),
            dead_letter_topic: kafka.dead_letter_topic.clone(),
            confirmed: Lsn::ZERO,
            sealed: Lsn::ZERO,
            skip: Mark::default(),
            target: Mark::default(),
            stored: Mark::default(),
            must_write: false,
            in_transaction: false,
            furthest: Lsn::ZERO,
            batch: Batch::default(),
            next_commit: now,
            interval: kafka.commit_interval,
            split_after: kafka.transaction_timeout / SPLIT_AT,
            most: (events, config.limits.in_flight_bytes as u64),
            isolation: match sending.mode {
                Mode::Normal => None,
                Mode::Isolate { until } => Some(Isolation::until(until)),
            },
            learned: Learned::default(),
            failure: None,
            fatal: false,
            buried: Arc::default(),
            taken: Vec::new(),
            clock_ahead_us: 0,
            commit_to_ack: metrics.commit_to_ack.local(),
            metrics,
            health,
        })
    }

    /// Says which log comes, and what earlier sessions have learned.
    pub fn prepare(&mut self, here: Whereabouts, learned: Learned) {
        self.topics.refused.clone_from(&learned.refused);
        (self.here, self.learned) = (here, learned);
        if self.learned.convicts.are_many(1)
            && let Some(isolation) = &mut self.isolation
        {
            // where one is refused more follow
            isolation.convict();
        }
    }

    /// For the session after this one.
    pub fn leave(&mut self) -> Learned {
        std::mem::take(&mut self.learned)
    }

    /// Where dead letters are noted.
    pub fn tell_of_dead_letters(&mut self, buried: Arc<Buried>) {
        self.buried = buried;
    }

    /// True while no session has begun: then another one may begin with this producer.
    pub fn is_fresh(&self) -> bool {
        self.state == State::New
    }

    fn give(&mut self, state: State, job: Job) {
        (self.state, self.since) = (state, Instant::now());
        self.worker.give(job);
    }

    fn begin_commit(&mut self) {
        let mark = self.target.clone();
        let progress = Progress::at(&self.here, &self.slot, &mark).to_bytes();
        self.next_commit = Instant::now() + self.interval;
        self.must_write = false;
        self.give(State::Committing(mark), Job::Commit(progress));
    }

    fn open(&mut self) -> Result<(), SinkError> {
        let begun = self.producer.begin_transaction();
        begun.map_err(|error| SinkError::Producer { code: trouble::name(&error) })?;
        self.state = State::Open;
        Ok(())
    }

    /// A transaction that takes no more, or one that ends here anyway and is due.
    fn is_over_before(&self, position: Position, weight: u64, now: Instant) -> bool {
        let (events, bytes) = self.batch.size();
        if events == 0 {
            return false;
        }
        let full = events >= self.most.0 || bytes + weight > self.most.1;
        let convicts = &self.learned.convicts;
        let enough = convicts.are_many(MOST_CONVICTS) && convicts.are_before(position);
        full || enough || !self.in_transaction && now >= self.next_commit
    }

    fn take_outcome(&mut self) -> Result<(), SinkError> {
        match self.worker.outcome() {
            None => Ok(()),
            Some(Outcome::Recovered(stored)) => self.recovered(&stored),
            Some(Outcome::Committed) => {
                self.committed();
                Ok(())
            }
            Some(Outcome::Failed(error)) => {
                if matches!(self.state, State::Committing(_)) {
                    self.metrics.once.transactions.with_label_values(&["aborted"]).inc();
                }
                // what a record was refused for says more than that its transaction failed
                self.take_reports();
                Err(self.failure.take().unwrap_or(error))
            }
        }
    }

    fn recovered(&mut self, stored: &Stored) -> Result<(), SinkError> {
        let log = (&self.here, &*self.slot, &*self.progress_topic);
        let known = stored.as_ref().map(Option::as_ref).map_err(String::as_str);
        let mark = progress::begin(known, log, self.confirmed, self.learned.accepted)?;
        self.learned.accepted = Accepted::default();
        tracing::info!(lsn = %mark.through.commit_lsn, end = %mark.end, "what is stored is known");
        let as_stored = known.ok().flatten().and_then(Progress::mark);
        self.must_write = as_stored.is_none_or(|stored| stored != mark);
        let end = self.target.end.max(mark.end);
        self.target = Mark { end, ..mark.clone() };
        (self.stored, self.skip, self.state) = (mark.clone(), mark, State::Idle);
        self.topics.watch().acknowledged();
        Ok(())
    }

    fn committed(&mut self) {
        let State::Committing(mark) = std::mem::replace(&mut self.state, State::Idle) else { return };
        self.take_reports();
        self.metrics.once.transactions.with_label_values(&["committed"]).inc();
        self.metrics.once.commit_seconds.observe(self.since.elapsed().as_secs_f64());
        let at_us = clock::steady_us() + self.clock_ahead_us;
        for (commit_us, events) in self.batch.commits() {
            let waited = Duration::from_micros(at_us.saturating_sub(commit_us).max(0).unsigned_abs()).as_secs_f64();
            (0..events).for_each(|_| self.commit_to_ack.observe(waited));
        }
        self.commit_to_ack.flush();
        for (number, events, bytes) in self.batch.accounts() {
            if let Some(account) = self.topics.account(number) {
                account.count(events, bytes.saturating_sub(events * Record::OVERHEAD as u64));
            }
        }
        let (events, _) = self.batch.size();
        if let Some(isolation) = &mut self.isolation {
            isolation.through_many(events);
        }
        self.learned.convicts.forget_before(mark.through);
        if events > 0 && self.learned.refused.take().is_some() {
            self.topics.refused = None;
            self.health.well(Part::Topic);
        }
        self.topics.watch().acknowledged();
        self.batch.clear();
        self.stored = mark;
        fault::point("after_ack");
    }

    /// Commits what is due by the clock.
    fn commit_if_due(&mut self) -> Result<(), SinkError> {
        let now = Instant::now();
        let idle_due = || now >= self.next_commit + IDLE_INTERVAL.saturating_sub(self.interval);
        match self.state {
            State::Open => {
                let old = self.batch.since().is_some_and(|since| now.duration_since(since) >= self.split_after);
                if now >= self.next_commit && !self.in_transaction || old {
                    self.begin_commit();
                }
            }
            State::Idle if self.must_write || self.target.end > self.stored.end && idle_due() => {
                self.open()?;
                self.begin_commit();
            }
            _ => {}
        }
        Ok(())
    }

    fn watch_for_stall(&mut self) {
        let waits = matches!(self.state, State::Recovering | State::Committing(_));
        if waits && self.since.elapsed() > STALLED_AFTER {
            self.topics.watch().stalled("a transaction has waited for its end");
        }
    }

    /// Whether the event is stored already. Part of a transaction was; then the last of its events must be the one that it was.
    fn is_stored(&self, position: Position, event_id: &[u8]) -> Result<bool, SinkError> {
        let Mark { through, last_id, .. } = &self.skip;
        if position >= *through {
            return Ok(false);
        }
        let is_last = position.commit_lsn == through.commit_lsn && position.ordinal + 1 == through.ordinal;
        let found = String::from_utf8_lossy(event_id);
        if is_last && self.skip.is_partial() && found != *last_id {
            let (found, expected) = (found.into_owned(), last_id.clone());
            return Err(Refusal::Different { ordinal: position.ordinal, found, expected }.into());
        }
        Ok(true)
    }
}

impl Sink for ExactlyOnceSink {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        (self.confirmed, self.sealed) = (confirmed, confirmed);
        self.give(State::Recovering, Job::Recover(self.learned.accepted.duplicates));
        Ok(())
    }

    fn enqueue(&mut self, position: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        if !matches!(self.state, State::Idle | State::Open) || self.failure.is_some() || self.fatal {
            return Ok(Queued::Full);
        }
        if self.is_stored(position, record.event_id)? {
            self.metrics.once.skipped_events.inc();
            if record.dead.is_some() {
                self.buried.note(record.event_id);
            }
            return Ok(Queued::Accepted);
        }
        if self.isolation.as_ref().is_some_and(|isolation| isolation.must_wait(position, record)) {
            return Ok(Queued::Full);
        }
        let weight = record.weight() as u64;
        if self.is_over_before(position, weight, Instant::now()) {
            self.begin_commit();
            return Ok(Queued::Full);
        }
        let sentence = self.learned.convicts.sentence(position, record.event_id);
        match sentence.zip(self.dead_letter_topic.as_deref()) {
            Some((sentence, topic)) => {
                let letter = DeadLetter::of_convict(record, sentence.code, sentence.is_shrunk);
                let topic = topic.to_owned();
                self.bury(position, commit_us, (&letter, &topic))
            }
            None => self.send(position, commit_us, record),
        }
    }

    fn seal(&mut self, end: Lsn) {
        self.sealed = self.sealed.max(end);
        let is_open = std::mem::take(&mut self.in_transaction);
        self.target.seal(is_open, end);
    }

    fn durable(&self) -> Lsn {
        // what is stored may be ahead of the stream; what the server has not sent is not ours to confirm
        self.stored.end.min(self.sealed).max(self.confirmed)
    }

    fn tick(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        self.clock_ahead_us = clock_ahead_us;
        self.take_reports();
        self.take_outcome()?;
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        self.check_fatal()?;
        self.commit_if_due()?;
        self.watch_for_stall();
        match &self.isolation {
            Some(isolation) if self.batch.size().0 == 0 && isolation.is_over(self.durable()) => {
                Err(SinkError::Cleared { convicted: isolation.convicted() })
            }
            _ => Ok(()),
        }
    }

    async fn ready(&self) {
        // single deliveries change nothing: the end of a transaction does, a failure, or news of a topic
        self.reports.wait_for(usize::MAX).await;
    }

    fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Open if !self.in_transaction => Some(self.next_commit),
            State::Open => self.batch.since().map(|since| since + self.split_after),
            _ => None,
        }
    }

    fn in_flight(&self) -> (u64, u64) {
        self.batch.size()
    }

    fn oldest_commit_us(&self) -> i64 {
        self.batch.oldest_commit_us()
    }
}

impl Drop for ExactlyOnceSink {
    fn drop(&mut self) {
        self.given_up.store(true, Relaxed);
        // a commit goes on by itself: whether it came about is read by the session after this one
        if self.state == State::Open {
            self.worker.give(Job::Abort);
        }
    }
}
