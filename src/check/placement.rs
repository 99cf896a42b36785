//! Whether records of ours lie where the topic's present number of partitions puts them.
//!
//! A partitioner counts partitions. Where partitions were added, the records of a key from before lie elsewhere than those
//! since, and nothing keeps them in order. Kafka does not remember that it was done; the oldest records do.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    error::{KafkaError, RDKafkaErrorCode},
    message::Headers as _,
};

use super::{
    Findings,
    consumer::Quiet,
    kafka::{grant, tool},
};
use crate::{config::KafkaConfig, sink::reader_config};

/// So many of the oldest records of a partition are looked at.
const RECORDS: usize = 100;
/// So many partitions in all.
const PARTITIONS: usize = 200;
/// How long it may take.
const BUDGET: Duration = Duration::from_secs(3);

/// What was seen of a topic.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Seen {
    keyed: usize,
    elsewhere: usize,
}

/// Topics with the number of their partitions.
pub(super) async fn check(config: &KafkaConfig, mut topics: HashMap<String, usize>, findings: &mut Findings) {
    let mut room = PARTITIONS;
    topics.retain(|_, partitions| {
        let fits = (2..=room).contains(partitions);
        room -= if fits { *partitions } else { 0 };
        fits
    });
    if topics.is_empty() {
        return;
    }
    let (own, counts) = (config.clone(), topics.clone());
    let seen = tokio::task::spawn_blocking(move || look(&own, &counts)).await;
    match seen.map_err(|error| error.to_string()).and_then(|seen| seen.map_err(|error| error.to_string())) {
        Ok(seen) => judge(config, &topics, seen, findings),
        Err(error) => {
            let names: Vec<&str> = topics.keys().map(String::as_str).collect();
            findings.unknown(
                "topic_records_unseen",
                format!("records of the topics cannot be read: {error}"),
                "whether partitions were added since the oldest of them is unknown",
                format!("{}, if you want to know", grant(config, "Read", &names)),
            );
        }
    }
}

fn judge(config: &KafkaConfig, topics: &HashMap<String, usize>, seen: HashMap<String, Seen>, findings: &mut Findings) {
    let mut moved: Vec<_> = seen.into_iter().filter(|(_, seen)| seen.elsewhere > 0).collect();
    moved.sort_by(|(left, _), (right, _)| left.cmp(right));
    for (topic, Seen { keyed, elsewhere }) in moved {
        let partitions = topics.get(&topic).copied().unwrap_or_default();
        findings.warn(
            "topic_partitions_changed",
            format!(
                "topic {topic} has {partitions} partitions, and of {keyed} of its oldest records {elsewhere} were placed among \
                 fewer"
            ),
            "records of a key from before the change lie in another partition than those since, so consumers may see newer \
             ones first",
            format!(
                "let consumers read to the end of the old partitions before they act on the new ones ({} shows the lag); it is \
                 over when the old records have left the topic",
                tool(config, "kafka-consumer-groups.sh", "--describe --all-groups")
            ),
        );
    }
}

/// Reads the oldest records, without becoming a member of a group. Blocks.
fn look(config: &KafkaConfig, topics: &HashMap<String, usize>) -> Result<HashMap<String, Seen>, KafkaError> {
    let mut settings = reader_config(config, false);
    settings.set("fetch.message.max.bytes", "65536").set("queued.max.messages.kbytes", "4096");
    let consumer: BaseConsumer<Quiet> = settings.create_with_context(Quiet)?;
    let mut assignment = TopicPartitionList::new();
    for (topic, partitions) in topics {
        for partition in 0..i32::try_from(*partitions).unwrap_or_default() {
            assignment.add_partition_offset(topic, partition, Offset::Beginning)?;
        }
    }
    consumer.assign(&assignment)?;
    let mut unfinished = assignment.count();
    let (mut counts, mut seen) = (HashMap::<(String, i32), usize>::new(), HashMap::<String, Seen>::new());
    let end = Instant::now() + BUDGET;
    while unfinished > 0 && Instant::now() < end {
        match consumer.poll(Duration::from_millis(100)) {
            None => {}
            Some(Ok(record)) => {
                let place = (record.topic().to_owned(), record.partition());
                let count = counts.entry(place).or_default();
                *count += 1;
                if *count == RECORDS {
                    unfinished -= 1;
                    let mut enough = TopicPartitionList::new();
                    enough.add_partition(record.topic(), record.partition());
                    consumer.pause(&enough)?;
                }
                if *count <= RECORDS {
                    let partitions = topics.get(record.topic()).copied().unwrap_or(1);
                    note(&record, partitions, seen.entry(record.topic().to_owned()).or_default());
                }
            }
            // one that came to its end with enough records was counted before; a look too short is no harm
            Some(Err(KafkaError::PartitionEOF(_))) => unfinished = unfinished.saturating_sub(1),
            Some(Err(error)) if error.rdkafka_error_code() == Some(RDKafkaErrorCode::TopicAuthorizationFailed) => {
                return Err(error);
            }
            // whether the brokers are there is told of elsewhere
            Some(Err(error)) => tracing::debug!(%error, "read the oldest records"),
        }
    }
    Ok(seen)
}

fn note(record: &impl Message, partitions: usize, seen: &mut Seen) {
    let Some(key) = record.key().filter(|key| !key.is_empty()) else { return };
    let has = |name: &str| record.headers().is_some_and(|headers| headers.iter().any(|header| header.key == name));
    // records of others may have been placed otherwise
    if !has("id") || !has("event_type") {
        return;
    }
    seen.keyed += 1;
    let wanted = usize::try_from(murmur2(key) & 0x7fff_ffff).unwrap_or_default() % partitions;
    if usize::try_from(record.partition()) != Ok(wanted) {
        seen.elsewhere += 1;
    }
}

/// The hash by which Java's producers, and ours (`murmur2_random`), choose the partition of a key.
///
/// <https://github.com/apache/kafka/blob/trunk/clients/src/main/java/org/apache/kafka/common/utils/Utils.java>
fn murmur2(key: &[u8]) -> u32 {
    const SEED: u32 = 0x9747_b28c;
    const FACTOR: u32 = 0x5bd1_e995;
    let length = u32::try_from(key.len()).unwrap_or(u32::MAX);
    let mut hash = SEED ^ length;
    let (words, rest) = key.as_chunks::<4>();
    for word in words {
        let mut word = u32::from_le_bytes(*word).wrapping_mul(FACTOR);
        word ^= word >> 24;
        hash = hash.wrapping_mul(FACTOR) ^ word.wrapping_mul(FACTOR);
    }
    if !rest.is_empty() {
        for (place, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * place);
        }
        hash = hash.wrapping_mul(FACTOR);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(FACTOR);
    hash ^ hash >> 15
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of Kafka's own test of the hash.
    #[test]
    fn keys_hash_as_in_java() {
        let known: [(&str, i32); 5] = [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ];
        for (key, hash) in known {
            assert_eq!(murmur2(key.as_bytes()).cast_signed(), hash, "{key}");
        }
    }
}
