//! [`KafkaSink`]: at-least-once delivery with an idempotent producer.
//!
//! Owns the producer, its poll thread, and the [`AckTracker`]. A session has one producer: when a delivery fails for good,
//! everything not acknowledged is thrown away with it, and the stream resumes from the slot. So nothing is ever sent again
//! beside its successors, and no later record overtakes an earlier one. The hard part is a refused batch: the broker
//! refuses it whole and does not say which record was at fault, so the next session sends each record alone
//! ([`Mode::Isolate`]) until all suspects are through. Who is refused alone is poison: it goes to the dead-letter topic under
//! the ticket of its event, or ends the run.

mod poison;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use prometheus::local::LocalHistogram;
use rdkafka::{
    producer::{Producer, PurgeConfig},
    types::RDKafkaErrorCode,
};
use tokio::time::Instant;

use super::{
    Buried, Delivered, Queued, Sink, SinkError,
    dead_letter::DeadLetters,
    isolation::Isolation,
    kafka_error,
    known_topics::Topics,
    produce::SessionProducer,
    producer,
    reports::{Report, Reports},
    settings::client_config,
    topics::STALLED_AFTER,
};
use crate::{
    ack::{AckTracker, Bounds, Load, Ticket},
    config::{KafkaConfig, LimitsConfig},
    encode::Record,
    event::Position,
    fault,
    lsn::Lsn,
    observe::{Health, Metrics, Part},
};

/// How long the reports of a producer that died are waited for, since they name the cause.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// In isolation so many records fly at most, each of another key.
const ISOLATED_EVENTS: usize = 64;

/// How a session sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// In batches.
    Normal,
    /// Each record alone, until everything up to this position is through.
    Isolate {
        /// The position.
        until: Lsn,
    },
}

/// How a session sends, and what earlier ones have learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sending {
    /// In batches or alone.
    pub mode: Mode,
    /// The largest batch, where the producer's default was too large for a topic.
    pub batch_bytes: Option<u32>,
    /// A record that is refused, or whose topic is missing, ends nothing: it is told by [`KafkaSink::take_failures`], or by the
    /// error of [`Sink::enqueue`], and counts as durable. For a source that can send each again by itself.
    pub lets_go: bool,
}

/// Sends records to Kafka.
pub struct KafkaSink {
    producer: Arc<SessionProducer>,
    reports: Arc<Reports>,
    stop: Arc<AtomicBool>,
    tracker: AckTracker,
    topics: Topics,
    isolation: Option<Isolation>,
    dead_letters: Option<DeadLetters>,
    /// Told of every event that becomes a dead letter, before it can count as delivered.
    buried: Arc<Buried>,
    delivered: Delivered,
    /// The furthest position that anything handed over belongs to.
    furthest: Lsn,
    last_delivery: Instant,
    fatal_since: Option<Instant>,
    /// The failure that ends the session, and since when it is known: what is in flight beside it may still be acknowledged.
    failure: Option<(SinkError, Instant)>,
    /// Records whose report has not come, good or bad.
    unreported: usize,
    taken: Vec<Report>,
    metrics: Arc<Metrics>,
    commit_to_ack: LocalHistogram,
    health: Arc<Health>,
    /// A single record tries the topic that refused; nothing else moves, so that a refusal costs no repetitions.
    probing: bool,
    troubled: bool,
    /// Where whoever sends takes single failures: those that have not been taken.
    failures: Option<Vec<Failed>>,
}

/// A record that was not delivered and holds nothing else up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The position that it was handed over with.
    pub commit_lsn: Lsn,
    /// The topic.
    pub topic: String,
    /// librdkafka's name of the error.
    pub code: String,
    /// It is the topic that takes no records, and not the record that is at fault.
    pub is_refusal: bool,
}

impl KafkaSink {
    /// Makes a producer and lets it connect. Brokers that are away are no error.
    pub fn start(
        config: &KafkaConfig,
        limits: LimitsConfig,
        sending: Sending,
        client_id: &str,
        (metrics, health): (Arc<Metrics>, Arc<Health>),
    ) -> Result<Self, SinkError> {
        let settings = client_config(config, sending, client_id);
        let reports = Arc::new(Reports::default());
        let alone = sending.mode != Mode::Normal;
        let stop = Arc::new(AtomicBool::new(false));
        let producer = producer::start(&settings, alone, (&reports, &health, &metrics), &stop)?;
        let topics = Topics::start(config, (&producer, &reports), (&metrics, &health))?;
        let events = if alone { limits.in_flight_events.min(ISOLATED_EVENTS) } else { limits.in_flight_events };
        let dead_letters = |topic: &String| DeadLetters { topic: topic.clone(), waiting: VecDeque::new() };
        Ok(Self {
            producer,
            reports,
            stop,
            tracker: AckTracker::new(Bounds { events, bytes: limits.in_flight_bytes }),
            topics,
            isolation: match sending.mode {
                Mode::Normal => None,
                Mode::Isolate { until } => Some(Isolation::until(until)),
            },
            dead_letters: config.dead_letter_topic.as_ref().map(dead_letters),
            buried: Arc::default(),
            delivered: Delivered::default(),
            furthest: Lsn::ZERO,
            last_delivery: Instant::now(),
            fatal_since: None,
            failure: None,
            unreported: 0,
            taken: Vec::new(),
            commit_to_ack: metrics.commit_to_ack.local(),
            metrics,
            health,
            probing: false,
            troubled: true,
            failures: sending.lets_go.then(Vec::new),
        })
    }

    /// True while nothing was ever handed over: then another session may begin with this producer.
    pub fn is_fresh(&self) -> bool {
        self.furthest == Lsn::ZERO
    }

    /// Where dead letters are noted.
    pub fn tell_of_dead_letters(&mut self, buried: Arc<Buried>) {
        self.buried = buried;
    }

    /// Records that ended nothing, since the last question.
    pub fn take_failures(&mut self) -> Vec<Failed> {
        self.failures.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Positions of what is delivered although something before it is not.
    pub fn delivered_ahead(&self) -> impl Iterator<Item = Lsn> {
        self.tracker.delivered_ahead().into_iter().flatten().map(|load| load.commit_lsn)
    }

    /// Remembers what earlier sessions have met: a topic that refused records, and what the brokers have beyond the slot.
    pub fn remember(&mut self, refused: Option<&str>, delivered: Delivered) {
        self.topics.refused = refused.map(str::to_owned);
        self.delivered = delivered;
    }

    /// The topic that refuses records, if one still does.
    pub fn refused(&self) -> Option<&str> {
        self.topics.refused.as_deref()
    }

    /// What the brokers have beyond the slot, for the session after this one.
    pub fn leave_delivered(&mut self) -> Delivered {
        let mut delivered = std::mem::take(&mut self.delivered);
        match self.tracker.delivered_ahead() {
            Some(ahead) if self.isolation.is_none() => delivered.remember(self.tracker.watermark(), ahead),
            // in isolation a refused record leaves a gap, and a later one of its key may be through before it comes again
            _ => return Delivered::default(),
        }
        delivered
    }

    /// Whether a record has to wait for a verdict on others: behind the suspects of an isolation, or around a probe of the
    /// topic that refused.
    fn must_wait(&self, position: Position, record: &Record<'_>) -> bool {
        let isolation = self.isolation.as_ref();
        let behind_suspects = isolation.is_some_and(|isolation| isolation.must_wait(position, record));
        let would_probe = self.topics.refused.as_deref() == Some(record.topic);
        behind_suspects || self.probing || would_probe && self.tracker.in_flight().0 > 0
    }

    fn take_reports(&mut self, clock_ahead_us: i64) {
        let mut taken = std::mem::take(&mut self.taken);
        self.reports.take(&mut taken);
        if !taken.is_empty() {
            self.unreported = self.unreported.saturating_sub(taken.len());
            for report in taken.drain(..) {
                match report.failure {
                    None => self.delivered(report.ticket, report.at_us + clock_ahead_us),
                    Some(failed) => self.failed(report.ticket, *failed),
                }
            }
            self.commit_to_ack.flush();
        }
        self.taken = taken;
    }

    /// The failure that ends the session, once its neighbours have been heard as well, so that they need not come again.
    fn check_failure(&self) -> Result<(), SinkError> {
        match &self.failure {
            Some((error, since)) if self.unreported == 0 || since.elapsed() >= LAST_WORDS => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn delivered(&mut self, ticket: Ticket, at_us: i64) {
        let Some(load) = self.tracker.complete(ticket) else { return };
        fault::point("after_ack");
        if let Some(account) = self.topics.account(load.account) {
            account.count(1, u64::from(load.weight).saturating_sub(Record::OVERHEAD as u64));
            if self.topics.refused.as_deref() == Some(&*account.topic) {
                self.topics.refused = None;
                self.probing = false;
                self.health.well(Part::Topic);
                tracing::info!("the topic takes records again");
            }
        }
        let waited = Duration::from_micros(at_us.saturating_sub(load.commit_us).max(0).unsigned_abs());
        self.commit_to_ack.observe(waited.as_secs_f64());
        self.last_delivery = Instant::now();
        if self.troubled {
            self.troubled = false;
            self.topics.watch().acknowledged();
        }
        if let Some(isolation) = &mut self.isolation {
            isolation.through(ticket);
        }
    }

    fn check_fatal(&mut self) -> Result<(), SinkError> {
        if self.reports.fatal_error(&self.producer).is_none() && self.fatal_since.is_none() {
            return Ok(());
        }
        let is_over = self.fatal_since.get_or_insert_with(Instant::now).elapsed() >= LAST_WORDS;
        // its own end says less than what it died of
        if !is_over || self.failure.is_some() {
            return Ok(());
        }
        let code = self.producer.client().fatal_error().map_or(RDKafkaErrorCode::Fatal, |(code, _)| code);
        Err(SinkError::Producer { code: kafka_error::name(code) })
    }

    fn watch_for_stall(&mut self) {
        if self.tracker.in_flight().0 == 0 {
            self.last_delivery = Instant::now();
        } else if self.last_delivery.elapsed() > STALLED_AFTER {
            self.troubled = true;
            self.topics.watch().stalled("events have been in flight");
        }
    }
}

impl Sink for KafkaSink {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        self.tracker.open(confirmed);
        self.delivered.resume(confirmed);
        Ok(())
    }

    fn enqueue(&mut self, position: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        let dying = self.fatal_since.is_some() || self.failure.is_some();
        if dying || self.must_wait(position, record) {
            return Ok(Queued::Full);
        }
        let Some(mut account) = self.topics.number(record.topic)? else {
            let absent = self.topics.absent(record.topic).filter(|_| self.failures.is_some());
            return absent.map_or(Ok(Queued::Full), |code| {
                Err(SinkError::Refused { topic: record.topic.to_owned(), code: code.to_owned() })
            });
        };
        if let Some(dead) = record.dead {
            account = self.topics.dead_number(account, dead);
            self.buried.note(record.event_id);
        }
        let weight = u32::try_from(record.weight()).unwrap_or(u32::MAX);
        let identity = self.delivered.identity(position, record.event_id);
        let load = Load { weight, account, commit_us, identity, commit_lsn: position.commit_lsn };
        let Some(ticket) = self.tracker.track(load) else { return Ok(Queued::Full) };
        if self.delivered.take(identity) {
            self.tracker.complete(ticket);
            return Ok(Queued::Accepted);
        }
        match self.topics.produce(account, record, ticket) {
            Err(RDKafkaErrorCode::QueueFull) => {
                self.tracker.untrack(ticket);
                return Ok(Queued::Full);
            }
            Err(code) => return self.not_taken(ticket, record, code),
            Ok(()) => self.unreported += 1,
        }
        if let Some(isolation) = &mut self.isolation {
            isolation.sent(ticket, record);
        }
        self.furthest = self.furthest.max(Lsn(position.commit_lsn.0 + 1));
        self.probing = self.topics.refused.as_deref() == Some(record.topic);
        Ok(Queued::Accepted)
    }

    fn seal(&mut self, end: Lsn) {
        self.tracker.seal(end);
    }

    fn durable(&self) -> Lsn {
        self.tracker.watermark()
    }

    fn tick(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        self.take_reports(clock_ahead_us);
        self.check_failure()?;
        self.send_dead_letters()?;
        self.check_fatal()?;
        self.watch_for_stall();
        match &self.isolation {
            Some(isolation) if self.tracker.in_flight().0 == 0 && isolation.is_over(self.durable()) => {
                Err(SinkError::Cleared { convicted: isolation.convicted() })
            }
            _ => Ok(()),
        }
    }

    async fn ready(&self) {
        let awaited = usize::try_from(self.tracker.incomplete()).unwrap_or(usize::MAX);
        if self.fatal_since.is_some() || self.failure.is_some() {
            let _ = tokio::time::timeout(LAST_WORDS / 10, self.reports.wait_for(1)).await;
            return;
        }
        // a quarter of what is awaited: waking for each would cost as much as sending it
        self.reports.wait_for(awaited / 4).await;
    }

    fn in_flight(&self) -> (u64, u64) {
        self.tracker.in_flight()
    }

    fn oldest_commit_us(&self) -> i64 {
        self.tracker.oldest_commit_us()
    }
}

impl Drop for KafkaSink {
    fn drop(&mut self) {
        // what was not acknowledged comes again from the slot; a producer that went on sending it would be in its way
        self.producer.purge(PurgeConfig::default().queue().inflight());
        self.stop.store(true, Relaxed);
    }
}
