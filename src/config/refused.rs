//! Which librdkafka properties an operator may set: all that librdkafka knows, save those that hold up the guarantees.
//!
//! The guarantees: *delivered* means acknowledged by all in-sync replicas, every outcome is reported, and events of one
//! key stay in order.
//! <https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md>

use rdkafka::{
    ClientConfig, config::RDKafkaLogLevel, error::KafkaError, producer::BaseProducer, types::RDKafkaConfRes,
};

use super::Secret;

/// What is wrong with a property, and what to do.
pub(super) struct Refusal {
    pub what: String,
    pub remedy: String,
}

/// Whether a property may be set, and whether librdkafka takes the value. Never quotes the value of a secret.
pub(super) fn check(name: &str, value: &str) -> Result<(), Refusal> {
    if let Some((reason, remedy)) = refusal(name) {
        return Err(Refusal { what: format!("is not yours to set: {reason}"), remedy: remedy.into() });
    }
    match ClientConfig::new().set(name, value).create_native_config() {
        Ok(_) => Ok(()),
        Err(KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..)) => Err(Refusal {
            what: "is no property of librdkafka".into(),
            remedy: "see librdkafka's CONFIGURATION.md for their names".into(),
        }),
        Err(KafkaError::ClientConfig(_, reason, ..)) if !secret(name) => {
            Err(Refusal { what: format!("is refused by librdkafka: {reason}"), remedy: "correct the value".into() })
        }
        Err(_) => Err(Refusal { what: "is refused by librdkafka".into(), remedy: "correct the value".into() }),
    }
}

/// Whether librdkafka takes the properties together: certificates it can read, a SASL mechanism it was built with.
///
/// Only a client tells. It is made without brokers, so it connects to nothing.
pub(super) fn check_together(properties: &[(String, Secret)]) -> Result<(), String> {
    let mut client = ClientConfig::new();
    client.set_log_level(RDKafkaLogLevel::Emerg);
    for (name, value) in properties {
        client.set(name, value.expose());
    }
    match client.create::<BaseProducer>() {
        Ok(_) => Ok(()),
        Err(KafkaError::ClientCreation(reason)) => Err(reason),
        // Any other error would show the value.
        Err(_) => Err("one of them is not usable".into()),
    }
}

/// Whether a property has to do with TLS or SASL.
pub(super) fn security(name: &str) -> bool {
    ["security.", "sasl.", "ssl.", "enable.s"].iter().any(|prefix| name.starts_with(prefix))
}

/// Whether a property's value must not be shown.
fn secret(name: &str) -> bool {
    ["password", "secret", "pem", "passphrase", "oauthbearer", "username", "key"].iter().any(|part| name.contains(part))
}

/// Second names of properties: (second name, the one that walpost uses). Under two names in one client either value may win,
/// since properties are set in no order. These are all that librdkafka's `rd_kafka_properties` has, but for
/// consumers' own and those of OIDC, which this build is without.
const ALIASES: &[(&str, &str)] = &[
    ("metadata.broker.list", "bootstrap.servers"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("sasl.mechanisms", "sasl.mechanism"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("message.send.max.retries", "retries"),
    ("compression.codec", "compression.type"),
    ("request.required.acks", "acks"),
    ("delivery.timeout.ms", "message.timeout.ms"),
];

/// The one name of a property that has several.
pub(super) fn canonical(name: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, canonical)| canonical)
}

const LEAVE: &str = "leave it out";

/// (property by the name that walpost uses, why it is refused, what to do instead)
const REFUSED: &[(&str, &str, &str)] = &[
    ("acks", "an event counts as delivered when all in-sync replicas have it", LEAVE),
    ("enable.idempotence", "without it a retry can duplicate or reorder events", LEAVE),
    ("enable.gapless.guarantee", "walpost itself sees to it that nothing is left out", LEAVE),
    (
        "max.in.flight.requests.per.connection",
        "more than five requests in flight would let a retry reorder events",
        LEAVE,
    ),
    ("retries", "an event is tried until it is delivered, or it would be lost", LEAVE),
    ("message.timeout.ms", "an event is tried until it is delivered, or later ones would overtake it", LEAVE),
    ("queuing.strategy", "last in, first out would reorder events", LEAVE),
    ("partitioner", "keys are placed as Java's clients do, and moving one would reorder its events", LEAVE),
    ("msg_order_cmp", "it would reorder events", LEAVE),
    ("delivery.report.only.error", "walpost must hear of each delivery to confirm it", LEAVE),
    (
        "transactional.id",
        "it is the name of the progress topic where kafka.delivery is exactly_once",
        "set kafka.progress_topic",
    ),
    ("transaction.timeout.ms", "it has a key of its own", "set kafka.transaction_timeout_ms"),
    ("isolation.level", "walpost reads its own position only as it was committed", LEAVE),
    ("queue.buffering.max.messages", "it follows from walpost's own bound", "set limits.in_flight_events"),
    ("queue.buffering.max.kbytes", "it follows from walpost's own bound", "set limits.in_flight_bytes"),
    ("bootstrap.servers", "it has a key of its own", "set kafka.brokers"),
    ("topic.blacklist", "events for a hidden topic could never be delivered", LEAVE),
    ("plugin.library.paths", "plugins could change or drop records", LEAVE),
    ("interceptors", "interceptors could change or drop records", LEAVE),
    ("enabled_events", "events are how walpost hears of deliveries", LEAVE),
    ("log.queue", "walpost sets how librdkafka logs", "set log.level, for example walpost::librdkafka=debug,info"),
    ("log_level", "walpost sets how librdkafka logs", "set log.level, for example walpost::librdkafka=debug,info"),
    ("internal.termination.signal", "signals are walpost's own way to stop", LEAVE),
    ("opaque", "only a program can set it", LEAVE),
    ("default_topic_conf", "only a program can set it", "set the topic's properties beside the others"),
    ("ssl_engine_callback_data", "only a program can set it", LEAVE),
    ("ssl_key", "only a program can set it", "set ssl.key.location or ssl.key.pem"),
    ("ssl_certificate", "only a program can set it", "set ssl.certificate.location or ssl.certificate.pem"),
    ("ssl_ca", "only a program can set it", "set ssl.ca.location or ssl.ca.pem"),
];

fn refusal(name: &str) -> Option<(&'static str, &'static str)> {
    if name.starts_with("test.mock.") {
        return Some(("a mock broker keeps nothing", "see walpost demo"));
    }
    if name.ends_with("_cb") {
        return Some(("only a program can set a callback", LEAVE));
    }
    let name = canonical(name);
    REFUSED.iter().find(|(refused, ..)| *refused == name).map(|(_, reason, remedy)| (*reason, *remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What librdkafka itself makes of a value that is set under one name and read under the other.
    #[test]
    fn aliases_are_what_librdkafka_takes_for_aliases() {
        for (alias, name) in ALIASES {
            let value = match *name {
                "bootstrap.servers" => "h:1",
                "compression.type" => "zstd",
                "sasl.mechanism" => "PLAIN",
                _ => "7",
            };
            let native = ClientConfig::new().set(*alias, value).create_native_config().unwrap();
            assert_eq!(native.get(name).ok().as_deref(), Some(value), "{alias}");
        }
    }

    #[test]
    fn what_is_refused_is_refused_under_each_of_its_names() {
        for (alias, name) in ALIASES {
            assert_eq!(refusal(alias), refusal(name), "{alias}");
            assert!(REFUSED.iter().all(|(refused, ..)| refused != alias), "{alias} would never be found");
        }
        assert!(
            ["delivery.timeout.ms", "max.in.flight", "request.required.acks"]
                .iter()
                .all(|name| refusal(name).is_some())
        );
    }
}
