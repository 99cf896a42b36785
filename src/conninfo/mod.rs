//! Where Postgres is and how to reach it: connection strings, TLS settings, passwords.
//!
//! Owns the meaning of every connection parameter; tokio-postgres gets only those that it understands. Must never show a
//! password: not in `Debug`, not in an error, not in [`ConnInfo::redacted`].
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS>

mod error;
mod syntax;
#[cfg(test)]
mod tests;
mod tls;
#[cfg(test)]
mod tls_tests;

use std::{
    fmt::Write as _,
    io,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use openssl::ssl::SslConnector;
use tokio_postgres::config::{Host, SslMode as WireSslMode, SslNegotiation};

pub use self::{
    error::ConnInfoError,
    tls::{SslMode, TlsSettings},
};
use self::{syntax::Parameters, tls::choice};
use crate::config::Secret;

/// How long one attempt to open a socket may take, unless `connect_timeout` says otherwise.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A parsed connection string with TLS settings.
#[derive(Debug, Clone)]
pub struct ConnInfo {
    /// Hosts, ports, user, database, options … as tokio-postgres understands them. User, database and at least one host
    /// are always set; the password never is: ask [`ConnInfo::password`].
    pub config: tokio_postgres::Config,
    /// How to secure the link.
    pub tls: TlsSettings,
    /// Read anew before each connect, so a rotated password is picked up.
    pub password_file: Option<PathBuf>,
    url_password: Option<Secret>,
    pgpassword: Option<Secret>,
    /// Made once where no file could change: OpenSSL reads the system's store with each, some 20 ms.
    connector: Arc<OnceLock<SslConnector>>,
}

impl ConnInfo {
    /// Parses a URL (`postgres://…`) or `key=value` pairs. `pgpassword` is the value of `PGPASSWORD`.
    pub fn parse(
        text: &str,
        password_file: Option<PathBuf>,
        pgpassword: Option<Secret>,
    ) -> Result<Self, ConnInfoError> {
        let mut parameters = syntax::parameters(text)?;
        let url_password = parameters.remove("password").filter(|password| !password.is_empty()).map(Secret::new);
        let mut tls = TlsSettings::take(&mut parameters)?;
        let mut config = settle(&mut parameters)?;
        if config.get_hosts().iter().all(|host| matches!(host, Host::Unix(_))) {
            // Postgres speaks no TLS over Unix sockets, so libpq ignores sslmode there.
            tls.mode = SslMode::Disable;
        }
        config.ssl_mode(match tls.mode {
            SslMode::Disable => WireSslMode::Disable,
            SslMode::Prefer => WireSslMode::Prefer,
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => WireSslMode::Require,
        });
        if tls.direct {
            config.ssl_negotiation(SslNegotiation::Direct);
        }
        Ok(Self { config, tls, password_file, url_password, pgpassword, connector: Arc::default() })
    }

    /// The password to use now: the connection string's, else the password file's, else `PGPASSWORD`.
    ///
    /// Reads the file on every call, without its trailing newline.
    pub fn password(&self) -> io::Result<Option<Secret>> {
        if let Some(password) = &self.url_password {
            return Ok(Some(password.clone()));
        }
        let Some(path) = &self.password_file else { return Ok(self.pgpassword.clone()) };
        let text = std::fs::read_to_string(path)?;
        let line = text.strip_suffix('\n').unwrap_or(&text);
        Ok(Some(Secret::new(line.strip_suffix('\r').unwrap_or(line))))
    }

    /// An OpenSSL connector for these settings; reads the certificates anew where any are checked or shown.
    pub fn tls_connector(&self) -> Result<SslConnector, ConnInfoError> {
        if self.tls.reads_files() {
            return self.tls.connector();
        }
        if let Some(connector) = self.connector.get() {
            return Ok(connector.clone());
        }
        let connector = self.tls.connector()?;
        Ok(self.connector.get_or_init(|| connector).clone())
    }

    /// Whether the certificate must be for the host that was asked for: to be set on each connection's
    /// [`openssl::ssl::ConnectConfiguration`].
    pub fn verify_hostname(&self) -> bool {
        self.tls.mode == SslMode::VerifyFull
    }

    /// Where this leads, for logs and errors: `user@host:port,host:port/database`.
    pub fn redacted(&self) -> String {
        let mut text = format!("{}@", self.config.get_user().unwrap_or_default());
        for (index, host) in self.config.get_hosts().iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            let _ = match host {
                Host::Tcp(host) if host.contains(':') => write!(text, "[{host}]"),
                Host::Tcp(host) => write!(text, "{host}"),
                Host::Unix(path) => write!(text, "{}", path.display()),
            };
            let ports = self.config.get_ports();
            let _ = write!(text, ":{}", ports.get(index).or_else(|| ports.first()).copied().unwrap_or(5432));
        }
        let _ = write!(text, "/{}", self.config.get_dbname().unwrap_or_default());
        text
    }
}

/// What tokio-postgres takes as it is.
const PASSED_ON: &[&str] = &[
    "user",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "options",
    "application_name",
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
];

/// What is translated, checked or refused here, for the sake of naming the nearest known parameter.
const UNDERSTOOD: &[&str] = &[
    "password",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslpassword",
    "sslnegotiation",
    "sslsni",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "keepalives_count",
    "tcp_user_timeout",
];

/// Everything but passwords and TLS.
fn settle(parameters: &mut Parameters) -> Result<tokio_postgres::Config, ConnInfoError> {
    refuse(parameters)?;
    let tcp_user_timeout = number(parameters, "tcp_user_timeout")?;
    let keepalives_count = match number(parameters, "keepalives_count")? {
        None => number(parameters, "keepalives_retries")?,
        count => count,
    };
    default_user(parameters)?;
    check_hosts(parameters)?;
    for (key, default) in [("application_name", "walpost"), ("keepalives_idle", "30"), ("keepalives_interval", "10")] {
        parameters.entry(key.into()).or_insert_with(|| default.into());
    }
    let own_timeout = parameters.contains_key("connect_timeout");
    let mut config = hand_over(parameters)?;
    if !own_timeout {
        config.connect_timeout(DEFAULT_CONNECT_TIMEOUT);
    }
    if let Some(millis) = tcp_user_timeout.filter(|&millis| millis > 0) {
        config.tcp_user_timeout(Duration::from_millis(millis.into()));
    }
    if let Some(count) = keepalives_count.filter(|&count| count > 0) {
        config.keepalives_retries(count);
    }
    Ok(config)
}

/// Parameters that libpq knows and walpost cannot honour: better refused than ignored.
fn refuse(parameters: &mut Parameters) -> Result<(), ConnInfoError> {
    const REFUSED: &[(&str, &str)] = &[
        ("passfile", "is not supported; set postgres.password_file"),
        ("service", "is not supported; write the parameters out"),
        ("servicefile", "is not supported; write the parameters out"),
        ("replication", "is set by walpost itself; leave it out"),
        ("sslcrl", "is not supported: certificate revocation lists are not read"),
        ("sslcrldir", "is not supported: certificate revocation lists are not read"),
        ("requirepeer", "is not supported"),
        ("require_auth", "is not supported; channel_binding=require insists on SCRAM with TLS"),
        ("krbsrvname", "is not supported: there is no GSSAPI"),
        ("gsslib", "is not supported: there is no GSSAPI"),
        ("sslkeylogfile", "is not supported"),
    ];
    if let Some((key, reason)) = REFUSED.iter().find(|(key, _)| parameters.contains_key(*key)) {
        return Err(ConnInfoError::invalid(key, *reason));
    }
    // What is in force anyway may be said.
    choice(parameters, "client_encoding", &[("utf8", ()), ("UTF8", ()), ("UTF-8", ()), ("auto", ())])?;
    choice(parameters, "gssencmode", &[("disable", ()), ("prefer", ())])?;
    choice(parameters, "sslcompression", &[("0", ())])?;
    if let Some(name) = parameters.remove("fallback_application_name") {
        parameters.entry("application_name".into()).or_insert(name);
    }
    if let Some(attrs) = parameters.get_mut("target_session_attrs") {
        match attrs.as_str() {
            "primary" => *attrs = "read-write".into(),
            "standby" => *attrs = "read-only".into(),
            "any" | "read-write" | "read-only" => {}
            _ => {
                let reason = "must be any, read-write, read-only, primary or standby";
                return Err(ConnInfoError::invalid("target_session_attrs", reason));
            }
        }
    }
    Ok(())
}

fn number(parameters: &mut Parameters, key: &'static str) -> Result<Option<u32>, ConnInfoError> {
    let Some(text) = parameters.remove(key) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| ConnInfoError::invalid(key, "must be a whole number, 0 or more"))
}

/// As in libpq: the user defaults to the process's, the database to the user.
fn default_user(parameters: &mut Parameters) -> Result<(), ConnInfoError> {
    let user = match parameters.get("user").filter(|user| !user.is_empty()) {
        Some(user) => user.clone(),
        None => whoami::username()
            .map_err(|_| ConnInfoError::invalid("user", "is missing, and the process's user has no name"))?,
    };
    if parameters.get("dbname").is_none_or(String::is_empty) {
        parameters.insert("dbname".into(), user.clone());
    }
    parameters.insert("user".into(), user);
    Ok(())
}

/// At least one host, none empty; as many ports and addresses as hosts.
fn check_hosts(parameters: &mut Parameters) -> Result<(), ConnInfoError> {
    let count = |text: &str| text.split(',').count();
    if let Some(addresses) = parameters.get("hostaddr").filter(|text| !text.is_empty()).cloned() {
        // The address stands in for a missing name, also in the certificate check.
        let hosts = parameters.entry("host".into()).or_insert_with(|| addresses.clone());
        if count(hosts) != count(&addresses) {
            return Err(ConnInfoError::invalid("hostaddr", "must have as many entries as host"));
        }
    } else {
        parameters.remove("hostaddr");
    }
    let hosts = parameters.get("host").map_or("", String::as_str);
    if hosts.split(',').any(str::is_empty) {
        let reason = "is missing; name one, for example localhost, or the directory of the Unix socket such as \
                      /var/run/postgresql (in a URL: ?host=/var/run/postgresql)";
        return Err(ConnInfoError::invalid("host", reason));
    }
    match parameters.get("port").map(|ports| count(ports)) {
        Some(ports) if ports != 1 && ports != count(hosts) => {
            Err(ConnInfoError::invalid("port", "must have one entry, or as many as host"))
        }
        _ => Ok(()),
    }
}

/// Writes what is left as `key='value'` pairs, the one form that tokio-postgres' public parser takes them in.
fn hand_over(parameters: &Parameters) -> Result<tokio_postgres::Config, ConnInfoError> {
    let mut text = String::new();
    for (key, value) in parameters {
        if !PASSED_ON.contains(&key.as_str()) {
            return Err(ConnInfoError::UnknownParameter { key: key.clone(), nearest: nearest(key) });
        }
        text.push_str(&pair(key, value));
    }
    text.parse().map_err(|_| first_invalid(parameters))
}

fn pair(key: &str, value: &str) -> String {
    format!("{key}='{}' ", value.replace('\\', "\\\\").replace('\'', "\\'"))
}

/// tokio-postgres' error is opaque, so each parameter is tried alone to find the one at fault.
fn first_invalid(parameters: &Parameters) -> ConnInfoError {
    let invalid = |key: &str| {
        parameters.get(key).is_some_and(|value| pair(key, value).parse::<tokio_postgres::Config>().is_err())
    };
    let key = PASSED_ON.iter().find(|key| invalid(key)).copied().unwrap_or("host");
    ConnInfoError::invalid(
        key,
        match key {
            "hostaddr" => "must be IP addresses, separated by commas",
            "port" => "must be port numbers, separated by commas",
            "connect_timeout" | "keepalives" | "keepalives_idle" | "keepalives_interval" => "must be a whole number",
            "channel_binding" => "must be disable, prefer or require",
            "load_balance_hosts" => "must be disable or random",
            _ => "is not usable",
        },
    )
}

fn nearest(key: &str) -> Option<String> {
    let known = PASSED_ON.iter().chain(UNDERSTOOD);
    let scored = known.map(|known| (strsim::jaro_winkler(key, known), *known));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.8).map(|(_, known)| known.to_owned())
}
