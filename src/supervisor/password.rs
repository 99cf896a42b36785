//! [`changes`]: sees that Kafka's password was rotated under a producer that still uses the old one.
//!
//! librdkafka keeps a client's password for ever. Links that are open stay so, and so does the producer; once the brokers
//! refuse it and the file holds another password, a new producer is made.

use std::time::Duration;

use crate::{
    config::{KafkaConfig, Secret},
    observe::{Health, Part},
    pipeline::SessionError,
    sink::SinkError,
};

/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Ends when the brokers are in trouble and the file holds another password than `used`; never where there is no file.
pub async fn changes(used: Option<&Secret>, kafka: &KafkaConfig, health: &Health) -> SessionError {
    loop {
        tokio::time::sleep(LOOK).await;
        let troubled = || health.troubles().iter().any(|(part, _)| *part == Part::Kafka);
        let changed = || kafka.password_in_file().is_some_and(|password| Some(&password) != used);
        if troubled() && changed() {
            return SinkError::Producer { code: "the password was changed".into() }.into();
        }
    }
}
