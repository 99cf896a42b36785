//! Every key: its section, type, default and bounds.

mod kafka;
mod retention;
mod trace;

use std::time::Duration;

use super::{
    AdminToken, Backfill, ColumnsConfig, Config, Delivery, HttpConfig, KafkaConfig, LimitsConfig, LogConfig, LogFormat,
    OnIllegalTopic, OptionalColumn, OutboxConfig, PollColumns, PollConfig, PostgresConfig, RetentionConfig,
    RouteConfig, RouteRule, SASL_PASSWORD, Secret, ShutdownConfig, SourceKind,
    fault::Origin,
    password_from,
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
    let polls = postgres.as_ref().is_some_and(|postgres| postgres.source == SourceKind::Poll);
    let stream = postgres.as_ref().map(|postgres| (postgres.slot.clone(), postgres.source));
    let kafka = within(root, "kafka", |section| kafka::kafka(section, stream));
    let limits = within(root, "limits", |section| LimitsConfig {
        in_flight_events: size(section, "in_flight_events", 20_000, 1..=1_000_000),
        in_flight_bytes: size(section, "in_flight_bytes", 64 << 20, 64 << 10..=16 << 30),
        backfill_rate: u32::try_from(section.integer("backfill_rate", 0, &(0..=1_000_000)).value).unwrap_or(0),
    });
    let poll = within(root, "poll", poll);
    let retention = within(root, "retention", |section| retention::retention(section, polls));
    let shutdown = within(root, "shutdown", |section| {
        let millis = section.integer("drain_timeout_ms", 10_000, &(0..=3_600_000)).value;
        ShutdownConfig { drain_timeout: Duration::from_millis(millis.unsigned_abs()) }
    });
    let http = within(root, "http", http);
    let log = within(root, "log", log_section);
    let trace = within(root, "trace", trace::trace);
    Some(Config { postgres: postgres?, outboxes, route, kafka, limits, poll, retention, shutdown, http, log, trace })
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
    let auto_create = section.boolean("auto_create", true).value;
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
