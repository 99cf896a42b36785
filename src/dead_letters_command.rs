//! `walpost dead-letters`: what lies in the dead-letter topic and why, and its way back.
//!
//! Reading leaves the topic as it is. Requeueing sends a letter's key, value and headers, those of walpost's own about its
//! death left out, to the topic that it was meant for; there it stands behind everything that was published meanwhile, so the
//! order of its key is lost for it. The letter stays in the dead-letter topic until that topic's retention ends, and a second
//! requeue sends it again, with the same `id`.

use std::{
    fmt,
    time::{Duration, Instant},
};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    message::{Headers, OwnedHeaders},
    producer::{BaseRecord, Producer, ThreadedProducer},
};
use serde::Serialize;

use crate::{
    config::Config,
    sink::{Sending, admin_config, client_config},
};

/// How long the brokers may take to answer, and to go on.
const PATIENCE: Duration = Duration::from_secs(10);
/// Headers that tell of the death.
const OWN: [&str; 5] =
    ["walpost_error", "walpost_topic", "walpost_attempts", "walpost_value_bytes", "walpost_value_sha256"];

/// Why a dead-letter command failed.
#[derive(Debug, thiserror::Error)]
pub enum DeadLettersError {
    /// There is nowhere to look.
    #[error("no dead-letter topic is configured; set kafka.dead_letter_topic")]
    NoTopic,
    /// The topic is not there.
    #[error("the dead-letter topic {0:?} does not exist")]
    Missing(String),
    /// The brokers failed.
    #[error("ask kafka")]
    Kafka(#[from] KafkaError),
    /// The end of the topic was not reached in time.
    #[error("the brokers sent no more within {} s, before the end of the topic", PATIENCE.as_secs())]
    Slow,
    /// Nothing was chosen.
    #[error("no dead letter has the id {0:?}; `walpost dead-letters list` shows them")]
    Unknown(String),
    /// A letter cannot go back.
    #[error("the dead letter of event {id} cannot go back: {reason}")]
    Stays {
        /// The event.
        id: String,
        /// Why, and what to do.
        reason: &'static str,
    },
}

/// One letter in the dead-letter topic.
#[derive(Debug, Serialize)]
pub struct Letter {
    /// The event's id; empty where the row had none.
    pub id: String,
    /// Its type.
    pub event_type: String,
    /// The topic that it was meant for; empty where it had none.
    pub topic: String,
    /// What was wrong.
    pub error: String,
    /// Where it stood in the log.
    pub position: String,
    /// Bytes of its value; of the value that was left out, where one was.
    pub value_bytes: u64,
    /// The value was left out for its size; it is in the table.
    pub value_left_out: bool,
    /// Partition and offset in the dead-letter topic.
    pub place: (i32, i64),
    #[serde(skip)]
    key: Option<Vec<u8>>,
    #[serde(skip)]
    value: Option<Vec<u8>>,
    #[serde(skip)]
    headers: OwnedHeaders,
    #[serde(skip)]
    timestamp_ms: Option<i64>,
}

impl Letter {
    fn read(message: &impl Message) -> Self {
        let header = |name: &str| {
            let found = message.headers().into_iter().flat_map(Headers::iter).find(|header| header.key == name);
            found.and_then(|header| header.value).map(|value| String::from_utf8_lossy(value).into_owned())
        };
        let text = |name: &str| header(name).unwrap_or_default();
        let left_out = header("walpost_value_bytes").and_then(|bytes| bytes.parse().ok());
        let kept = message.headers().into_iter().flat_map(Headers::iter).filter(|header| !OWN.contains(&header.key));
        Self {
            id: text("id"),
            event_type: text("event_type"),
            topic: text("walpost_topic"),
            error: text("walpost_error"),
            position: text("walpost_position"),
            value_bytes: left_out.unwrap_or_else(|| message.payload().map_or(0, |value| value.len() as u64)),
            value_left_out: left_out.is_some(),
            place: (message.partition(), message.offset()),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers: kept.fold(OwnedHeaders::new(), OwnedHeaders::insert),
            timestamp_ms: message.timestamp().to_millis(),
        }
    }

    fn forget_content(&mut self) {
        (self.key, self.value, self.headers) = (None, None, OwnedHeaders::new());
    }

    /// Why it cannot go back as it is, if it cannot.
    fn stays(&self) -> Option<&'static str> {
        if self.value_left_out {
            return Some(
                "its value was too large and is not in the letter; raise the topic's max.message.bytes, then insert the row \
                 anew under the same id",
            );
        }
        crate::route::legal(self.topic.as_bytes())
            .err()
            .map(|_| "it was meant for no legal topic; mend its row or route, then insert it anew")
    }
}

/// All letters, partition by partition, in their order.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Letters(pub Vec<Letter>);

/// Reads the dead-letter topic as far as it reaches now.
pub fn list(config: &Config) -> Result<Letters, DeadLettersError> {
    read(config, |_| false)
}

/// Reads all; what would be sent is kept in memory only of those with an id that is wanted.
fn read(config: &Config, wanted: impl Fn(&str) -> bool) -> Result<Letters, DeadLettersError> {
    let topic = config.kafka.dead_letter_topic.as_deref().ok_or(DeadLettersError::NoTopic)?;
    let mut settings = admin_config(&config.kafka);
    settings.set("group.id", "walpost-dead-letters").set("enable.auto.commit", "false");
    let consumer: BaseConsumer = settings.create()?;
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic && found.error().is_none());
    let partitions = found.ok_or_else(|| DeadLettersError::Missing(topic.to_owned()))?.partitions();
    let (mut assigned, mut open) = (TopicPartitionList::new(), Vec::new());
    for partition in partitions.iter().map(rdkafka::metadata::MetadataPartition::id) {
        let (low, high) = consumer.fetch_watermarks(topic, partition, PATIENCE)?;
        if low < high {
            assigned.add_partition_offset(topic, partition, Offset::Offset(low))?;
            open.push((partition, high));
        }
    }
    consumer.assign(&assigned)?;
    let (mut letters, mut heard) = (Vec::new(), Instant::now());
    while !open.is_empty() {
        if heard.elapsed() > PATIENCE {
            return Err(DeadLettersError::Slow);
        }
        let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
        let message = message?;
        heard = Instant::now();
        open.retain(|(partition, high)| *partition != message.partition() || message.offset() + 1 < *high);
        let mut letter = Letter::read(&message);
        if !wanted(&letter.id) {
            letter.forget_content();
        }
        letters.push(letter);
    }
    letters.sort_by_key(|letter| letter.place);
    Ok(Letters(letters))
}

/// Sends letters back to the topics that they were meant for: those with one of these ids, or all. Nothing is sent when one
/// of them cannot go back. Says how many were sent.
pub fn requeue(config: &Config, ids: &[String]) -> Result<u64, DeadLettersError> {
    let wanted = |id: &str| ids.is_empty() || ids.iter().any(|chosen| chosen == id);
    let Letters(letters) = read(config, wanted)?;
    for id in ids {
        if !letters.iter().any(|letter| letter.id == *id) {
            return Err(DeadLettersError::Unknown(id.clone()));
        }
    }
    let chosen: Vec<_> = letters.iter().filter(|letter| wanted(&letter.id)).collect();
    for letter in &chosen {
        if let Some(reason) = letter.stays() {
            return Err(DeadLettersError::Stays { id: letter.id.clone(), reason });
        }
    }
    let sending = Sending { mode: crate::sink::Mode::Normal, batch_bytes: None, lets_go: false };
    let mut settings = client_config(&config.kafka, sending, "walpost-dead-letters");
    // the operator waits: what is refused or not taken within the time is an error
    settings.set("message.timeout.ms", "10000");
    let producer: ThreadedProducer<Outcomes> = settings.create_with_context(Outcomes::default())?;
    for letter in &chosen {
        let mut record = BaseRecord::to(&letter.topic).headers(letter.headers.clone());
        record.key = letter.key.as_deref();
        record.payload = letter.value.as_deref();
        record.timestamp = letter.timestamp_ms;
        producer.send::<[u8], [u8]>(record).map_err(|(error, _)| error)?;
    }
    producer.flush(PATIENCE * 2)?;
    match producer.context().first_failure() {
        Some(error) => Err(error.into()),
        None => Ok(chosen.len() as u64),
    }
}

/// Keeps the first delivery that failed.
#[derive(Default)]
struct Outcomes {
    failure: std::sync::Mutex<Option<KafkaError>>,
}

impl Outcomes {
    fn first_failure(&self) -> Option<KafkaError> {
        self.failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

impl rdkafka::ClientContext for Outcomes {}

impl rdkafka::producer::ProducerContext for Outcomes {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &rdkafka::message::DeliveryResult<'_>, (): ()) {
        if let Err((error, _)) = result {
            let mut failure = self.failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            failure.get_or_insert_with(|| error.clone());
        }
    }
}

impl fmt::Display for Letters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no dead letters");
        }
        for letter in &self.0 {
            let (partition, offset) = letter.place;
            let left_out = if letter.value_left_out { ", left out" } else { "" };
            writeln!(f, "{partition}/{offset}  {}  {} → {:?}", letter.id, letter.event_type, letter.topic)?;
            writeln!(f, "      {} B{left_out}, at {}: {}", letter.value_bytes, letter.position, letter.error)?;
        }
        Ok(())
    }
}
