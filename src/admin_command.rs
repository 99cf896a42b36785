//! `walpost pause`, `resume`, and the first half of `takeover`: they ask a walpost that runs, over its admin.

use std::{net::SocketAddr, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    config::Config,
    observe::Status,
    status_command::{ask, exchange, reachable},
};

/// How often a walpost that is taken over is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How long it may take to end beyond its `shutdown.drain_timeout_ms`.
const LAST_STEPS: Duration = Duration::from_secs(10);

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Nowhere to ask.
    #[error("http.listen is empty, so there is no walpost that could be asked")]
    NoListener,
    /// Nothing to ask with.
    #[error(
        "the admin is off: set http.admin_token_file (or http.admin_token) for the walpost that runs and for this command"
    )]
    NoToken,
    /// The token's file.
    #[error("read http.admin_token_file")]
    Token(#[source] std::io::Error),
    /// Nobody answers.
    #[error("ask the walpost at {address}; see `walpost status`")]
    Silent {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// It answers and does not obey.
    #[error("the walpost at {address} refuses ({status}): {why}")]
    Refused {
        /// Where.
        address: SocketAddr,
        /// HTTP's status code.
        status: String,
        /// What it says.
        why: String,
    },
    /// It is not the one that is meant.
    #[error("no walpost for slot {slot} answers at {address}; nothing was changed")]
    Other {
        /// Where.
        address: SocketAddr,
        /// The slot of this configuration.
        slot: String,
    },
    /// Kafka does not take what is in flight.
    #[error(
        "{events} events are still in flight after {waited:?}, so a hand-over would publish them twice; it goes on as before; \
         mend Kafka first, or stop it by SIGTERM and accept duplicates"
    )]
    InFlight {
        /// How many.
        events: u64,
        /// For so long.
        waited: Duration,
    },
    /// It does not end.
    #[error("the walpost at {address} was told to stop and still answers after {waited:?}; see its log")]
    Lives {
        /// Where.
        address: SocketAddr,
        /// For so long.
        waited: Duration,
    },
}

/// Tells the walpost that runs with this configuration on this machine; what it says to that.
pub async fn tell(config: &Config, action: &str) -> Result<String, AdminError> {
    let address = config.http.listen.map(reachable).ok_or(AdminError::NoListener)?;
    post(config, address, action).await
}

/// Has a walpost elsewhere publish what it has begun, confirm it, and end: then nothing comes twice.
pub async fn hand_over(config: &Config, from: SocketAddr) -> Result<(), AdminError> {
    let other = || AdminError::Other { address: from, slot: config.postgres.slot.clone() };
    let look = async || ask(from).await.filter(|status: &Status| status.slot == config.postgres.slot);
    look().await.ok_or_else(other)?;
    post(config, from, "pause").await?;
    let patience = config.shutdown.drain_timeout;
    let start = Instant::now();
    loop {
        let events = look().await.ok_or_else(other)?.in_flight_events.unwrap_or(0);
        if events == 0 {
            break;
        }
        if start.elapsed() >= patience {
            post(config, from, "resume").await?;
            return Err(AdminError::InFlight { events, waited: patience });
        }
        sleep(LOOK).await;
    }
    post(config, from, "stop").await?;
    let (start, patience) = (Instant::now(), patience + LAST_STEPS);
    while look().await.is_some() {
        if start.elapsed() >= patience {
            return Err(AdminError::Lives { address: from, waited: patience });
        }
        sleep(LOOK).await;
    }
    tracing::info!(%from, "the other walpost has confirmed everything and is gone");
    Ok(())
}

async fn post(config: &Config, address: SocketAddr, action: &str) -> Result<String, AdminError> {
    let token = config.http.admin_token.as_ref().ok_or(AdminError::NoToken)?.read().map_err(AdminError::Token)?;
    let token = token.expose();
    let request = format!(
        "POST /admin/{action} HTTP/1.0\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n"
    );
    let answer = exchange(address, &request).await.map_err(|source| AdminError::Silent { address, source })?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).unwrap_or("no HTTP");
    if status.starts_with('2') {
        return Ok(body.trim_end().to_owned());
    }
    Err(AdminError::Refused { address, status: status.to_owned(), why: body.trim_end().to_owned() })
}
