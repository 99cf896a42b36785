//! [`tail`]: the tailer within one's own service, into one's own [`Sink`].
//!
//! The same stream, stages and loop as `walpost run`, and the same promise: the slot moves only over what the sink calls
//! durable. No listener, no signals, no Kafka: those are the service's. A whole service in 40 lines, compiled and run
//! against a real Postgres by the tests:
//!
//! ```no_run
#![doc = include_str!("../tests/examples/own_sink.rs")]
//! ```

use std::time::Duration;

use tokio::sync::watch;

use crate::{
    backoff::Backoff,
    config::Config,
    error::{Verdict, chain, judge},
    lsn::Lsn,
    observe::{Metrics, Progress, ServerState},
    pipeline::{SessionError, Signals, Stages, Telltale, Wish, run_session},
    prepare::{Prepared, prepare},
    route::RouteError,
    sink::Sink,
    source::{Replication, Wire, slot},
};

/// Waits between tries to reach Postgres.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The shortest wait where somebody has to mend something.
const SLOW_WAIT: Duration = Duration::from_secs(2);

/// Why the tailer does not go on by itself. The slot keeps its position.
#[derive(Debug, thiserror::Error)]
pub enum TailError {
    /// A route is malformed.
    #[error("route")]
    Route(#[from] RouteError),
    /// Rows that are older than the slot are to be published first, which needs Kafka.
    #[error(
        "rows older than the slot are to be published first, and only `walpost run` does that: let it run until it streams, \
         or set outbox.backfill = \"none\""
    )]
    RowsFirst,
    /// An error that needs a human.
    #[error("stream from the slot; remedy: {remedy}")]
    Session {
        /// What to do about it.
        remedy: &'static str,
        /// What happened.
        source: Box<SessionError>,
    },
}

/// Streams the events of the configured outboxes into a sink until `wish` changes, or until an error needs a human. What is
/// transient is tried again: then [`Sink::recover`] is called anew, and events that were not durable come again.
///
/// [`Wish::Drain`] waits for what is in flight (at most `shutdown.drain_timeout_ms`), confirms it and ends. Creates
/// publication and slot where `postgres.auto_create` says so.
pub async fn tail<S: Sink>(config: &Config, sink: &mut S, wish: watch::Receiver<Wish>) -> Result<(), TailError> {
    // nobody watches the server beside the stream: its end is what tells that it stops
    let (_unwatched, server) = watch::channel(ServerState::Unknown);
    let (_never, pause) = watch::channel(false);
    let signals = Signals { wish, server, pause, drain_timeout: config.shutdown.drain_timeout };
    let mut tailer = Tailer { config, stages: Stages::new(config)?, signals, metrics: Metrics::new(), system: None };
    let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
    let progress = Progress::default();
    loop {
        let before = progress.confirmed_lsn();
        let error = match tailer.session(sink, &progress).await {
            Ok(()) => return Ok(()),
            Err(Broken::RowsFirst) => return Err(TailError::RowsFirst),
            Err(Broken::Session(error)) => error,
        };
        if tailer.wish() > Wish::Run {
            return Ok(());
        }
        if progress.confirmed_lsn() > before {
            backoff.reset();
        }
        let wait = match judge(&error) {
            Verdict::Retry => backoff.next_wait(),
            Verdict::RetrySlowly(_) => backoff.next_wait().max(SLOW_WAIT),
            Verdict::Halt(remedy) | Verdict::Misconfigured(remedy) | Verdict::SlotLost(remedy) => {
                return Err(TailError::Session { remedy, source: Box::new(error) });
            }
        };
        tracing::warn!(error = chain(&error), wait_ms = wait.as_millis(), "trying again");
        let _ = tokio::time::timeout(wait, tailer.signals.wish.wait_for(|wish| *wish > Wish::Run)).await;
    }
}

/// Why a session is over.
enum Broken {
    Session(SessionError),
    RowsFirst,
}

impl<E: Into<SessionError>> From<E> for Broken {
    fn from(error: E) -> Self {
        Self::Session(error.into())
    }
}

/// What lasts from session to session.
struct Tailer<'a> {
    config: &'a Config,
    stages: Stages,
    signals: Signals,
    metrics: Metrics,
    /// The cluster that is streamed from, once a slot is held.
    system: Option<String>,
}

impl Tailer<'_> {
    fn wish(&self) -> Wish {
        *self.signals.wish.borrow()
    }

    async fn session<S: Sink>(&mut self, sink: &mut S, progress: &Progress) -> Result<(), Broken> {
        let mut wish = self.signals.wish.clone();
        let connected = tokio::select! {
            biased;
            _ = wish.wait_for(|wish| *wish > Wish::Run) => return Ok(()),
            connected = self.connect() => connected,
        };
        let (mut source, confirmed) = connected?;
        let telltale = Telltale { metrics: &self.metrics, progress };
        Ok(run_session(&mut source, sink, (&mut self.stages, confirmed), &mut self.signals, telltale).await?)
    }

    async fn connect(&mut self) -> Result<(Replication, Lsn), Broken> {
        let postgres = &self.config.postgres;
        if self.system.is_none() {
            match prepare(self.config).await? {
                Prepared::Ready(catalog) => self.stages.know(catalog),
                Prepared::Behind(_) => return Err(Broken::RowsFirst),
            }
        }
        let mut wire = Wire::connect(&postgres.conninfo).await?;
        let held = self.system.is_some();
        let found = slot::look_again(&mut wire, &postgres.slot, held, &mut self.system).await?;
        Ok((Replication::start(wire, &postgres.slot, &postgres.publication).await?, found.confirmed))
    }
}
