//! From a connection string to an authenticated replication connection: hosts, TLS, start-up, authentication.
//!
//! The layout is <https://www.postgresql.org/docs/current/protocol-flow.html>; messages and SCRAM come from
//! `postgres-protocol`. Replication connections speak the simple query protocol only.

use std::{io, net::IpAddr, time::Duration};

use fallible_iterator::FallibleIterator;
use openssl::{hash::MessageDigest, nid::Nid};
use postgres_protocol::{
    authentication::{
        self,
        sasl::{ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256},
    },
    message::{
        backend::{self, Message},
        frontend,
    },
};
use tokio::net::{TcpStream, UnixStream};
use tokio_openssl::SslStream;
use tokio_postgres::config::{ChannelBinding as BindingMode, Host, SslNegotiation, TargetSessionAttrs};

use super::{
    ServerError, SourceError,
    wire::{Socket, Wire},
};
use crate::{
    conninfo::{ConnInfo, SslMode},
    sql::SESSION_SETTINGS,
};

/// When the server gives up on a silent client.
pub const WAL_SENDER_TIMEOUT: &str = "15s";

const NOT_BOUND: &str = "channel_binding=require, but the server did not ask for SCRAM-SHA-256-PLUS";

/// What the server is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Replication,
    Sql,
}

/// A text row of a simple query.
pub type TextRow = Vec<Option<String>>;

impl Wire {
    /// A replication connection, to the first host that takes us and has the wanted `target_session_attrs`.
    pub async fn connect(info: &ConnInfo) -> Result<Self, SourceError> {
        Self::connect_as(Kind::Replication, info).await
    }

    /// The same for ordinary SQL, where values are wanted as the walsender would print them.
    pub async fn connect_for_sql(info: &ConnInfo) -> Result<Self, SourceError> {
        Self::connect_as(Kind::Sql, info).await
    }

    async fn connect_as(kind: Kind, info: &ConnInfo) -> Result<Self, SourceError> {
        let mut last = None;
        for target in targets(info)? {
            let limit = info.config.get_connect_timeout().copied().unwrap_or(Duration::from_secs(10));
            let attempt = tokio::time::timeout(limit, Self::connect_one(kind, info, &target)).await;
            match attempt {
                Ok(Ok(wire)) => return Ok(wire),
                Ok(Err(error)) => last = Some(error),
                Err(_) => {
                    last = Some(SourceError::Connect { host: target.name, source: io::ErrorKind::TimedOut.into() });
                }
            }
        }
        Err(last.unwrap_or_else(|| SourceError::Protocol("the connection string names no host".into())))
    }

    async fn connect_one(kind: Kind, info: &ConnInfo, target: &Target) -> Result<Self, SourceError> {
        let socket = open(info, target).await?;
        let binding = end_point(&socket);
        let mut wire = Self::new(socket);
        wire.start_up(kind, info).await?;
        wire.authenticate(info, binding).await?;
        wire.settle().await?;
        wire.check_session_attrs(info.config.get_target_session_attrs()).await?;
        Ok(wire)
    }

    async fn start_up(&mut self, kind: Kind, info: &ConnInfo) -> Result<(), SourceError> {
        let user = user(info)?;
        let timeout = format!("-c wal_sender_timeout={WAL_SENDER_TIMEOUT}");
        let options = [info.config.get_options().unwrap_or_default(), SESSION_SETTINGS, &timeout].join(" ");
        let parameters = [
            ("user", user.as_str()),
            ("database", info.config.get_dbname().unwrap_or(&user)),
            ("replication", "database"),
            ("application_name", info.config.get_application_name().unwrap_or("walpost")),
            ("client_encoding", "UTF8"),
            ("options", options.trim()),
        ];
        let parameters = parameters.into_iter().filter(|(name, _)| kind == Kind::Replication || *name != "replication");
        frontend::startup_message(parameters, self.output()).map_err(SourceError::Io)?;
        self.send().await
    }

    async fn authenticate(&mut self, info: &ConnInfo, end_point: Option<Vec<u8>>) -> Result<(), SourceError> {
        let binding_required = info.config.get_channel_binding() == BindingMode::Require;
        loop {
            match self.message().await? {
                Message::AuthenticationOk if binding_required => {
                    return Err(refusal(NOT_BOUND));
                }
                Message::AuthenticationOk => return Ok(()),
                Message::AuthenticationCleartextPassword if !binding_required => {
                    frontend::password_message(password(info)?.as_bytes(), self.output()).map_err(SourceError::Io)?;
                    self.send().await?;
                }
                Message::AuthenticationMd5Password(body) if !binding_required => {
                    let (user, password) = (user(info)?, password(info)?);
                    let hash = authentication::md5_hash(user.as_bytes(), password.as_bytes(), body.salt());
                    frontend::password_message(hash.as_bytes(), self.output()).map_err(SourceError::Io)?;
                    self.send().await?;
                }
                Message::AuthenticationSasl(body) => {
                    let mechanisms: Vec<String> =
                        body.mechanisms().map(|name| Ok(name.to_owned())).collect().map_err(SourceError::Io)?;
                    self.scram(&password(info)?, &mechanisms, end_point.clone(), info.config.get_channel_binding())
                        .await?;
                    // the proof is mutual: AuthenticationOk may follow
                    return match self.message().await? {
                        Message::AuthenticationOk => Ok(()),
                        _ => Err(unexpected("authentication")),
                    };
                }
                Message::AuthenticationCleartextPassword | Message::AuthenticationMd5Password(_) => {
                    return Err(refusal(NOT_BOUND));
                }
                Message::NoticeResponse(_) => {}
                Message::AuthenticationGss
                | Message::AuthenticationKerberosV5
                | Message::AuthenticationScmCredential
                | Message::AuthenticationSspi => {
                    return Err(refusal("the server asks for a way of authentication that walpost does not speak"));
                }
                _ => return Err(unexpected("authentication")),
            }
        }
    }

    async fn scram(
        &mut self,
        password: &str,
        mechanisms: &[String],
        end_point: Option<Vec<u8>>,
        mode: BindingMode,
    ) -> Result<(), SourceError> {
        let offers = |name: &str| mechanisms.iter().any(|mechanism| mechanism == name);
        let end_point = end_point.filter(|_| mode != BindingMode::Disable);
        let (binding, mechanism) = match end_point {
            Some(hash) if offers(SCRAM_SHA_256_PLUS) => {
                (ChannelBinding::tls_server_end_point(hash), SCRAM_SHA_256_PLUS)
            }
            _ if mode == BindingMode::Require => {
                return Err(refusal("channel_binding=require needs TLS and a server that offers SCRAM-SHA-256-PLUS"));
            }
            Some(_) if offers(SCRAM_SHA_256) => (ChannelBinding::unrequested(), SCRAM_SHA_256),
            None if offers(SCRAM_SHA_256) => (ChannelBinding::unsupported(), SCRAM_SHA_256),
            _ => return Err(refusal("the server offers no SASL mechanism that walpost speaks")),
        };
        let mut scram = ScramSha256::new(password.as_bytes(), binding);
        frontend::sasl_initial_response(mechanism, scram.message(), self.output()).map_err(SourceError::Io)?;
        self.send().await?;
        let Message::AuthenticationSaslContinue(body) = self.message().await? else {
            return Err(unexpected("SASL authentication"));
        };
        scram.update(body.data()).map_err(SourceError::Io)?;
        frontend::sasl_response(scram.message(), self.output()).map_err(SourceError::Io)?;
        self.send().await?;
        let Message::AuthenticationSaslFinal(body) = self.message().await? else {
            return Err(unexpected("SASL authentication"));
        };
        scram.finish(body.data()).map_err(SourceError::Io)
    }

    /// Reads on to `ReadyForQuery`.
    ///
    /// A database in `SQL_ASCII` holds bytes of any encoding: asking for UTF-8 would fail at the first that is none, at
    /// every retry, so there the bytes are taken as they are.
    async fn settle(&mut self) -> Result<(), SourceError> {
        let mut any_encoding = false;
        loop {
            match self.message().await? {
                Message::ParameterStatus(body) if body.name().is_ok_and(|name| name == "server_encoding") => {
                    any_encoding = body.value().is_ok_and(|value| value == "SQL_ASCII");
                }
                Message::BackendKeyData(_) | Message::ParameterStatus(_) | Message::NoticeResponse(_) => {}
                Message::ReadyForQuery(_) => break,
                _ => return Err(unexpected("start-up")),
            }
        }
        if any_encoding {
            self.query("SET client_encoding = 'SQL_ASCII'").await?;
        }
        Ok(())
    }

    async fn check_session_attrs(&mut self, wanted: TargetSessionAttrs) -> Result<(), SourceError> {
        let read_only = match wanted {
            TargetSessionAttrs::ReadWrite => "off",
            TargetSessionAttrs::ReadOnly => "on",
            _ => return Ok(()),
        };
        let rows = self.query("SHOW transaction_read_only").await?;
        let value = rows.first().and_then(|row| row.first()).and_then(Option::as_deref);
        if value == Some(read_only) { Ok(()) } else { Err(SourceError::WrongSessionAttrs) }
    }

    /// Runs one statement by the simple query protocol; values as text.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<TextRow>, SourceError> {
        frontend::query(sql, self.output()).map_err(SourceError::Io)?;
        self.send().await?;
        let (mut rows, mut failure) = (Vec::new(), None);
        loop {
            match self.any_message().await? {
                Message::DataRow(body) => rows.push(text_row(&body)?),
                Message::ErrorResponse(body) => failure = Some(ServerError::from_fields(body.fields())),
                Message::ReadyForQuery(_) => return failure.map_or(Ok(rows), |error| Err(SourceError::Server(error))),
                Message::NotificationResponse(_) => self.note_notification(b'A'),
                _ => {}
            }
        }
    }

    /// The next message; an `ErrorResponse` is the error that it says.
    async fn message(&mut self) -> Result<Message, SourceError> {
        match self.any_message().await? {
            Message::ErrorResponse(body) => Err(SourceError::Server(ServerError::from_fields(body.fields()))),
            message => Ok(message),
        }
    }

    async fn any_message(&mut self) -> Result<Message, SourceError> {
        loop {
            if self.peek().map_err(SourceError::Io)?.is_some() {
                let message = Message::parse(self.input()).map_err(SourceError::Io)?;
                return message.ok_or_else(|| unexpected("a whole message"));
            }
            self.drive(true, false).await.map_err(SourceError::Io)?;
        }
    }

    /// Sends all output.
    pub async fn send(&mut self) -> Result<(), SourceError> {
        self.drive(false, false).await.map_err(SourceError::Io)
    }
}

/// One host to try.
struct Target {
    /// As it was written; what a certificate must name.
    name: String,
    address: Address,
    port: u16,
}

enum Address {
    Name(String),
    Ip(IpAddr),
    Unix(std::path::PathBuf),
}

fn targets(info: &ConnInfo) -> Result<Vec<Target>, SourceError> {
    let config = &info.config;
    let (hosts, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let count = hosts.len().max(addresses.len());
    if ports.len() > 1 && ports.len() != count {
        return Err(SourceError::Protocol("the connection string names another number of ports than of hosts".into()));
    }
    let port = |index: usize| ports.get(index).or_else(|| ports.first()).copied().unwrap_or(5432);
    let target = |index: usize| {
        let address = match (addresses.get(index), hosts.get(index)) {
            (Some(ip), _) => Address::Ip(*ip),
            (None, Some(Host::Tcp(name))) => Address::Name(name.clone()),
            (None, Some(Host::Unix(folder))) => Address::Unix(folder.join(format!(".s.PGSQL.{}", port(index)))),
            (None, None) => return None,
        };
        let name = match (hosts.get(index), &address) {
            (Some(Host::Tcp(name)), _) | (_, Address::Name(name)) => name.clone(),
            (_, Address::Ip(ip)) => ip.to_string(),
            (_, Address::Unix(path)) => path.display().to_string(),
        };
        Some(Target { name, address, port: port(index) })
    };
    Ok((0..count).filter_map(target).collect())
}

async fn open(info: &ConnInfo, target: &Target) -> Result<Socket, SourceError> {
    let failed = |source| SourceError::Connect { host: target.name.clone(), source };
    let stream = match &target.address {
        Address::Unix(path) => return UnixStream::connect(path).await.map(Socket::Unix).map_err(failed),
        Address::Name(name) => TcpStream::connect((name.as_str(), target.port)).await,
        Address::Ip(ip) => TcpStream::connect((*ip, target.port)).await,
    };
    let stream = stream.map_err(failed)?;
    tune(&stream, info).map_err(failed)?;
    if info.tls.mode == SslMode::Disable {
        return Ok(Socket::Tcp(stream));
    }
    secure(info, target, stream).await
}

fn tune(stream: &TcpStream, info: &ConnInfo) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    if info.config.get_keepalives() {
        let idle = info.config.get_keepalives_idle().min(Duration::from_mins(1));
        let interval = info.config.get_keepalives_interval().unwrap_or(Duration::from_secs(10));
        let keepalive = socket2::TcpKeepalive::new().with_time(idle).with_interval(interval);
        socket.set_tcp_keepalive(&keepalive)?;
    }
    let limit = info.config.get_tcp_user_timeout().copied().unwrap_or(Duration::from_secs(30));
    socket.set_tcp_user_timeout(Some(limit))
}

async fn secure(info: &ConnInfo, target: &Target, stream: TcpStream) -> Result<Socket, SourceError> {
    let failed = |source| SourceError::Connect { host: target.name.clone(), source };
    let mut stream = stream;
    if info.config.get_ssl_negotiation() != SslNegotiation::Direct
        && !asks_for_tls(&mut stream).await.map_err(failed)?
    {
        return if info.tls.mode == SslMode::Prefer {
            Ok(Socket::Tcp(stream))
        } else {
            Err(SourceError::NoTls { host: target.name.clone() })
        };
    }
    let tls = |error: openssl::error::ErrorStack| failed(io::Error::other(error));
    let connector = info.tls_connector().map_err(|error| failed(io::Error::other(error)))?;
    let mut config = connector.configure().map_err(tls)?.verify_hostname(info.verify_hostname());
    config.set_use_server_name_indication(target.name.parse::<IpAddr>().is_err());
    let ssl = config.into_ssl(&target.name).map_err(tls)?;
    let mut stream = SslStream::new(ssl, stream).map_err(tls)?;
    std::pin::Pin::new(&mut stream)
        .connect()
        .await
        .map_err(|source| SourceError::Tls { host: target.name.clone(), source })?;
    Ok(Socket::Tls(Box::new(stream)))
}

/// Asks the server whether it speaks TLS. Its answer is one byte; nothing may stand behind it yet.
async fn asks_for_tls(stream: &mut TcpStream) -> io::Result<bool> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut request = bytes::BytesMut::new();
    frontend::ssl_request(&mut request);
    stream.write_all(&request).await?;
    match stream.read_u8().await? {
        b'S' => Ok(true),
        b'N' => Ok(false),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the answer to SSLRequest is neither S nor N")),
    }
}

/// The hash of the server's certificate that SCRAM-SHA-256-PLUS binds to (RFC 5929, `tls-server-end-point`).
fn end_point(socket: &Socket) -> Option<Vec<u8>> {
    let Socket::Tls(stream) = socket else { return None };
    let certificate = stream.ssl().peer_certificate()?;
    let algorithms = certificate.signature_algorithm().object().nid().signature_algorithms()?;
    let digest = match algorithms.digest {
        Nid::MD5 | Nid::SHA1 => MessageDigest::sha256(),
        nid => MessageDigest::from_nid(nid)?,
    };
    certificate.digest(digest).ok().map(|hash| hash.to_vec())
}

fn user(info: &ConnInfo) -> Result<String, SourceError> {
    info.config
        .get_user()
        .map(str::to_owned)
        .ok_or_else(|| refusal("the connection string names no user: add one, as in postgres://USER@host/database"))
}

fn password(info: &ConnInfo) -> Result<String, SourceError> {
    match info.password() {
        Ok(Some(password)) => Ok(password.expose().to_owned()),
        Ok(None) => Err(refusal("the server asks for a password: set it in the URL, password_file or PGPASSWORD")),
        Err(source) => Err(SourceError::PasswordFile(source)),
    }
}

fn text_row(body: &backend::DataRowBody) -> Result<TextRow, SourceError> {
    let buffer = body.buffer();
    let text = |range: std::ops::Range<usize>| String::from_utf8_lossy(&buffer[range]).into_owned();
    body.ranges().map(|range| Ok(range.map(text))).collect().map_err(SourceError::Io)
}

fn refusal(text: &str) -> SourceError {
    SourceError::Refused(text.to_owned())
}

fn unexpected(when: &str) -> SourceError {
    SourceError::Protocol(format!("an unexpected message during {when}"))
}
