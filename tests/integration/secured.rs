//! Brokers that ask who one is, over TLS.

use std::{fs, path::PathBuf, sync::LazyLock, time::Duration};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, stays},
    services::{
        certificates::{Authority, Issued},
        kafka::{Kafka, Settings, tool},
        postgres::{Postgres, Version},
        run, wait_until,
        walpost::Walpost,
    },
};

const PASSWORD: &str = "hush p@s's/#%7! hush";

/// A broker with a certificate for `localhost`, which knows the user `relay` by three mechanisms.
struct Secured {
    kafka: Kafka,
    authority: Authority,
    stranger: Authority,
}

static SECURED: LazyLock<Secured> = LazyLock::new(|| {
    let authority = Authority::new();
    let it = Secured {
        kafka: Kafka::start(&settings(&authority.server("localhost"))),
        authority,
        stranger: Authority::new(),
    };
    for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let credential = format!("{mechanism}=[password={PASSWORD}]");
        let user = ["--entity-type", "users", "--entity-name", "relay", "--alter", "--add-config", &credential];
        tool("kafka.admin.ConfigCommand", &[&["--bootstrap-server", &it.kafka.brokers()], &user[..]].concat());
    }
    it
});

/// A broker that proves itself by this certificate.
fn settings(identity: &Issued) -> Settings {
    let jaas = "org.apache.kafka.common.security";
    let plain = format!("{jaas}.plain.PlainLoginModule required user_relay=\"{PASSWORD}\";");
    let scram = format!("{jaas}.scram.ScramLoginModule required;");
    Settings::default()
        .secured()
        .set(&on_listener("ssl.keystore.type"), "PEM")
        .set(&on_listener("ssl.keystore.certificate.chain"), &one_line(&identity.certificate))
        .set(&on_listener("ssl.keystore.key"), &one_line(&identity.key))
        .set(&on_listener("sasl.enabled.mechanisms"), "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512")
        .set(&on_listener("plain.sasl.jaas.config"), &plain)
        .set(&on_listener("scram-sha-256.sasl.jaas.config"), &scram)
        .set(&on_listener("scram-sha-512.sasl.jaas.config"), &scram)
}

fn on_listener(name: &str) -> String {
    format!("listener.name.secured.{name}")
}

/// As a properties file takes it.
fn one_line(pem: &[u8]) -> String {
    text(pem).replace('\n', "\\n")
}

fn text(pem: &[u8]) -> String {
    String::from_utf8(pem.to_vec()).expect("PEM is text")
}

fn relay(outbox: &Outbox<'_>, host: &str, mechanism: &str, authority: &Authority, password: &str) -> Walpost {
    relay_with(outbox, host, authority, &[("SASL_MECHANISM", mechanism), ("SASL_PASSWORD", password)])
}

/// One with these properties beside the usual ones.
fn relay_with(outbox: &Outbox<'_>, host: &str, authority: &Authority, properties: &[(&str, &str)]) -> Walpost {
    let brokers = format!("{host}:{}", outbox.kafka.nodes()[0].secured_port());
    let authority = text(&authority.certificate());
    let usual = [
        ("SECURITY_PROTOCOL", "sasl_ssl"),
        ("SASL_MECHANISM", "PLAIN"),
        ("SASL_USERNAME", "relay"),
        ("SASL_PASSWORD", PASSWORD),
        ("SSL_CA_PEM", &authority),
    ];
    let of_kafka =
        usual.iter().chain(properties).map(|(name, value)| (format!("WALPOST_KAFKA_PROPERTIES_{name}"), *value));
    let of_kafka: Vec<_> = of_kafka.collect();
    let mut env = vec![("WALPOST_KAFKA_BROKERS", brokers.as_str()), ("WALPOST_LOG_LEVEL", "debug")];
    env.extend(of_kafka.iter().map(|(name, value)| (name.as_str(), *value)));
    Walpost::relay(&outbox.database, outbox.kafka, &env)
}

/// Case 42.
#[test]
fn every_mechanism_proves_who_walpost_is_and_no_secret_is_told() {
    for mechanism in ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &SECURED.kafka, TABLE);
        let topic = outbox.topic("t", 1);
        let walpost = relay(&outbox, "localhost", mechanism, &SECURED.authority, PASSWORD);
        walpost.wait_for_log(PATIENCE, "streaming slot=");
        outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
        outbox.wait_until_confirmed();
        assert_eq!(outbox.kafka.record_count(&topic), 1, "{mechanism}");
        let told = [walpost.log(), walpost.get("/status").body, walpost.get("/metrics").body, command_line(&walpost)];
        assert!(told.iter().all(|text| !text.contains("hush")), "the password is told");
    }
}

/// Case 43 and its neighbours.
#[test]
fn what_does_not_prove_itself_is_said_within_seconds_and_nothing_is_confirmed() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &SECURED.kafka, TABLE);
    outbox.topic("t", 1);
    relay(&outbox, "localhost", "PLAIN", &SECURED.authority, PASSWORD).wait_for_log(PATIENCE, "streaming slot=");
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    let (mine, stranger) = (&SECURED.authority, &SECURED.stranger);
    let cases = [
        ("wrong password", "localhost", "PLAIN", mine, "hush wrong", "uthentication"),
        ("wrong password", "localhost", "SCRAM-SHA-256", mine, "hush wrong", "uthentication"),
        ("wrong host", "127.0.0.1", "PLAIN", mine, PASSWORD, "SSL"),
        ("unknown authority", "localhost", "PLAIN", stranger, PASSWORD, "SSL"),
    ];
    let before = outbox.confirmed();
    for (fault, host, mechanism, authority, password, said) in cases {
        let walpost = relay(&outbox, host, mechanism, authority, password);
        wait_until_said(&walpost, fault, said);
        let warnings =
            || walpost.log().lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR")).count();
        let so_far = warnings();
        stays(Duration::from_secs(3), "it is alive and waits", || walpost.get("/livez").status == 200);
        assert!(warnings() - so_far <= 3, "{fault} fills the log:\n{}", walpost.log());
        assert!(!walpost.log().contains("hush"), "{fault}: the password is told");
        assert_eq!(outbox.confirmed(), before, "{fault}");
    }
}

#[test]
fn a_rotated_password_is_taken_from_its_file_without_a_restart() {
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &SECURED.kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let file = run::folder("password").join("kafka");
    fs::write(&file, "hush the old one\n").expect("a file of our own");
    let brokers = format!("localhost:{}", outbox.kafka.nodes()[0].secured_port());
    let authority = text(&SECURED.authority.certificate());
    let walpost = outbox.relay(&[
        ("WALPOST_KAFKA_BROKERS", &brokers),
        ("WALPOST_KAFKA_SASL_PASSWORD_FILE", file.to_str().expect("a path of ours is UTF-8")),
        ("WALPOST_KAFKA_PROPERTIES_SECURITY_PROTOCOL", "sasl_ssl"),
        ("WALPOST_KAFKA_PROPERTIES_SASL_MECHANISM", "PLAIN"),
        ("WALPOST_KAFKA_PROPERTIES_SASL_USERNAME", "relay"),
        ("WALPOST_KAFKA_PROPERTIES_SSL_CA_PEM", &authority),
    ]);
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    wait_until_said(&walpost, "the old password", "uthentication");
    fs::write(&file, format!("{PASSWORD}\n")).expect("a file of our own");
    outbox.wait_until_confirmed();
    assert_eq!(outbox.kafka.record_count(&topic), 1);
    walpost.wait_until_ready(PATIENCE);
    assert!(!walpost.log().contains("hush"), "the password is told");
}

#[test]
fn a_broker_that_asks_for_a_certificate_is_given_one() {
    let authority = Authority::new();
    let settings = settings(&authority.server("localhost"))
        .set(&on_listener("ssl.client.auth"), "required")
        .set(&on_listener("ssl.truststore.type"), "PEM")
        .set(&on_listener("ssl.truststore.certificates"), &one_line(&authority.certificate()));
    let kafka = Kafka::start(&settings);
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let without = relay_with(&outbox, "localhost", &authority, &[]);
    without.wait_for_log(PATIENCE, "streaming slot=");
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    wait_until_said(&without, "no certificate", "SSL");
    without.kill9();
    let Issued { certificate, key } = authority.client("relay");
    let (certificate, key) = (text(&certificate), text(&key));
    let _with =
        relay_with(&outbox, "localhost", &authority, &[("SSL_CERTIFICATE_PEM", &certificate), ("SSL_KEY_PEM", &key)]);
    outbox.wait_until_confirmed();
    assert_eq!(kafka.record_count(&topic), 1);
}

#[test]
fn a_broker_whose_certificate_has_expired_is_not_believed() {
    let authority = Authority::new();
    let kafka = Kafka::start(&settings(&authority.expired_server("localhost")));
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let walpost = relay_with(&outbox, "localhost", &authority, &[]);
    walpost.wait_for_log(PATIENCE, "streaming slot=");
    outbox.execute("INSERT INTO outbox VALUES ('1', 't', 'k', '')");
    wait_until_said(&walpost, "expired", "certificate verify failed");
    stays(Duration::from_secs(1), "nothing is sent", || kafka.record_count(&topic) == 0);
}

/// The reason stands in `/readyz` within seconds.
fn wait_until_said(walpost: &Walpost, what: &str, said: &str) {
    wait_until(Duration::from_secs(10), &format!("{what}: {said:?} is said"), || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains("kafka:") && answer.body.contains(said)
    });
}

fn command_line(walpost: &Walpost) -> String {
    let path = PathBuf::from(format!("/proc/{}/cmdline", walpost.process().pid()));
    String::from_utf8_lossy(&fs::read(path).expect("it lives")).into_owned()
}
