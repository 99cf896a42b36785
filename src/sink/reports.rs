//! [`Reports`]: the one thing that crosses from the producer's poll thread to the pipeline.
//!
//! The callback only hands the outcome over. The lock is held for a push, or for the exchange of two vectors.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rdkafka::{
    ClientContext, Message,
    config::RDKafkaLogLevel,
    error::KafkaError,
    message::DeliveryResult,
    producer::{NoCustomPartitioner, Producer, ProducerContext},
    types::RDKafkaErrorCode,
};
use tokio::sync::Notify;

use super::{
    dead_letter::Returned,
    kafka_error::{self, Verdict},
    produce::SessionProducer,
    statistics::Statistics,
};
use crate::{
    ack::Ticket,
    clock,
    codes::Code,
    fault,
    observe::{Health, Part},
};

/// For so long what was said of a single broker may explain why none can be reached.
const CAUSE_HOLDS: Duration = Duration::from_mins(1);

/// The outcome of one record.
#[derive(Debug, Clone)]
pub struct Report {
    /// Which record.
    pub ticket: Ticket,
    /// When it became known, Unix µs.
    pub at_us: i64,
    /// Set when it was not delivered.
    pub failure: Option<Box<Failure>>,
}

/// Why a record was not delivered.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The code.
    pub code: RDKafkaErrorCode,
    /// The topic.
    pub topic: String,
    /// The record itself, where it was sent alone and may be poison.
    pub returned: Option<Returned>,
}

/// Outcomes on their way to the pipeline.
#[derive(Debug, Default)]
pub struct Reports {
    arrived: Mutex<Vec<Report>>,
    /// Wake the pipeline once this many have arrived; `usize::MAX`: it does not wait.
    wake_at: AtomicUsize,
    wake: Notify,
    /// The producer said something that may mean that it is dead.
    unwell: AtomicBool,
}

impl Reports {
    fn push(&self, report: Report) {
        let failed = report.failure.is_some();
        let count = {
            let mut arrived = self.lock();
            arrived.push(report);
            arrived.len()
        };
        if failed || count >= self.wake_at.load(Relaxed) {
            self.wake_at.store(usize::MAX, Relaxed);
            self.wake.notify_one();
        }
    }

    /// Takes all that has arrived; `empty` is what they are exchanged for.
    pub fn take(&self, empty: &mut Vec<Report>) {
        std::mem::swap(&mut *self.lock(), empty);
    }

    /// Something other than a report is worth a look.
    pub fn nudge(&self) {
        self.wake.notify_one();
    }

    /// Waits until `count` reports have arrived, or a nudge.
    pub async fn wait_for(&self, count: usize) {
        self.wake_at.store(count.max(1), Relaxed);
        if self.lock().len() < count.max(1) {
            self.wake.notified().await;
        }
        self.wake_at.store(usize::MAX, Relaxed);
    }

    /// Why the producer is dead, where it has said something since the last question.
    ///
    /// A fatal error is told by the code of its cause, like any other: only the producer knows which one it was.
    pub fn fatal_error(&self, producer: &SessionProducer) -> Option<RDKafkaErrorCode> {
        if !self.unwell.load(Relaxed) {
            return None;
        }
        self.unwell.store(false, Relaxed);
        producer.client().fatal_error().map(|(code, _)| code)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Report>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the producer calls, on its poll thread.
pub struct Context {
    /// Where outcomes go.
    pub reports: Arc<Reports>,
    /// Where trouble with the brokers is noted.
    pub health: Arc<Health>,
    /// What was last said of a single broker that cannot be reached: the cause to name when none can.
    pub cause: Mutex<Option<(String, Instant)>>,
    /// Each record is sent alone: give back the one that is refused.
    pub alone: bool,
    /// Where the producer's statistics go.
    pub statistics: Statistics,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        // state changes are told by health; this is detail, and in an outage a lot of it
        tracing::debug!(target: "walpost::librdkafka", ?level, facility, message);
    }

    fn stats_raw(&self, json: &[u8]) {
        self.statistics.take(json);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let Some(code) = error.rdkafka_error_code() else { return };
        match code {
            RDKafkaErrorCode::AllBrokersDown => {
                let cause = self.recent_cause().clone();
                let cause = cause.map_or_else(|| code.to_string(), |(cause, _)| cause);
                if self.health.trouble(Part::Kafka, format!("kafka is unreachable: {cause} [{}]", Code::NoBroker)) {
                    tracing::warn!(cause, reason, "kafka is unreachable");
                }
            }
            // said of one broker; others may serve
            RDKafkaErrorCode::Authentication
            | RDKafkaErrorCode::SaslAuthenticationFailed
            | RDKafkaErrorCode::SSL
            | RDKafkaErrorCode::Resolve => {
                *self.recent_cause() = Some(cause(code, reason));
                tracing::debug!(%code, reason, "a broker is unreachable");
            }
            // each broker has its own words; the first ones will do, and weigh less than those above
            RDKafkaErrorCode::BrokerTransportFailure => {
                self.recent_cause().get_or_insert_with(|| cause(code, reason));
                tracing::debug!(%code, reason, "a broker is unreachable");
            }
            _ => {
                tracing::debug!(%code, reason, "kafka client error");
                self.reports.unwell.store(true, Relaxed);
                self.reports.nudge();
            }
        }
    }
}

impl Context {
    /// What was last said of a single broker, unless that is too long ago.
    fn recent_cause(&self) -> MutexGuard<'_, Option<(String, Instant)>> {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        cause.take_if(|(_, since)| since.elapsed() >= CAUSE_HOLDS);
        cause
    }
}

fn cause(code: RDKafkaErrorCode, reason: &str) -> (String, Instant) {
    // what follows differs from time to time, and the same cause is to be told once
    let (stable, _) = reason.split_once(" (after ").unwrap_or((reason, ""));
    (format!("{code}: {stable}"), Instant::now())
}

impl ProducerContext<NoCustomPartitioner> for Context {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, word: usize) {
        fault::point("after_send");
        let failure = match result {
            Ok(_) => None,
            Err((error, message)) => {
                let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown);
                let suspect = self.alone && kafka_error::judge(code) == Verdict::Suspect;
                let returned = suspect.then(|| Returned::copy(message));
                Some(Box::new(Failure { code, topic: message.topic().to_owned(), returned }))
            }
        };
        self.reports.push(Report { ticket: Ticket::from_word(word as u64), at_us: clock::steady_us(), failure });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let statistics = Statistics::new(Arc::default());
        Context { reports: Arc::default(), health: Arc::default(), cause: Mutex::default(), alone: false, statistics }
    }

    #[test]
    fn one_broker_in_trouble_is_only_the_cause_when_none_is_left() {
        for code in [
            RDKafkaErrorCode::Resolve,
            RDKafkaErrorCode::SSL,
            RDKafkaErrorCode::Authentication,
            RDKafkaErrorCode::BrokerTransportFailure,
        ] {
            let context = context();
            context.error(KafkaError::Global(code), "b1:9092/1: that is wrong (after 3ms in state CONNECT)");
            assert_eq!(context.health.troubles(), [], "{code}: others may serve");
            context.error(KafkaError::Global(RDKafkaErrorCode::AllBrokersDown), "2/2 brokers are down");
            let troubles = context.health.troubles();
            assert!(matches!(&troubles[..], [(Part::Kafka, reason)] if reason.contains("b1:9092/1: that is wrong")));
            assert!(!troubles[0].1.contains("3ms"), "the same cause would be told anew each time: {troubles:?}");
        }
    }
}
