//! [`KafkaSink`]: at-least-once delivery with an idempotent producer.
//!
//! Owns the producer, its poll thread, and the [`AckTracker`]. A session has one producer: when a delivery fails for good,
//! everything not acknowledged is thrown away with it, and the stream resumes from the slot. So nothing is ever sent again
//! beside its successors, and no later record overtakes an earlier one. The hard part is a refused batch: the broker
//! refuses it whole and does not say which record was at fault, so the next session sends each record alone
//! ([`Mode::Isolate`]) until the culprit is certain or all suspects are through.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use prometheus::{IntCounter, local::LocalHistogram};
use rdkafka::{
    producer::{Producer, PurgeConfig},
    types::RDKafkaErrorCode,
};
use tokio::time::Instant;

use super::{
    Queued, Sink, SinkError,
    kafka_error::{self, Verdict},
    produce::{SessionProducer, TopicHandle},
    reports::{Context, Report, Reports},
    settings::{admin_config, client_config},
    topics::{Creator, TopicState, TopicWatch},
};
use crate::{
    ack::{AckTracker, Bounds, Load, Ticket},
    config::{KafkaConfig, LimitsConfig},
    encode::Record,
    event::Position,
    lsn::Lsn,
    observe::{Health, Metrics, Part},
};

/// Events in flight for so long without any delivery make walpost unready.
const STALLED_AFTER: Duration = Duration::from_secs(10);
/// How long the reports of a producer that died are waited for, since they name the cause.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// How a session sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// In batches.
    Normal,
    /// Each record alone, until everything up to this position is delivered.
    Isolate {
        /// The position.
        until: Lsn,
    },
}

/// Sends records to Kafka.
pub struct KafkaSink {
    producer: Arc<SessionProducer>,
    reports: Arc<Reports>,
    watch: TopicWatch,
    stop: Arc<AtomicBool>,
    tracker: AckTracker,
    topics: Topics,
    mode: Mode,
    /// In isolation: who is on its way, to name the culprit.
    alone: VecDeque<(Ticket, String)>,
    /// The furthest position that anything handed over belongs to.
    furthest: Lsn,
    last_delivery: Instant,
    fatal_since: Option<Instant>,
    taken: Vec<Report>,
    metrics: Arc<Metrics>,
    commit_to_ack: LocalHistogram,
    health: Arc<Health>,
    /// A topic that refused records in the session before: ready again only once it takes one.
    refused: Option<String>,
    /// A single record tries the topic that refused; nothing else moves, so that a refusal costs no repetitions.
    probing: bool,
    troubled: bool,
}

/// The topics of this producer, by name and by number.
#[derive(Default)]
struct Topics {
    numbers: HashMap<String, u32>,
    ready: Vec<Topic>,
    asked: Option<String>,
}

struct Topic {
    handle: TopicHandle,
    published: IntCounter,
    bytes: IntCounter,
}

impl KafkaSink {
    /// Makes a producer and lets it connect. Brokers that are away are no error.
    pub fn start(
        config: &KafkaConfig,
        limits: LimitsConfig,
        mode: Mode,
        client_id: &str,
        (metrics, health): (Arc<Metrics>, Arc<Health>),
    ) -> Result<Self, SinkError> {
        let settings = client_config(config, mode, client_id);
        let reports = Arc::new(Reports::default());
        let context = Context { reports: Arc::clone(&reports), health: Arc::clone(&health) };
        let failed = |error: rdkafka::error::KafkaError| SinkError::Settings(error.to_string());
        let producer: Arc<SessionProducer> = Arc::new(settings.create_with_context(context).map_err(failed)?);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = |error: std::io::Error| SinkError::Settings(format!("start a thread: {error}"));
        poll(Arc::clone(&producer), Arc::clone(&stop)).map_err(thread)?;
        let create = Creator::new(config, &admin_config(config)).map_err(failed)?;
        let watch = TopicWatch::start(Arc::clone(&producer), Arc::clone(&reports), Arc::clone(&health), create);
        let bounds = match mode {
            Mode::Normal => Bounds { events: limits.in_flight_events, bytes: limits.in_flight_bytes },
            Mode::Isolate { .. } => Bounds { events: limits.in_flight_events.min(64), bytes: limits.in_flight_bytes },
        };
        Ok(Self {
            producer,
            reports,
            watch: watch.map_err(thread)?,
            stop,
            tracker: AckTracker::new(bounds),
            topics: Topics::default(),
            mode,
            alone: VecDeque::new(),
            furthest: Lsn::ZERO,
            last_delivery: Instant::now(),
            fatal_since: None,
            taken: Vec::new(),
            commit_to_ack: metrics.commit_to_ack.local(),
            metrics,
            health,
            refused: None,
            probing: false,
            troubled: true,
        })
    }

    /// True while nothing was ever handed over: then another session may begin with this producer.
    pub fn is_fresh(&self) -> bool {
        self.furthest == Lsn::ZERO
    }

    /// Remembers that a topic refused records in an earlier session.
    pub fn remember_refused(&mut self, topic: &str) {
        self.refused = Some(topic.to_owned());
    }

    /// The topic that refuses records, if one still does.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Whether a record has to wait for a verdict on others: behind the suspects of an isolation, or around a probe of the
    /// topic that refused.
    fn must_wait(&self, position: Position, topic: &str) -> bool {
        let behind_suspects = matches!(self.mode, Mode::Isolate { until } if position.commit_lsn >= until);
        let would_probe = self.refused.as_deref() == Some(topic);
        behind_suspects || self.probing || would_probe && self.tracker.in_flight().0 > 0
    }

    /// The number of the record's topic, or `None` while it is not known to be there.
    fn topic(&mut self, name: &str) -> Result<Option<u32>, SinkError> {
        if let Some(number) = self.topics.numbers.get(name) {
            return Ok(Some(*number));
        }
        match self.watch.answer(name) {
            Some(TopicState::Present) => {
                self.release(name);
                self.open_topic(name).map(Some)
            }
            Some(TopicState::Absent(why)) => {
                self.hold(name, &why);
                Ok(None)
            }
            None => {
                if self.topics.asked.as_deref() != Some(name) {
                    self.watch.ask(name);
                    self.topics.asked = Some(name.to_owned());
                }
                Ok(None)
            }
        }
    }

    fn open_topic(&mut self, name: &str) -> Result<u32, SinkError> {
        let poison = || SinkError::Settings(format!("librdkafka refuses the topic name {name:?}"));
        let handle = TopicHandle::new(&self.producer, name).ok_or_else(poison)?;
        let number = u32::try_from(self.topics.ready.len()).unwrap_or(u32::MAX);
        let published = self.metrics.events_published.with_label_values(&[name]);
        let bytes = self.metrics.published_bytes.with_label_values(&[name]);
        self.topics.ready.push(Topic { handle, published, bytes });
        self.topics.numbers.insert(name.to_owned(), number);
        self.topics.asked = None;
        Ok(number)
    }

    fn hold(&mut self, topic: &str, why: &str) {
        let reason =
            format!("events are held for topic {topic:?}: {why}; create it or grant access, walpost resumes by itself");
        if self.health.trouble(Part::Topic, reason) {
            tracing::warn!(topic, why, "events are held for a topic; they follow as soon as it is there");
            self.metrics.delivery_errors.with_label_values(&[topic, "UnknownTopicOrPartition"]).inc();
        }
    }

    fn release(&mut self, topic: &str) {
        // the stream is serial: only the record in front can be held, also one that an earlier session held
        if self.refused.is_none() && self.health.well(Part::Topic) {
            tracing::info!(topic, "the topic is there, events follow");
        }
    }

    fn take_reports(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        let mut taken = std::mem::take(&mut self.taken);
        self.reports.take(&mut taken);
        if taken.is_empty() {
            self.taken = taken;
            return Ok(());
        }
        let mut failure = None;
        for report in taken.drain(..) {
            match report.failure {
                None => self.delivered(report.ticket, report.at_us + clock_ahead_us),
                Some(failed) => self.failed(report.ticket, *failed, &mut failure),
            }
        }
        self.taken = taken;
        self.commit_to_ack.flush();
        failure.map_or(Ok(()), Err)
    }

    fn delivered(&mut self, ticket: Ticket, at_us: i64) {
        let Some(load) = self.tracker.complete(ticket) else { return };
        if let Some(topic) = self.topics.ready.get(load.topic as usize) {
            topic.published.inc();
            topic.bytes.inc_by(u64::from(load.weight).saturating_sub(Record::OVERHEAD as u64));
        }
        let waited = Duration::from_micros(at_us.saturating_sub(load.commit_us).max(0).unsigned_abs());
        self.commit_to_ack.observe(waited.as_secs_f64());
        self.last_delivery = Instant::now();
        if self.troubled {
            self.troubled = false;
            self.watch.set_stalled(false);
            self.health.well(Part::Kafka);
        }
        if self.refused.is_some()
            && self.refused.as_deref().and_then(|name| self.topics.numbers.get(name)) == Some(&load.topic)
        {
            self.refused = None;
            self.probing = false;
            self.health.well(Part::Topic);
            tracing::info!("the topic takes records again");
        }
        // at most as many as fly, and the one in front but for partitions that overtake each other
        if let Some(index) = self.alone.iter().position(|(alone, _)| *alone == ticket) {
            self.alone.remove(index);
        }
    }

    /// The first failure that says something by itself decides.
    fn failed(&mut self, ticket: Ticket, (code, topic): (RDKafkaErrorCode, String), first: &mut Option<SinkError>) {
        let verdict = kafka_error::judge(code);
        if verdict == Verdict::Consequence || first.is_some() {
            return;
        }
        let code = kafka_error::name(code);
        self.metrics.delivery_errors.with_label_values(&[&topic, &code]).inc();
        *first = Some(match (verdict, self.mode) {
            (Verdict::Wait, _) => SinkError::Refused { topic, code },
            (Verdict::Suspect, Mode::Isolate { .. }) => {
                let culprit = self.alone.iter().find(|(alone, _)| *alone == ticket);
                let event_id = culprit.map_or_else(String::new, |(_, id)| id.clone());
                SinkError::Poison { event_id, topic, code }
            }
            (Verdict::Suspect, Mode::Normal) => SinkError::Suspect { topic, code, until: self.furthest },
            _ => SinkError::Producer { code },
        });
    }

    fn check_fatal(&mut self) -> Result<(), SinkError> {
        if !self.reports.is_fatal() && self.fatal_since.is_none() {
            return Ok(());
        }
        if self.fatal_since.get_or_insert_with(Instant::now).elapsed() < LAST_WORDS {
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
            self.watch.set_stalled(true);
            let reason = "kafka acknowledges nothing: events have been in flight for more than 10 s";
            if self.health.trouble(Part::Kafka, reason) {
                tracing::warn!("{reason}");
            }
        }
    }
}

impl Sink for KafkaSink {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        self.tracker.open(confirmed);
        Ok(())
    }

    fn enqueue(&mut self, position: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        if self.fatal_since.is_some() || self.must_wait(position, record.topic) {
            return Ok(Queued::Full);
        }
        let Some(topic) = self.topic(record.topic)? else { return Ok(Queued::Full) };
        let weight = u32::try_from(record.weight()).unwrap_or(u32::MAX);
        let Some(ticket) = self.tracker.track(Load { weight, topic, commit_us }) else { return Ok(Queued::Full) };
        let word = usize::try_from(ticket.to_word()).unwrap_or(usize::MAX);
        match self.topics.ready[topic as usize].handle.produce(record, word) {
            Ok(()) => {
                self.furthest = self.furthest.max(Lsn(position.commit_lsn.0 + 1));
                self.probing = self.refused.as_deref() == Some(record.topic);
                if self.mode != Mode::Normal {
                    self.alone.push_back((ticket, String::from_utf8_lossy(record.event_id).into_owned()));
                }
                Ok(Queued::Accepted)
            }
            Err(RDKafkaErrorCode::QueueFull) => {
                self.tracker.untrack(ticket);
                Ok(Queued::Full)
            }
            Err(code) => {
                self.tracker.untrack(ticket);
                if kafka_error::judge(code) == Verdict::Consequence {
                    // the producer died of something that the reports on their way will name
                    self.fatal_since.get_or_insert_with(Instant::now);
                    return Ok(Queued::Full);
                }
                let (topic, name) = (record.topic.to_owned(), kafka_error::name(code));
                self.metrics.delivery_errors.with_label_values(&[&topic, &name]).inc();
                Err(match kafka_error::judge(code) {
                    Verdict::Wait => SinkError::Refused { topic, code: name },
                    Verdict::Suspect => {
                        let event_id = String::from_utf8_lossy(record.event_id).into_owned();
                        SinkError::Poison { event_id, topic, code: name }
                    }
                    Verdict::Consequence | Verdict::Rebuild => SinkError::Producer { code: name },
                })
            }
        }
    }

    fn seal(&mut self, end: Lsn) {
        self.tracker.seal(end);
    }

    fn durable(&self) -> Lsn {
        self.tracker.watermark()
    }

    fn tick(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        self.take_reports(clock_ahead_us)?;
        self.check_fatal()?;
        self.watch_for_stall();
        match self.mode {
            Mode::Isolate { until } if self.durable() >= until && self.tracker.in_flight().0 == 0 => {
                Err(SinkError::Cleared)
            }
            _ => Ok(()),
        }
    }

    async fn ready(&self) {
        let awaited = usize::try_from(self.tracker.incomplete()).unwrap_or(usize::MAX);
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

/// Delivery reports, errors and statistics all come from here; it must run before the first connect.
fn poll(producer: Arc<SessionProducer>, stop: Arc<AtomicBool>) -> std::io::Result<()> {
    let run = move || {
        while !stop.load(Relaxed) {
            producer.poll(Duration::from_millis(100));
        }
    };
    std::thread::Builder::new().name("kafka-poll".into()).spawn(run).map(|_| ())
}
