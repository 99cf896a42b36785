//! [`Supervisor`]: sessions, one after the other, until one ends as asked or an error needs a human.
//!
//! A session is a producer, a connection and a stream. What one has learned that the next must know (a topic that refuses, a
//! batch to take apart, what the brokers have beyond the slot) is kept here.

mod clock_step;
mod password;
mod reasons;
mod renewal;
mod session_sink;

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use crate::{
    backfill::{Fill, Filled},
    backoff::Backoff,
    codes,
    config::{Config, Delivery, SourceKind},
    error::{Verdict, chain, judge},
    fault,
    lsn::Lsn,
    observe::{Health, Metrics, Part, Progress, Stage},
    pipeline::{SessionError, Signals, Stages, Telltale, Wish, run_session},
    poll::{self, Retry, Witnesses},
    prepare::{Prepared, prepare},
    retention::Witness,
    sink::{
        Delivered, ExactlyOnceSink, KafkaSink, Mode, Sending, SinkError,
        exactly_once::{Accepted, Learned},
    },
    source::{
        Replication, SourceError, Wire,
        queue::Queue,
        slot::{self, SlotFound},
        whereabouts::{self, Whereabouts},
    },
    trace::{Recorder, Traced},
};
use reasons::{part, reason, sink_reason, slot_is_taken};
use renewal::{Birth, until_outdated};
use session_sink::{Memory, SessionSink};

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// As it was asked to.
    Stopped,
    /// Every row of a backfill is published, and that was all it was to do.
    Filled,
    /// By an error that needs a human.
    Halted,
    /// By a setting that only showed its fault when it was used.
    Misconfigured,
    /// The slot is lost: events may be missing.
    SlotLost,
}

impl Ended {
    /// The process's exit code.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Stopped | Self::Filled => 0,
            Self::Halted => 1,
            Self::Misconfigured => 2,
            Self::SlotLost => 3,
        }
    }
}

/// What the parts of a run share.
#[derive(Clone)]
pub struct Shared {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Where the pipeline stands.
    pub progress: Arc<Progress>,
    /// What is wrong.
    pub health: Arc<Health>,
    /// What retention must know of the stream.
    pub witness: Arc<Witness>,
}

/// How a session that did not fail was over.
enum Over {
    AsAsked,
    /// A backfill is complete.
    Filled,
}

/// What there is to do once the server is reached.
enum Reached {
    Stream(Box<Replication>, Lsn, Whereabouts),
    /// The rows before the stream.
    Rows,
    /// The tables themselves.
    Tables(Box<Queue>),
}

/// Waits between tries to reach Postgres; the first is short, since most losses are short.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// A standby asks for the slot this often, so that it takes over soon after the holder's death.
const STANDBY_WAIT: Duration = Duration::from_secs(1);
/// The shortest wait where somebody has to mend something.
const SLOW_WAIT: Duration = Duration::from_secs(2);
/// A session that lasted this long was progress.
const PROGRESS: Duration = Duration::from_secs(5);
/// librdkafka's `batch.size`, and what it is divided by while it is too large for a topic.
const DEFAULT_BATCH_BYTES: u32 = 1_000_000;
const SHRINK_BY: u32 = 8;
/// librdkafka's name of the error.
const TOO_LARGE: &str = "MessageSizeTooLarge";
/// A stopping server is left alone for a moment.
const STOPPING_WAIT: Duration = Duration::from_secs(2);

/// Runs sessions until one ends as asked or an error needs a human.
pub struct Supervisor {
    config: Config,
    shared: Shared,
    signals: Signals,
    stages: Stages,
    sending: Sending,
    /// The last batch that was refused was refused for its size.
    was_too_large: bool,
    /// The producer, when nothing was sent by it yet.
    spare: Option<SessionSink>,
    /// What at-least-once sessions have learned.
    memory: Memory,
    /// The same for exactly-once delivery.
    learned: Learned,
    /// Of the present producer.
    birth: Birth,
    /// The cluster that this process streams from.
    system: Option<String>,
    /// Rows to publish before the stream, or instead of one.
    fill: Option<Box<Fill>>,
    /// When what failed is tried again, where the tables are polled.
    retries: Vec<Retry>,
    /// Adds up spans, where they are wanted.
    recorder: Option<Recorder>,
    /// The slot was held in this process: when it is gone, it was taken away.
    held: bool,
    /// Turns true once tables, publication and slot are there.
    pub(crate) prepared: watch::Sender<bool>,
}

impl Supervisor {
    /// Compiles the routes; the configuration is valid otherwise.
    pub fn new(config: Config, shared: Shared, signals: Signals) -> Result<Self, crate::route::RouteError> {
        Self::accepting(Accepted::default(), config, shared, signals)
    }

    /// The same with what the operator accepts of what the progress topic would refuse.
    pub fn accepting(
        accepted: Accepted,
        config: Config,
        shared: Shared,
        signals: Signals,
    ) -> Result<Self, crate::route::RouteError> {
        let stages = Stages::new(&config)?;
        let lets_go = config.postgres.source == SourceKind::Poll;
        Ok(Self {
            config,
            shared,
            signals,
            stages,
            sending: Sending { mode: Mode::Normal, batch_bytes: None, lets_go },
            was_too_large: false,
            birth: Birth::default(),
            spare: None,
            memory: Memory::default(),
            learned: Learned { accepted, ..Learned::default() },
            system: None,
            fill: None,
            retries: Vec::new(),
            recorder: None,
            held: false,
            prepared: watch::Sender::new(false),
        })
    }

    /// Where it tells how it stands.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.shared.progress)
    }

    /// Tells a recorder of every batch.
    pub(crate) fn trace_by(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Publishes rows that are in the table, and no more.
    pub async fn fill(mut self, fill: Box<Fill>) -> Ended {
        self.fill = Some(fill);
        self.work(true).await
    }

    /// Runs.
    pub async fn run(self) -> Ended {
        self.work(false).await
    }

    async fn work(mut self, only_fill: bool) -> Ended {
        let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
        loop {
            let began = Instant::now();
            let outcome = self.session().await;
            if self.shared.progress.stage() != Stage::Standby {
                self.shared.progress.set_stage(Stage::Connecting);
            }
            let error = match outcome {
                Ok(Over::AsAsked) => return Ended::Stopped,
                Ok(Over::Filled) if only_fill => return Ended::Filled,
                Ok(Over::Filled) => continue,
                Err(error) if self.wish() > Wish::Run => {
                    tracing::warn!(
                        error = chain(&error),
                        "stopped before everything was confirmed; the rest comes again"
                    );
                    return Ended::Stopped;
                }
                Err(error) => error,
            };
            if began.elapsed() >= PROGRESS {
                backoff.reset();
            }
            match self.after(&error, &mut backoff) {
                Err(ended) => return ended,
                Ok(wait) => {
                    let _ = tokio::time::timeout(wait, self.signals.wish.wait_for(|wish| *wish > Wish::Run)).await;
                    if self.wish() > Wish::Run {
                        return Ended::Stopped;
                    }
                }
            }
        }
    }

    fn wish(&self) -> Wish {
        *self.signals.wish.borrow()
    }

    /// One session: a producer, a connection, a stream or the rows before it.
    async fn session(&mut self) -> Result<Over, SessionError> {
        // first the producer: it connects while Postgres is asked
        let mut sink = if let Some(sink) = self.spare.take() {
            sink
        } else {
            self.birth = Birth::now(&self.config.kafka);
            self.make_sink()?
        };
        let mut wish = self.signals.wish.clone();
        let connected = tokio::select! {
            biased;
            _ = wish.wait_for(|wish| *wish > Wish::Run) => return Ok(Over::AsAsked),
            connected = self.connect() => connected,
        };
        let outcome = match connected {
            Err(error) => Err(error),
            Ok(Reached::Rows) => {
                let mut plain = sink.take_at_least_once().map_or_else(|| self.make_kafka_sink(), Ok)?;
                let outcome = self.backfill(&mut plain).await;
                sink = SessionSink::AtLeastOnce(Box::new(plain));
                outcome
            }
            Ok(Reached::Tables(queue)) => match &mut sink {
                SessionSink::AtLeastOnce(sink) => self.poll(queue, sink).await,
                // the configuration has refused it
                SessionSink::ExactlyOnce(_) | SessionSink::Taken => return Ok(Over::AsAsked),
            },
            Ok(Reached::Stream(source, confirmed, here)) => self.stream(source, &mut sink, (confirmed, here)).await,
        };
        if sink.is_fresh() && !matches!(outcome, Err(SessionError::Sink(_))) {
            self.spare = Some(sink);
        }
        outcome
    }

    /// Publishes what the log brings.
    async fn stream(
        &mut self,
        mut source: Box<Replication>,
        sink: &mut SessionSink,
        (confirmed, here): (Lsn, Whereabouts),
    ) -> Result<Over, SessionError> {
        self.shared.progress.set_streaming(true);
        self.shared.health.well(Part::Stream);
        tracing::info!(slot = self.config.postgres.slot, lsn = %confirmed, "streaming");
        let telltale = Telltale { metrics: &self.shared.metrics, progress: &self.shared.progress };
        let stages = (&mut self.stages, confirmed);
        let changing = (&self.config.kafka, &*self.shared.health);
        let outcome = match sink {
            SessionSink::AtLeastOnce(sink) => {
                self.memory.lend(sink);
                let mut traced = Traced::new(&mut **sink, self.recorder.as_mut());
                let session = run_session(&mut *source, &mut traced, stages, &mut self.signals, telltale);
                let session = until_outdated(&self.shared.witness, session);
                let outcome = self.birth.guard(changing, session).await;
                self.memory.take_back(sink);
                outcome
            }
            SessionSink::ExactlyOnce(sink) => {
                sink.prepare(here, std::mem::take(&mut self.learned));
                let mut traced = Traced::new(&mut **sink, self.recorder.as_mut());
                let session = run_session(&mut *source, &mut traced, stages, &mut self.signals, telltale);
                let session = until_outdated(&self.shared.witness, session);
                let outcome = self.birth.guard(changing, session).await;
                self.learned = sink.leave();
                outcome
            }
            SessionSink::Taken => Ok(()),
        };
        self.tell_recorder(&outcome);
        outcome.map(|()| Over::AsAsked)
    }

    /// Publishes what the tables hold, without a stream.
    async fn poll(&mut self, mut queue: Box<Queue>, sink: &mut KafkaSink) -> Result<Over, SessionError> {
        self.shared.progress.set_streaming(true);
        self.shared.health.well(Part::Stream);
        tracing::info!(tables = queue.len(), "polling");
        let telltale = Telltale { metrics: &self.shared.metrics, progress: &self.shared.progress };
        let witnesses = Witnesses { telltale, health: &self.shared.health };
        let way = (&self.config, self.sending.mode != Mode::Normal);
        let traced = Traced::that_lets_go(sink, self.recorder.as_mut());
        let mut session = poll::Session::new(&mut queue, (traced, &mut self.stages), way, witnesses);
        let session = session.run(&mut self.retries, &mut self.signals);
        let outcome = self.birth.guard((&self.config.kafka, &self.shared.health), session).await;
        self.tell_recorder(&outcome);
        outcome.map(|()| Over::AsAsked)
    }

    fn tell_recorder(&mut self, outcome: &Result<(), SessionError>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.session_over(outcome.as_ref().err());
        }
    }

    /// Publishes the rows that stand before the stream, then gives the slot its name.
    async fn backfill(&mut self, sink: &mut KafkaSink) -> Result<Over, SessionError> {
        let Some(fill) = &mut self.fill else { return Ok(Over::Filled) };
        let telltale = Telltale { metrics: &self.shared.metrics, progress: &self.shared.progress };
        self.shared.progress.set_stage(Stage::Backfilling);
        self.shared.health.hold(Part::Stream, "rows older than the slot are published first");
        self.memory.lend(sink);
        let filled = fill.publish((sink, &mut self.stages), &mut self.signals, telltale).await;
        self.memory.take_back(sink);
        if filled? == Filled::Interrupted {
            tracing::warn!("stopped before the backfill was complete; it begins anew at the next start");
            return Ok(Over::AsAsked);
        }
        fill.finish(&self.shared.witness.buried).await?;
        self.fill = None;
        // what was learned by row number means nothing to the stream
        (self.memory.delivered, self.sending.mode) = (Delivered::default(), Mode::Normal);
        Ok(Over::Filled)
    }

    fn make_sink(&self) -> Result<SessionSink, SinkError> {
        if self.held {
            fault::point("in_rebuild");
        }
        // rows before the stream have no position that could be stored
        if self.fill.is_some() || !self.is_exactly_once() {
            return self.make_kafka_sink().map(|sink| SessionSink::AtLeastOnce(Box::new(sink)));
        }
        let (client_id, watchers) = self.who_sends();
        let mut sink = ExactlyOnceSink::start(&self.config, self.sending, &client_id, watchers)?;
        sink.tell_of_dead_letters(Arc::clone(&self.shared.witness.buried));
        Ok(SessionSink::ExactlyOnce(Box::new(sink)))
    }

    fn is_exactly_once(&self) -> bool {
        self.config.kafka.delivery == Delivery::ExactlyOnce
    }

    /// What brokers call a producer of ours, and who hears of its fate.
    fn who_sends(&self) -> (String, (Arc<Metrics>, Arc<Health>)) {
        let watchers = (Arc::clone(&self.shared.metrics), Arc::clone(&self.shared.health));
        (format!("walpost-{}", self.config.postgres.slot), watchers)
    }

    fn make_kafka_sink(&self) -> Result<KafkaSink, SinkError> {
        let (kafka, limits) = (&self.config.kafka, self.config.limits);
        let (client_id, watchers) = self.who_sends();
        let mut sink = KafkaSink::start(kafka, limits, self.sending, &client_id, watchers)?;
        sink.tell_of_dead_letters(Arc::clone(&self.shared.witness.buried));
        Ok(sink)
    }

    async fn connect(&mut self) -> Result<Reached, SessionError> {
        if self.fill.is_some() {
            return Ok(Reached::Rows);
        }
        if self.polls() {
            let queue = poll::connect(&self.config).await?;
            if self.prepared.send_replace(true) {
                self.shared.metrics.reconnects.with_label_values(&["sql"]).inc();
            }
            return Ok(Reached::Tables(Box::new(queue)));
        }
        let postgres = &self.config.postgres;
        let prepared = *self.prepared.borrow();
        if self.held {
            fault::point("in_reconnect");
        }
        let mut wire = if prepared {
            Wire::connect(&postgres.conninfo).await?
        } else {
            // both links at once: a start should not wait for one after the other
            let (wire, prepared) = tokio::join!(Wire::connect(&postgres.conninfo), prepare(&self.config));
            let wire = wire?; // it names what to do about the commonest faults
            match prepared? {
                Prepared::Behind(fill) => {
                    self.fill = Some(fill);
                    return Ok(Reached::Rows);
                }
                Prepared::Ready(catalog) => self.stages.know(catalog),
            }
            self.prepared.send_replace(true);
            wire
        };
        let found = slot::look_again(&mut wire, &postgres.slot, self.held, &mut self.system).await?;
        self.compare(&found);
        let here = if self.is_exactly_once() { whereabouts::ask(&mut wire).await? } else { Whereabouts::default() };
        let postgres = &self.config.postgres;
        let stream = Replication::start(wire, &postgres.slot, &postgres.publication).await?;
        if std::mem::replace(&mut self.held, true) {
            self.shared.metrics.reconnects.with_label_values(&["replication"]).inc();
        }
        Ok(Reached::Stream(Box::new(stream), found.confirmed, here))
    }

    /// Holds what the slot says against what this process knows.
    fn compare(&self, found: &SlotFound) {
        let ours = self.shared.progress.confirmed_lsn();
        self.shared.witness.session_begins(found.confirmed, ours);
        if ours > Lsn::ZERO && found.confirmed > ours {
            let reason = slot::was_moved(ours, found.confirmed);
            tracing::error!(slot = self.config.postgres.slot, confirmed = %ours, found = %found.confirmed, "{reason}");
            self.shared.health.remember(reason);
        }
    }

    /// What follows an error: a wait, or the end.
    fn after(&mut self, error: &SessionError, backoff: &mut Backoff) -> Result<Duration, Ended> {
        let code = codes::of_session(error);
        let text = format!("{} [{code}]", chain(error));
        self.note(error);
        let (hint, ended) = match judge(error) {
            Verdict::Retry => ("", None),
            Verdict::RetrySlowly(hint) => (hint, None),
            Verdict::Halt(hint) => (hint, Some(Ended::Halted)),
            Verdict::Misconfigured(hint) => (hint, Some(Ended::Misconfigured)),
            Verdict::SlotLost(hint) => (hint, Some(Ended::SlotLost)),
        };
        if let Some(ended) = ended {
            self.shared.health.trouble(Part::Stream, format!("halted: {text}; {hint}"));
            self.shared.metrics.halted.with_label_values(&[reason(error)]).set(1.0);
            tracing::error!(error = text, %code, remedy = hint, "halted");
            return Err(ended);
        }
        if matches!(
            error,
            SessionError::Sink(SinkError::Suspect { .. } | SinkError::Cleared { .. } | SinkError::Convicted { .. })
        ) {
            tracing::warn!(error = text, %code, "starting over with another way of sending");
            return Ok(Duration::ZERO);
        }
        if matches!(error, SessionError::Source(SourceError::Outdated)) {
            tracing::info!(reason = text, %code, "another session begins");
            return Ok(Duration::ZERO);
        }
        let fresh = self.shared.health.trouble(part(error), format!("{text}; {hint}").trim_end_matches("; "));
        let mut wait = backoff.next_wait();
        let taken = slot_is_taken(error);
        self.shared.progress.set_stage(if taken { Stage::Standby } else { Stage::Connecting });
        if taken {
            wait = wait.min(STANDBY_WAIT);
        }
        if !hint.is_empty() {
            wait = wait.max(SLOW_WAIT);
        }
        if matches!(error, SessionError::Source(SourceError::ServerStopping)) {
            wait = wait.max(STOPPING_WAIT);
        }
        if fresh {
            tracing::warn!(error = text, %code, remedy = hint, wait_ms = wait.as_millis(), "trying again until it works");
        }
        Ok(wait)
    }

    fn note(&mut self, error: &SessionError) {
        let metrics = Arc::clone(&self.shared.metrics);
        let SessionError::Sink(error) = error else { return };
        metrics.producer_restarts.with_label_values(&[sink_reason(error)]).inc();
        match error {
            SinkError::Suspect { until, code, .. } => {
                self.was_too_large = code == TOO_LARGE;
                // a polling session counts its rows from 0, and begins with those of the batch that failed
                let until = if self.polls() { Lsn(u64::from(self.config.poll.batch)) } else { *until };
                self.sending.mode = Mode::Isolate { until };
            }
            // its dead letter goes the same careful way
            SinkError::Convicted { .. } => {}
            SinkError::Refused { topic, .. } => self.memory.refused = Some(topic.clone()),
            SinkError::Cleared { convicted: 0 } if self.was_too_large => self.shrink_batches(),
            _ => self.sending.mode = Mode::Normal,
        }
    }
}

impl Supervisor {
    fn polls(&self) -> bool {
        self.config.postgres.source == SourceKind::Poll
    }

    /// A batch was too large and none of its records was: a topic takes less than the producer's default.
    fn shrink_batches(&mut self) {
        let bytes = (self.sending.batch_bytes.unwrap_or(DEFAULT_BATCH_BYTES) / SHRINK_BY).max(1);
        tracing::warn!(bytes, "a topic takes smaller batches than others; from now on no batch is larger than this");
        self.sending = Sending { mode: Mode::Normal, batch_bytes: Some(bytes), ..self.sending };
    }
}
