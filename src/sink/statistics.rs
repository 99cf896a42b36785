//! librdkafka's own statistics, as far as they help: how much waits in its queue, and how each broker fares.
//!
//! The producer tells them every few seconds on its poll thread, as one JSON document with a part for each topic, which is
//! skipped. Brokers are told apart by their number in the cluster, so there are as many series as brokers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use serde::Deserialize;

use crate::observe::Metrics;

/// What is read of the document: <https://github.com/confluentinc/librdkafka/blob/master/STATISTICS.md>.
#[derive(Debug, Deserialize)]
struct Document {
    msg_cnt: i64,
    msg_size: i64,
    brokers: HashMap<String, Broker>,
}

#[derive(Debug, Deserialize)]
struct Broker {
    /// -1 for a bootstrap server that has not said who it is, and for the group's coordinator.
    nodeid: i32,
    state: String,
    /// Requests that were sent again.
    txretries: u64,
    rtt: RoundTrip,
}

#[derive(Debug, Deserialize)]
struct RoundTrip {
    /// µs, over the last interval; 0 where there was no request.
    avg: i64,
}

/// Puts statistics into metrics.
#[derive(Debug)]
pub struct Statistics {
    metrics: Arc<Metrics>,
    /// Retries told so far, by broker: the producer counts from its own start.
    retries: Mutex<HashMap<i32, u64>>,
}

impl Statistics {
    /// Of a new producer.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, retries: Mutex::default() }
    }

    /// Takes a document in.
    pub fn take(&self, json: &[u8]) {
        let document: Document = match serde_json::from_slice(json) {
            Ok(document) => document,
            Err(error) => return tracing::debug!(%error, "librdkafka's statistics are not understood"),
        };
        let kafka = &self.metrics.kafka;
        kafka.queue_messages.set(document.msg_cnt);
        kafka.queue_bytes.set(document.msg_size);
        let mut told = self.retries.lock().unwrap_or_else(PoisonError::into_inner);
        for broker in document.brokers.values().filter(|broker| broker.nodeid >= 0) {
            let label = broker.nodeid.to_string();
            kafka.broker_up.with_label_values(&[&label]).set(i64::from(broker.state == "UP"));
            let before = told.insert(broker.nodeid, broker.txretries).unwrap_or(0);
            kafka.retries.with_label_values(&[&label]).inc_by(broker.txretries.saturating_sub(before));
            if broker.rtt.avg > 0 {
                #[expect(clippy::cast_precision_loss, reason = "microseconds of a round trip, far below 2^53")]
                kafka.round_trip.with_label_values(&[&label]).set(broker.rtt.avg as f64 / 1e6);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{Observation, Progress};

    const DOCUMENT: &str = r#"{"name": "x", "msg_cnt": 3, "msg_size": 512, "topics": {"t": {"partitions": {}}}, "brokers": {
        "b:1/bootstrap": {"nodeid": -1, "state": "UP", "txretries": 9, "rtt": {"avg": 1}},
        "b:1/7": {"nodeid": 7, "state": "UP", "txretries": 2, "rtt": {"avg": 1500}},
        "b:2/8": {"nodeid": 8, "state": "TRY_CONNECT", "txretries": 0, "rtt": {"avg": 0}}}}"#;

    #[test]
    fn retries_add_up_over_producers_and_bootstrap_servers_are_no_brokers() {
        let metrics = Arc::new(Metrics::new());
        for _ in 0..2 {
            let producer = Statistics::new(Arc::clone(&metrics));
            producer.take(DOCUMENT.as_bytes());
            producer.take(DOCUMENT.as_bytes());
            producer.take(b"no JSON");
        }
        let text = metrics.render(&Progress::default(), &Observation::default(), 0);
        for line in [
            "walpost_kafka_queue_messages 3",
            "walpost_kafka_queue_bytes 512",
            "walpost_kafka_broker_up{broker=\"7\"} 1",
            "walpost_kafka_broker_up{broker=\"8\"} 0",
            "walpost_kafka_request_retries_total{broker=\"7\"} 4",
            "walpost_kafka_round_trip_seconds{broker=\"7\"} 0.0015",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line} is missing:\n{text}");
        }
        assert!(!text.contains("broker=\"-1\"") && !text.contains("round_trip_seconds{broker=\"8\"}"), "{text}");
    }
}
