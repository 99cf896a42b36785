//! [`ConnInfoError`]: why a connection string cannot be used.

use std::path::PathBuf;

/// Why a connection string cannot be used. No message carries a value that could be a password.
#[derive(Debug, thiserror::Error)]
pub enum ConnInfoError {
    /// Neither form of connection string.
    #[error("malformed connection string: {0}")]
    Syntax(&'static str),
    /// A parameter that neither libpq nor walpost knows.
    #[error("unknown connection parameter `{key}`{}", did_you_mean(.nearest.as_deref()))]
    UnknownParameter {
        /// The parameter.
        key: String,
        /// The known one that it resembles.
        nearest: Option<String>,
    },
    /// A known parameter with an unusable value.
    #[error("connection parameter `{key}`: {reason}")]
    Invalid {
        /// The parameter.
        key: &'static str,
        /// What is wrong and what to write instead.
        reason: String,
    },
    /// A certificate or key that cannot be read.
    #[error("read `{key}` {path}", path = .path.display())]
    File {
        /// The parameter that names the file.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A certificate, key or TLS setting that OpenSSL refuses.
    #[error("set up TLS: `{key}` is not usable")]
    Tls {
        /// The parameter at fault.
        key: &'static str,
        /// OpenSSL's reasons.
        source: openssl::error::ErrorStack,
    },
}

impl ConnInfoError {
    /// A known parameter whose value does not do.
    pub(super) fn invalid(key: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { key, reason: reason.into() }
    }
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|key| format!(", did you mean `{key}`?")).unwrap_or_default()
}
