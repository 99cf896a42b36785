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
    metadata::{Metadata, MetadataTopic},
    producer::{BaseProducer, Producer, ProducerContext},
};

use super::{Findings, placement, sample::Payload};
use crate::{config::KafkaConfig, sink::admin_config};

/// How long the brokers may take to answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// A batch of the producer is at most this large (librdkafka's `batch.size`), before compression.
const BATCH_BYTES: u64 = 1_000_000;
/// What a broker takes unless it is told otherwise (`message.max.bytes`).
const DEFAULT_MESSAGE_BYTES: u64 = 1_048_588;

pub(super) async fn check(
    config: &KafkaConfig,
    (topics, payloads): (&BTreeSet<String>, &[Payload]),
    findings: &mut Findings,
) {
    let own = config.clone();
    let metadata = match tokio::task::spawn_blocking(move || metadata(&own)).await {
        Ok(Ok(metadata)) => metadata,
        Ok(Err(reason)) => return unreachable(config, &reason, findings),
        Err(error) => return unreachable(config, &error.to_string(), findings),
    };
    let brokers: Vec<i32> = metadata.brokers().iter().map(rdkafka::metadata::MetadataBroker::id).collect();
    findings.ok("kafka_reachable", format!("Kafka answers at {} (brokers: {})", config.brokers, brokers.len()));
    let mut present = Vec::new();
    for topic in topics {
        match metadata.topics().iter().find(|found| found.name() == topic) {
            Some(found) => present.push(Topic { found, brokers: &brokers, config }),
            None => missing(config, topic, findings),
        }
    }
    if present.is_empty() {
        return;
    }
    let names: Vec<&str> = present.iter().map(|topic| topic.found.name()).collect();
    findings.ok("topics", format!("topics exist: {}", names.join(", ")));
    for topic in &present {
        topic.judge_replicas(findings);
    }
    limits(config, &present, payloads, findings).await;
    let counts = present.iter().map(|topic| (topic.found.name().to_owned(), topic.found.partitions().len()));
    placement::check(config, counts.collect(), findings).await;
}

/// A command of Kafka's, for this cluster.
pub(super) fn tool(config: &KafkaConfig, name: &str, arguments: &str) -> String {
    let secured = config.properties.iter().any(|(name, _)| name == "security.protocol");
    let secured = if secured { " --command-config client.properties" } else { "" };
    format!("`{name} --bootstrap-server {}{secured} {arguments}`", config.brokers)
}

/// The command that lets walpost's principal do something with topics.
pub(super) fn grant(config: &KafkaConfig, operation: &str, topics: &[&str]) -> String {
    let named: Vec<_> = topics.iter().map(|topic| format!("--topic {topic}")).collect();
    let principal = config.properties.iter().find(|(name, _)| name == "sasl.username");
    let principal = principal.map_or("NAME", |(_, user)| user.expose());
    let arguments = format!("--add --allow-principal User:{principal} --operation {operation} {}", named.join(" "));
    tool(config, "kafka-acls.sh", &arguments)
}

/// The command that changes a setting of a topic.
pub(super) fn set(config: &KafkaConfig, topic: &str, setting: &str) -> String {
    let arguments = format!("--alter --entity-type topics --entity-name {topic} --add-config {setting}");
    tool(config, "kafka-configs.sh", &arguments)
}

/// The command that gives every partition of a topic three replicas, or as many as there are brokers.
pub(super) fn more_replicas(config: &KafkaConfig, topic: &MetadataTopic, brokers: &[i32]) -> String {
    let name = topic.name();
    let partitions = topic.partitions().iter().map(|partition| {
        let others = brokers.iter().filter(|broker| !partition.replicas().contains(broker));
        let replicas: Vec<String> = partition.replicas().iter().chain(others).take(3).map(i32::to_string).collect();
        let (number, replicas) = (partition.id(), replicas.join(","));
        format!(r#"{{"topic":"{name}","partition":{number},"replicas":[{replicas}]}}"#)
    });
    let plan = format!(r#"{{"version":1,"partitions":[{}]}}"#, partitions.collect::<Vec<_>>().join(","));
    let execute = tool(config, "kafka-reassign-partitions.sh", "--reassignment-json-file replicas.json --execute");
    format!("`echo '{plan}' > replicas.json` and {execute}")
}

fn missing(config: &KafkaConfig, topic: &str, findings: &mut Findings) {
    if config.create_topics {
        return findings.ok("topic_missing", format!("topic {topic} does not exist yet; walpost creates it"));
    }
    let create = tool(config, "kafka-topics.sh", &format!("--create --topic {topic}"));
    findings.error(
        "topic_missing",
        format!("topic {topic} does not exist, or may not be seen by this principal"),
        "its events and all behind them wait until it does",
        format!("{create}, or set kafka.create_topics = true; or allow Describe and Write"),
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

async fn limits(config: &KafkaConfig, topics: &[Topic<'_>], payloads: &[Payload], findings: &mut Findings) {
    let names: Vec<&str> = topics.iter().map(|topic| topic.found.name()).collect();
    let resources = match describe(config, &names).await {
        Ok(resources) => resources,
        Err(error) => return unknown(config, &names, &error, findings),
    };
    for (topic, resource) in topics.iter().zip(resources) {
        match resource {
            Ok(resource) => topic.judge_settings(&resource, payloads, findings),
            Err(error) => return unknown(config, &names, &error.to_string(), findings),
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

pub(super) fn unknown(config: &KafkaConfig, topics: &[&str], error: &str, findings: &mut Findings) {
    findings.warn(
        "topic_limits_unknown",
        format!("the topics' settings cannot be read: {error}"),
        "so whether large events will be taken is unknown",
        format!("{}, if you want to know", grant(config, "DescribeConfigs", topics)),
    );
}

/// A topic that is there.
struct Topic<'a> {
    found: &'a MetadataTopic,
    /// The ids of all brokers that are there.
    brokers: &'a [i32],
    config: &'a KafkaConfig,
}

impl Topic<'_> {
    /// The least number of replicas of a partition.
    fn replicas(&self) -> usize {
        self.found.partitions().iter().map(|partition| partition.replicas().len()).min().unwrap_or_default()
    }

    fn judge_replicas(&self, findings: &mut Findings) {
        if self.brokers.len() > 1 && self.replicas() == 1 {
            findings.warn(
                "topic_replicas",
                format!("topic {} has a partition with a single replica", self.found.name()),
                "an event that was acknowledged is lost with that one broker's disk",
                more_replicas(self.config, self.found, self.brokers),
            );
        }
    }

    fn set(&self, setting: &str) -> String {
        set(self.config, self.found.name(), setting)
    }

    fn judge_settings(&self, resource: &ConfigResource, payloads: &[Payload], findings: &mut Findings) {
        let number = |name: &str| resource.get(name).and_then(|entry| entry.value.as_ref()?.parse::<u64>().ok());
        if let Some(limit) = number("max.message.bytes") {
            self.judge_size(limit, payloads, findings);
        }
        if let Some(wanted) = number("min.insync.replicas").and_then(|wanted| usize::try_from(wanted).ok()) {
            self.judge_insync(wanted, findings);
        }
    }

    fn judge_size(&self, limit: u64, payloads: &[Payload], findings: &mut Findings) {
        let topic = self.found.name();
        let of_it = payloads.iter().filter(|payload| payload.topic == topic);
        let largest = of_it.max_by_key(|payload| payload.bytes);
        if let Some(Payload { event_type, bytes, .. }) = largest.filter(|payload| payload.bytes > limit) {
            let more = bytes.saturating_mul(2);
            findings.warn(
                "topic_payload_too_large",
                format!(
                    "topic {topic} takes at most {limit} bytes (max.message.bytes), and a row of type {event_type} has a payload \
                     of {bytes}"
                ),
                "unless it shrinks enough by compression it is refused for good: a dead letter, or a halt where there is no \
                 dead-letter topic",
                self.set(&format!("max.message.bytes={more}")),
            );
        }
        if limit < BATCH_BYTES {
            findings.warn(
                "topic_max_message_bytes",
                format!("topic {topic} takes at most {limit} bytes a batch (max.message.bytes)"),
                "a fuller batch is refused and sent again record by record, and a larger event is refused for good",
                format!(
                    "{}, or set \"batch.size\" = \"{limit}\" in [kafka.properties]",
                    self.set(&format!("max.message.bytes={DEFAULT_MESSAGE_BYTES}"))
                ),
            );
        }
    }

    fn judge_insync(&self, wanted: usize, findings: &mut Findings) {
        let (topic, replicas) = (self.found.name(), self.replicas());
        let away: BTreeSet<i32> = self
            .found
            .partitions()
            .iter()
            .filter(|partition| partition.isr().len() < wanted)
            .flat_map(|partition| partition.replicas().iter().filter(|id| !partition.isr().contains(id)).copied())
            .collect();
        if wanted > replicas {
            findings.error(
                "topic_min_insync_impossible",
                format!("topic {topic} has min.insync.replicas = {wanted}, and a partition with {replicas} replicas"),
                "the brokers acknowledge nothing there, so its events and all behind them wait",
                self.set(&format!("min.insync.replicas={}", (replicas.max(2) - 1))),
            );
        } else if !away.is_empty() {
            let away: Vec<_> = away.iter().map(i32::to_string).collect();
            findings.error(
                "topic_under_min_insync",
                format!("topic {topic} has fewer replicas in sync than min.insync.replicas = {wanted}"),
                "the brokers acknowledge nothing there, so its events and all behind them wait",
                format!("bring these brokers back, or see why they do not keep up: {}", away.join(", ")),
            );
        } else if replicas > 1 && wanted == replicas {
            let fix = match replicas {
                2 => more_replicas(self.config, self.found, self.brokers),
                _ => self.set(&format!("min.insync.replicas={}", replicas - 1)),
            };
            findings.warn(
                "topic_no_spare_replica",
                format!("topic {topic} has min.insync.replicas = {wanted}, and as many replicas"),
                "while any one broker is away, if only for a restart, nothing is acknowledged",
                fix,
            );
        }
        if self.brokers.len() > 1 && wanted < 2 {
            findings.warn(
                "topic_min_insync_replicas",
                format!("topic {topic} has min.insync.replicas = 1"),
                "an event counts as acknowledged when a single broker has it, and is lost with that broker's disk",
                self.set("min.insync.replicas=2"),
            );
        }
    }
}
