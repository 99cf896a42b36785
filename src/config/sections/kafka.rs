//! `[kafka]`: brokers, topics and the properties of the client library.

use std::{path::PathBuf, time::Duration};

use super::{
    Delivery, Entries, KafkaConfig, Located, Node, Origin, SASL_PASSWORD, Secret, Section, SourceKind, Value, legal,
    password_from, refused, text_or,
};

pub(super) fn kafka(section: &mut Section<'_>, stream: Option<(String, SourceKind)>) -> KafkaConfig {
    let brokers = text_or(section, "brokers", "localhost:9092");
    if brokers.value.split(',').any(|broker| broker.trim().is_empty()) {
        section.fault(&brokers.at, "brokers", "has an empty entry", "write host:port,host:port");
    }
    let create_topics = section.boolean("create_topics", false).value;
    let partitions = broker_default_or(section, "partitions", 10_000);
    let replication_factor = broker_default_or(section, "replication_factor", 100);
    let dead_letter_topic = section.text("dead_letter_topic");
    if let Some(topic) = &dead_letter_topic
        && let Err(problem) = legal(topic.value.as_bytes())
    {
        section.fault(&topic.at, "dead_letter_topic", format!("is no legal topic name: {problem}"), "rename it");
    }
    let (slot, source) = stream.unwrap_or_else(|| ("walpost".to_owned(), SourceKind::Wal));
    let delivery = delivery(section, source);
    let interval = section.integer("commit_interval_ms", 100, &(20..=10_000));
    let timeout = section.integer("transaction_timeout_ms", 30_000, &(5_000..=900_000));
    let progress = section.text("progress_topic");
    if let Some(topic) = &progress
        && let Err(problem) = legal(topic.value.as_bytes())
    {
        section.fault(&topic.at, "progress_topic", format!("is no legal topic name: {problem}"), "rename it");
    }
    let progress_at = progress.as_ref().map_or(&Origin::Unset, |topic| &topic.at);
    let keys = [
        ("commit_interval_ms", &interval.at),
        ("transaction_timeout_ms", &timeout.at),
        ("progress_topic", progress_at),
    ];
    for (key, at) in keys {
        if delivery == Delivery::AtLeastOnce && *at != Origin::Unset {
            let what = "has no effect without kafka.delivery = \"exactly_once\"";
            section.fault(at, key, what, "set kafka.delivery, or leave it out");
        }
    }
    let (password, sasl_password_file) = password_file(section).unzip();
    let properties = properties(section, password);
    let millis = |located: &Located<i64>| Duration::from_millis(located.value.unsigned_abs());
    KafkaConfig {
        delivery,
        commit_interval: millis(&interval),
        transaction_timeout: millis(&timeout),
        progress_topic: progress.map_or_else(|| format!("walpost.progress.{slot}"), |topic| topic.value),
        brokers: brokers.value,
        create_topics,
        partitions,
        replication_factor,
        dead_letter_topic: dead_letter_topic.map(|topic| topic.value),
        properties,
        sasl_password_file,
    }
}

/// The password, and the file that holds it.
fn password_file(section: &mut Section<'_>) -> Option<(Secret, PathBuf)> {
    let key = "sasl_password_file";
    let file = section.text(key)?;
    match password_from(file.value.as_ref()) {
        Ok(password) => Some((password, file.value.into())),
        Err(error) => {
            section.fault(&file.at, key, format!("cannot be read: {error}"), "name a readable file");
            None
        }
    }
}

fn delivery(section: &mut Section<'_>, source: SourceKind) -> Delivery {
    let (once, key) = (Delivery::ExactlyOnce, "delivery");
    let choices = [("at_least_once", Delivery::AtLeastOnce), ("exactly_once", once)];
    let delivery = section.choice(key, &choices);
    if delivery == once && source == SourceKind::Poll {
        let what =
            "cannot be exactly_once where the table is polled: its mark is in Postgres, not in the Kafka transaction";
        section.fault(&Origin::Unset, key, what, "set postgres.source = \"wal\", or leave kafka.delivery out");
    }
    delivery
}

/// -1, or 1 to `most`.
fn broker_default_or(section: &mut Section<'_>, key: &str, most: i32) -> i32 {
    let number = section.integer(key, -1, &(-1..=i64::from(most)));
    if number.value == 0 {
        section.fault(&number.at, key, "must not be 0", "write -1 for the broker's default");
    }
    i32::try_from(number.value).unwrap_or(-1)
}

fn properties(section: &mut Section<'_>, password: Option<Secret>) -> Vec<(String, Secret)> {
    let key = "properties";
    let password = password.map(|password| (SASL_PASSWORD.to_owned(), password));
    let mut properties: Vec<(String, Secret)> = password.into_iter().collect();
    let mut secured = None;
    for (name, Node { value, at }) in flatten(section.dotted_map(key)) {
        let value = match value {
            Value::Raw(text) | Value::Text(text) | Value::Other(text) => text,
            Value::Integer(number) => number.to_string(),
            Value::Boolean(boolean) => boolean.to_string(),
            Value::Array(_) | Value::Table(_) => {
                section.fault(&at, key, format!("{name} must be text, a number or a boolean"), "put it in quotes");
                continue;
            }
        };
        match refused::check(&name, &value) {
            Ok(()) if name == SASL_PASSWORD && !properties.is_empty() && properties[0].0 == name => {
                section.fault(&at, key, "sasl.password is set beside sasl_password_file", "leave one of them out");
            }
            Ok(()) if properties.iter().any(|(taken, _)| taken == refused::canonical(&name)) => {
                let what = format!("{name} is set under two names: {} is the same", refused::canonical(&name));
                section.fault(&at, key, what, "leave one of them out");
            }
            Ok(()) => {
                secured = secured.or_else(|| refused::security(&name).then(|| at.clone()));
                properties.push((refused::canonical(&name).to_owned(), Secret::new(value)));
            }
            Err(refusal) => section.fault(&at, key, format!("{name} {}", refusal.what), refusal.remedy),
        }
    }
    // Making a client costs a few milliseconds, so only where there is something to find.
    if let Some(at) = secured
        && let Err(reason) = refused::check_together(&properties)
    {
        let remedy = "correct the properties it speaks of";
        section.fault(&at, key, format!("are refused by librdkafka together: {reason}"), remedy);
    }
    properties
}

/// An unquoted `compression.type = "lz4"` is a table within a table to TOML; it means the same property.
fn flatten(entries: Entries) -> Entries {
    let flat = |(name, node): (String, Node)| match node.value {
        Value::Table(inner) => {
            let named = flatten(inner).into_iter().map(|(rest, node)| (format!("{name}.{rest}"), node));
            named.collect::<Vec<_>>()
        }
        _ => vec![(name, node)],
    };
    entries.into_iter().flat_map(flat).collect()
}
