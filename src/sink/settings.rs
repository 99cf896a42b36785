//! librdkafka's settings: walpost's defaults, the operator's, and those that guard the guarantees.

use rdkafka::ClientConfig;

use super::{Mode, Sending};
use crate::config::KafkaConfig;

/// What walpost sets: first what an operator may change, then what an operator named, then what guards the guarantees.
pub fn client_config(config: &KafkaConfig, sending: Sending, client_id: &str) -> ClientConfig {
    let mut settings = ClientConfig::new();
    let defaults = [
        ("client.id", client_id),
        ("linger.ms", "1"),
        ("compression.type", "lz4"),
        // what counts is what the broker counts, after compression; but no request is larger than a broker takes by default
        // (socket.request.max.bytes), and what is refused by this is never copied
        ("message.max.bytes", "104857600"),
        ("batch.num.messages", "10000"),
        ("queue.buffering.max.messages", "1000000"),
        ("queue.buffering.max.kbytes", "2097151"),
        ("socket.keepalive.enable", "true"),
        ("socket.timeout.ms", "30000"),
        ("reconnect.backoff.ms", "20"),
        ("reconnect.backoff.max.ms", "1000"),
        ("retry.backoff.max.ms", "1000"),
        ("topic.metadata.refresh.interval.ms", "60000"),
        ("allow.auto.create.topics", "false"),
        ("enable.metrics.push", "false"),
    ];
    for (key, value) in defaults {
        settings.set(key, value);
    }
    for (key, value) in &config.properties {
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
        // a refused record that goes to the dead-letter topic leaves a gap; one that ends the run must not
        settings.set("enable.gapless.guarantee", config.dead_letter_topic.is_none().to_string());
    }
    settings
}

/// An admin client of the same cluster.
pub fn admin_config(config: &KafkaConfig) -> ClientConfig {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", &config.brokers).set("log_level", "0");
    // it is a producer as well, as librdkafka sees it, so whatever leads to the brokers leads it there too
    for (key, value) in &config.properties {
        settings.set(key, value.expose());
    }
    settings
}
