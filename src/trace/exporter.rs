//! [`Exporter`]: takes spans off the queue and posts them, many at once.
//!
//! A task of the main runtime. While the collector is away one request's spans are kept and tried again, the queue fills, and
//! what comes then is dropped by the recorder. One line says so, and one says when it is over.

use std::time::Duration;

use axum::body::Bytes;
use prometheus::IntCounter;
use prost::Message as _;
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::{
    batch::Batch,
    collector::{Collector, ExportError},
    otlp::{self, Identity},
};
use crate::{backoff::Backoff, error::chain, observe::log::Sparse};

/// Spans of one request at most.
const MOST_SPANS: usize = 512;
/// How long the first of them may wait for others.
const GATHER: Duration = Duration::from_secs(1);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Posts spans until nobody makes any more.
#[derive(Debug)]
pub struct Exporter {
    receiver: mpsc::Receiver<Batch>,
    collector: Collector,
    identity: Identity,
    dropped: IntCounter,
    /// The last request failed, and that was said.
    is_away: bool,
    sparse: Sparse,
}

impl Exporter {
    pub(super) fn new(
        receiver: mpsc::Receiver<Batch>,
        collector: Collector,
        identity: Identity,
        dropped: IntCounter,
    ) -> Self {
        Self { receiver, collector, identity, dropped, is_away: false, sparse: Sparse::new() }
    }

    /// Runs until the recorder is gone and the queue is empty. From `stop` on nothing is waited for: what is not taken is dropped.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            let Some(first) = self.receiver.recv().await else { return };
            let mut batches = vec![first];
            // what was received is kept whether or not the time is up
            let _ = timeout(GATHER, gather(&mut self.receiver, &mut batches)).await;
            self.send(&batches, &mut stop).await;
        }
    }

    async fn send(&mut self, batches: &[Batch], stop: &mut watch::Receiver<bool>) {
        let spans = batches.len() as u64;
        let body = Bytes::from(otlp::request(&self.identity, batches).encode_to_vec());
        let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
        let mut is_last = *stop.borrow();
        loop {
            let error = match self.collector.post(body.clone()).await {
                Ok(refused) => return self.taken(refused),
                Err(error) => error,
            };
            self.tell_away(&error);
            if !error.passes() || is_last {
                self.dropped.inc_by(spans);
                return;
            }
            is_last = timeout(backoff.next_wait(), stop.wait_for(|stop| *stop)).await.is_ok();
        }
    }

    fn taken(&mut self, refused: u64) {
        if std::mem::take(&mut self.is_away) {
            let dropped = self.dropped.get();
            tracing::info!(endpoint = %self.collector.endpoint(), dropped, "the collector takes spans again");
        }
        self.dropped.inc_by(refused);
        if refused > 0
            && let Some(untold) = self.sparse.turn()
        {
            tracing::warn!(endpoint = %self.collector.endpoint(), refused, untold, "the collector refused some spans");
        }
    }

    fn tell_away(&mut self, error: &ExportError) {
        if !std::mem::replace(&mut self.is_away, true)
            && let Some(untold) = self.sparse.turn()
        {
            let (endpoint, error) = (self.collector.endpoint(), chain(error));
            tracing::warn!(%endpoint, error, untold, "spans are not taken, and dropped where they are too many; events go on");
        }
    }
}

/// Receives until there are enough or nobody sends any more. Cancel-safe: what was received is in `batches`.
async fn gather(receiver: &mut mpsc::Receiver<Batch>, batches: &mut Vec<Batch>) {
    while batches.len() < MOST_SPANS {
        let Some(batch) = receiver.recv().await else { return };
        batches.push(batch);
    }
}
