//! The HTTP listener: the status page at `/`, `/metrics`, `/livez`, `/readyz`, `/status`, `/status/history`.
//!
//! Anybody who can reach the port may be slow or hostile, so connections are few, short and serve one request each: no
//! state is worth keeping between two scrapes.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use super::{metrics, overview::Overview, page, status::View};

/// Connections served at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// How long a connection may take, from its first byte to its last.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// A pipeline that shows no life for so long hangs; its thread beats every second, its loop turns every few.
const HANGS_AFTER: Duration = Duration::from_mins(1);
/// What is said where there is nothing.
const ELSEWHERE: &str = "there are /, /metrics, /livez, /readyz, /status and /status/history\n";
/// Request line and headers, at most (bytes).
const MAX_HEAD: usize = 16 * 1024;
/// After a failed accept (out of file descriptors, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address} for HTTP (http.listen; the empty string turns it off)")]
pub struct BindError {
    address: SocketAddr,
    source: std::io::Error,
}

/// Opens the listening socket.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|source| BindError { address, source })
}

/// Serves for ever, and routes of others as well. Dropping the future closes every connection.
pub async fn serve(listener: TcpListener, view: View, more: Router) {
    serve_within(listener, router(view).merge(more), CONNECTION_TIMEOUT).await;
}

async fn serve_within(listener: TcpListener, router: Router, timeout: Duration) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            // the ended ones first, so that their places are free again
            biased;
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    let router = router.clone();
                    connections.spawn(async move { tokio::time::timeout(timeout, answer(stream, router)).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "http connection not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

async fn answer(stream: TcpStream, router: Router) {
    let service = TowerToHyperService::new(router);
    let connection =
        http1::Builder::new().keep_alive(false).max_buf_size(MAX_HEAD).serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "http connection failed");
    }
}

fn router(view: View) -> Router {
    Router::new()
        .route("/", get(page::answer))
        .route(
            "/metrics",
            get(async |State(view): State<View>| ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], view.metrics())),
        )
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .route("/status/history", get(history))
        .fallback(async || (StatusCode::NOT_FOUND, ELSEWHERE))
        .with_state(view)
}

async fn livez(State(view): State<View>) -> impl IntoResponse {
    if view.hangs(HANGS_AFTER) {
        return (StatusCode::SERVICE_UNAVAILABLE, "the pipeline hangs; restart walpost\n");
    }
    (StatusCode::OK, "alive\n")
}

/// `?standby=ok` is for who asks whether a replica is of use: one that waits for the slot is.
async fn readyz(State(view): State<View>, RawQuery(query): RawQuery) -> impl IntoResponse {
    if query.as_deref() == Some("standby=ok") && view.stands_by() {
        return (StatusCode::OK, "standing by for the slot\n".to_owned());
    }
    let troubles = view.troubles();
    if troubles.is_empty() {
        return (StatusCode::OK, "ready\n".to_owned());
    }
    let lines: Vec<_> = troubles.iter().map(|trouble| format!("{}: {}", trouble.part, trouble.reason)).collect();
    (StatusCode::SERVICE_UNAVAILABLE, lines.join("\n") + "\n")
}

async fn status(State(view): State<View>) -> impl IntoResponse {
    json(&view.status())
}

async fn history(State(view): State<View>) -> impl IntoResponse {
    json(&Overview::of(&view))
}

fn json<T: serde::Serialize>(value: &T) -> impl IntoResponse + use<T> {
    let json = serde_json::to_string(value).expect("a status holds nothing that JSON cannot");
    ([(CONTENT_TYPE, "application/json")], json)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::{
        super::{Stage, status::tests::view},
        *,
    };

    async fn started(timeout: Duration) -> (SocketAddr, View) {
        let (view, _) = view();
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve_within(listener, router(view.clone()), timeout));
        (address, view)
    }

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn answers_what_the_contract_lists_and_nothing_else() {
        let (address, view) = started(CONNECTION_TIMEOUT).await;
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200 "));
        let unready = get(address, "/readyz").await;
        assert!(unready.starts_with("HTTP/1.1 503 ") && unready.contains("\r\n\r\nstream: "), "{unready}");
        view.progress.beat();
        assert!(view.progress.silent_for(Duration::ZERO) && !view.progress.silent_for(HANGS_AFTER));
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200 "));
        view.progress.set_stage(Stage::Standby);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 503 "));
        assert!(get(address, "/readyz?standby=ok").await.ends_with("standing by for the slot\n"));
        view.progress.set_streaming(true);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200 "));
        assert!(get(address, "/readyz?standby=ok").await.ends_with("ready\n"));
        let metrics = get(address, "/metrics").await;
        assert!(metrics.contains("text/plain; version=0.0.4") && metrics.contains("\nwalpost_transactions_total 0\n"));
        assert!(get(address, "/status").await.contains(r#""slot":"walpost""#));
        let page = get(address, "/").await;
        assert!(page.starts_with("HTTP/1.1 200 ") && page.contains("content-security-policy: default-src 'none'"));
        assert!(get(address, "/status/history").await.contains(r#""lag_bytes":[]"#));
        assert!(get(address, "/nothing").await.starts_with("HTTP/1.1 404 "));
    }

    #[tokio::test]
    async fn silent_clients_cannot_hold_their_places() {
        let (address, _view) = started(Duration::from_millis(50)).await;
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS + 8 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn a_taken_address_is_named_with_its_setting() {
        let (address, _view) = started(CONNECTION_TIMEOUT).await;
        let error = bind(address).await.unwrap_err().to_string();
        assert!(error.contains(&address.to_string()) && error.contains("http.listen"), "{error}");
    }
}
