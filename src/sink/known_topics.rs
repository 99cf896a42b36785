//! [`Topics`]: the topics of one producer, and how each kind of delivery is counted.
//!
//! A record is handed over with the number of an [`Account`]: a topic's handle together with the counters that its delivery
//! moves. A topic is asked for before anything is produced to it; while it is missing or denied, records are held.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use prometheus::IntCounter;
use rdkafka::types::RDKafkaErrorCode;

use super::{
    SinkError,
    produce::{SessionProducer, TopicHandle},
    producer::no_thread,
    reports::Reports,
    settings::admin_config,
    topics::{Creator, TopicState, TopicWatch},
};
use crate::{
    ack::Ticket,
    codes::Code,
    config::KafkaConfig,
    encode::{Dead, Record},
    observe::{Health, Metrics, Part},
};

/// Where a record goes, and what counts its delivery.
pub struct Account {
    /// Which of the handles.
    handle: usize,
    /// The topic's name.
    pub topic: Arc<str>,
    events: IntCounter,
    /// Dead letters are counted once, not as published bytes.
    bytes: Option<IntCounter>,
    /// Of a dead letter: the topic that it was meant for, and the reason.
    dead: Option<(String, &'static str)>,
}

impl Account {
    /// Counts deliveries.
    pub fn count(&self, events: u64, bytes: u64) {
        self.events.inc_by(events);
        if let Some(counter) = &self.bytes {
            counter.inc_by(bytes);
        }
    }
}

/// The topics of one producer.
pub struct Topics {
    producer: Arc<SessionProducer>,
    watch: TopicWatch,
    numbers: HashMap<String, u32>,
    /// By the topic it was meant for and the reason.
    dead: HashMap<(String, &'static str), u32>,
    handles: Vec<TopicHandle>,
    accounts: Vec<Account>,
    asked: HashSet<String>,
    /// Missing or denied when last asked for; the value is librdkafka's name of the error.
    absent: HashMap<String, String>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    /// A topic that refused records in the session before: ready again only once it takes one.
    pub refused: Option<String>,
}

impl Topics {
    /// None yet; the brokers are asked from now on.
    pub fn start(
        config: &KafkaConfig,
        (producer, reports): (&Arc<SessionProducer>, &Arc<Reports>),
        (metrics, health): (&Arc<Metrics>, &Arc<Health>),
    ) -> Result<Self, SinkError> {
        let create = Creator::new(config, &admin_config(config));
        let create = create.map_err(|error| SinkError::Settings(error.to_string()))?;
        let watch = TopicWatch::start(Arc::clone(producer), Arc::clone(reports), Arc::clone(health), create);
        Ok(Self::new((Arc::clone(producer), watch.map_err(no_thread)?), (Arc::clone(metrics), Arc::clone(health))))
    }

    fn new(
        (producer, watch): (Arc<SessionProducer>, TopicWatch),
        (metrics, health): (Arc<Metrics>, Arc<Health>),
    ) -> Self {
        Self {
            producer,
            watch,
            numbers: HashMap::new(),
            dead: HashMap::new(),
            handles: Vec::new(),
            accounts: Vec::new(),
            asked: HashSet::new(),
            absent: HashMap::new(),
            metrics,
            health,
            refused: None,
        }
    }

    /// The account of a number that was given out.
    pub fn account(&self, number: u32) -> Option<&Account> {
        self.accounts.get(number as usize)
    }

    /// What a dead letter of this account is counted as.
    pub fn dead_of(&self, number: u32) -> Option<Dead<'_>> {
        let (topic, reason) = self.account(number)?.dead.as_ref()?;
        Some(Dead { topic, reason })
    }

    /// Hands a record to the producer, which copies it.
    pub fn produce(&self, account: u32, record: &Record<'_>, ticket: Ticket) -> Result<(), RDKafkaErrorCode> {
        let word = usize::try_from(ticket.to_word()).unwrap_or(usize::MAX);
        let Account { handle, .. } = &self.accounts[account as usize];
        self.handles[*handle].produce(record, word)
    }

    /// The watch, to tell it how deliveries go.
    pub fn watch(&self) -> &TopicWatch {
        &self.watch
    }

    /// The account for ordinary records of a topic, or `None` while it is not known to be there.
    pub fn number(&mut self, name: &str) -> Result<Option<u32>, SinkError> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(Some(*number));
        }
        match self.watch.answer(name) {
            Some(TopicState::Present) => {
                self.release(name);
                self.open(name).map(Some)
            }
            Some(TopicState::Absent { code, why }) => {
                self.hold(name, &code, &why);
                self.absent.insert(name.to_owned(), code);
                Ok(None)
            }
            None => {
                if !self.asked.contains(name) {
                    self.watch.ask(name);
                    self.asked.insert(name.to_owned());
                }
                Ok(None)
            }
        }
    }

    /// Why a topic takes no records, where the brokers have said so.
    pub fn absent(&self, name: &str) -> Option<&str> {
        self.absent.get(name).map(String::as_str)
    }

    /// The account for dead letters of one kind, which go to the topic with this number.
    pub fn dead_number(&mut self, number: u32, dead: Dead<'_>) -> u32 {
        let key = (dead.topic.to_owned(), dead.reason);
        if let Some(known) = self.dead.get(&key) {
            return *known;
        }
        let Account { handle, topic, .. } = &self.accounts[number as usize];
        let (handle, topic) = (*handle, Arc::clone(topic));
        let events = self.metrics.dead_lettered.with_label_values(&[dead.topic, dead.reason]);
        let number = self.push(Account { handle, topic, events, bytes: None, dead: Some(key.clone()) });
        self.dead.insert(key, number);
        number
    }

    fn push(&mut self, account: Account) -> u32 {
        let number = u32::try_from(self.accounts.len()).unwrap_or(u32::MAX);
        self.accounts.push(account);
        number
    }

    fn open(&mut self, name: &str) -> Result<u32, SinkError> {
        let poison = || SinkError::Settings(format!("librdkafka refuses the topic name {name:?}"));
        self.handles.push(TopicHandle::new(&self.producer, name).ok_or_else(poison)?);
        let handle = self.handles.len() - 1;
        let events = self.metrics.events_published.with_label_values(&[name]);
        let bytes = Some(self.metrics.published_bytes.with_label_values(&[name]));
        let number = self.push(Account { handle, topic: name.into(), events, bytes, dead: None });
        self.numbers.insert(name.to_owned(), number);
        self.asked.remove(name);
        self.absent.remove(name);
        Ok(number)
    }

    fn hold(&mut self, topic: &str, code: &str, why: &str) {
        let listed = Code::TopicRefuses;
        let reason = format!(
            "events are held for topic {topic:?}: {why}; create it or grant access, walpost resumes by itself [{listed}]"
        );
        if self.health.trouble(Part::Topic, reason) {
            tracing::warn!(topic, why, "events are held for a topic; they follow as soon as it is there");
            self.metrics.delivery_errors.with_label_values(&[topic, code]).inc();
        }
    }

    fn release(&mut self, topic: &str) {
        // the stream is serial: only the record in front can be held, also one that an earlier session held
        if self.refused.is_none() && self.health.well(Part::Topic).is_some() {
            tracing::info!(topic, "the topic is there, events follow");
        }
    }
}
