//! A certificate authority for one test.

use openssl::{
    asn1::Asn1Time,
    bn::BigNum,
    ec::{EcGroup, EcKey},
    error::ErrorStack,
    hash::MessageDigest,
    nid::Nid,
    pkey::{PKey, Private},
    x509::{
        X509, X509Builder, X509Name, X509NameBuilder,
        extension::{BasicConstraints, SubjectAlternativeName},
    },
};

/// A certificate with its key, both in PEM.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The certificate.
    pub certificate: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
}

/// An authority that signs what the test asks for.
#[derive(Debug)]
pub struct Authority {
    certificate: X509,
    key: PKey<Private>,
}

impl Authority {
    /// A new authority that nobody trusts yet.
    pub fn new() -> Self {
        Self::try_new().expect("OpenSSL makes a certificate")
    }

    /// The authority's own certificate in PEM, for `sslrootcert` and `ssl_ca_file`.
    pub fn certificate(&self) -> Vec<u8> {
        self.certificate.to_pem().expect("a certificate has a PEM form")
    }

    /// A certificate for a host; the name may be `localhost` or any other, 127.0.0.1 is not in it.
    pub fn server(&self, host: &str) -> Issued {
        self.issue(host, Some(host), 1).expect("OpenSSL makes a certificate")
    }

    /// One for a host that was valid until yesterday.
    pub fn expired_server(&self, host: &str) -> Issued {
        self.issue(host, Some(host), -1).expect("OpenSSL makes a certificate")
    }

    /// A certificate for a Postgres user.
    pub fn client(&self, user: &str) -> Issued {
        self.issue(user, None, 1).expect("OpenSSL makes a certificate")
    }

    fn try_new() -> Result<Self, ErrorStack> {
        let (name, key) = (common_name("test authority")?, new_key()?);
        let mut builder = begin(&name, &name, &key, 1)?;
        builder.append_extension(BasicConstraints::new().critical().ca().build()?)?;
        builder.sign(&key, MessageDigest::sha256())?;
        Ok(Self { certificate: builder.build(), key })
    }

    fn issue(&self, subject: &str, host: Option<&str>, days: i64) -> Result<Issued, ErrorStack> {
        let key = new_key()?;
        let mut builder = begin(&common_name(subject)?, self.certificate.subject_name(), &key, days)?;
        if let Some(host) = host {
            let context = builder.x509v3_context(Some(&self.certificate), None);
            let names = SubjectAlternativeName::new().dns(host).build(&context)?;
            builder.append_extension(names)?;
        }
        builder.sign(&self.key, MessageDigest::sha256())?;
        Ok(Issued { certificate: builder.build().to_pem()?, key: key.private_key_to_pem_pkcs8()? })
    }
}

/// A certificate that holds all but extensions and signature, and is valid until so many days from now.
fn begin(
    subject: &X509Name,
    issuer: &openssl::x509::X509NameRef,
    key: &PKey<Private>,
    days: i64,
) -> Result<X509Builder, ErrorStack> {
    let mut builder = X509::builder()?;
    builder.set_version(2)?;
    builder.set_serial_number(BigNum::from_u32(fastrand::u32(1..))?.to_asn1_integer()?.as_ref())?;
    builder.set_subject_name(subject)?;
    builder.set_issuer_name(issuer)?;
    builder.set_pubkey(key)?;
    let day = |days: i64| Asn1Time::from_unix(now() + days * 86_400);
    builder.set_not_before(day(-2)?.as_ref())?;
    builder.set_not_after(day(days)?.as_ref())?;
    Ok(builder)
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    i64::try_from(since.as_secs()).expect("not that far")
}

fn common_name(name: &str) -> Result<X509Name, ErrorStack> {
    let mut builder = X509NameBuilder::new()?;
    builder.append_entry_by_nid(Nid::COMMONNAME, name)?;
    Ok(builder.build())
}

fn new_key() -> Result<PKey<Private>, ErrorStack> {
    let curve = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1)?;
    PKey::from_ec_key(EcKey::generate(&curve)?)
}
