//! `walpost backfill`, and the part of `walpost init` that publishes rows: a run that ends when the brokers have them.

use std::sync::Arc;

use tokio::sync::watch;

use crate::{
    app::{self, StartError},
    backfill::{BackfillError, Fill},
    cli::Again,
    config::{Backfill, Config},
    observe::{Health, Metrics, ServerState},
    pipeline::{Signals, Wish},
    supervisor::{Ended, Shared, Supervisor},
};

/// Why nothing was published.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The rows cannot be read.
    #[error(transparent)]
    Backfill(#[from] BackfillError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Start(#[from] StartError),
    /// There is nothing to do.
    #[error("`walpost backfill` publishes rows: say which, all or an SQL condition")]
    Nothing,
}

/// Publishes rows that are in the tables once more, or counts them.
pub async fn run(config: &Config, again: &Again, mut print: impl FnMut(String)) -> Result<u8, CommandError> {
    let wanted = Backfill::parse(&again.condition);
    if wanted == Backfill::None || again.condition.trim().is_empty() {
        return Err(CommandError::Nothing);
    }
    let fill = Fill::again(config, wanted, again.only.as_ref()).await?;
    let counts = fill.counts();
    if again.dry_run {
        for (table, rows) in counts {
            print(format!("{table}: {rows} rows would be published"));
        }
        return Ok(0);
    }
    let ended = publish(config, Box::new(fill)).await?;
    if ended == Ended::Filled {
        for (table, rows) in counts {
            print(format!("{table}: {rows} rows published"));
        }
    }
    Ok(exit_code(ended))
}

/// Publishes until the brokers have all, an error needs a human, or a signal comes.
pub async fn publish(config: &Config, fill: Box<Fill>) -> Result<Ended, StartError> {
    let shared = Shared {
        metrics: Arc::new(Metrics::new()),
        progress: Arc::default(),
        health: Arc::new(Health::starting()),
        witness: Arc::default(),
    };
    let (tell_wish, wish) = watch::channel(Wish::Run);
    let (_tell_server, server) = watch::channel(ServerState::Unknown);
    let (_never, pause) = watch::channel(false);
    let signals = Signals { wish, server, pause, drain_timeout: config.shutdown.drain_timeout };
    let supervisor = Supervisor::new(config.clone(), shared, signals)?;
    app::obey_signals(tell_wish);
    Ok(Box::pin(supervisor.fill(fill)).await)
}

/// A stop before the end is no success here.
pub fn exit_code(ended: Ended) -> u8 {
    if ended == Ended::Stopped { Ended::Halted.exit_code() } else { ended.exit_code() }
}
