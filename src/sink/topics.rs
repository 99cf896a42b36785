//! [`TopicWatch`]: a thread that asks the brokers about topics, so that the pipeline never waits for an answer.
//!
//! It answers "is this topic there" for each topic once, again and again while the topic is missing, creates it where that
//! is wanted, and in between asks for anything at all, to know whether the brokers are there.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    error::{KafkaError, RDKafkaErrorCode},
    metadata::MetadataTopic,
    producer::Producer,
};

use super::{kafka_error, produce::SessionProducer, reports::Reports};
use crate::{
    codes::Code,
    config::KafkaConfig,
    observe::{Health, NOT_REACHED_YET, Part},
};

/// How often the brokers are asked when nothing is to be known.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// How often a missing topic is asked for.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// How long one answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);
/// How long to wait for a connection where there was none: librdkafka tries some eighty times a second while it is waited for, and
/// by itself at its own pace when it is not.
const CONNECTION_LIMIT: Duration = Duration::from_millis(20);

/// After so many single questions all topics are asked for at once: there may be thousands, and each costs a round trip in
/// which nothing else is sent.
const ASK_FOR_ALL_AT: u32 = 20;

const UNKNOWN: RDKafkaErrorCode = RDKafkaErrorCode::UnknownTopicOrPartition;

/// What is known of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicState {
    /// It is there.
    Present,
    /// It is not, or may not be seen.
    Absent {
        /// librdkafka's name of the error.
        code: String,
        /// In words.
        why: String,
    },
}

/// Without an acknowledgement for so long walpost is not ready.
pub const STALLED_AFTER: Duration = Duration::from_secs(10);

/// What the thread shares with the sink.
#[derive(Debug, Default)]
struct Shared {
    answers: Mutex<HashMap<String, TopicState>>,
    stop: AtomicBool,
    /// The sink has waited too long for deliveries: answers alone do not make the brokers well.
    stalled: AtomicBool,
}

/// The sink's side of the thread.
pub struct TopicWatch {
    questions: Sender<String>,
    shared: Arc<Shared>,
    health: Arc<Health>,
}

impl TopicWatch {
    /// Starts the thread.
    pub fn start(
        producer: Arc<SessionProducer>,
        reports: Arc<Reports>,
        health: Arc<Health>,
        create: Option<Creator>,
    ) -> std::io::Result<Self> {
        let (questions, asked) = channel();
        let shared = Arc::new(Shared::default());
        let watch = Watch {
            producer,
            reports,
            health: Arc::clone(&health),
            create,
            shared: Arc::clone(&shared),
            known: None,
            asked: 0,
            away: Cell::new(false),
        };
        std::thread::Builder::new().name("kafka-topics".into()).spawn(move || watch.run(&asked))?;
        Ok(Self { questions, shared, health })
    }

    /// Asks about a topic. The answer comes with a nudge of the reports.
    pub fn ask(&self, topic: &str) {
        // the thread lives as long as `self`; without it no answer comes and the record waits, as it should
        let _ = self.questions.send(topic.to_owned());
    }

    /// Takes the answer about a topic, if there is one.
    pub fn answer(&self, topic: &str) -> Option<TopicState> {
        self.shared.answers.lock().unwrap_or_else(PoisonError::into_inner).remove(topic)
    }

    /// Deliveries have stalled. Told once, until they have not: others may have a better reason, and the two would take turns.
    pub fn stalled(&self, what: &str) {
        if self.shared.stalled.swap(true, Relaxed) {
            return;
        }
        let limit = STALLED_AFTER.as_secs();
        let reason = format!("kafka acknowledges nothing: {what} for more than {limit} s [{}]", Code::Unacknowledged);
        if self.health.trouble(Part::Kafka, &reason) {
            tracing::warn!("{reason}");
        }
    }

    /// Something was acknowledged.
    pub fn acknowledged(&self) {
        self.shared.stalled.store(false, Relaxed);
        self.health.well(Part::Kafka);
    }
}

impl Drop for TopicWatch {
    fn drop(&mut self) {
        // not joined: it may be waiting for a broker that is away
        self.shared.stop.store(true, Relaxed);
    }
}

struct Watch {
    producer: Arc<SessionProducer>,
    reports: Arc<Reports>,
    health: Arc<Health>,
    create: Option<Creator>,
    shared: Arc<Shared>,
    /// A topic that is there: asking for it is cheaper than asking for all.
    known: Option<String>,
    /// How many questions there were.
    asked: u32,
    /// No broker was connected when one was last asked.
    away: Cell<bool>,
}

impl Watch {
    fn run(mut self, asked: &Receiver<String>) {
        let (mut open, mut next_probe) = (HashSet::new(), Instant::now());
        while !self.shared.stop.load(Relaxed) {
            let wait = if open.is_empty() && !self.away.get() {
                next_probe.saturating_duration_since(Instant::now())
            } else {
                ASK_AGAIN
            };
            match asked.recv_timeout(wait) {
                Ok(topic) => {
                    self.asked += 1;
                    if !self.settle(&topic) {
                        open.insert(topic);
                    } else if self.asked == ASK_FOR_ALL_AT {
                        self.learn_all();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    open.retain(|topic| !self.settle(topic));
                    if open.is_empty() && (self.away.get() || Instant::now() >= next_probe) {
                        self.probe();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= next_probe {
                next_probe = Instant::now() + PROBE_EVERY;
            }
        }
    }

    /// Asks for one topic and answers; true when it is there.
    fn settle(&mut self, topic: &str) -> bool {
        let state = match self.fetch(Some(topic)) {
            Ok(None) => TopicState::Present,
            Ok(Some(UNKNOWN)) => {
                match self.create.as_mut().map(|create| create.topic(topic)) {
                    None => absent(UNKNOWN, "it does not exist".to_owned()),
                    Some(Ok(())) => return false, // asked for again at once, until every broker knows it
                    Some(Err(problem)) => {
                        absent(UNKNOWN, format!("it does not exist and cannot be created: {problem}"))
                    }
                }
            }
            Ok(Some(code)) => absent(code, code.to_string()),
            Err(_) => return false, // the brokers' trouble, noted already
        };
        let present = state == TopicState::Present;
        if present {
            self.known = Some(topic.to_owned());
        }
        self.shared.answers.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned(), state);
        self.reports.nudge();
        present
    }

    /// Answers about every topic before it is asked for.
    fn learn_all(&self) {
        // where this fails, each is asked for by itself, and what is wrong will be noted
        let Ok(metadata) = self.producer.client().fetch_metadata(None, ANSWER_LIMIT) else { return };
        let present = metadata.topics().iter().filter(|topic| topic.error().is_none());
        let present = present.map(|topic| (topic.name().to_owned(), TopicState::Present));
        self.shared.answers.lock().unwrap_or_else(PoisonError::into_inner).extend(present);
        self.reports.nudge();
    }

    fn probe(&mut self) {
        let known = self.known.clone();
        if !matches!(self.fetch(known.as_deref()), Ok(None)) {
            self.known = None;
        }
    }

    /// The topic's own error, if any; or the brokers' trouble.
    fn fetch(&self, topic: Option<&str>) -> Result<Option<RDKafkaErrorCode>, KafkaError> {
        let limit = if self.away.get() { CONNECTION_LIMIT } else { ANSWER_LIMIT };
        let answer = self.producer.client().fetch_metadata(topic, limit);
        // a broker that was asked and did not answer in time is connected: the next answer may take as long as it likes
        let is_away = |error: &KafkaError| error.rdkafka_error_code() == Some(RDKafkaErrorCode::BrokerTransportFailure);
        self.away.set(answer.as_ref().err().is_some_and(is_away));
        match answer {
            Ok(metadata) => {
                let asked = !self.shared.stalled.load(Relaxed) && !self.shared.stop.load(Relaxed);
                if asked && self.health.well(Part::Kafka).is_some() {
                    tracing::info!("kafka is reachable");
                }
                let found = metadata.topics().iter().find(|found| topic == Some(found.name()));
                Ok(found.and_then(MetadataTopic::error).map(RDKafkaErrorCode::from))
            }
            Err(error) => {
                let reason = format!("kafka is unreachable: no broker answers [{}]", Code::NoBroker);
                let told = |(part, reason): &(Part, String)| *part == Part::Kafka && reason != NOT_REACHED_YET;
                let told = self.health.troubles().iter().any(told);
                if !told && !self.shared.stop.load(Relaxed) && self.health.trouble(Part::Kafka, reason) {
                    tracing::warn!(%error, "kafka is unreachable: no broker answers");
                }
                Err(error)
            }
        }
    }
}

fn absent(code: RDKafkaErrorCode, why: String) -> TopicState {
    TopicState::Absent { code: kafka_error::name(code), why }
}

/// Creates missing topics.
pub struct Creator {
    client: AdminClient<DefaultClientContext>,
    runtime: tokio::runtime::Runtime,
    partitions: i32,
    replication_factor: i32,
    compacted: bool,
}

impl Creator {
    /// Makes an admin client of its own, where the configuration wants topics created.
    pub fn new(config: &KafkaConfig, client: &ClientConfig) -> Result<Option<Self>, KafkaError> {
        let create = config.create_topics.then(|| Self::with(client, config.partitions, config.replication_factor));
        create.transpose()
    }

    /// Of a topic that keeps the last record of each key, in one partition.
    pub fn of_compacted(config: &KafkaConfig, client: &ClientConfig) -> Result<Self, KafkaError> {
        Ok(Self { compacted: true, ..Self::with(client, 1, config.replication_factor)? })
    }

    fn with(client: &ClientConfig, partitions: i32, replication_factor: i32) -> Result<Self, KafkaError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(|error| KafkaError::ClientCreation(error.to_string()))?;
        Ok(Self { client: client.create()?, runtime, partitions, replication_factor, compacted: false })
    }

    /// Creates a topic; one that is there already is no error.
    pub fn topic(&mut self, name: &str) -> Result<(), String> {
        let mut topic = NewTopic::new(name, self.partitions, TopicReplication::Fixed(self.replication_factor));
        if self.compacted {
            topic = topic.set("cleanup.policy", "compact");
        }
        let options = AdminOptions::new().operation_timeout(Some(ANSWER_LIMIT)).request_timeout(Some(ANSWER_LIMIT));
        let results = self.runtime.block_on(self.client.create_topics([&topic], &options));
        match results.map_err(|error| error.to_string())?.pop() {
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(()),
            Some(Err((_, code))) => Err(code.to_string()),
            Some(Ok(_)) | None => {
                tracing::info!(topic = name, partitions = self.partitions, "topic created");
                Ok(())
            }
        }
    }
}
