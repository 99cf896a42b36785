//! [`Monitor`]: one SQL link of its own that looks at server, slot and publication every few seconds.
//!
//! The replication stream cannot tell these: a publication that lost its table is silent, a slot at risk still streams, and
//! a stopping server waits for us without a word. The monitor only reports; what follows is decided elsewhere.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{oneshot, watch},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tokio_postgres::{Client, error::SqlState};

use super::{
    Health, Metrics, NOT_SEEN_YET, Part,
    slot::{self, Observation, ServerState, SlotState},
};
use crate::{
    backoff::Backoff,
    codes::Code,
    config::{Config, OutboxConfig},
    conninfo::ConnInfo,
    error::chain,
    publication,
    sql::{self, Link},
};

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(5);
/// A look that takes longer means a dead link.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Looks, and reports what changed: to health, to the log, and to whoever watches.
pub struct Monitor {
    conninfo: ConnInfo,
    slot: String,
    publication: String,
    outboxes: Vec<OutboxConfig>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    observation: watch::Sender<Observation>,
    server: watch::Sender<ServerState>,
}

/// Why a link is over.
struct Lost {
    code: Option<SqlState>,
    reason: String,
}

impl Monitor {
    /// A monitor, and where its reports appear. `ServerState` changes within moments, the observation every few seconds.
    pub fn new(
        config: &Config,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> (Self, watch::Receiver<Observation>, watch::Receiver<ServerState>) {
        let (observation, observed) = watch::channel(Observation::default());
        let (server, server_state) = watch::channel(ServerState::default());
        let monitor = Self {
            conninfo: config.postgres.conninfo.clone(),
            slot: config.postgres.slot.clone(),
            publication: config.postgres.publication.clone(),
            outboxes: config.outboxes.clone(),
            metrics,
            health,
            observation,
            server,
        };
        (monitor, observed, server_state)
    }

    /// Watches for ever, over as many links as it takes. May be dropped at any time.
    pub async fn run(self) {
        let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
        let mut lost: Option<Lost> = None;
        loop {
            match sql::open(&self.conninfo).await {
                Ok(link) => {
                    if lost.is_some() {
                        self.metrics.reconnects.with_label_values(&["sql"]).inc();
                        tracing::info!("sql link open again");
                    }
                    let end = self.watch(link, &mut backoff).await;
                    tracing::warn!(error = end.reason, "sql link lost");
                    lost = Some(end);
                    self.unseen(ServerState::Unknown);
                    sleep(backoff.next_wait()).await;
                }
                Err(error) => {
                    let state = state_after(lost.as_ref(), error.code());
                    self.unseen(state);
                    self.cannot_look(&chain(&error));
                    sleep(backoff.next_wait()).await;
                }
            }
        }
    }

    /// Looks again and again over one link until it is lost.
    async fn watch(&self, link: Link, backoff: &mut Backoff) -> Lost {
        let Link { client, mut ended } = link;
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // the end first: a look over a dead link says less about why
                biased;
                end = &mut ended => return lost(end),
                looked = async { ticks.tick().await; timeout(LOOK_TIMEOUT, self.look(&client)).await } => match looked {
                    Ok(Ok(())) => backoff.reset(),
                    Ok(Err(error)) if error.is_closed() => return lost(ended.await),
                    Ok(Err(error)) if error.code() == Some(&SqlState::ADMIN_SHUTDOWN) => return lost(Ok(Some(error))),
                    Ok(Err(error)) => self.cannot_look(&chain(&error)),
                    Err(_) => return Lost { code: None, reason: "no answer to a look at the slot".to_owned() },
                },
            }
        }
    }

    async fn look(&self, client: &Client) -> Result<(), tokio_postgres::Error> {
        let seen = slot::look(client, &self.slot).await?;
        self.report_slot(&seen.slot);
        self.observation.send_replace(seen);
        self.set_server(ServerState::Up);
        self.report_publication(&publication::find(client, &self.publication, &self.outboxes).await?);
        Ok(())
    }

    fn report_slot(&self, slot: &SlotState) {
        let lost = slot.loss(&self.slot).map(|loss| format!("{loss} [{}]", Code::SlotLost));
        match lost.or_else(|| slot.trouble(&self.slot)) {
            Some(reason) if self.health.trouble(Part::Slot, &reason) => {
                tracing::error!(slot = self.slot, reason, "slot unhealthy");
            }
            None if self.recovered(Part::Slot) => {
                tracing::info!(slot = self.slot, "slot healthy again");
            }
            _ => {}
        }
    }

    fn report_publication(&self, found: &publication::PublicationFound) {
        let faults = found.faults();
        let publication = &self.publication;
        if faults.is_empty() {
            if self.recovered(Part::Publication) {
                tracing::info!(
                    publication,
                    "publication whole again; rows written meanwhile may not have been published"
                );
            }
            return;
        }
        let reason = faults.iter().map(|fault| format!("{}: {}; mend it with: {}", fault.what, fault.why, fault.fix));
        let reason = format!("{} [{}]", reason.collect::<Vec<_>>().join("; "), Code::Publication);
        if self.health.trouble(Part::Publication, &reason) {
            tracing::error!(publication, reason, "publication leaves rows out");
        }
    }

    /// Notes that a part is well. True when it was not, which a first look does not show.
    fn recovered(&self, part: Part) -> bool {
        self.health.well(part).is_some_and(|trouble| trouble != NOT_SEEN_YET)
    }

    fn cannot_look(&self, error: &str) {
        let reason = format!("slot and publication cannot be watched: {error}; trying again until it works");
        if self.health.trouble(Part::Slot, &reason) {
            tracing::warn!(error, "slot and publication cannot be watched; trying again until it works");
        }
    }

    /// What was seen over a lost link is no longer known; the WAL position can only have grown.
    fn unseen(&self, server: ServerState) {
        self.observation.send_modify(|seen| seen.slot = SlotState::Unknown);
        self.set_server(server);
    }

    fn set_server(&self, state: ServerState) {
        self.server.send_if_modified(|present| std::mem::replace(present, state) != state);
    }
}

/// A server that ended our link on request and refuses the next one is stopping. (The same refusal after a crash, or before
/// the first link, is a server that starts.)
fn state_after(lost: Option<&Lost>, refused: Option<&SqlState>) -> ServerState {
    let asked_to_leave = lost.is_some_and(|lost| lost.code == Some(SqlState::ADMIN_SHUTDOWN));
    if asked_to_leave && refused == Some(&SqlState::CANNOT_CONNECT_NOW) {
        ServerState::Stopping
    } else {
        ServerState::Unknown
    }
}

fn lost(end: Result<Option<tokio_postgres::Error>, oneshot::error::RecvError>) -> Lost {
    match end {
        Ok(Some(error)) => Lost { code: error.code().cloned(), reason: chain(&error) },
        Ok(None) | Err(_) => Lost { code: None, reason: "the server closed it".to_owned() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_sent_us_away_and_takes_nobody_is_stopping() {
        let sent_away = Lost { code: Some(SqlState::ADMIN_SHUTDOWN), reason: String::new() };
        let crashed = Lost { code: Some(SqlState::CRASH_SHUTDOWN), reason: String::new() };
        let refused = Some(&SqlState::CANNOT_CONNECT_NOW);
        assert_eq!(state_after(Some(&sent_away), refused), ServerState::Stopping);
        assert_eq!(state_after(Some(&crashed), refused), ServerState::Unknown);
        assert_eq!(state_after(None, refused), ServerState::Unknown);
        assert_eq!(state_after(Some(&sent_away), None), ServerState::Unknown, "it is gone already");
    }
}
