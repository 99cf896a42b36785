//! [`Collector`]: one request at a time, over a connection of its own, within a bounded time.

use std::time::Duration;

use axum::{
    body::{Body, Bytes, to_bytes},
    http::{Request, StatusCode, header},
};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message as _;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

use super::Endpoint;

/// How long a collector may take, from the connection to the end of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// An answer has a number and a sentence in it.
const LARGEST_ANSWER: usize = 64 << 10;

/// Why spans were not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExportError {
    #[error("connect to the collector")]
    Connect(#[source] std::io::Error),
    #[error("talk HTTP with the collector")]
    Http(#[source] hyper::Error),
    #[error("the collector has not answered within {} s", PATIENCE.as_secs())]
    Silent,
    #[error("the collector answers {0}")]
    Status(StatusCode),
    #[error("the collector's answer cannot be read")]
    Answer(#[source] axum::Error),
    #[error("make a request")]
    Request(#[source] axum::http::Error),
}

impl ExportError {
    /// Whether the same spans may be taken later; of answers those that
    /// [OTLP](https://opentelemetry.io/docs/specs/otlp/#retryable-response-codes) says so of.
    pub fn passes(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Http(_) | Self::Silent | Self::Answer(_) => true,
            Self::Status(status) => matches!(status.as_u16(), 429 | 502..=504),
            Self::Request(_) => false,
        }
    }
}

/// Where spans go.
#[derive(Debug)]
pub(super) struct Collector {
    endpoint: Endpoint,
}

impl Collector {
    pub fn at(endpoint: Endpoint) -> Self {
        Self { endpoint }
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Posts an encoded request; how many of its spans the collector has refused.
    pub async fn post(&self, body: Bytes) -> Result<u64, ExportError> {
        timeout(PATIENCE, self.exchange(body)).await.unwrap_or(Err(ExportError::Silent))
    }

    async fn exchange(&self, body: Bytes) -> Result<u64, ExportError> {
        let stream = TcpStream::connect(self.endpoint.address()).await.map_err(ExportError::Connect)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(ExportError::Http)?;
        // it ends with this set, however this ends
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let request = Request::post(self.endpoint.path())
            .header(header::HOST, self.endpoint.authority())
            .header(header::CONTENT_TYPE, "application/x-protobuf")
            .header(header::USER_AGENT, concat!("walpost/", env!("CARGO_PKG_VERSION")))
            .header(header::CONNECTION, "close")
            .body(Body::from(body))
            .map_err(ExportError::Request)?;
        let response = sender.send_request(request).await.map_err(ExportError::Http)?;
        if !response.status().is_success() {
            return Err(ExportError::Status(response.status()));
        }
        let answer = to_bytes(Body::new(response.into_body()), LARGEST_ANSWER).await.map_err(ExportError::Answer)?;
        // the spans are taken; one who says nothing readable about it has refused none
        let partly = ExportTraceServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
        Ok(partly.map_or(0, |partly| partly.rejected_spans.max(0).unsigned_abs()))
    }
}
