//! Kafka: reachable, the topics there, their limits.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rdkafka::{
    ClientContext,
    admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier},
    client::DefaultClientContext,
    config::RDKafkaLogLevel,
    error::KafkaError,
    metadata::Metadata,
    producer::{BaseProducer, Producer, ProducerContext},
};

use super::Findings;
use crate::{config::KafkaConfig, sink::admin_config};

/// How long the brokers may take to answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// A batch of the producer is at most this large (librdkafka's `batch.size`), before compression.
const BATCH_BYTES: u64 = 1_000_000;

pub(super) async fn check(config: &KafkaConfig, topics: &BTreeSet<String>, findings: &mut Findings) {
    let own = config.clone();
    let metadata = match tokio::task::spawn_blocking(move || metadata(&own)).await {
        Ok(Ok(metadata)) => metadata,
        Ok(Err(reason)) => return unreachable(config, &reason, findings),
        Err(error) => return unreachable(config, &error.to_string(), findings),
    };
    let brokers = metadata.brokers().len();
    findings.ok("kafka_reachable", format!("Kafka answers at {} (brokers: {brokers})", config.brokers));
    let mut present = Vec::new();
    for topic in topics {
        match metadata.topics().iter().find(|found| found.name() == topic) {
            Some(found) => {
                let replicas = found.partitions().iter().map(|partition| partition.replicas().len()).min();
                if brokers > 1 && replicas == Some(1) {
                    findings.warn(
                        "topic_replicas",
                        format!("topic {topic} has a partition with a single replica"),
                        "an event that was acknowledged is lost with that one broker's disk",
                        "raise its replication factor",
                    );
                }
                present.push(topic.as_str());
            }
            None => missing(config, topic, findings),
        }
    }
    if !present.is_empty() {
        findings.ok("topics", format!("topics exist: {}", present.join(", ")));
        limits(config, &present, brokers, findings).await;
    }
}

fn missing(config: &KafkaConfig, topic: &str, findings: &mut Findings) {
    if config.create_topics {
        return findings.ok("topic_missing", format!("topic {topic} does not exist yet; walpost creates it"));
    }
    findings.error(
        "topic_missing",
        format!("topic {topic} does not exist, or may not be seen by this principal"),
        "its events and all behind them wait until it does",
        format!(
            "kafka-topics.sh --create --topic {topic}, or set kafka.create_topics = true; or allow Describe and Write"
        ),
    );
}

fn unreachable(config: &KafkaConfig, reason: &str, findings: &mut Findings) {
    findings.error(
        "kafka_unreachable",
        format!("Kafka does not answer at {}: {reason}", config.brokers),
        "events wait in Postgres until it does",
        "check kafka.brokers, and security.protocol, sasl.* and ssl.* in [kafka.properties]",
    );
}

/// Remembers the last thing that librdkafka complained about: a failed request says only that time is up.
#[derive(Clone, Default)]
struct Complaint(Arc<Mutex<Option<String>>>);

impl Complaint {
    fn note(&self, complaint: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(complaint);
    }

    fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ClientContext for Complaint {
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: KafkaError, reason: &str) {
        // that all brokers are down is the consequence; the cause was said before
        if !reason.contains("brokers are down") {
            self.note(reason.to_owned());
        }
    }
}

impl ProducerContext for Complaint {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &rdkafka::message::DeliveryResult<'_>, (): Self::DeliveryOpaque) {}
}

/// All topics at once: a question about one topic could create it. Blocks.
pub(super) fn metadata(config: &KafkaConfig) -> Result<Metadata, String> {
    let complaint = Complaint::default();
    let mut settings = admin_config(config);
    settings.set("allow.auto.create.topics", "false");
    let client: BaseProducer<Complaint> =
        settings.create_with_context(complaint.clone()).map_err(|error| error.to_string())?;
    client.client().fetch_metadata(None, TIMEOUT).map_err(|error| {
        client.poll(Duration::from_millis(100));
        complaint.take().unwrap_or_else(|| error.to_string())
    })
}

async fn limits(config: &KafkaConfig, topics: &[&str], brokers: usize, findings: &mut Findings) {
    let resources = match describe(config, topics).await {
        Ok(resources) => resources,
        Err(error) => return unknown(&error, findings),
    };
    for (topic, resource) in topics.iter().zip(resources) {
        match resource {
            Ok(resource) => judge_limits(topic, &resource, brokers, findings),
            Err(error) => return unknown(&error.to_string(), findings),
        }
    }
}

/// The settings of topics, in their order.
pub(super) async fn describe(
    config: &KafkaConfig,
    topics: &[&str],
) -> Result<Vec<Result<ConfigResource, rdkafka::types::RDKafkaErrorCode>>, String> {
    let admin: AdminClient<DefaultClientContext> = admin_config(config).create().map_err(|error| error.to_string())?;
    let specifiers: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let options = AdminOptions::new().request_timeout(Some(TIMEOUT));
    admin.describe_configs(&specifiers, &options).await.map_err(|error| error.to_string())
}

pub(super) fn unknown(error: &str, findings: &mut Findings) {
    findings.warn(
        "topic_limits_unknown",
        format!("the topics' settings cannot be read: {error}"),
        "so whether large events will be taken is unknown",
        "allow DescribeConfigs on the topics, if you want to know",
    );
}

fn judge_limits(topic: &str, resource: &ConfigResource, brokers: usize, findings: &mut Findings) {
    let number = |name: &str| resource.get(name).and_then(|entry| entry.value.as_ref()?.parse::<u64>().ok());
    if let Some(limit) = number("max.message.bytes").filter(|limit| *limit < BATCH_BYTES) {
        findings.warn(
            "topic_max_message_bytes",
            format!("topic {topic} takes at most {limit} bytes a batch (max.message.bytes)"),
            "a fuller batch is refused and sent again record by record, and a larger event is refused for good",
            format!("raise max.message.bytes, or set \"batch.size\" = \"{limit}\" in [kafka.properties]"),
        );
    }
    if brokers > 1 && number("min.insync.replicas").is_some_and(|replicas| replicas < 2) {
        findings.warn(
            "topic_min_insync_replicas",
            format!("topic {topic} has min.insync.replicas = 1"),
            "an event counts as acknowledged when a single broker has it, and is lost with that broker's disk",
            "set min.insync.replicas = 2",
        );
    }
}
