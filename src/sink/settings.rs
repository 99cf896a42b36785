//! librdkafka's settings: walpost's defaults, the operator's, and those that guard the guarantees.

use rdkafka::ClientConfig;

use super::{Mode, Sending};
use crate::config::KafkaConfig;

/// What walpost sets for any client, so that properties which fit together in one fit together in each.
const CONNECTION: &[(&str, &str)] = &[
    ("socket.keepalive.enable", "true"),
    ("socket.timeout.ms", "30000"),
    ("reconnect.backoff.ms", "20"),
    ("reconnect.backoff.max.ms", "1000"),
    ("retry.backoff.max.ms", "1000"),
    ("topic.metadata.refresh.interval.ms", "60000"),
    ("allow.auto.create.topics", "false"),
    ("enable.metrics.push", "false"),
];

/// How often the producer tells its statistics: never, unless an operator wants it. The document names every topic, and with
/// thousands of them it costs memory.
const STATISTICS_MS: &str = "0";

/// The properties of producers and topics among those that an operator may set (`P` in librdkafka's CONFIGURATION.md).
const PRODUCING: &[&str] = &[
    "batch.num.messages",
    "batch.size",
    "compression.level",
    "compression.type",
    "linger.ms",
    "produce.offset.report",
    "queue.buffering.backpressure.threshold",
    "request.timeout.ms",
    "sticky.partitioning.linger.ms",
];

/// What walpost sets: first what an operator may change, then what an operator named, then what guards the guarantees.
pub fn client_config(config: &KafkaConfig, sending: Sending, client_id: &str) -> ClientConfig {
    let mut settings = ClientConfig::new();
    let defaults = [
        ("client.id", client_id),
        ("statistics.interval.ms", STATISTICS_MS),
        ("linger.ms", "1"),
        ("compression.type", "lz4"),
        // what counts is what the broker counts, after compression; but no request is larger than a broker takes by default
        // (socket.request.max.bytes), and what is refused by this is never copied
        ("message.max.bytes", "104857600"),
        ("batch.num.messages", "10000"),
        ("queue.buffering.max.messages", "1000000"),
        ("queue.buffering.max.kbytes", "2097151"),
    ];
    for (key, value) in CONNECTION.iter().copied().chain(defaults) {
        settings.set(key, value);
    }
    for (key, value) in config.present_properties() {
        settings.set(key, value.expose());
    }
    let guards = [
        ("bootstrap.servers", config.brokers.as_str()),
        ("enable.idempotence", "true"),
        ("acks", "all"),
        // not five, though idempotence allows it: see docs/decisions/0007
        ("max.in.flight.requests.per.connection", "1"),
        ("message.timeout.ms", "0"),
        ("enable.gapless.guarantee", "true"),
        ("partitioner", "murmur2_random"),
    ];
    for (key, value) in guards {
        settings.set(key, value);
    }
    if let Some(bytes) = sending.batch_bytes {
        settings.set("batch.size", bytes.to_string());
    }
    if sending.mode != Mode::Normal {
        settings.set("batch.num.messages", "1").set("linger.ms", "0");
        // a refused record that goes to the dead-letter topic, or is left, leaves a gap; one that ends the run must not
        let gapless = config.dead_letter_topic.is_none() && !sending.lets_go;
        settings.set("enable.gapless.guarantee", gapless.to_string());
    }
    settings
}

/// The same for a producer whose records come in transactions. `config.progress_topic` names it: a second producer of that name
/// ends the transactions of the first.
pub fn transactional_config(config: &KafkaConfig, sending: Sending, client_id: &str) -> ClientConfig {
    let mut settings = client_config(config, sending, client_id);
    let timeout = u64::try_from(config.transaction_timeout.as_millis()).unwrap_or(u64::MAX);
    settings
        .set("transactional.id", &config.progress_topic)
        .set("transaction.timeout.ms", timeout.to_string())
        // a record that comes too late for its transaction says so before the brokers do
        .set("message.timeout.ms", (timeout * 4 / 5).to_string())
        // whatever fails, all of the transaction does
        .set("enable.gapless.guarantee", "false");
    if !config.properties.iter().any(|(name, _)| name == "socket.timeout.ms") {
        settings.set("socket.timeout.ms", (timeout * 4 / 5).min(30_000).to_string());
    }
    settings
}

/// A consumer of one topic that joins no group. `committed`: it reads what is committed, else also what is still open.
pub fn reader_config(config: &KafkaConfig, committed: bool) -> ClientConfig {
    let mut settings = admin_config(config);
    settings
        .set("group.id", "walpost")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", "earliest")
        .set("enable.partition.eof", "true")
        .set("fetch.wait.max.ms", "10")
        .set("isolation.level", if committed { "read_committed" } else { "read_uncommitted" });
    settings
}

/// An admin client, or a consumer, of the same cluster: whatever leads the producer to the brokers leads it there too.
pub fn admin_config(config: &KafkaConfig) -> ClientConfig {
    let mut settings = ClientConfig::new();
    for (key, value) in CONNECTION {
        settings.set(*key, *value);
    }
    // log_level is none that an operator may set
    settings.set("bootstrap.servers", &config.brokers).set("log_level", "0");
    for (key, value) in config.present_properties().iter().filter(|(key, _)| !PRODUCING.contains(&key.as_str())) {
        settings.set(key, value.expose());
    }
    settings
}

#[cfg(test)]
mod tests {
    use rdkafka::{admin::AdminClient, client::DefaultClientContext, producer::BaseProducer};

    use super::*;
    use crate::config;

    fn kafka(properties: &[(&str, &str)]) -> KafkaConfig {
        let mut flags = vec![("postgres.url".to_owned(), "postgres://localhost/db".to_owned())];
        flags.extend(properties.iter().map(|(name, value)| (format!("kafka.properties.{name}"), (*value).to_owned())));
        config::load(None, &flags).unwrap().kafka
    }

    #[test]
    fn an_admin_client_takes_what_leads_to_the_brokers_and_nothing_of_producing() {
        let connecting = [
            ("client.dns.lookup", "resolve_canonical_bootstrap_servers_only"),
            ("broker.address.family", "v4"),
            ("socket.connection.setup.timeout.ms", "5000"),
            ("reconnect.backoff.max.ms", "70"),
            ("api.version.request.timeout.ms", "5000"),
        ];
        let producing = [("linger.ms", "900"), ("compression.codec", "zstd"), ("request.timeout.ms", "5000")];
        let settings = admin_config(&kafka(&[&connecting[..], &producing].concat()));
        for (name, value) in connecting {
            assert_eq!(settings.get(name), Some(value));
        }
        for name in ["linger.ms", "compression.type", "compression.codec", "request.timeout.ms", "acks"] {
            assert_eq!(settings.get(name), None, "{name}");
        }
    }

    #[test]
    fn properties_that_fit_the_producer_fit_the_admin_client() {
        // librdkafka's own reconnect.backoff.ms is larger than this, and it refuses the pair
        let config = kafka(&[("reconnect.backoff.max.ms", "70")]);
        let sending = Sending { mode: Mode::Normal, batch_bytes: None, lets_go: false };
        client_config(&config, sending, "test").create::<BaseProducer>().unwrap();
        admin_config(&config).create::<AdminClient<DefaultClientContext>>().unwrap();
    }
}
