//! [`Ledger`]: the progress topic as it is read at a start.
//!
//! The last record of the slot's key counts, and only once nothing before the end of the topic is undecided: with a
//! transaction of somebody else open, who reads only what is committed would be shown an old record as the last one. Read
//! backwards, since the newest part of a compacted topic is not compacted.

use std::time::Duration;

use rdkafka::{
    ClientContext, Message, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode},
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
}

impl Ledger {
    /// Lets the consumers connect.
    pub fn connect(config: &KafkaConfig) -> Result<Self, KafkaError> {
        let reader = |committed| reader_config(config, committed).create_with_context(Quiet);
        let (committed, all) = (reader(true)?, reader(false)?);
        Ok(Self { topic: config.progress_topic.clone(), committed, all })
    }

    /// The last value under a key. Goes on until it is known, or nobody waits for it.
    pub fn read(&self, key: &str, is_given_up: &dyn Fn() -> bool) -> Result<Entry, NotRead> {
        let mut told = false;
        while !is_given_up() {
            let error = match self.try_read(key, is_given_up) {
                Ok(Some(entry)) => return Ok(entry),
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
        let (low, high) = self.all.fetch_watermarks(&self.topic, PARTITION, ANSWER_LIMIT)?;
        if low == high {
            return Ok(Some(Entry::None));
        }
        let (_, decided) = self.committed.fetch_watermarks(&self.topic, PARTITION, ANSWER_LIMIT)?;
        if decided < high {
            return Ok(None);
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

    /// The last value under a key between an offset and the end.
    fn last_from(&self, start: i64, key: &str, is_given_up: &dyn Fn() -> bool) -> Result<Option<Vec<u8>>, TryError> {
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(&self.topic, PARTITION, Offset::Offset(start))?;
        self.committed.assign(&assignment)?;
        let mut last = None;
        loop {
            match self.committed.poll(ASK_AGAIN) {
                Some(Ok(record)) if record.key() == Some(key.as_bytes()) => {
                    last = record.payload().map(<[u8]>::to_vec);
                }
                Some(Ok(_)) | None => {}
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(last),
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
