//! Spans over OTLP, one for each batch; off unless `trace.otlp_endpoint` is set.
//!
//! A batch is what one step of the acknowledged position moves over: [`Traced`] stands around a session's sink and sees what
//! goes in and how far it is durable, [`Recorder`] adds that up, and the [`Exporter`] sends it from the main runtime. Between
//! the two is a queue with a bound that drops and counts: the pipeline never waits for a collector. Where it is off nothing is
//! allocated and no clock is read; [`Traced`] only passes on.

mod batch;
mod collector;
mod endpoint;
mod exporter;
mod link;
mod otlp;
mod recorder;
mod traced;

use tokio::sync::mpsc;

use self::{collector::Collector, otlp::Identity};
pub use self::{
    endpoint::{Endpoint, EndpointError},
    exporter::Exporter,
    recorder::Recorder,
    traced::Traced,
};
use crate::{
    config::{Config, SourceKind},
    observe::Metrics,
};

/// Spans between the pipeline and the exporter, at most.
const QUEUE: usize = 2_048;

/// Both ends, where spans are wanted.
pub fn start(config: &Config, metrics: &Metrics) -> Option<(Recorder, Exporter)> {
    let endpoint = config.trace.otlp_endpoint.clone()?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let dropped = metrics.trace_spans_dropped.clone();
    let identity = Identity {
        service: config.trace.service_name.clone(),
        slot: (config.postgres.source == SourceKind::Wal).then(|| config.postgres.slot.clone()),
    };
    let recorder = Recorder::new(sender, config.trace.one_in, dropped.clone());
    Some((recorder, Exporter::new(receiver, Collector::at(endpoint), identity, dropped)))
}
