//! Whom the connector trusts, checked by handshakes with certificates made on the spot.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
};

use openssl::{
    asn1::Asn1Time,
    bn::BigNum,
    hash::MessageDigest,
    pkey::{PKey, Private},
    rsa::Rsa,
    ssl::{HandshakeError, SslAcceptor, SslMethod, SslVerifyMode},
    symm::Cipher,
    x509::{
        X509, X509Builder, X509NameBuilder,
        extension::{BasicConstraints, SubjectAlternativeName},
    },
};

use super::ConnInfo;

struct Identity {
    cert: X509,
    key: PKey<Private>,
}

/// A certificate for `name`, signed by `issuer`, else by itself and an authority.
fn identity(name: &str, serial: u32, issuer: Option<&Identity>) -> Identity {
    let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut builder = X509Builder::new().unwrap();
    builder.set_version(2).unwrap();
    builder.set_serial_number(&BigNum::from_u32(serial).unwrap().to_asn1_integer().unwrap()).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(1).unwrap()).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_issuer_name(issuer.map_or(&*subject, |issuer| issuer.cert.subject_name())).unwrap();
    builder.set_pubkey(&key).unwrap();
    if issuer.is_none() {
        builder.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
    } else {
        let context = builder.x509v3_context(None, None);
        let names = SubjectAlternativeName::new().dns(name).build(&context).unwrap();
        builder.append_extension(names).unwrap();
    }
    builder.sign(issuer.map_or(&key, |issuer| &issuer.key), MessageDigest::sha256()).unwrap();
    Identity { cert: builder.build(), key }
}

/// A directory of PEM files that goes when the test ends.
struct Files(PathBuf);

impl Files {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("walpost-tls-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, pem: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::File::create(&path).unwrap().write_all(pem).unwrap();
        path
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Shakes hands with a server that shows `server` and, where given, demands a certificate signed by `client_ca`. Returns
/// the common name of the client's certificate.
fn shake(settings: &str, host: &str, server: &Identity, client_ca: Option<&Path>) -> Result<Option<String>, String> {
    let info = ConnInfo::parse(&format!("host={host} {settings}"), None, None).map_err(|error| error.to_string())?;
    let client = info.tls_connector().map_err(|error| error.to_string())?;
    let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server()).unwrap();
    acceptor.set_certificate(&server.cert).unwrap();
    acceptor.set_private_key(&server.key).unwrap();
    if let Some(ca) = client_ca {
        acceptor.set_ca_file(ca).unwrap();
        acceptor.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    }
    let acceptor = acceptor.build();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let stream = acceptor.accept(listener.accept().unwrap().0).ok()?;
        let cert = stream.ssl().peer_certificate();
        let name = cert.as_ref().and_then(|cert| cert.subject_name().entries().next());
        Some(name.map(|name| String::from_utf8_lossy(name.data().as_slice()).into_owned()))
    });
    let connection = client.configure().unwrap().verify_hostname(info.verify_hostname());
    let outcome = match connection.connect(host, TcpStream::connect(address).unwrap()) {
        Ok(_) => Ok(()),
        Err(HandshakeError::Failure(stream)) => Err(stream.error().to_string()),
        Err(error) => Err(error.to_string()),
    };
    let shown = server.join().unwrap();
    outcome.and_then(|()| shown.ok_or_else(|| "the server refuses the client".to_owned()))
}

#[test]
fn each_sslmode_checks_what_libpq_checks() {
    let files = Files::new("modes");
    let (ours, other) = (identity("ours", 1, None), identity("other", 2, None));
    let server = identity("db.example", 3, Some(&ours));
    let ours = files.write("ours.pem", &ours.cert.to_pem().unwrap()).display().to_string();
    let other = files.write("other.pem", &other.cert.to_pem().unwrap()).display().to_string();
    for (settings, host, trusted) in [
        ("sslmode=prefer".into(), "elsewhere", true),
        ("sslmode=require".into(), "elsewhere", true),
        (format!("sslmode=require sslrootcert={ours}"), "elsewhere", true),
        (format!("sslmode=require sslrootcert={other}"), "db.example", false),
        (format!("sslmode=verify-ca sslrootcert={ours}"), "elsewhere", true),
        (format!("sslmode=verify-ca sslrootcert={other}"), "db.example", false),
        (format!("sslmode=verify-full sslrootcert={ours}"), "db.example", true),
        (format!("sslmode=verify-full sslrootcert={ours}"), "elsewhere", false),
        (format!("sslmode=verify-full sslrootcert={other}"), "db.example", false),
        ("sslmode=verify-full".into(), "db.example", false),
    ] {
        let outcome = shake(&settings, host, &server, None);
        assert_eq!(outcome.is_ok(), trusted, "{settings} {host}: {outcome:?}");
    }
}

#[test]
fn a_given_root_is_trusted_alone() {
    let files = Files::new("alone");
    let ours = identity("ours", 1, None);
    let path = files.write("ours.pem", &ours.cert.to_pem().unwrap());
    let text = format!("host=h sslmode=verify-ca sslrootcert={}", path.display());
    let connector = ConnInfo::parse(&text, None, None).unwrap().tls_connector().unwrap();
    assert_eq!(connector.context().cert_store().all_certificates().len(), 1);
}

#[test]
fn a_client_certificate_is_shown_also_with_an_encrypted_key() {
    let files = Files::new("client");
    let ca = identity("ca", 1, None);
    let (server, client) = (identity("db.example", 2, Some(&ca)), identity("relay", 3, Some(&ca)));
    let ca = files.write("ca.pem", &ca.cert.to_pem().unwrap());
    let cert = files.write("client.pem", &client.cert.to_pem().unwrap());
    let plain = files.write("client.key", &client.key.private_key_to_pem_pkcs8().unwrap());
    let encrypted = client.key.private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), b"s3cr").unwrap();
    let encrypted = files.write("encrypted.key", &encrypted);
    let shake = |rest: String| {
        let settings = format!("sslmode=verify-full sslrootcert={} {rest}", ca.display());
        shake(&settings, "db.example", &server, Some(&ca))
    };
    let cert = cert.display();
    let relay = Ok(Some("relay".to_owned()));
    assert_eq!(shake(format!("sslcert={cert} sslkey={}", plain.display())), relay);
    assert_eq!(shake(format!("sslcert={cert} sslkey={} sslpassword=s3cr", encrypted.display())), relay);
    let refused = shake(format!("sslcert={cert} sslkey={}", encrypted.display())).unwrap_err();
    assert!(refused.contains("`sslkey`"), "{refused}");
    assert!(shake(String::new()).is_err());
}
