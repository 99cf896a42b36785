//! `walpost run`: wiring, the few tasks, ordered shutdown.
//!
//! The pipeline has a thread of its own with a single-threaded runtime: it may pause there (see `source::wire`), and a
//! scrape or a slow HTTP client never stands in its way. Everything else runs on the main runtime.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinHandle};

use crate::{
    admin::{self, Admin},
    check::{self, Severity},
    config::{Config, SourceKind},
    observe::{self, Health, Metrics, Monitor, Part, View, service_manager},
    pipeline::{Signals, Wish},
    retention::upkeep::Upkeep,
    sink::exactly_once::Accepted,
    sql,
    supervisor::{Ended, Shared, Supervisor},
    trace,
};

/// How often the pipeline's thread shows that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long the last record of what was delivered may take at a stop.
const LAST_RECORD: Duration = Duration::from_secs(2);

/// How long the last spans may take at a stop.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A route is malformed.
    #[error("route")]
    Route(#[from] crate::route::RouteError),
    /// The listener's address is taken or not ours.
    #[error(transparent)]
    Listen(#[from] observe::http::BindError),
    /// A thread or the runtime could not be started.
    #[error("start the runtime")]
    Runtime(#[source] std::io::Error),
}

/// Runs the service: returns when it was told to stop, or when an error needs a human.
pub fn run(config: &Config, accepted: Accepted) -> Result<Ended, StartError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("walpost")
        .enable_all()
        .build()
        .map_err(StartError::Runtime)?;
    let shared = Shared {
        metrics: Arc::new(Metrics::new()),
        progress: Arc::default(),
        health: Arc::new(Health::starting()),
        witness: Arc::default(),
    };
    let polls = config.postgres.source == SourceKind::Poll;
    if polls {
        // there are none
        shared.health.well(Part::Slot);
        shared.health.well(Part::Publication);
    }
    let (tell_wish, wish) = watch::channel(Wish::Run);
    {
        // before anyone hears of this process, and may ask it to stop
        let _inside = runtime.enter();
        obey_signals(tell_wish.clone());
    }
    let (monitor, observation, server) = Monitor::new(config, Arc::clone(&shared.metrics), Arc::clone(&shared.health));
    let stopping = wish.clone();
    let (tell_pause, pause) = watch::channel(false);
    let signals = Signals { wish, server, pause, drain_timeout: config.shutdown.drain_timeout };
    let mut supervisor = Supervisor::accepting(accepted, config.clone(), shared.clone(), signals)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        postgres = config.postgres.conninfo.redacted(),
        slot = config.postgres.slot,
        brokers = config.kafka.brokers,
        "starting"
    );
    let view = View {
        metrics: Arc::clone(&shared.metrics),
        progress: Arc::clone(&shared.progress),
        health: Arc::clone(&shared.health),
        observation,
        slot: config.postgres.slot.clone(),
        publication: config.postgres.publication.clone(),
        polls,
        history: Arc::default(),
        in_flight_limits: (config.limits.in_flight_events, config.limits.in_flight_bytes),
    };
    if service_manager::listens() {
        runtime.spawn(service_manager::keep_told(view.clone(), stopping, config.shutdown.drain_timeout));
    }
    if let Some(address) = config.http.listen {
        let listener = runtime.block_on(observe::http::bind(address))?;
        runtime.spawn(observe::history::record(view.clone()));
        let admin = Admin {
            token: config.http.admin_token.clone(),
            pause: tell_pause,
            wish: tell_wish,
            health: Arc::clone(&shared.health),
            progress: Arc::clone(&shared.progress),
        };
        runtime.spawn(observe::http::serve(listener, view, admin::router(Arc::new(admin))));
    }
    let mut prepared = supervisor.prepared.subscribe();
    let (tell_stop, stop) = watch::channel(false);
    let exporter = trace::start(config, &shared.metrics).map(|(recorder, exporter)| {
        supervisor.trace_by(recorder);
        runtime.spawn(exporter.run(stop.clone()))
    });
    // a table that is polled says itself what was delivered
    let upkeep = Upkeep::new(config, &shared).run(supervisor.prepared.subscribe(), stop);
    let upkeep = (!polls).then(|| runtime.spawn(upkeep));
    let watched = config.clone();
    runtime.spawn(async move {
        // before, a slot that is missing is nothing to report
        if prepared.wait_for(|prepared| *prepared).await.is_ok() {
            tokio::spawn(async move { tell_findings(&watched).await });
            if !polls {
                monitor.run().await;
            }
        }
    });
    let (tell_end, end) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("pipeline".into())
        .spawn(move || {
            let _ = tell_end.send(on_this_thread(supervisor));
        })
        .map_err(StartError::Runtime)?;
    let ended = runtime.block_on(end);
    tell_stop.send_replace(true);
    let _ = runtime.block_on(async { tokio::join!(within(LAST_RECORD, upkeep), within(LAST_SPANS, exporter)) });
    runtime.shutdown_timeout(Duration::from_millis(200));
    // the thread never drops its end without a word, unless it panicked; then the slot has kept everything
    let ended = ended.unwrap_or(Ok(Ended::Halted))?;
    service_manager::tell_the_end(ended, shared.health.last_error());
    tracing::info!(exit_code = ended.exit_code(), lsn = %shared.progress.confirmed_lsn(), "stopped");
    Ok(ended)
}

/// Waits for a task to end, where there is one, and not for long.
async fn within(limit: Duration, task: Option<JoinHandle<()>>) {
    if let Some(task) = task {
        let _ = tokio::time::timeout(limit, task).await;
    }
}

/// What `walpost check` would say of the database, once, for the log.
async fn tell_findings(config: &Config) {
    let Ok(client) = sql::connect(&config.postgres.conninfo).await else { return };
    for finding in check::postgres(&client, config).await {
        if finding.severity >= Severity::Warn {
            let (what, why, fix) = (finding.what, finding.why, finding.fix);
            tracing::warn!(code = finding.code, what, why = &*why, fix, "found at the start; see `walpost check`");
        }
    }
}

fn on_this_thread(supervisor: Supervisor) -> Result<Ended, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Runtime)?;
    let progress = supervisor.progress();
    runtime.spawn(async move {
        loop {
            progress.beat();
            tokio::time::sleep(HEARTBEAT).await;
        }
    });
    Ok(runtime.block_on(supervisor.run()))
}

/// From now on the first SIGTERM or SIGINT drains, the second aborts. Wants to be called inside a runtime.
pub(crate) fn obey_signals(wish: watch::Sender<Wish>) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("cannot listen for signals: only SIGKILL will stop this process");
        return;
    };
    tokio::spawn(async move {
        for next in [Wish::Drain, Wish::Abort] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!(next = ?next, "told to stop");
            wish.send_replace(next);
        }
        // a sender that is gone would look like a wish
        wish.closed().await;
    });
}
