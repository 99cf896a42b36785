//! `--consumer`: does the inbox remember for at least as long as Kafka can deliver again?
//!
//! A mark that is forgotten too soon makes an old record a new one, and its action happens twice. How long the inbox
//! remembers stands nowhere: whoever calls `inbox_prune` decides. So it is told by a flag, or guessed from the oldest mark.

use std::{collections::BTreeSet, time::Duration};

use humantime::format_duration;
use rdkafka::{
    ClientContext, Offset, TopicPartitionList,
    admin::ConfigResource,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
};
use tokio_postgres::Client;
use wildmatch::WildMatch;

use super::{Findings, kafka};
use crate::{
    config::{Config, KafkaConfig, TableName},
    route::Template,
    sink::admin_config,
    sql::quote_literal,
};

/// The consumer whose inbox is looked at.
#[derive(Debug, Clone)]
pub struct Consumer {
    /// The consumer group; its marks in the inbox have the same name.
    pub group: String,
    /// How long marks are kept, where somebody knows.
    pub inbox_keep: Option<Duration>,
}

/// For how long a record of a topic may be delivered; `None`: for ever.
struct Reach {
    topic: String,
    long: Option<Duration>,
    /// How that comes about.
    because: String,
}

/// How long the inbox remembers.
enum Memory {
    Said(Duration),
    /// The age of the oldest mark.
    Oldest(Duration),
    NoMark,
    Unknown(String),
}

pub(super) async fn check(
    client: Option<&Client>,
    config: &Config,
    consumer: &Consumer,
    (routed, findings): (&BTreeSet<String>, &mut Findings),
) {
    let (own, group) = (config.kafka.clone(), consumer.group.clone());
    let committed = tokio::task::spawn_blocking(move || committed_topics(&own, &group)).await;
    let committed = committed.map_err(|error| error.to_string()).and_then(|committed| committed);
    let committed = match committed {
        Ok(committed) => committed,
        Err(error) => return unreadable(&consumer.group, &error, findings),
    };
    let patterns = patterns(config);
    let ours = |topic: &&String| patterns.iter().any(|pattern| pattern.matches(topic));
    let mut topics: BTreeSet<String> = committed.iter().filter(ours).cloned().collect();
    if topics.is_empty() {
        findings.warn(
            "consumer_offsets",
            format!("consumer group {} has committed no offset in a topic that the routes lead to", consumer.group),
            "which topics it reads is unknown, so all that the routes name are looked at",
            "check the name; a group that has read nothing yet, or keeps its offsets elsewhere, is in order",
        );
        let graves = config.kafka.dead_letter_topic.as_ref();
        topics = routed.iter().filter(|topic| Some(*topic) != graves).cloned().collect();
    }
    let memory = match consumer.inbox_keep {
        Some(keep) => Memory::Said(keep),
        None => remembered(client, config, &consumer.group).await,
    };
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    if topics.is_empty() {
        return;
    }
    match reaches(&config.kafka, &topics).await {
        Ok(reaches) => judge(consumer, &inbox(config), &memory, (reaches, findings)),
        Err(error) => kafka::unknown(&config.kafka, &topics, &error, findings),
    }
}

fn unreadable(group: &str, error: &str, findings: &mut Findings) {
    findings.warn(
        "consumer_unreadable",
        format!("the offsets of consumer group {group} cannot be read: {error}"),
        "so which topics it reads is unknown, and whether its inbox remembers for long enough",
        "allow Describe on the group and on the topics, if you want to know",
    );
}

/// The inbox beside the (first) outbox.
fn inbox(config: &Config) -> TableName {
    let schema = config.outboxes.first().map_or_else(|| "public".to_owned(), |outbox| outbox.table.schema.clone());
    TableName { schema, table: "inbox".to_owned() }
}

/// What the topics of the routes look like.
fn patterns(config: &Config) -> Vec<WildMatch> {
    let texts = config.route.rules.iter().map(|rule| &rule.topic).chain([&config.route.topic]);
    let templates = texts.filter_map(|text| Some((text, Template::parse(text).ok()?)));
    let pattern = |(text, template): (&String, Template)| {
        let holes = template.columns().map(|column| format!("{{{column}}}"));
        WildMatch::new(&holes.fold(text.clone(), |pattern, hole| pattern.replace(&hole, "*")))
    };
    templates.map(pattern).collect()
}

/// Says nothing: what goes wrong is returned.
pub(super) struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: rdkafka::error::KafkaError, _reason: &str) {}
}

impl ConsumerContext for Quiet {}

/// The topics in which a group has committed offsets. Asks without becoming a member. Blocks.
fn committed_topics(config: &KafkaConfig, group: &str) -> Result<BTreeSet<String>, String> {
    let mut settings = admin_config(config);
    settings.set("group.id", group).set("enable.auto.commit", "false").set("allow.auto.create.topics", "false");
    let consumer: BaseConsumer<Quiet> = settings.create_with_context(Quiet).map_err(|error| error.to_string())?;
    let metadata = consumer.fetch_metadata(None, kafka::TIMEOUT).map_err(|error| error.to_string())?;
    let mut partitions = TopicPartitionList::new();
    for topic in metadata.topics() {
        for partition in topic.partitions() {
            partitions.add_partition(topic.name(), partition.id());
        }
    }
    let committed = consumer.committed_offsets(partitions, kafka::TIMEOUT).map_err(|error| error.to_string())?;
    let committed = committed.elements();
    let read = committed.iter().filter(|element| matches!(element.offset(), Offset::Offset(_)));
    Ok(read.map(|element| element.topic().to_owned()).collect())
}

async fn remembered(client: Option<&Client>, config: &Config, group: &str) -> Memory {
    let Some(client) = client else { return Memory::Unknown("there is no link to Postgres".to_owned()) };
    let sql = format!(
        "SELECT extract(epoch FROM now() - min(claimed_at))::double precision FROM {} WHERE consumer = {}",
        inbox(config),
        quote_literal(group)
    );
    match client.query_one(&sql, &[]).await {
        Ok(row) => row.get::<_, Option<f64>>(0).map_or(Memory::NoMark, |age| {
            Memory::Oldest(Duration::try_from_secs_f64(age.max(0.0).floor()).unwrap_or_default())
        }),
        Err(error) => {
            Memory::Unknown(error.as_db_error().map_or_else(|| error.to_string(), |error| error.message().to_owned()))
        }
    }
}

async fn reaches(config: &KafkaConfig, topics: &[&str]) -> Result<Vec<Reach>, String> {
    let resources = kafka::describe(config, topics).await?;
    let described = topics.iter().zip(resources);
    described.map(|(topic, resource)| Ok(reach(topic, &resource.map_err(|error| error.to_string())?))).collect()
}

/// A record goes with its whole segment, and that only when the newest record in it is too old: so the first one of a
/// segment stays for as long again as the segment took to fill.
fn reach(topic: &str, resource: &ConfigResource) -> Reach {
    let text = |name: &str| resource.get(name).and_then(|entry| entry.value.as_deref());
    let millis = |name: &str| Some(Duration::from_millis(text(name)?.parse().ok()?));
    let topic = topic.to_owned();
    if !text("cleanup.policy").unwrap_or("delete").contains("delete") {
        return Reach { topic, long: None, because: "it is compacted and deletes nothing by age".to_owned() };
    }
    let (Some(keep), Some(segment)) = (millis("retention.ms"), millis("segment.ms")) else {
        return Reach { topic, long: None, because: "retention.ms is -1".to_owned() };
    };
    let because = format!(
        "retention.ms is {}, and its segments take in records for {}",
        format_duration(keep),
        format_duration(segment)
    );
    Reach { topic, long: Some(keep.saturating_add(segment)), because }
}

fn judge(consumer: &Consumer, inbox: &TableName, memory: &Memory, (reaches, findings): (Vec<Reach>, &mut Findings)) {
    let group = &consumer.group;
    let (long, what) = match memory {
        Memory::Said(keep) => {
            (*keep, format!("inbox {inbox} keeps the marks of {group} for {}", format_duration(*keep)))
        }
        Memory::Oldest(age) => {
            (*age, format!("the oldest mark of {group} in inbox {inbox} is {} old", format_duration(*age)))
        }
        Memory::NoMark => return unmarked(group, inbox, findings),
        Memory::Unknown(reason) => return unseen(inbox, reason, findings),
    };
    let count = reaches.len();
    let mut longer: Vec<_> = reaches.into_iter().filter(|reach| reach.long.is_none_or(|reach| reach > long)).collect();
    longer.sort_by_key(|reach| reach.long.unwrap_or(Duration::MAX));
    let others = longer.len().saturating_sub(1);
    let Some(Reach { topic, long: reach, because }) = longer.pop() else {
        return findings.ok("inbox_retention", format!("{what}, longer than its topics ({count}) can deliver again"));
    };
    let again = reach.map_or_else(|| "for ever".to_owned(), |reach| format!("for {}", format_duration(reach)));
    let more = if others > 0 { format!("; so it is with {others} more") } else { String::new() };
    let what = format!("{what}, and topic {topic} can deliver a record again {again} ({because}){more}");
    let keep = reach.map_or_else(
        || "never run inbox_prune for it, or set retention.ms on the topic".to_owned(),
        |reach| format!("SELECT inbox_prune('{}', '{} seconds')", group.replace('\'', "''"), reach.as_secs() + 1),
    );
    match memory {
        Memory::Said(_) => findings.warn("inbox_retention", what, FORGOTTEN, keep),
        _ => findings.warn(
            "inbox_retention_unproven",
            what,
            format!("a consumer that is younger than that is in order; where older marks were deleted, {FORGOTTEN}"),
            format!("say how long marks are kept (--inbox-keep 30d); long enough is {keep}"),
        ),
    }
}

const FORGOTTEN: &str =
    "a record that comes again after its mark was deleted counts as a new one, and its action happens twice";

fn unmarked(group: &str, inbox: &TableName, findings: &mut Findings) {
    findings.warn(
        "inbox_unmarked",
        format!("inbox {inbox} has no mark of consumer {group}"),
        "it has claimed nothing yet, claims under another name or elsewhere, or acts on events without claiming them",
        "claim under the group's name; where the inbox is in another database, say how long it keeps marks: --inbox-keep 30d",
    );
}

fn unseen(inbox: &TableName, reason: &str, findings: &mut Findings) {
    findings.warn(
        "inbox_unreadable",
        format!("inbox {inbox} cannot be read: {reason}"),
        "so whether it remembers for long enough is unknown",
        "say how long it keeps marks (--inbox-keep 30d), or grant SELECT on it to walpost's role",
    );
}
