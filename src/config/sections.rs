//! Every key: its section, type, default and bounds.

use std::{path::PathBuf, time::Duration};

use super::{
    AdminToken, Backfill, ColumnsConfig, Config, Delivery, HttpConfig, KafkaConfig, LimitsConfig, LogConfig, LogFormat,
    OnIllegalTopic, OptionalColumn, OutboxConfig, PollColumns, PollConfig, PostgresConfig, RetentionConfig,
    RouteConfig, RouteRule, SASL_PASSWORD, Secret, ShutdownConfig, SourceKind,
    fault::Origin,
    reader::{Located, Section},
    refused,
    value::{Entries, Node, Value},
};
use crate::{
    admin::SHORTEST_TOKEN,
    backfill::MARKER_SUFFIX,
    conninfo::{ConnInfo, ConnInfoError},
    observe::log,
    route::{Template, legal},
    table_name::{MAX_NAME_BYTES, TableName, column_name},
};

/// Reads all sections, the faulty ones too. `None` means that a fault was noted.
pub(super) fn config(root: &mut Section<'_>, pgpassword: Option<Secret>) -> Option<Config> {
    let postgres = within(root, "postgres", |section| postgres(section, pgpassword));
    let outboxes = outboxes(root);
    let route = within(root, "route", route);
    let stream = postgres.as_ref().map(|postgres| (postgres.slot.clone(), postgres.source));
    let kafka = within(root, "kafka", |section| kafka(section, stream));
    let limits = within(root, "limits", |section| LimitsConfig {
        in_flight_events: size(section, "in_flight_events", 20_000, 1..=1_000_000),
        in_flight_bytes: size(section, "in_flight_bytes", 64 << 20, 64 << 10..=16 << 30),
        backfill_rate: u32::try_from(section.integer("backfill_rate", 0, &(0..=1_000_000)).value).unwrap_or(0),
    });
    let poll = within(root, "poll", poll);
    let retention = within(root, "retention", retention);
    let shutdown = within(root, "shutdown", |section| {
        let millis = section.integer("drain_timeout_ms", 10_000, &(0..=3_600_000)).value;
        ShutdownConfig { drain_timeout: Duration::from_millis(millis.unsigned_abs()) }
    });
    let http = within(root, "http", http);
    let log = within(root, "log", log_section);
    Some(Config { postgres: postgres?, outboxes, route, kafka, limits, poll, retention, shutdown, http, log })
}

fn within<T>(root: &mut Section<'_>, key: &str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
    let mut section = root.section(key);
    let value = read(&mut section);
    section.close();
    value
}

fn size(section: &mut Section<'_>, key: &str, default: i64, bounds: std::ops::RangeInclusive<i64>) -> usize {
    usize::try_from(section.integer(key, default, &bounds).value).unwrap_or(usize::MAX)
}

fn postgres(section: &mut Section<'_>, pgpassword: Option<Secret>) -> Option<PostgresConfig> {
    let url = section.text("url");
    let password_file = section.text("password_file");
    let slot = text_or(section, "slot", "walpost");
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if slot.value.len() > MAX_NAME_BYTES || !slot.value.bytes().all(legal) {
        let what = "must be 1 to 63 of the characters a-z, 0-9 and _, as Postgres demands of slots";
        section.fault(&slot.at, "slot", what, "rename it");
    }
    if slot.value.ends_with(MARKER_SUFFIX) {
        let what = format!("must not end with {MARKER_SUFFIX}: so slots are called whose backfill is not complete");
        section.fault(&slot.at, "slot", what, "rename it");
    }
    let publication = text_or(section, "publication", "walpost");
    if publication.value.len() > MAX_NAME_BYTES || publication.value.contains('\0') {
        section.fault(&publication.at, "publication", "must have 1 to 63 bytes, none of them NUL", "rename it");
    }
    let auto_create = section.boolean("auto_create", true);
    let source = section.choice("source", &[("wal", SourceKind::Wal), ("poll", SourceKind::Poll)]);
    let Some(url) = url else {
        section.missing(
            "url",
            "say where Postgres is: [postgres] url = \"postgres://walpost@localhost:5432/app\" in the file, or \
             WALPOST_POSTGRES_URL in the environment",
        );
        return None;
    };
    let conninfo = conninfo(section, &url, password_file, pgpassword)?;
    Some(PostgresConfig { conninfo, slot: slot.value, publication: publication.value, auto_create, source })
}

fn conninfo(
    section: &mut Section<'_>,
    url: &Located<String>,
    password_file: Option<Located<String>>,
    pgpassword: Option<Secret>,
) -> Option<ConnInfo> {
    if let Some(file) = &password_file
        && let Err(error) = std::fs::read_to_string(&file.value)
    {
        section.fault(&file.at, "password_file", format!("cannot be read: {error}"), "name a readable file");
    }
    let parsed = ConnInfo::parse(&url.value, password_file.map(|file| file.value.into()), pgpassword);
    match parsed.and_then(|info| info.tls_connector().map(|_| info)) {
        Ok(info) => Some(info),
        Err(error) => {
            let remedy = match &error {
                ConnInfoError::File { .. } | ConnInfoError::Tls { .. } => "name a readable PEM file",
                _ => "correct the connection string",
            };
            section.fault(&url.at, "url", chain(&error), remedy);
            None
        }
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |cause| cause.source())
        .fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn text_or(section: &mut Section<'_>, key: &str, default: &str) -> Located<String> {
    section.text(key).unwrap_or_else(|| Located { value: default.into(), at: Origin::Unset })
}

fn outboxes(root: &mut Section<'_>) -> Vec<OutboxConfig> {
    let node = root.take_typed("outbox");
    let Some(Node { value: Value::Array(items), at }) = node else {
        let mut section = root.nested("outbox", node, true);
        let outbox = outbox(&mut section, false);
        section.close();
        return vec![outbox];
    };
    root.refuse_overrides("outbox");
    if items.is_empty() {
        root.fault(&at, "outbox", "is an empty array", "name at least one table");
    }
    let mut outboxes: Vec<OutboxConfig> = Vec::new();
    for item in items {
        let at = item.at.clone();
        let mut section = root.nested("outbox", Some(item), false);
        let outbox = outbox(&mut section, true);
        if outboxes.iter().any(|other| other.table == outbox.table) {
            section.fault(&at, "table", format!("{} appears twice", outbox.table), "remove one of the two");
        }
        section.close();
        outboxes.push(outbox);
    }
    outboxes
}

fn outbox(section: &mut Section<'_>, one_of_several: bool) -> OutboxConfig {
    let default = || TableName { schema: "public".into(), table: "outbox".into() };
    let text = section.text("table");
    if text.is_none() && one_of_several {
        section.missing("table", "name the table");
    }
    let table = text.map_or_else(default, |text| {
        TableName::parse(&text.value).unwrap_or_else(|what| {
            let remedy = "write it as in SQL, for example public.outbox or '\"My.Schema\".\"Outbox\"'";
            section.fault(&text.at, "table", what, remedy);
            default()
        })
    });
    let backfill = section.text("backfill").map(|text| Backfill::parse(&text.value));
    let (columns, poll) = within(section, "columns", |section| {
        let columns = ColumnsConfig {
            id: column(section, "id", "id").name,
            event_type: column(section, "event_type", "event_type").name,
            payload: column(section, "payload", "payload").name,
            key: column(section, "key", "key"),
            headers: column(section, "headers", "headers"),
            timestamp: column(section, "timestamp", "created_at"),
        };
        let order = column(section, "order", "");
        let poll = PollColumns {
            delivered_at: column(section, "delivered_at", "delivered_at").name,
            attempts: column(section, "attempts", "attempts").name,
            order: order.explicit.then_some(order.name),
        };
        (columns, poll)
    });
    OutboxConfig { table, backfill, columns, header_columns: header_columns(section), poll }
}

fn column(section: &mut Section<'_>, key: &str, default: &str) -> OptionalColumn {
    let Some(text) = section.text(key) else { return OptionalColumn { name: default.into(), explicit: false } };
    let name = column_name(&text.value).unwrap_or_else(|what| {
        section.fault(&text.at, key, what, "write the column's name as the catalog has it");
        text.value
    });
    OptionalColumn { name, explicit: true }
}

fn header_columns(section: &mut Section<'_>) -> Vec<(String, String)> {
    let key = "header_columns";
    let mut columns = Vec::new();
    for (header, Node { value, at }) in section.map(key) {
        let (Value::Text(text) | Value::Raw(text)) = value else {
            let what = format!("{header} must be text");
            section.fault(&at, key, what, "write header = \"column\"");
            continue;
        };
        match column_name(&text) {
            Ok(_) if header.is_empty() => {
                section.fault(&at, key, "has a header without a name", "write header = \"column\"");
            }
            Ok(column) => columns.push((header, column)),
            Err(what) => {
                section.fault(&at, key, format!("{header}: the column's name {what}"), "name a column of the table");
            }
        }
    }
    columns
}

fn route(section: &mut Section<'_>) -> RouteConfig {
    let topic = text_or(section, "topic", "outbox.{event_type}");
    check_template(section, &topic);
    let on_illegal_topic = section.choice(
        "on_illegal_topic",
        &[("park", OnIllegalTopic::Park), ("halt", OnIllegalTopic::Halt), ("sanitize", OnIllegalTopic::Sanitize)],
    );
    let mut rules = Vec::new();
    for item in section.array("rules") {
        let mut rule = section.nested("rules", Some(item), false);
        let event_type = required(&mut rule, "event_type", "write a glob such as order.*");
        let topic = required(&mut rule, "topic", "name the topic");
        if let Some(topic) = &topic {
            check_template(&mut rule, topic);
        }
        rule.close();
        if let (Some(event_type), Some(topic)) = (event_type, topic) {
            rules.push(RouteRule { event_type: event_type.value, topic: topic.value });
        }
    }
    RouteConfig { topic: topic.value, on_illegal_topic, rules }
}

/// Takes text that must be there; empty counts as missing.
fn required(section: &mut Section<'_>, key: &str, remedy: &str) -> Option<Located<String>> {
    let text = section.text_or_empty(key).filter(|text| !text.value.is_empty());
    if text.is_none() {
        section.missing(key, remedy);
    }
    text
}

fn check_template(section: &mut Section<'_>, text: &Located<String>) {
    if let Err(error) = Template::parse(&text.value) {
        let remedy = "write a topic's name with columns in braces, for example outbox.{event_type}";
        section.fault(&text.at, "topic", error.to_string(), remedy);
    }
}

fn kafka(section: &mut Section<'_>, stream: Option<(String, SourceKind)>) -> KafkaConfig {
    let brokers = text_or(section, "brokers", "localhost:9092");
    if brokers.value.split(',').any(|broker| broker.trim().is_empty()) {
        section.fault(&brokers.at, "brokers", "has an empty entry", "write host:port,host:port");
    }
    let create_topics = section.boolean("create_topics", false);
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
    match std::fs::read_to_string(&file.value) {
        Ok(text) => Some((Secret::new(text.trim_end_matches(['\n', '\r'])), file.value.into())),
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

fn poll(section: &mut Section<'_>) -> PollConfig {
    let millis = |located: Located<i64>| Duration::from_millis(located.value.unsigned_abs());
    let channel = section.text("notify_channel");
    if let Some(channel) = &channel
        && (channel.value.len() > MAX_NAME_BYTES || channel.value.contains('\0'))
    {
        section.fault(&channel.at, "notify_channel", "must have 1 to 63 bytes, none of them NUL", "rename it");
    }
    PollConfig {
        batch: u32::try_from(section.integer("batch", 1_000, &(1..=10_000)).value).unwrap_or(1_000),
        interval: millis(section.integer("interval_ms", 1_000, &(10..=3_600_000))),
        ack_timeout: millis(section.integer("ack_timeout_ms", 30_000, &(1_000..=600_000))),
        notify_channel: channel.map(|channel| channel.value),
    }
}

fn retention(section: &mut Section<'_>) -> Option<RetentionConfig> {
    const DAY: Duration = Duration::from_hours(24);
    let keep = section.duration("keep", &(Duration::ZERO..=3650 * DAY));
    let batch = section.integer("batch", 1_000, &(1..=100_000));
    let interval = section.duration("interval", &(Duration::from_secs(1)..=DAY));
    let keep_dead = section.duration("keep_dead_lettered", &(Duration::ZERO..=3650 * DAY));
    let minute = Located { value: Duration::from_mins(1), at: Origin::Unset };
    let interval = interval.unwrap_or(minute);
    let dead_at = keep_dead.as_ref().map_or(&Origin::Unset, |keep| &keep.at);
    for (key, at) in [("batch", &batch.at), ("interval", &interval.at), ("keep_dead_lettered", dead_at)] {
        if keep.is_none() && *at != Origin::Unset {
            section.fault(at, key, "has no effect without retention.keep", "set retention.keep, for example 7d");
        }
    }
    if let (Some(keep), Some(dead)) = (&keep, &keep_dead)
        && dead.value < keep.value
    {
        let remedy = "set it to at least retention.keep, or leave it out to keep such rows for ever";
        section.fault(dead_at, "keep_dead_lettered", "is shorter than retention.keep", remedy);
    }
    let batch = u32::try_from(batch.value).unwrap_or(1_000);
    let keep_dead_lettered = keep_dead.map(|keep| keep.value);
    let keep_partitions =
        (section.boolean("drop_partitions", false), section.integer("partitions_ahead", 0, &(1..=366)));
    let (drop_partitions, ahead) = keep_partitions;
    let partitions_ahead = u32::try_from(ahead.value).ok().filter(|days| *days > 0);
    keep.map(|keep| RetentionConfig {
        keep: keep.value,
        batch,
        interval: interval.value,
        keep_dead_lettered,
        drop_partitions,
        partitions_ahead,
    })
}

fn http(section: &mut Section<'_>) -> HttpConfig {
    let text = section.text_or_empty("listen");
    let text = text.unwrap_or_else(|| Located { value: "127.0.0.1:9465".into(), at: Origin::Unset });
    let listen = (!text.value.is_empty()).then(|| text.value.parse());
    if let Some(Err(_)) = listen {
        let remedy = "for example 127.0.0.1:9465, 0.0.0.0:9465 or [::]:9465; empty means no listener";
        section.fault(&text.at, "listen", "must be an IP address and a port", remedy);
    }
    HttpConfig { listen: listen.and_then(Result::ok), admin_token: admin_token(section) }
}

fn admin_token(section: &mut Section<'_>) -> Option<AdminToken> {
    let file = section.text("admin_token_file");
    let token = section.text("admin_token");
    if let (Some(_), Some(token)) = (&file, &token) {
        section.fault(&token.at, "admin_token", "is set beside admin_token_file", "leave one of them out");
    }
    if let Some(file) = file {
        let token = AdminToken::File(file.value.into());
        if let Err(error) = token.read() {
            let remedy = format!("name a readable file that holds at least {SHORTEST_TOKEN} characters");
            section.fault(&file.at, "admin_token_file", format!("cannot be used: {error}"), remedy);
        }
        return Some(token);
    }
    let token = token?;
    if token.value.len() < SHORTEST_TOKEN {
        let what = format!("must have at least {SHORTEST_TOKEN} characters");
        section.fault(&token.at, "admin_token", what, "for example: openssl rand -hex 32");
    }
    Some(AdminToken::Text(Secret::new(token.value)))
}

fn log_section(section: &mut Section<'_>) -> LogConfig {
    let format = section.choice("format", &[("text", LogFormat::Text), ("json", LogFormat::Json)]);
    let level = text_or(section, "level", "info");
    if let Err(what) = log::filter(&level.value) {
        let remedy = "write error, warn, info, debug or trace, or a filter such as walpost=debug,info";
        section.fault(&level.at, "level", what, remedy);
    }
    LogConfig { format, level: level.value }
}
