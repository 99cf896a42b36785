//! [`Writer`]: what blocks while brokers decide: the fence, the look at the progress topic, and commits.
//!
//! [`Worker`] is the thread that does it for a sink, so that the stream's keepalives are answered meanwhile.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use rdkafka::{
    error::{KafkaError, RDKafkaErrorCode},
    producer::Producer,
};

use super::{
    ledger::{Entry, Ledger, NotRead, NotSeen},
    progress::Progress,
};
use crate::{
    ack::Ticket,
    config::KafkaConfig,
    encode::{Headers, Record},
    fault::{self, Bug},
    sink::{
        SinkError,
        kafka_error::{self, Verdict},
        produce::{self, NotCommitted, SessionProducer, TopicHandle},
        reports::Reports,
        settings::admin_config,
        topics::Creator,
    },
};

/// The ticket of a progress record; no event has it.
pub const OF_PROGRESS: u64 = u64::MAX;

/// How long one try to become the only producer of its name may take.
const FENCE_LIMIT: Duration = Duration::from_secs(5);
/// How long to wait before the next try, or commit.
const TRY_AGAIN: Duration = Duration::from_millis(50);
/// How long an abort may take that only spares the next start a wait.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// What the progress topic holds: the record, none, or one that cannot be read.
pub type Stored = Result<Option<Progress>, String>;

/// A producer with the topic that its position is written to.
pub struct Writer {
    config: KafkaConfig,
    slot: String,
    producer: Arc<SessionProducer>,
    /// Its consumers connect once a broker has answered: without one they ask for it a hundred times a second.
    ledger: Option<Ledger>,
    topic: Option<TopicHandle>,
    given_up: Arc<AtomicBool>,
}

impl Writer {
    /// Gives up what may take long once `given_up` turns true.
    pub fn new(config: &KafkaConfig, slot: &str, producer: Arc<SessionProducer>, given_up: Arc<AtomicBool>) -> Self {
        let (config, slot) = (config.clone(), slot.to_owned());
        Self { config, slot, producer, ledger: None, topic: None, given_up }
    }

    /// Ends the transactions of every other producer of this name, then reads what is stored. `create`: a topic that is missing
    /// is created.
    pub fn recover(&mut self, create: bool) -> Result<Stored, SinkError> {
        self.fence()?;
        fault::point("after_fence");
        let ledger = Ledger::connect(&self.config).map_err(|error| SinkError::Settings(error.to_string()))?;
        let stored = self.read(&ledger, create)?;
        self.ledger = Some(ledger);
        fault::point("after_progress");
        self.topic = TopicHandle::new(&self.producer, &self.config.progress_topic);
        Ok(stored)
    }

    fn fence(&self) -> Result<(), SinkError> {
        loop {
            let Err(error) = self.producer.init_transactions(FENCE_LIMIT) else { return Ok(()) };
            let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown);
            let passes = matches!(&error, KafkaError::Transaction(error) if error.is_retriable());
            if passes || code == RDKafkaErrorCode::OperationTimedOut {
                tracing::debug!(%error, "no transactions yet");
                self.wait()?;
                continue;
            }
            let (id, code) = (self.config.progress_topic.clone(), kafka_error::name(code));
            return Err(SinkError::NoTransaction { id, code });
        }
    }

    fn wait(&self) -> Result<(), SinkError> {
        if self.given_up.load(Relaxed) {
            return Err(SinkError::Producer { code: "GivenUp".into() });
        }
        std::thread::sleep(TRY_AGAIN);
        Ok(())
    }

    fn read(&self, ledger: &Ledger, create: bool) -> Result<Stored, SinkError> {
        match ledger.read(&self.slot, &|| self.given_up.load(Relaxed)) {
            Ok(Entry::NoTopic) if create => self.create_topic().map(|()| Ok(None)),
            Ok(Entry::NoTopic | Entry::None) => Ok(Ok(None)),
            Ok(Entry::Value(value)) => Ok(Progress::from_bytes(&value).map(Some)),
            Err(NotRead::GivenUp) => Err(SinkError::Producer { code: "GivenUp".into() }),
            Err(NotRead::Unfit(why)) => Err(SinkError::Settings(why)),
            Err(NotRead::Denied(code)) => Err(SinkError::Refused { topic: self.config.progress_topic.clone(), code }),
        }
    }

    fn create_topic(&self) -> Result<(), SinkError> {
        let settings = |error: KafkaError| SinkError::Settings(error.to_string());
        let mut creator = Creator::of_compacted(&self.config, &admin_config(&self.config)).map_err(settings)?;
        let topic = &self.config.progress_topic;
        creator.topic(topic).map_err(|code| SinkError::Refused { topic: topic.clone(), code })
    }

    /// Adds the position to the transaction that is open, commits it, and waits until both can be read.
    pub fn commit(&self, progress: &[u8]) -> Result<(), SinkError> {
        let headers = Headers::default();
        let record = Record {
            topic: &self.config.progress_topic,
            key: Some(self.slot.as_bytes()),
            value: Some(progress),
            headers: &headers,
            timestamp_ms: crate::clock::unix_us() / 1000,
            event_id: b"",
            dead: None,
        };
        let word = usize::try_from(Ticket::from_word(OF_PROGRESS).to_word()).unwrap_or(usize::MAX);
        let produced = self.topic.as_ref().map(|topic| topic.produce(&record, word));
        produced.unwrap_or(Err(RDKafkaErrorCode::UnknownTopic)).map_err(|code| self.failed(code))?;
        fault::point("before_commit");
        loop {
            match self.end_transaction() {
                Ok(()) => break,
                Err(NotCommitted { is_retriable: true, .. }) if !self.given_up.load(Relaxed) => {
                    std::thread::sleep(TRY_AGAIN);
                }
                Err(NotCommitted { code, .. }) => return Err(self.failed(code)),
            }
        }
        fault::point("after_commit");
        self.see(progress)
    }

    /// What was committed can be read. Only that makes it so: see [`Ledger::see`].
    fn see(&self, progress: &[u8]) -> Result<(), SinkError> {
        let not_read = || SinkError::Producer { code: "NotRecovered".into() };
        let ledger = self.ledger.as_ref().ok_or_else(not_read)?;
        ledger.see(progress, &|| self.given_up.load(Relaxed)).map_err(|error| match error {
            NotSeen::GivenUp => SinkError::Producer { code: "GivenUp".into() },
            NotSeen::NotThere => SinkError::NotThere { topic: self.config.progress_topic.clone() },
        })
    }

    fn end_transaction(&self) -> Result<(), NotCommitted> {
        static COMMITS: AtomicU64 = AtomicU64::new(1);
        if fault::bug(Bug::CommitForNothing) && COMMITS.fetch_add(1, Relaxed).is_multiple_of(10) {
            self.abort();
            return Ok(());
        }
        produce::commit(&self.producer)
    }

    fn failed(&self, code: RDKafkaErrorCode) -> SinkError {
        let (id, name) = (self.config.progress_topic.clone(), kafka_error::name(code));
        match kafka_error::judge(code) {
            Verdict::Wait => SinkError::NoTransaction { id, code: name },
            _ => SinkError::Producer { code: name },
        }
    }

    /// Lets go of the reader: its end takes a tenth of a second, which nobody has to wait for.
    pub fn close(self) {
        let Some(ledger) = self.ledger else { return };
        let _ = std::thread::Builder::new().name("kafka-close".into()).spawn(move || drop(ledger));
    }

    /// Ends the transaction that is open, so that nobody has to wait for its end.
    fn abort(&self) {
        if let Err(error) = self.producer.abort_transaction(ABORT_LIMIT) {
            tracing::debug!(%error, "the open transaction is left to its end");
        }
    }
}

/// What the thread is to do.
pub enum Job {
    /// Fence and read. Create a missing topic?
    Recover(bool),
    /// Commit with this position.
    Commit(Vec<u8>),
    /// Abort what is open; the last job.
    Abort,
}

/// What became of a job.
#[derive(Debug)]
pub enum Outcome {
    /// This is stored.
    Recovered(Stored),
    /// The transaction is committed.
    Committed,
    /// Neither.
    Failed(SinkError),
}

/// The thread of a sink.
pub struct Worker {
    jobs: Sender<Job>,
    outcome: Arc<Mutex<Option<Outcome>>>,
}

impl Worker {
    /// Starts the thread. When it ends, with this or its last job, it lets `stop` turn true for the
    /// producer's own thread: a commit needs that until then.
    pub fn start(mut writer: Writer, reports: Arc<Reports>, stop: Arc<AtomicBool>) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let outcome = Arc::default();
        let place = Arc::clone(&outcome);
        std::thread::Builder::new().name("kafka-commit".into()).spawn(move || {
            work(&mut writer, &todo, &place, &reports);
            writer.close();
            stop.store(true, Relaxed);
        })?;
        Ok(Self { jobs, outcome })
    }

    /// Hands a job over; one at a time.
    pub fn give(&self, job: Job) {
        // the thread lives as long as `self`; without it no outcome comes, which shows as a stall
        let _ = self.jobs.send(job);
    }

    /// Takes what became of the job, once it is known. That comes with a nudge of the reports.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn work(writer: &mut Writer, todo: &Receiver<Job>, place: &Mutex<Option<Outcome>>, reports: &Reports) {
    while let Ok(job) = todo.recv() {
        let commits = matches!(job, Job::Commit(_));
        let outcome = match job {
            Job::Recover(create) => writer.recover(create).map_or_else(Outcome::Failed, Outcome::Recovered),
            Job::Commit(progress) => writer.commit(&progress).map_or_else(Outcome::Failed, |()| Outcome::Committed),
            Job::Abort => return writer.abort(),
        };
        let spoiled = commits && matches!(outcome, Outcome::Failed(_));
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        reports.nudge();
        if spoiled {
            return writer.abort();
        }
    }
}
