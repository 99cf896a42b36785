//! [`Ledger`]: the progress topic as it is read: at a start, and behind every commit.
//!
//! The last record of the slot's key counts, and only once nothing before the end of the topic is undecided: with a
//! transaction of somebody else open, who reads only what is committed would be shown an old record as the last one. Read
//! backwards, since the newest part of a compacted topic is not compacted.
//!
//! What a commit has brought about is seen by reading on from there: brokers acknowledge the end of a transaction before its
//! marks are in the partitions, and a coordinator that crashes in between can leave them out.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientContext, Message, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode},
    message::BorrowedMessage,
};

use crate::{
    config::KafkaConfig,
    sink::{
        kafka_error::{self, Verdict},
        settings::reader_config,
    },
};

/// How long one answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long to wait before the brokers are asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How many records from the end are read first; each further try reads so many times more.
const FIRST_READ: i64 = 50;
const READ_MORE: i64 = 10;
/// A record that was not seen so long after its commit may not be there: the brokers are asked.
const DOUBT_AFTER: Duration = Duration::from_secs(1);
/// The only one.
const PARTITION: i32 = 0;

/// What the topic says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// There is no such topic.
    NoTopic,
    /// It has no record of this key.
    None,
    /// The last record's value.
    Value(Vec<u8>),
}

/// Why it was not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotRead {
    /// Nobody waits for it any more.
    GivenUp,
    /// The topic is not one that a position can be kept in.
    Unfit(String),
    /// An operator has to grant something: the name of librdkafka's error.
    Denied(String),
}

/// What is not there behind a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotSeen {
    /// Nobody waits for it any more.
    GivenUp,
    /// The topic is decided up to its end, and the record is not among what is committed.
    NotThere,
}

/// The producer tells of the brokers' trouble; the ends of partitions are none.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(target: "walpost::librdkafka", ?level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "walpost::librdkafka", %error, reason);
    }
}

impl ConsumerContext for Quiet {}

/// Reads the progress topic.
pub struct Ledger {
    topic: String,
    committed: BaseConsumer<Quiet>,
    all: BaseConsumer<Quiet>,
    /// Up to here it is known.
    end: Cell<i64>,
}

impl Ledger {
    /// Lets the consumers connect.
    pub fn connect(config: &KafkaConfig) -> Result<Self, KafkaError> {
        let reader = |committed| reader_config(config, committed).create_with_context(Quiet);
        let (committed, all) = (reader(true)?, reader(false)?);
        Ok(Self { topic: config.progress_topic.clone(), committed, all, end: Cell::new(0) })
    }

    /// The last value under a key. Goes on until it is known, or nobody waits for it.
    pub fn read(&self, key: &str, is_given_up: &dyn Fn() -> bool) -> Result<Entry, NotRead> {
        let mut told = false;
        while !is_given_up() {
            let error = match self.try_read(key, is_given_up) {
                Ok(Some(entry)) => {
                    self.rest();
                    return Ok(entry);
                }
                Ok(None) => {
                    if !std::mem::replace(&mut told, true) {
                        let topic = &self.topic;
                        tracing::warn!(
                            topic,
                            "another producer has a transaction open in this topic; waiting for its end"
                        );
                    }
                    std::thread::sleep(ASK_AGAIN);
                    continue;
                }
                Err(TryError::NotRead(reason)) => return Err(reason),
                Err(TryError::Kafka(error)) => error,
            };
            if let Some(code) = error.rdkafka_error_code()
                && kafka_error::judge(code) == Verdict::Wait
                && !is_unknown(code)
            {
                return Err(NotRead::Denied(kafka_error::name(code)));
            }
            tracing::debug!(%error, topic = self.topic, "the progress topic cannot be read yet");
            std::thread::sleep(ASK_AGAIN);
        }
        Err(NotRead::GivenUp)
    }

    /// `None` while a transaction of somebody else is open.
    fn try_read(&self, key: &str, is_given_up: &dyn Fn() -> bool) -> Result<Option<Entry>, TryError> {
        let metadata = self.all.fetch_metadata(Some(&self.topic), ANSWER_LIMIT)?;
        let partitions = match metadata.topics().first() {
            None => return Ok(Some(Entry::NoTopic)),
            Some(topic) => match topic.error().map(RDKafkaErrorCode::from) {
                Some(code) if is_unknown(code) => return Ok(Some(Entry::NoTopic)),
                Some(code) => return Err(KafkaError::MetadataFetch(code).into()),
                None => topic.partitions().len(),
            },
        };
        if partitions != 1 {
            let why = format!(
                "topic {:?} has {partitions} partitions and must have one: a position has one place; name another topic in \
                 kafka.progress_topic",
                self.topic
            );
            return Err(TryError::NotRead(NotRead::Unfit(why)));
        }
        let Some((low, high)) = self.decided()? else { return Ok(None) };
        self.end.set(high);
        if low == high {
            return Ok(Some(Entry::None));
        }
        let mut records = FIRST_READ;
        loop {
            let start = (high - records).max(low);
            if let Some(value) = self.last_from(start, key, is_given_up)? {
                return Ok(Some(Entry::Value(value)));
            }
            if start == low {
                return Ok(Some(Entry::None));
            }
            records = records.saturating_mul(READ_MORE);
        }
    }

    /// Where the topic begins and ends, once everything in it is decided.
    fn decided(&self) -> Result<Option<(i64, i64)>, KafkaError> {
        let (low, high) = self.all.fetch_watermarks(&self.topic, PARTITION, ANSWER_LIMIT)?;
        if low == high {
            return Ok(Some((low, high)));
        }
        let (_, decided) = self.committed.fetch_watermarks(&self.topic, PARTITION, ANSWER_LIMIT)?;
        Ok((decided >= high).then_some((low, high)))
    }

    /// Reads on until the value comes that was just committed. Waits while brokers are away or the end is undecided.
    pub fn see(&self, value: &[u8], is_given_up: &dyn Fn() -> bool) -> Result<(), NotSeen> {
        let seen = self.wait_for(value, is_given_up);
        self.rest();
        seen
    }

    fn wait_for(&self, value: &[u8], is_given_up: &dyn Fn() -> bool) -> Result<(), NotSeen> {
        if let Err(error) = self.begin_at(self.end.get()) {
            tracing::debug!(%error, topic = self.topic, "the progress topic cannot be read on");
        }
        let mut asked = Instant::now();
        while !is_given_up() {
            match self.committed.poll(ASK_AGAIN) {
                Some(Ok(record)) if record.payload() == Some(value) => {
                    self.end.set(record.offset() + 1);
                    return Ok(());
                }
                Some(Err(KafkaError::PartitionEOF(_))) | None if asked.elapsed() >= DOUBT_AFTER => {
                    match self.is_there(value, is_given_up) {
                        Ok(Some(true)) => return Ok(()),
                        Ok(Some(false)) => return Err(NotSeen::NotThere),
                        Ok(None) | Err(_) => asked = Instant::now(),
                    }
                }
                Some(Ok(_) | Err(KafkaError::PartitionEOF(_))) | None => {}
                Some(Err(error)) => {
                    tracing::debug!(%error, topic = self.topic, "the progress topic cannot be read yet");
                }
            }
        }
        Err(NotSeen::GivenUp)
    }

    /// Whether a value is among what is committed since the last one; `None` while that is not decided.
    fn is_there(&self, value: &[u8], is_given_up: &dyn Fn() -> bool) -> Result<Option<bool>, TryError> {
        let high = match self.decided() {
            Ok(Some((_, high))) => high,
            Ok(None) => return Ok(None),
            Err(error) if error.rdkafka_error_code().is_some_and(is_unknown) => return Ok(Some(false)),
            Err(error) => return Err(error.into()),
        };
        let mut is_there = false;
        self.read_from(self.end.get(), &mut |record| is_there |= record.payload() == Some(value), is_given_up)?;
        if is_there {
            self.end.set(high);
        }
        Ok(Some(is_there))
    }

    /// Between commits nothing is fetched: a reader that is quick at a start asks a hundred times a second.
    fn rest(&self) {
        // with nothing assigned there is nothing that could fail
        let _ = self.committed.unassign();
    }

    /// Lets the reader begin at an offset.
    fn begin_at(&self, offset: i64) -> Result<(), KafkaError> {
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(&self.topic, PARTITION, Offset::Offset(offset))?;
        self.committed.assign(&assignment)
    }

    /// The last value under a key between an offset and the end.
    fn last_from(&self, start: i64, key: &str, is_given_up: &dyn Fn() -> bool) -> Result<Option<Vec<u8>>, TryError> {
        let mut last = None;
        let mut take = |record: &BorrowedMessage<'_>| {
            if record.key() == Some(key.as_bytes()) {
                last = record.payload().map(<[u8]>::to_vec);
            }
        };
        self.read_from(start, &mut take, is_given_up)?;
        Ok(last)
    }

    /// Reads what is committed between an offset and the end.
    fn read_from(
        &self,
        start: i64,
        take: &mut dyn FnMut(&BorrowedMessage<'_>),
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), TryError> {
        self.begin_at(start)?;
        loop {
            match self.committed.poll(ASK_AGAIN) {
                Some(Ok(record)) => take(&record),
                None => {}
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(()),
                // told again and again while it lasts, and still in the queue when it is over
                Some(Err(error)) if is_absence(&error) => {}
                Some(Err(error)) => return Err(error.into()),
            }
            if is_given_up() {
                return Err(TryError::NotRead(NotRead::GivenUp));
            }
        }
    }
}

enum TryError {
    NotRead(NotRead),
    Kafka(KafkaError),
}

impl From<KafkaError> for TryError {
    fn from(error: KafkaError) -> Self {
        Self::Kafka(error)
    }
}

fn is_unknown(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(code, Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition)
}

/// No broker is there; the reader goes on by itself once one is.
fn is_absence(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(error.rdkafka_error_code(), Some(Code::AllBrokersDown | Code::BrokerTransportFailure | Code::Resolve))
}
