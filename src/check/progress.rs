//! Exactly-once delivery: the topic that holds the position, and what cannot be seen of the readers.

use rdkafka::metadata::{MetadataBroker, MetadataTopic};

use super::{
    Findings,
    kafka::{describe, metadata, more_replicas, set},
};
use crate::{
    config::{Config, Delivery},
    sql,
};

pub(super) async fn check(config: &Config, findings: &mut Findings) {
    if config.kafka.delivery != Delivery::ExactlyOnce {
        return;
    }
    findings.ok(
        "consumers_isolation",
        "each event comes once to consumers with isolation.level = read_committed; whether yours have it cannot be seen from \
         here (Java's default is read_uncommitted, librdkafka's is read_committed)"
            .to_owned(),
    );
    let kafka = config.kafka.clone();
    // that the brokers do not answer is found elsewhere
    let Ok(Ok(seen)) = tokio::task::spawn_blocking(move || metadata(&kafka)).await else { return };
    let topic = config.kafka.progress_topic.as_str();
    match seen.topics().iter().find(|found| found.name() == topic) {
        None => missing(config, topic, findings).await,
        Some(found) => {
            let brokers: Vec<i32> = seen.brokers().iter().map(MetadataBroker::id).collect();
            judge(config, found, &brokers, findings);
            judge_policy(config, topic, findings).await;
        }
    }
}

async fn missing(config: &Config, topic: &str, findings: &mut Findings) {
    const EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1::text)";
    let Ok(client) = sql::connect(&config.postgres.conninfo).await else { return };
    let slot = &config.postgres.slot;
    let exists = client.query_one(EXISTS, &[slot]).await.is_ok_and(|row| row.get(0));
    if !exists {
        return findings.ok("progress_topic", format!("topic {topic} is created together with slot {slot}"));
    }
    findings.error(
        "progress_topic_missing",
        format!("slot {slot} exists, and topic {topic}, the record of what was published from it, does not"),
        "nothing is published before somebody has said that it may come twice",
        "`walpost run --accept-duplicates`, once",
    );
}

fn judge(config: &Config, topic: &MetadataTopic, brokers: &[i32], findings: &mut Findings) {
    let (name, partitions) = (topic.name(), topic.partitions().len());
    if partitions != 1 {
        return findings.error(
            "progress_topic_partitions",
            format!("topic {name} has {partitions} partitions and must have one"),
            "a position has one place",
            format!(
                "set kafka.progress_topic to a name that no topic has, for example \"{name}-1\", and run `walpost init`"
            ),
        );
    }
    let single = topic.partitions().iter().any(|partition| partition.replicas().len() == 1);
    if brokers.len() > 1 && single {
        findings.warn(
            "progress_topic_replicas",
            format!("topic {name} has a single replica"),
            "with that one broker's disk the record of what was published is lost, and events come twice",
            more_replicas(&config.kafka, topic, brokers),
        );
    }
}

async fn judge_policy(config: &Config, topic: &str, findings: &mut Findings) {
    // that settings cannot be read is told of the other topics
    let Ok(mut resources) = describe(&config.kafka, &[topic]).await else { return };
    let Some(Ok(resource)) = resources.pop() else { return };
    let policy = resource.get("cleanup.policy").and_then(|entry| entry.value.clone()).unwrap_or_default();
    if policy == "compact" {
        return findings.ok("progress_topic", format!("topic {topic} keeps the record of what is published"));
    }
    findings.error(
        "progress_topic_policy",
        format!("topic {topic} has cleanup.policy = {policy}"),
        "the record of what was published is deleted when it is old, and then nothing is published until somebody decides",
        set(&config.kafka, topic, "cleanup.policy=compact"),
    );
}
