//! [`Endpoint`]: where a collector takes spans.

use std::fmt;

use axum::http::Uri;

/// What is appended to the base of every endpoint, as OTLP says.
const TRACES: &str = "/v1/traces";

/// Where a collector takes spans: OTLP over HTTP, without TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
    path: String,
}

/// Why a text is no endpoint. Names no part of it: there may be a password in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// It cannot be read at all.
    #[error("is no URL")]
    NoUrl,
    /// `https`.
    #[error("is https, and spans are sent over plain http only")]
    Tls,
    /// Another scheme, or none.
    #[error("does not begin with http://")]
    Scheme,
    /// No port.
    #[error("names no port")]
    NoPort,
    /// A user, a query.
    #[error("has a user or a query in it, which a collector's address has not")]
    Extras,
}

impl EndpointError {
    /// What to do.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Tls => "let a collector beside walpost speak TLS and add credentials: http://localhost:4318",
            Self::NoPort => "collectors take OTLP over HTTP at 4318, for example http://localhost:4318",
            Self::NoUrl | Self::Scheme | Self::Extras => "for example http://localhost:4318",
        }
    }
}

impl Endpoint {
    /// Reads the base URL of a collector, for example `http://localhost:4318`.
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        let uri: Uri = text.trim().parse().map_err(|_| EndpointError::NoUrl)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(EndpointError::Tls),
            _ => return Err(EndpointError::Scheme),
        }
        let authority = uri.authority().ok_or(EndpointError::NoUrl)?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(EndpointError::Extras);
        }
        let port = authority.port_u16().filter(|port| *port > 0).ok_or(EndpointError::NoPort)?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        if host.is_empty() {
            return Err(EndpointError::NoUrl);
        }
        let base = uri.path().trim_end_matches('/');
        let base = base.strip_suffix(TRACES).unwrap_or(base);
        Ok(Self { host, port, path: format!("{base}{TRACES}") })
    }

    /// Host and port to connect to.
    pub(super) fn address(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// The path to post to.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Host and port as they are written in a URL.
    pub(super) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_traces_is_appended_to_the_base_once() {
        for (text, url) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
            ("HTTP://collector.example:80/otlp/", "http://collector.example:80/otlp/v1/traces"),
            ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ] {
            assert_eq!(Endpoint::parse(text).map(|endpoint| endpoint.to_string()), Ok(url.to_owned()), "{text}");
        }
        assert_eq!(Endpoint::parse("http://[::1]:4318").unwrap().address(), ("::1", 4318));
    }

    #[test]
    fn what_is_no_endpoint_is_refused_by_its_reason() {
        for (text, error) in [
            ("https://localhost:4318", EndpointError::Tls),
            ("localhost:4318", EndpointError::Scheme),
            ("grpc://localhost:4317", EndpointError::Scheme),
            ("/v1/traces", EndpointError::Scheme),
            ("http://localhost", EndpointError::NoPort),
            ("http://localhost:0", EndpointError::NoPort),
            ("http://me:secret@localhost:4318", EndpointError::Extras),
            ("http://localhost:4318/?key=1", EndpointError::Extras),
            ("http://", EndpointError::NoUrl),
            ("a b", EndpointError::NoUrl),
        ] {
            assert_eq!(Endpoint::parse(text), Err(error), "{text}");
        }
    }
}
