//! How walpost proves who it is, and whom it believes.

use std::{fs, os::unix::fs::PermissionsExt, sync::OnceLock};

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{
        certificates::Authority,
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        wait_for, wait_until,
        walpost::Walpost,
    },
};

const PASSWORD: &str = "s3cr3t/of@the:relay";
/// The same within a URL.
const PASSWORD_IN_URL: &str = "s3cr3t%2Fof%40the%3Arelay";

/// A server that asks each role for something else.
struct Guarded {
    server: Postgres,
}

impl Guarded {
    fn server(version: Version) -> &'static Self {
        static ENDS: [OnceLock<Guarded>; 2] = [OnceLock::new(), OnceLock::new()];
        ENDS[usize::from(version == Version::OLDEST)].get_or_init(|| Self::start(version))
    }

    fn start(version: Version) -> Self {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let (server_identity, client_identity) = (authority.server("localhost"), authority.client("by_certificate"));
        let settings = Settings::default()
            .set("ssl", "on")
            .set("ssl_ca_file", "root.crt")
            .file("server.crt", server_identity.certificate)
            .file("server.key", server_identity.key)
            .file("root.crt", authority.certificate())
            .hba(
                "host all by_trust 127.0.0.1/32 trust
                 host all by_password 127.0.0.1/32 password
                 host all by_md5 127.0.0.1/32 md5
                 host all by_scram 127.0.0.1/32 scram-sha-256
                 host all rotates 127.0.0.1/32 scram-sha-256
                 hostssl all with_tls 127.0.0.1/32 scram-sha-256
                 hostnossl all without_tls 127.0.0.1/32 trust
                 hostssl all by_certificate 127.0.0.1/32 cert",
            );
        let it = Self { server: Postgres::start(version, &settings) };
        it.write("ca.crt", &authority.certificate());
        it.write("stranger.crt", &stranger.certificate());
        it.write("client.crt", &client_identity.certificate);
        it.write("client.key", &client_identity.key);
        let roles = ["by_trust", "by_password", "by_scram", "rotates", "with_tls", "without_tls", "by_certificate"];
        let create = |role: &str| format!("CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{PASSWORD}'");
        let roles = roles.map(create).join("; ");
        let encryption = |method: &str| format!("SET password_encryption = '{method}'");
        let (scram, md5, by_md5) = (encryption("scram-sha-256"), encryption("md5"), create("by_md5"));
        it.server.database().execute(&format!("{scram}; {roles}; {md5}; {by_md5}"));
        it
    }

    /// A file for walpost, beside the server's data.
    fn write(&self, name: &str, content: &[u8]) {
        let path = self.path(name);
        fs::write(&path, content).expect("a file in the server's folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("our own file");
    }

    fn path(&self, name: &str) -> String {
        self.server.socket_folder().join(name).display().to_string()
    }

    /// An outbox whose publication and slot exist: the roles may replicate, and no more.
    fn outbox(&self) -> Outbox<'_> {
        let outbox = Outbox::new(&self.server, Kafka::shared());
        let socket = self.server.socket_folder().display();
        let url = format!("host={socket} port={} user=postgres dbname={}", self.server.port(), outbox.database.name());
        let init = outbox.command(&["init"], &[("WALPOST_POSTGRES_URL", &url)]);
        assert_eq!(init.code, Some(0), "{}", init.output);
        outbox
    }

    /// A connection string for `user` with its password, where `host` is a name or address of the server.
    fn url(&self, outbox: &Outbox<'_>, user: &str, host: &str, settings: &str) -> String {
        let (port, database) = (self.server.port(), outbox.database.name());
        format!("postgres://{user}:{PASSWORD_IN_URL}@{host}:{port}/{database}?hostaddr=127.0.0.1&{settings}")
    }
}

/// Starts a walpost with this URL, waits until both of its links are open, and says whether they are encrypted.
fn encrypted(outbox: &Outbox<'_>, url: &str) -> bool {
    let walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", url)]);
    walpost.wait_until_ready(PATIENCE);
    let links = "FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    // the stream's and the monitor's; what else a start needs is gone after a moment
    let count = format!("SELECT count(*) || ', encrypted ' || count(*) FILTER (WHERE ssl) {links}");
    let encrypted = wait_for(PATIENCE, "two links, both encrypted or neither", || match outbox.text(&count).as_str() {
        "2, encrypted 2" => Some(true),
        "2, encrypted 0" => Some(false),
        _ => None,
    });
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    outbox.wait_until_true(PATIENCE, &format!("NOT EXISTS (SELECT {links})"));
    encrypted
}

/// Starts a walpost with this URL that does not get in; what it says about it.
fn refusal(outbox: &Outbox<'_>, url: &str) -> String {
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[("WALPOST_POSTGRES_URL", url)]);
    wait_until(PATIENCE, "walpost says that it does not get in", || {
        walpost.log().lines().any(|line| line.contains("WARN") || line.contains("ERROR"))
    });
    assert!(!walpost.log().contains("streaming slot="), "{url} got in:\n{}", walpost.log());
    walpost.log()
}

#[test]
fn every_way_to_prove_a_password_is_spoken() {
    at_both_ends(|version| {
        let guarded = Guarded::server(version);
        let outbox = guarded.outbox();
        for user in ["by_trust", "by_password", "by_md5", "by_scram"] {
            let url = guarded.url(&outbox, user, "localhost", "sslmode=disable");
            assert!(!encrypted(&outbox, &url), "{user}");
        }
    });
}

#[test]
fn every_sslmode_does_what_it_promises() {
    at_both_ends(|version| {
        let guarded = Guarded::server(version);
        let outbox = guarded.outbox();
        let url = |user, host, settings: &str| guarded.url(&outbox, user, host, settings);
        let (ours, stranger) = (guarded.path("ca.crt"), guarded.path("stranger.crt"));
        assert!(!encrypted(&outbox, &url("without_tls", "localhost", "sslmode=disable")));
        for (host, settings) in [
            ("localhost", String::new()),
            ("localhost", "sslmode=prefer".to_owned()),
            ("127.0.0.1", "sslmode=require".to_owned()),
            ("127.0.0.1", format!("sslmode=verify-ca&sslrootcert={ours}")),
            ("localhost", format!("sslmode=verify-full&sslrootcert={ours}")),
        ] {
            assert!(encrypted(&outbox, &url("with_tls", host, &settings)), "{settings}");
        }
        let without = refusal(&outbox, &url("with_tls", "localhost", "sslmode=disable"));
        assert!(without.contains("pg_hba.conf"), "{without}");
        for (host, settings) in [
            ("localhost", format!("sslmode=verify-ca&sslrootcert={stranger}")),
            ("127.0.0.1", format!("sslmode=verify-full&sslrootcert={ours}")),
        ] {
            let said = refusal(&outbox, &url("with_tls", host, &settings));
            assert!(said.contains("certificate"), "{settings}: {said}");
        }
    });
}

#[test]
fn a_client_certificate_proves_who_walpost_is() {
    at_both_ends(|version| {
        let guarded = Guarded::server(version);
        let outbox = guarded.outbox();
        let (ca, cert, key) = (guarded.path("ca.crt"), guarded.path("client.crt"), guarded.path("client.key"));
        let settings = format!("sslmode=verify-full&sslrootcert={ca}");
        let shown = format!("{settings}&sslcert={cert}&sslkey={key}");
        assert!(encrypted(&outbox, &guarded.url(&outbox, "by_certificate", "localhost", &shown)));
        refusal(&outbox, &guarded.url(&outbox, "by_certificate", "localhost", &settings));
    });
}

#[test]
fn channel_binding_can_be_required() {
    at_both_ends(|version| {
        let guarded = Guarded::server(version);
        let outbox = guarded.outbox();
        let bound =
            |user, mode| guarded.url(&outbox, user, "localhost", &format!("sslmode={mode}&channel_binding=require"));
        assert!(encrypted(&outbox, &bound("by_scram", "require")));
        for (user, mode) in [("by_password", "require"), ("by_trust", "require"), ("by_scram", "disable")] {
            let said = refusal(&outbox, &bound(user, mode));
            assert!(said.contains("channel"), "{user}: {said}");
        }
    });
}

#[test]
fn a_wrong_password_is_waited_out_until_the_file_holds_the_right_one() {
    at_both_ends(|version| {
        let guarded = Guarded::server(version);
        let outbox = guarded.outbox();
        let name = format!("password of {}", outbox.database.name());
        guarded.write(&name, b"wrong\n");
        let url = guarded.url(&outbox, "by_scram", "localhost", "").replace(&format!(":{PASSWORD_IN_URL}"), "");
        let file = guarded.path(&name);
        let env = [("WALPOST_POSTGRES_URL", url.as_str()), ("WALPOST_POSTGRES_PASSWORD_FILE", &file)];
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &env);
        wait_until(PATIENCE, "walpost says what is wrong", || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains("password_file")
        });
        guarded.write(&name, format!("{PASSWORD}\n").as_bytes());
        walpost.wait_until_ready(PATIENCE);
    });
}

#[test]
fn a_rotated_password_is_taken_from_its_file_without_a_restart() {
    let guarded = Guarded::server(Version::NEWEST);
    let outbox = guarded.outbox();
    let name = format!("rotated password of {}", outbox.database.name());
    guarded.write(&name, PASSWORD.as_bytes());
    let url = guarded.url(&outbox, "rotates", "localhost", "").replace(&format!(":{PASSWORD_IN_URL}"), "");
    let file = guarded.path(&name);
    let walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", &url), ("WALPOST_POSTGRES_PASSWORD_FILE", &file)]);
    outbox.execute("SET password_encryption = 'scram-sha-256'; ALTER ROLE rotates PASSWORD 'the next one'");
    guarded.write(&name, b"the next one\n");
    // links that are open stay so; these are ended, as an operator does who wants the old password out of use at once
    outbox.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'rotates'");
    walpost.wait_for_log(PATIENCE, "terminating connection");
    outbox.topic("a", 1);
    outbox.execute("INSERT INTO outbox (event_type, payload) VALUES ('a', '{}')");
    outbox.wait_until_confirmed();
    walpost.wait_until_ready(PATIENCE);
}

/// Case 42.
#[test]
fn no_secret_is_ever_printed() {
    let guarded = Guarded::server(Version::NEWEST);
    let outbox = guarded.outbox();
    let claim = |printed: &str| {
        for secret in [PASSWORD, PASSWORD_IN_URL, "hush-hush"] {
            assert!(!printed.contains(secret), "{printed}");
        }
    };
    let secrets = [("WALPOST_LOG_LEVEL", "trace"), ("WALPOST_KAFKA_PROPERTIES_SASL_PASSWORD", "hush-hush")];
    for (user, outcome) in [("by_scram", "streaming slot="), ("with_tls", "trying again"), ("nobody", "trying again")] {
        let url = guarded.url(&outbox, user, "localhost", "sslmode=disable");
        let env = [secrets[0], secrets[1], ("WALPOST_POSTGRES_URL", url.as_str())];
        let walpost = Walpost::relay(&outbox.database, outbox.kafka, &env);
        walpost.wait_for_log(PATIENCE, outcome);
        for path in ["/metrics", "/readyz", "/status"] {
            claim(&walpost.get(path).body);
        }
        walpost.sigterm_and_wait(PATIENCE);
        claim(&walpost.log());
        for args in [&["check"][..], &["run", "--set", "kafka.nonsense=1"], &["init", "--print"]] {
            claim(&Walpost::run_to_end(args, &env).output);
        }
    }
}
