//! The topics that can be known before the events come.

use std::collections::BTreeSet;

use tokio_postgres::Client;
use wildmatch::WildMatch;

use super::{
    Findings,
    sample::{ROWS, ask},
};
use crate::{
    config::{Config, OnIllegalTopic, OutboxConfig},
    publication::quoted,
    route::{Template, legal},
    sql::quote_identifier,
};

/// So many event types are taken.
const TYPES: u32 = 100;

/// Event types that stand in the tables, each with the place of its outbox in the configuration. A role that may not read
/// a table learns of none.
pub(super) async fn event_types(client: &Client, config: &Config) -> Vec<(usize, String)> {
    let mut types = Vec::new();
    for (place, outbox) in config.outboxes.iter().enumerate() {
        let (table, column) = (quoted(&outbox.table), quote_identifier(&outbox.columns.event_type));
        let sql = format!(
            "SELECT DISTINCT event_type::text FROM (SELECT {column} AS event_type FROM {table} LIMIT {ROWS}) sampled \
             WHERE event_type IS NOT NULL LIMIT {TYPES}"
        );
        match ask(client, &sql).await {
            Ok(rows) => types.extend(rows.iter().map(|row| (place, row.get(0)))),
            Err(error) => tracing::debug!(%error, table, "event types cannot be read"),
        }
    }
    types
}

/// The topics that events will go to, as far as they can be known.
pub(super) fn wanted(config: &Config, event_types: &[(usize, String)], findings: &mut Findings) -> BTreeSet<String> {
    let route = &config.route;
    let fixed = route.rules.iter().map(|rule| &rule.topic).chain([&route.topic]);
    let fixed = fixed.filter_map(|text| Template::parse(text).ok()?.fixed().map(str::to_owned));
    let mut topics: BTreeSet<String> = fixed.chain(config.kafka.dead_letter_topic.clone()).collect();
    for (place, event_type) in event_types {
        let Some(topic) = config.outboxes.get(*place).and_then(|outbox| topic(config, outbox, event_type)) else {
            continue;
        };
        match (legal(topic.as_bytes()), route.on_illegal_topic) {
            (Ok(()), _) => {
                topics.insert(topic);
            }
            (Err(_), OnIllegalTopic::Sanitize) => {}
            (Err(problem), _) => findings.warn(
                "illegal_topic",
                format!("events of type {event_type:?} would go to topic {topic:?}: {problem}"),
                "Kafka would not take them",
                "route the type with [[route.rules]], or set route.on_illegal_topic = \"sanitize\"",
            ),
        }
    }
    topics
}

/// The topic of an event type, where nothing else decides about it.
pub(super) fn topic(config: &Config, outbox: &OutboxConfig, event_type: &str) -> Option<String> {
    let rule = config.route.rules.iter().find(|rule| WildMatch::new(&rule.event_type).matches(event_type));
    let text = rule.map_or(&config.route.topic, |rule| &rule.topic);
    let template = Template::parse(text).ok()?;
    let names = ["event_type", outbox.columns.event_type.as_str()];
    if !template.columns().all(|column| names.contains(&column)) {
        return None;
    }
    Some(names.iter().fold(text.clone(), |topic, name| topic.replace(&format!("{{{name}}}"), event_type)))
}
