//! `walpost status`: asks the walpost that runs, and where none answers, the slot.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use tokio_postgres::Client;

use crate::{
    cli::Probe,
    config::{Config, SourceKind},
    observe::{
        slot::{self, SlotState},
        status::{Status, Trouble},
    },
    poll,
    sql::{self, SqlError},
};

/// How long a running walpost may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A longer answer is none of ours.
const MAX_ANSWER: u64 = 1024 * 1024;

/// Why there is no status: no walpost answered, and Postgres did not either.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// No SQL link.
    #[error("no walpost answers{}, and neither does Postgres", at(*.asked))]
    Sql {
        /// Where a walpost was looked for.
        asked: Option<SocketAddr>,
        /// Why Postgres does not answer.
        source: SqlError,
    },
    /// There is nobody to ask.
    #[error(
        "http.listen is empty, so a walpost that runs here cannot be asked; give it an address, for example 127.0.0.1:9465"
    )]
    NoListener,
    /// The look at the tables failed.
    #[error("look at the outbox tables")]
    Tables(#[source] tokio_postgres::Error),
    /// The look at the slot failed.
    #[error("look at the replication slot")]
    Slot(#[from] tokio_postgres::Error),
}

fn at(asked: Option<SocketAddr>) -> String {
    asked.map(|address| format!(" at {address} (http.listen)")).unwrap_or_default()
}

/// The status of the walpost that runs with this configuration on this machine; else what the slot tells.
pub async fn run(config: &Config) -> Result<Status, StatusError> {
    let postgres = &config.postgres;
    let asked = config.http.listen.map(reachable);
    if let Some(status) = match asked {
        Some(address) => ask(address).await,
        None => None,
    } && status.slot == postgres.slot
    {
        return Ok(status);
    }
    let client = sql::connect(&postgres.conninfo).await.map_err(|source| StatusError::Sql { asked, source })?;
    if postgres.source == SourceKind::Poll {
        return of_tables(&client, config, asked).await;
    }
    let seen = slot::look(&client, &postgres.slot).await?;
    let mut status = Status::of_slot(&postgres.slot, &postgres.publication, &seen);
    let holder = match &seen.slot {
        SlotState::Present(slot) => slot.active_pid,
        SlotState::Missing | SlotState::Unknown => None,
    };
    let reason = match holder {
        None => format!("no walpost runs: none answers{}, and nobody streams from the slot", at(asked)),
        Some(pid) => {
            format!("no walpost answers{}; server process {pid} streams from the slot to one elsewhere", at(asked))
        }
    };
    status.troubles.insert(0, Trouble { part: "stream".to_owned(), reason });
    Ok(status)
}

/// What a walpost that was asked says.
#[derive(Debug, PartialEq, Eq)]
pub struct ProbeAnswer {
    /// Yes.
    pub yes: bool,
    /// Its own words, or why there are none.
    pub text: String,
}

/// Asks the walpost that runs with this configuration on this machine one thing.
pub async fn probe(config: &Config, probe: Probe) -> Result<ProbeAnswer, StatusError> {
    let address = reachable(config.http.listen.ok_or(StatusError::NoListener)?);
    let path = match probe {
        Probe::Live => "/livez",
        Probe::Ready => "/readyz",
        Probe::Standby => "/readyz?standby=ok",
    };
    let answered = match get(address, path).await {
        Ok(answer) => answer,
        Err(error) => return Ok(ProbeAnswer { yes: false, text: format!("no answer at {address}: {error}") }),
    };
    let (yes, body) = parts(&answered).unwrap_or((false, "the answer is not walpost's"));
    Ok(ProbeAnswer { yes, text: body.to_owned() })
}

/// What the tables tell: how long the first undelivered event waits.
async fn of_tables(client: &Client, config: &Config, asked: Option<SocketAddr>) -> Result<Status, StatusError> {
    let postgres = &config.postgres;
    let mut waiting: Option<f64> = Some(0.0);
    for outbox in &config.outboxes {
        let seconds = poll::waiting_seconds(client, outbox).await.map_err(StatusError::Tables)?;
        waiting = waiting.zip(seconds).map(|(longest, seconds)| longest.max(seconds));
    }
    let mut status = Status::of_tables(&postgres.slot, &postgres.publication, waiting);
    let reason = format!("no walpost answers{}; whether one polls elsewhere, no table tells", at(asked));
    status.troubles.insert(0, Trouble { part: "stream".to_owned(), reason });
    Ok(status)
}

/// Where to ask: a listener on all addresses is asked on the loopback one.
pub(crate) fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// `None` when nobody answers there, or somebody else does.
pub(crate) async fn ask(address: SocketAddr) -> Option<Status> {
    let answer = get(address, "/status").await;
    let answer = answer.inspect_err(|error| tracing::debug!(%address, %error, "no walpost answers")).ok()?;
    let (yes, body) = parts(&answer)?;
    yes.then(|| serde_json::from_str(body).ok())?
}

/// Whether the answer is 200, and its body; `None` where it is no HTTP.
fn parts(answer: &str) -> Option<(bool, &str)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.").then(|| (head.split(' ').nth(1) == Some("200"), body))
}

async fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    exchange(address, &format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")).await
}

/// One question, and the answer with its head; the listener closes the connection behind it.
pub(crate) async fn exchange(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let whole = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.take(MAX_ANSWER).read_to_string(&mut answer).await?;
        Ok(answer)
    };
    timeout(TIMEOUT, whole).await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_asked_on_loopback() {
        for (listen, asked) in [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("10.0.0.1:1", "10.0.0.1:1")] {
            assert_eq!(reachable(listen.parse().unwrap()), asked.parse().unwrap());
        }
    }

    #[tokio::test]
    async fn the_answer_of_another_service_is_no_status() {
        for answer in ["HTTP/1.1 200 OK\r\n\r\n{}", "HTTP/1.1 404 Not Found\r\n\r\n", "SSH-2.0-x\r\n", ""] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            });
            assert_eq!(ask(address).await, None, "{answer:?}");
        }
    }

    #[tokio::test]
    async fn the_listener_of_a_running_walpost_is_understood() {
        let (view, _sender) = crate::observe::status::tests::view();
        let listener = crate::observe::http::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(crate::observe::http::serve(listener, view.clone(), axum::Router::new()));
        assert_eq!(ask(address).await, Some(view.status()));
    }
}
