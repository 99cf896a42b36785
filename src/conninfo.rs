//! Where Postgres is and how to reach it: connection strings, TLS settings, passwords.

/// A parsed connection string with TLS settings.
#[derive(Debug, Clone)]
pub struct ConnInfo {
    /// Hosts, ports, user, database, options … as tokio-postgres understands them.
    pub config: tokio_postgres::Config,
    /// How to secure the link.
    pub tls: TlsSettings,
    /// Read anew before each connect, so a rotated password is picked up.
    pub password_file: Option<std::path::PathBuf>,
}

/// `sslmode`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SslMode {
    /// Never TLS.
    Disable,
    /// TLS where the server offers it.
    Prefer,
    /// TLS, certificate unchecked.
    Require,
    /// TLS, certificate checked against a root.
    VerifyCa,
    /// TLS, certificate and host name checked.
    VerifyFull,
}

/// TLS settings of a connection string.
#[derive(Debug, Clone)]
pub struct TlsSettings {
    /// `sslmode`
    pub mode: SslMode,
    /// `sslrootcert`; `None`: the system's store.
    pub root_cert: Option<std::path::PathBuf>,
    /// `sslcert`
    pub cert: Option<std::path::PathBuf>,
    /// `sslkey`
    pub key: Option<std::path::PathBuf>,
}
