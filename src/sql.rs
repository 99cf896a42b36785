//! The ordinary SQL link, for the monitor and the commands. The replication link is not made here.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio_postgres::{Client, error::SqlState};

pub use crate::table_name::quote_identifier;
use crate::{
    conninfo::{ConnInfo, ConnInfoError, DEFAULT_CONNECT_TIMEOUT},
    error::chain,
};

/// Settings of every session of walpost, in the form of the startup parameter `options`: so that no role's or database's
/// defaults leak into what Postgres prints, and none can cut a session short.
/// Later ones win, so these go behind the operator's own.
pub const SESSION_SETTINGS: &str = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 \
     -c bytea_output=hex -c timezone=UTC -c client_min_messages=warning -c statement_timeout=0 \
     -c idle_in_transaction_session_timeout=0 -c idle_session_timeout=0 -c lock_timeout=0";

/// As an expression: the position behind all that is written (on a standby: replayed).
pub const WAL_END: &str =
    "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END";

/// What is unacknowledged for so long means a dead link, unless `tcp_user_timeout` says otherwise.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Why there is no link, or why a statement failed.
#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    /// Connecting failed: network, TLS, authentication, or the server's refusal.
    #[error("connect to {target}")]
    Connect {
        /// Where to, without the password.
        target: String,
        /// Why.
        source: tokio_postgres::Error,
    },
    /// The server took the connection and then said nothing.
    #[error("connect to {target}: no answer within {}", humantime::format_duration(*.waited))]
    Silent {
        /// Where to, without the password.
        target: String,
        /// How long walpost waited.
        waited: Duration,
    },
    /// A certificate or key is not usable.
    #[error(transparent)]
    Tls(#[from] ConnInfoError),
    /// The password file cannot be read.
    #[error("read password file {path}")]
    Password {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A statement failed.
    #[error("run a statement")]
    Statement(#[from] tokio_postgres::Error),
}

impl SqlError {
    /// The server's SQLSTATE, where the server said anything.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Connect { source, .. } | Self::Statement(source) => source.code(),
            Self::Silent { .. } | Self::Tls(_) | Self::Password { .. } => None,
        }
    }
}

/// A link whose end is told, for whoever waits longer than one statement.
pub struct Link {
    /// Runs statements.
    pub client: Client,
    /// Comes when the link is over; with the server's reason, where it gave one.
    pub ended: oneshot::Receiver<Option<tokio_postgres::Error>>,
}

/// Opens a link for a few statements: whoever uses the client learns of a failure from the next one, and reports it there.
pub async fn connect(info: &ConnInfo) -> Result<Client, SqlError> {
    Ok(open(info).await?.client)
}

/// Opens a link with a freshly read password and pinned session settings. Its driver runs as a task of its own until the
/// client is dropped or the link fails.
pub async fn open(info: &ConnInfo) -> Result<Link, SqlError> {
    let config = session_config(info)?;
    let mut tls = postgres_openssl::MakeTlsConnector::new(info.tls_connector()?);
    let (verify_hostname, sni) = (info.verify_hostname(), info.tls.sni);
    tls.set_callback(move |connection, _host| {
        connection.set_verify_hostname(verify_hostname);
        connection.set_use_server_name_indication(sni);
        Ok(())
    });
    let limit = time_limit(&config);
    let target = || info.redacted();
    let (client, connection) = tokio::time::timeout(limit, config.connect(tls))
        .await
        .map_err(|_| SqlError::Silent { target: target(), waited: limit })?
        .map_err(|source| SqlError::Connect { target: target(), source })?;
    let (tell_end, ended) = oneshot::channel();
    tokio::spawn(async move {
        let end = connection.await.err();
        if let Some(error) = &end {
            tracing::debug!(error = chain(error), "sql link ended");
        }
        // nobody listens to the end of a link made with `connect`
        let _ = tell_end.send(end);
    });
    Ok(Link { client, ended })
}

/// Quotes a string literal as SQL does, with `standard_conforming_strings` or without.
pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') { format!("E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

fn session_config(info: &ConnInfo) -> Result<tokio_postgres::Config, SqlError> {
    let mut config = info.config.clone();
    let password = info.password().map_err(|source| SqlError::Password {
        path: info.password_file.as_deref().unwrap_or(std::path::Path::new("")).display().to_string(),
        source,
    })?;
    if let Some(password) = password {
        config.password(password.expose());
    }
    let own = config.get_options().unwrap_or_default();
    let options = format!("{own} {SESSION_SETTINGS}");
    config.options(options.trim_start());
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    Ok(config)
}

/// `connect_timeout` bounds opening a socket only; a server that accepts and then is silent must not hold us either.
fn time_limit(config: &tokio_postgres::Config) -> Duration {
    let each = config.get_connect_timeout().copied().unwrap_or(DEFAULT_CONNECT_TIMEOUT);
    each.saturating_mul(u32::try_from(config.get_hosts().len()).unwrap_or(u32::MAX).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_literals_are_quoted_as_in_sql() {
        assert_eq!(quote_identifier("My\"Pub"), "\"My\"\"Pub\"");
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\b"), "E'a\\\\b'");
    }
    use crate::config::Secret;

    fn info(text: &str) -> ConnInfo {
        ConnInfo::parse(text, None, Some(Secret::new("from environment"))).unwrap()
    }

    #[test]
    fn session_settings_come_after_the_operators_options() {
        let config = session_config(&info("host=h options='-c datestyle=German'")).unwrap();
        let options = config.get_options().unwrap();
        assert!(options.starts_with("-c datestyle=German -c datestyle=ISO "), "{options}");
        let config = session_config(&info("host=h")).unwrap();
        assert_eq!(config.get_options(), Some(SESSION_SETTINGS));
    }

    #[test]
    fn a_session_gets_the_password() {
        let config = session_config(&info("host=h")).unwrap();
        assert_eq!(config.get_password(), Some(b"from environment".as_slice()));
    }

    #[test]
    fn a_password_file_that_is_gone_is_named() {
        let info = ConnInfo::parse("host=h", Some("/nonexistent/secret".into()), None).unwrap();
        assert_eq!(session_config(&info).unwrap_err().to_string(), "read password file /nonexistent/secret");
    }

    #[tokio::test]
    async fn a_server_that_says_nothing_does_not_hold_us() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = silent.local_addr().unwrap().port();
        let info = info(&format!("host=127.0.0.1 port={port} user=u connect_timeout=1 sslmode=disable"));
        let error = connect(&info).await.unwrap_err();
        assert!(matches!(error, SqlError::Silent { .. }), "{error}");
        assert_eq!(error.to_string(), format!("connect to u@127.0.0.1:{port}/u: no answer within 2s"));
        assert!(error.code().is_none());
    }
}
