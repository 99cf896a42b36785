//! What has arrived in the topics of a run, by the broker's own word: watermarks and append times.

use std::time::{Duration, SystemTime};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};

use crate::{
    PATIENCE, Servers,
    backlog::TYPES,
    candidate::Relay,
    services::{wait_for, wait_until},
};

/// Partitions of each topic.
const PARTITIONS: i32 = 3;

/// The topics of one run.
pub struct Arrivals {
    consumer: BaseConsumer,
    partitions: Vec<(String, i32)>,
}

impl Arrivals {
    /// Creates the topics `<prefix>.t0` and so on; the broker stamps their records with its own clock.
    pub fn create(servers: &Servers, prefix: &str) -> Self {
        let topics: Vec<String> = (0..TYPES).map(|number| format!("{prefix}.t{number}")).collect();
        for topic in &topics {
            servers.kafka.create_topic(topic, PARTITIONS, &[("message.timestamp.type", "LogAppendTime")]);
        }
        let mut config = servers.kafka.client_config();
        config.set("group.id", "nobody").set("enable.auto.commit", "false");
        let consumer = config.create().expect("a client needs no broker to be created");
        let all = topics.iter().flat_map(|topic| (0..PARTITIONS).map(move |partition| (topic.clone(), partition)));
        let arrivals = Self { partitions: all.collect(), consumer };
        arrivals.count(); // connects
        arrivals
    }

    /// How many records there are.
    pub fn count(&self) -> u64 {
        self.partitions.iter().map(|(topic, partition)| self.high(topic, *partition).unsigned_abs()).sum()
    }

    /// Waits until there are so many, and fails when there are more.
    pub fn wait_for(&self, expected: u64, interval: Duration, relay: &Relay) {
        wait_until(PATIENCE, "all events have arrived", || {
            relay.assert_alive();
            std::thread::sleep(interval);
            self.count() >= expected
        });
        assert_eq!(self.count(), expected, "more records than events");
    }

    /// How long after the relay's start the last record was appended, in seconds.
    pub fn last_append(&self, relay: &Relay) -> f64 {
        let started = relay.wall.duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970").as_secs_f64();
        let mut last = 0;
        self.read(1, |timestamp_ms, _| last = last.max(timestamp_ms));
        last as f64 / 1e3 - started
    }

    /// Shows append time (Unix ms) and payload of the last `per_partition` records of each partition.
    pub fn read(&self, per_partition: i64, mut see: impl FnMut(i64, &[u8])) {
        let mut assignment = TopicPartitionList::new();
        let mut wanted = 0;
        for (topic, partition) in &self.partitions {
            let high = self.high(topic, *partition);
            let first = (high - per_partition).max(0);
            wanted += high - first;
            assignment.add_partition_offset(topic, *partition, Offset::Offset(first)).expect("a legal offset");
        }
        self.consumer.assign(&assignment).expect("a legal assignment");
        while wanted > 0 {
            let message = self.consumer.poll(PATIENCE).expect("a record that the watermark counts");
            let message = message.expect("a record");
            see(message.timestamp().to_millis().expect("a timestamp"), message.payload().unwrap_or_default());
            wanted -= 1;
        }
        self.consumer.unassign().expect("nothing to object to");
    }

    fn high(&self, topic: &str, partition: i32) -> i64 {
        // a new topic's leaders take their seats a moment after it is known
        wait_for(PATIENCE, "the watermarks of a partition", || {
            self.consumer.fetch_watermarks(topic, partition, PATIENCE).ok().map(|(_, high)| high)
        })
    }
}
