//! What is in Kafka: topics and records.

use std::{collections::HashMap, fmt::Debug, time::Duration};

use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication, TopicResult},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, KafkaResult},
    message::Headers,
    types::RDKafkaErrorCode,
};

use super::{complete, kafka::Kafka, wait_for, wait_until};

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// A record as a consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// Its topic.
    pub topic: String,
    /// Its partition.
    pub partition: i32,
    /// Its offset in the partition.
    pub offset: i64,
    /// Its key; `None` is null, which is not the same as empty.
    pub key: Option<Vec<u8>>,
    /// Its value; `None` is null.
    pub value: Option<Vec<u8>>,
    /// Its headers in their order.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    /// Milliseconds since 1970.
    pub timestamp: Option<i64>,
}

impl Received {
    /// The text of the first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(key, _)| key == name)?;
        std::str::from_utf8(value.as_deref()?).ok()
    }

    fn new(message: &impl Message) -> Self {
        let headers = message.headers().map(|headers| {
            headers.iter().map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec))).collect()
        });
        Self {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            offset: message.offset(),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers: headers.unwrap_or_default(),
            timestamp: message.timestamp().to_millis(),
        }
    }
}

impl Kafka {
    /// Creates a topic with the default number of replicas and waits until it is known.
    pub fn create_topic(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) {
        match self.ask_for_topic(name, partitions, configs) {
            // the client took the broker it had asked for another one, and let go of it
            Err(KafkaError::AdminOp(RDKafkaErrorCode::DestroyBroker)) if self.partitions(name).is_none() => {
                single(self.ask_for_topic(name, partitions, configs));
            }
            Err(KafkaError::AdminOp(RDKafkaErrorCode::DestroyBroker)) => {}
            answer => single(answer),
        }
        wait_until(PATIENCE, &format!("topic {name} is known"), || self.partitions(name) == Some(partitions));
    }

    /// The same where the brokers may be in no state to do so. False: it is not there, or not yet.
    pub fn try_create_topic(&self, name: &str, partitions: i32) -> bool {
        // there by now or not: the brokers know it better than an answer that did not come
        let _ = self.ask_for_topic(name, partitions, &[]);
        self.partitions(name) == Some(partitions)
    }

    fn ask_for_topic(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) -> KafkaResult<Vec<TopicResult>> {
        let (admin, topic) = (self.admin(), name.to_owned());
        let configs: Vec<_> = configs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        complete(async move {
            let topic = NewTopic::new(&topic, partitions, TopicReplication::Fixed(-1));
            let topic = configs.iter().fold(topic, |topic, (key, value)| topic.set(key, value));
            admin.create_topics([&topic], &options()).await
        })
    }

    /// Creates topics, some hundred in a request, and waits until the last is known.
    pub fn create_topics(&self, names: &[String], partitions: i32) {
        for names in names.chunks(500) {
            let (admin, names) = (self.admin(), names.to_vec());
            complete(async move {
                let topic = |name| NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
                let topics: Vec<_> = names.iter().map(|name| topic(name)).collect();
                for result in admin.create_topics(&topics, &options()).await.expect("the broker answers") {
                    result.expect("the broker does as it is asked");
                }
            });
        }
        if let Some(last) = names.last() {
            wait_until(2 * PATIENCE, &format!("topic {last} is known"), || self.partitions(last) == Some(partitions));
        }
    }

    /// Deletes a topic and waits until it is gone.
    pub fn delete_topic(&self, name: &str) {
        let (admin, topic) = (self.admin(), name.to_owned());
        complete(async move { single(admin.delete_topics(&[&topic], &options()).await) });
        wait_until(PATIENCE, &format!("topic {name} is gone"), || self.partitions(name).is_none());
    }

    /// Sets configs of a topic; those not named go back to their defaults.
    pub fn alter_topic(&self, name: &str, configs: &[(&str, &str)]) {
        let (admin, topic) = (self.admin(), name.to_owned());
        let configs: Vec<_> = configs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        complete(async move {
            let change = AlterConfig::new(ResourceSpecifier::Topic(&topic));
            let change = configs.iter().fold(change, |change, (key, value)| change.set(key, value));
            single(admin.alter_configs([&change], &options()).await);
        });
    }

    /// How many partitions a topic has; `None` when there is no such topic.
    pub fn partitions(&self, topic: &str) -> Option<i32> {
        partition_count(&self.consumer(), topic)
    }

    /// How many records a topic holds, by its watermarks.
    pub fn record_count(&self, topic: &str) -> i64 {
        let consumer = self.consumer();
        let partitions = partition_count(&consumer, topic).unwrap_or_else(|| panic!("no topic {topic}"));
        let count = |partition| {
            let marks = consumer.fetch_watermarks(topic, partition, PATIENCE);
            let (low, high) = marks.unwrap_or_else(|error| panic!("watermarks of {topic}/{partition}: {error}"));
            high - low
        };
        (0..partitions).map(count).sum()
    }

    /// All records of some topics, each partition in its order. Exact when nobody writes meanwhile.
    pub fn read_all(&self, topics: &[&str]) -> Vec<Received> {
        Reader::new(self.consumer(), topics).read_all()
    }

    /// The same for a reader that does not ask whether a transaction was committed.
    pub fn read_all_uncommitted(&self, topics: &[&str]) -> Vec<Received> {
        let mut config = self.consumer_config();
        config.set("isolation.level", "read_uncommitted");
        Reader::new(config.create().expect("a client needs no broker to be created"), topics).read_all()
    }

    /// Reads topics from their beginning until `is_enough` says so; panics when it does not within `limit`.
    pub fn read_until(
        &self,
        topics: &[&str],
        limit: Duration,
        mut is_enough: impl FnMut(&[Received]) -> bool,
    ) -> Vec<Received> {
        let mut reader = Reader::new(self.consumer(), topics);
        wait_until(limit, &format!("enough records in {topics:?}"), || {
            reader.poll();
            is_enough(&reader.records)
        });
        reader.records
    }

    /// A librdkafka configuration that knows the brokers.
    pub fn client_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.brokers());
        config
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client_config().create().expect("a client needs no broker to be created")
    }

    fn consumer(&self) -> BaseConsumer {
        self.consumer_config().create().expect("a client needs no broker to be created")
    }

    fn consumer_config(&self) -> ClientConfig {
        let mut config = self.client_config();
        // the answers of newer versions name new leaders; where some partitions have one and others none, as while a broker starts,
        // librdkafka reads what it never wrote and may crash (https://github.com/confluentinc/librdkafka/issues/5280)
        config.set("api.version.request", "false").set("broker.version.fallback", "0.11.0");
        config.set("group.id", "nobody").set("enable.auto.commit", "false").set("enable.partition.eof", "true");
        config
    }
}

/// Reads partitions from their beginning, and counts how many of them it has seen the end of.
struct Reader {
    consumer: BaseConsumer,
    /// Partition number → how many of the topics have it, less the ends that were seen. An end is reported without its
    /// topic, and again after each new record; so this is exact only while nobody writes.
    unfinished: HashMap<i32, usize>,
    records: Vec<Received>,
}

impl Reader {
    fn new(consumer: BaseConsumer, topics: &[&str]) -> Self {
        let mut assignment = TopicPartitionList::new();
        let mut unfinished = HashMap::new();
        for topic in topics {
            // a topic that was made a moment ago may be unknown to the broker that is asked
            let partitions = wait_for(PATIENCE, &format!("topic {topic}"), || partition_count(&consumer, topic));
            for partition in 0..partitions {
                assignment.add_partition_offset(topic, partition, Offset::Beginning).expect("a legal offset");
                *unfinished.entry(partition).or_default() += 1;
            }
        }
        consumer.assign(&assignment).expect("a legal assignment");
        Self { consumer, unfinished, records: Vec::new() }
    }

    /// Millions of records may take a while: what is waited for is the next one, or the next end.
    fn read_all(mut self) -> Vec<Received> {
        while !self.is_at_end() {
            let far = |reader: &Self| (reader.records.len(), reader.unfinished.values().sum::<usize>());
            let before = far(&self);
            wait_until(PATIENCE, "the end of all partitions", || {
                self.poll();
                far(&self) != before
            });
        }
        self.records
    }

    fn is_at_end(&self) -> bool {
        self.unfinished.is_empty()
    }

    /// Takes what has come, for a moment at most where nothing has.
    fn poll(&mut self) {
        let mut patience = Duration::from_millis(50);
        while let Some(event) = self.consumer.poll(patience) {
            patience = Duration::ZERO;
            match event {
                Ok(message) => self.records.push(Received::new(&message)),
                Err(KafkaError::PartitionEOF(partition)) => note_end(&mut self.unfinished, partition),
                // It reconnects by itself; the caller's limit is the judge.
                Err(error) => eprintln!("reader: {error}"),
            }
        }
    }
}

fn note_end(unfinished: &mut HashMap<i32, usize>, partition: i32) {
    if let Some(topics) = unfinished.get_mut(&partition) {
        *topics -= 1;
        if *topics == 0 {
            unfinished.remove(&partition);
        }
    }
}

/// How many brokers the cluster's metadata names now; none when no broker answers.
pub(super) fn serving_brokers(kafka: &Kafka) -> usize {
    let metadata = kafka.consumer().fetch_metadata(Some(""), Duration::from_secs(1));
    metadata.map_or(0, |metadata| metadata.brokers().len())
}

fn partition_count(consumer: &BaseConsumer, topic: &str) -> Option<i32> {
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).expect("the broker answers");
    let known = metadata.topics().iter().find(|known| known.name() == topic && known.error().is_none())?;
    let leaders = known.partitions().iter().filter(|partition| partition.leader() >= 0).count();
    (leaders > 0).then(|| i32::try_from(leaders).expect("a partition's number is one"))
}

fn options() -> AdminOptions {
    AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE))
}

/// The answer to a request about one thing.
fn single<T: Debug, E: Debug>(answer: Result<Vec<Result<T, E>>, KafkaError>) {
    let mut results = answer.expect("the broker answers");
    let result = results.pop().expect("one answer to one question");
    result.expect("the broker does as it is asked");
}
