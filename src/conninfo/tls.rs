//! [`TlsSettings`]: `sslmode` and its kin, and the OpenSSL connector made of them.
//!
//! The hard part: with a given root certificate the connector must trust it *alone*. OpenSSL's builder starts with the
//! system's store loaded, and under `verify-ca`, which checks no host name, any public certificate would then do.
//! <https://www.postgresql.org/docs/current/libpq-ssl.html>

use std::path::{Path, PathBuf};

use openssl::{
    pkey::PKey,
    ssl::{SslConnector, SslConnectorBuilder, SslMethod, SslVerifyMode, SslVersion},
    x509::{X509, store::X509StoreBuilder},
};

use super::{ConnInfoError, syntax::Parameters};
use crate::config::Secret;

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
    /// `sslmode`; `require` with a root certificate has become [`SslMode::VerifyCa`], as in libpq.
    pub mode: SslMode,
    /// `sslrootcert`, the only certificates trusted; `None`: the system's store.
    pub root_cert: Option<PathBuf>,
    /// `sslcert`
    pub cert: Option<PathBuf>,
    /// `sslkey`
    pub key: Option<PathBuf>,
    /// `sslpassword`, of an encrypted `sslkey`.
    pub key_password: Option<Secret>,
    /// `sslnegotiation=direct`: no `SSLRequest` before the handshake (Postgres 17 and later).
    pub direct: bool,
    /// `sslsni`: send the host name in the handshake.
    pub sni: bool,
    min_version: SslVersion,
    max_version: Option<SslVersion>,
}

impl TlsSettings {
    /// Takes the TLS parameters out of `parameters`.
    pub(super) fn take(parameters: &mut Parameters) -> Result<Self, ConnInfoError> {
        let root_cert = parameters.remove("sslrootcert").filter(|path| !path.is_empty());
        let system = root_cert.as_deref() == Some("system");
        let mode = match parameters.remove("sslmode") {
            Some(text) => mode(&text)?,
            None if system => SslMode::VerifyFull,
            None => SslMode::Prefer,
        };
        let settings = Self {
            mode: effective_mode(mode, root_cert.as_deref())?,
            root_cert: root_cert.filter(|_| !system).map(PathBuf::from),
            cert: path(parameters, "sslcert"),
            key: path(parameters, "sslkey"),
            key_password: parameters.remove("sslpassword").map(Secret::new),
            direct: choice(parameters, "sslnegotiation", &[("postgres", false), ("direct", true)])?.unwrap_or(false),
            sni: choice(parameters, "sslsni", &[("1", true), ("0", false)])?.unwrap_or(true),
            min_version: choice(parameters, "ssl_min_protocol_version", VERSIONS)?.unwrap_or(SslVersion::TLS1_2),
            max_version: choice(parameters, "ssl_max_protocol_version", VERSIONS)?,
        };
        if settings.direct && settings.mode < SslMode::Require {
            return Err(ConnInfoError::invalid("sslnegotiation", "direct needs sslmode=require or stronger"));
        }
        if settings.cert.is_some() != settings.key.is_some() {
            return Err(ConnInfoError::invalid("sslcert", "a client certificate needs both sslcert and sslkey"));
        }
        Ok(settings)
    }

    /// Whether a connector depends on files: certificates to trust or to show.
    pub(super) fn reads_files(&self) -> bool {
        self.mode >= SslMode::VerifyCa || self.root_cert.is_some() || self.cert.is_some()
    }

    /// The connector for these settings; reads the files anew, so that renewed certificates are picked up.
    pub(super) fn connector(&self) -> Result<SslConnector, ConnInfoError> {
        let tls = |key| move |source| ConnInfoError::Tls { key, source };
        let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(tls("sslmode"))?;
        builder.set_min_proto_version(Some(self.min_version)).map_err(tls("ssl_min_protocol_version"))?;
        builder.set_max_proto_version(self.max_version).map_err(tls("ssl_max_protocol_version"))?;
        if self.mode >= SslMode::VerifyCa {
            builder.set_verify(SslVerifyMode::PEER);
        } else {
            builder.set_verify(SslVerifyMode::NONE);
        }
        match &self.root_cert {
            Some(path) => trust_only(&mut builder, path)?,
            None => trust_system(&mut builder).map_err(tls("sslrootcert"))?,
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
            self.identify(&mut builder, cert, key)?;
        }
        if self.direct {
            postgres_openssl::set_postgresql_alpn(&mut builder).map_err(tls("sslnegotiation"))?;
        }
        Ok(builder.build())
    }

    fn identify(&self, builder: &mut SslConnectorBuilder, cert: &Path, key: &Path) -> Result<(), ConnInfoError> {
        let tls = |key| move |source| ConnInfoError::Tls { key, source };
        read("sslcert", cert)?;
        builder.set_certificate_chain_file(cert).map_err(tls("sslcert"))?;
        // Without a passphrase an empty one, or OpenSSL would ask the terminal.
        let passphrase = self.key_password.as_ref().map_or("", Secret::expose);
        let key = PKey::private_key_from_pem_passphrase(&read("sslkey", key)?, passphrase.as_bytes())
            .map_err(tls("sslkey"))?;
        builder.set_private_key(&key).map_err(tls("sslkey"))?;
        builder.check_private_key().map_err(tls("sslkey"))
    }
}

const VERSIONS: &[(&str, SslVersion)] = &[
    ("TLSv1", SslVersion::TLS1),
    ("TLSv1.1", SslVersion::TLS1_1),
    ("TLSv1.2", SslVersion::TLS1_2),
    ("TLSv1.3", SslVersion::TLS1_3),
];

fn mode(text: &str) -> Result<SslMode, ConnInfoError> {
    Ok(match text {
        "disable" => SslMode::Disable,
        "prefer" => SslMode::Prefer,
        "require" => SslMode::Require,
        "verify-ca" => SslMode::VerifyCa,
        "verify-full" => SslMode::VerifyFull,
        "allow" => {
            let reason =
                "allow is not supported: it tries without TLS first; write prefer, or require to insist on TLS";
            return Err(ConnInfoError::invalid("sslmode", reason));
        }
        _ => {
            let reason = "must be disable, prefer, require, verify-ca or verify-full";
            return Err(ConnInfoError::invalid("sslmode", reason));
        }
    })
}

/// What the mode amounts to beside `sslrootcert`.
fn effective_mode(mode: SslMode, root_cert: Option<&str>) -> Result<SslMode, ConnInfoError> {
    match (mode, root_cert) {
        (SslMode::Disable | SslMode::VerifyFull, _) | (SslMode::Prefer | SslMode::Require, None) => Ok(mode),
        (_, Some("system")) => Err(ConnInfoError::invalid(
            "sslrootcert",
            "system needs sslmode=verify-full: without the host name check any public certificate would do",
        )),
        (SslMode::Prefer, Some(_)) => Err(ConnInfoError::invalid(
            "sslrootcert",
            "has no effect with sslmode=prefer; add sslmode=verify-full (or verify-ca) to have the server checked",
        )),
        (SslMode::Require | SslMode::VerifyCa, Some(_)) => Ok(SslMode::VerifyCa),
        (SslMode::VerifyCa, None) => Err(ConnInfoError::invalid(
            "sslmode",
            "verify-ca needs sslrootcert, the certificate of the authority to trust",
        )),
    }
}

fn path(parameters: &mut Parameters, key: &str) -> Option<PathBuf> {
    parameters.remove(key).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Takes a parameter that has a fixed set of values.
pub(super) fn choice<T: Copy>(
    parameters: &mut Parameters,
    key: &'static str,
    choices: &[(&str, T)],
) -> Result<Option<T>, ConnInfoError> {
    let Some(text) = parameters.remove(key) else { return Ok(None) };
    let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    found.map(Some).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        ConnInfoError::invalid(key, format!("must be {}", names.join(" or ")))
    })
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, ConnInfoError> {
    std::fs::read(path).map_err(|source| ConnInfoError::File { key, path: path.into(), source })
}

/// OpenSSL's builder has loaded the store of its build already. A vendored OpenSSL's is in a place that exists nowhere,
/// so the store is looked for where distributions keep it.
fn trust_system(builder: &mut SslConnectorBuilder) -> Result<(), openssl::error::ErrorStack> {
    const STORES: [&str; 4] = [
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
        "/etc/ssl/ca-bundle.pem",
        "/etc/ssl/cert.pem",
    ];
    match STORES.iter().find(|store| cfg!(feature = "vendored-openssl") && Path::new(store).exists()) {
        Some(store) => builder.set_ca_file(store),
        None => Ok(()),
    }
}

fn trust_only(builder: &mut SslConnectorBuilder, path: &Path) -> Result<(), ConnInfoError> {
    let key = "sslrootcert";
    let tls = |source| ConnInfoError::Tls { key, source };
    let roots = X509::stack_from_pem(&read(key, path)?).map_err(tls)?;
    if roots.is_empty() {
        return Err(ConnInfoError::invalid(key, format!("{} holds no PEM certificate", path.display())));
    }
    let mut store = X509StoreBuilder::new().map_err(tls)?;
    for root in roots {
        store.add_cert(root).map_err(tls)?;
    }
    builder.set_cert_store(store.build());
    Ok(())
}
