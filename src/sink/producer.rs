//! [`start`]: a producer with the thread that hears what became of its records.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use rdkafka::ClientConfig;

use super::{
    SinkError,
    produce::SessionProducer,
    reports::{Context, Reports},
    statistics::Statistics,
};
use crate::observe::{Health, Metrics};

/// How long one poll waits. Before the end of each the crate spins for up to a millisecond, so not for short.
const POLL: Duration = Duration::from_secs(1);

/// Makes a producer and lets it connect; brokers that are away are no error. Its thread runs until `stop` turns true.
/// `alone`: each record is sent alone, and given back when it is refused.
pub fn start(
    settings: &ClientConfig,
    alone: bool,
    (reports, health, metrics): (&Arc<Reports>, &Arc<Health>, &Arc<Metrics>),
    stop: &Arc<AtomicBool>,
) -> Result<Arc<SessionProducer>, SinkError> {
    let (statistics, cause) = (Statistics::new(Arc::clone(metrics)), Mutex::default());
    let context = Context { reports: Arc::clone(reports), health: Arc::clone(health), cause, alone, statistics };
    let producer: SessionProducer =
        settings.create_with_context(context).map_err(|error| SinkError::Settings(error.to_string()))?;
    let producer = Arc::new(producer);
    poll(Arc::clone(&producer), Arc::clone(stop)).map_err(no_thread)?;
    Ok(producer)
}

/// A thread could not be started.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub fn no_thread(error: std::io::Error) -> SinkError {
    SinkError::Settings(format!("start a thread: {error}"))
}

/// Delivery reports, errors and statistics all come from here; it must run before the first connect.
fn poll(producer: Arc<SessionProducer>, stop: Arc<AtomicBool>) -> std::io::Result<()> {
    let run = move || {
        while !stop.load(Relaxed) {
            producer.poll(POLL);
        }
    };
    std::thread::Builder::new().name("kafka-poll".into()).spawn(run).map(|_| ())
}
