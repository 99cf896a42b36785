//! Brokers that ask who one is, over TLS.

use std::{fs, path::PathBuf, sync::LazyLock, time::Duration};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, stays},
    services::{
        certificates::{Authority, Issued},
        kafka::{Kafka, Settings, tool},
        postgres::{Postgres, Version},
        wait_until,
        walpost::Walpost,
    },
};

const PASSWORD: &str = "hush p@s's/#%7! hush";

/// A broker with a certificate for `localhost`, which knows the user `relay` by three mechanisms.
struct Secured {
    kafka: Kafka,
    authority: String,
    stranger: String,
}

static SECURED: LazyLock<Secured> = LazyLock::new(|| {
    let authority = Authority::new();
    let Issued { certificate, key } = authority.server("localhost");
    let pem = |bytes: Vec<u8>| String::from_utf8(bytes).expect("PEM is text").replace('\n', "\\n");
    let jaas = "org.apache.kafka.common.security";
    let prefix = |name: &str| format!("listener.name.secured.{name}");
    let plain = format!("{jaas}.plain.PlainLoginModule required user_relay=\"{PASSWORD}\";");
    let scram = format!("{jaas}.scram.ScramLoginModule required;");
    let settings = Settings::default()
        .secured()
        .set(&prefix("ssl.keystore.type"), "PEM")
        .set(&prefix("ssl.keystore.certificate.chain"), &pem(certificate))
        .set(&prefix("ssl.keystore.key"), &pem(key))
        .set(&prefix("sasl.enabled.mechanisms"), "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512")
        .set(&prefix("plain.sasl.jaas.config"), &plain)
        .set(&prefix("scram-sha-256.sasl.jaas.config"), &scram)
        .set(&prefix("scram-sha-512.sasl.jaas.config"), &scram);
    let kafka = Kafka::start(&settings);
    for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let credential = format!("{mechanism}=[password={PASSWORD}]");
        let user = ["--entity-type", "users", "--entity-name", "relay", "--alter", "--add-config", &credential];
        tool("kafka.admin.ConfigCommand", &[&["--bootstrap-server", &kafka.brokers()], &user[..]].concat());
    }
    let text = |authority: &Authority| String::from_utf8(authority.certificate()).expect("PEM is text");
    Secured { kafka, authority: text(&authority), stranger: text(&Authority::new()) }
});

fn relay(outbox: &Outbox<'_>, host: &str, mechanism: &str, authority: &str, password: &str) -> Walpost {
    let brokers = format!("{host}:{}", SECURED.kafka.nodes()[0].secured_port());
    Walpost::relay(
        &outbox.database,
        outbox.kafka,
        &[
            ("WALPOST_KAFKA_BROKERS", &brokers),
            ("WALPOST_KAFKA_PROPERTIES_SECURITY_PROTOCOL", "sasl_ssl"),
            ("WALPOST_KAFKA_PROPERTIES_SASL_MECHANISM", mechanism),
            ("WALPOST_KAFKA_PROPERTIES_SASL_USERNAME", "relay"),
            ("WALPOST_KAFKA_PROPERTIES_SASL_PASSWORD", password),
            ("WALPOST_KAFKA_PROPERTIES_SSL_CA_PEM", authority),
            ("WALPOST_LOG_LEVEL", "debug"),
        ],
    )
}

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
    let (mine, stranger) = (SECURED.authority.as_str(), SECURED.stranger.as_str());
    let cases = [
        ("wrong password", "localhost", "PLAIN", mine, "hush wrong", "uthentication"),
        ("wrong password", "localhost", "SCRAM-SHA-256", mine, "hush wrong", "uthentication"),
        ("wrong host", "127.0.0.1", "PLAIN", mine, PASSWORD, "SSL"),
        ("unknown authority", "localhost", "PLAIN", stranger, PASSWORD, "SSL"),
    ];
    let before = outbox.confirmed();
    for (fault, host, mechanism, authority, password, said) in cases {
        let walpost = relay(&outbox, host, mechanism, authority, password);
        wait_until(Duration::from_secs(10), &format!("{fault} is said"), || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains("kafka:") && answer.body.contains(said)
        });
        let warnings =
            || walpost.log().lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR")).count();
        let so_far = warnings();
        stays(Duration::from_secs(3), "it is alive and waits", || walpost.get("/livez").status == 200);
        assert!(warnings() - so_far <= 3, "{fault} fills the log:\n{}", walpost.log());
        assert!(!walpost.log().contains("hush"), "{fault}: the password is told");
        assert_eq!(outbox.confirmed(), before, "{fault}");
    }
}

fn command_line(walpost: &Walpost) -> String {
    let path = PathBuf::from(format!("/proc/{}/cmdline", walpost.process().pid()));
    String::from_utf8_lossy(&fs::read(path).expect("it lives")).into_owned()
}
