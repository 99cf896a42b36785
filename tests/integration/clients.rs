//! What is in `tests/clients`: applications in five languages that write events and act once on each, as roles that may do
//! that and no more.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    applications::initialised,
    outbox::{Outbox, PATIENCE},
    services::{
        postgres::Version,
        process::{Process, tail},
        run,
        topics::Received,
    },
};

const ROLES: &str = include_str!("../../sql/roles.sql");
const DOCUMENTATION: &str = include_str!("../../docs/clients.md");
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const STRANGER: &str = "00000000-0000-7000-8000-000000000001";

/// How long a compiler may take on a machine that is busy.
const BUILD_PATIENCE: Duration = Duration::from_mins(5);

#[test]
fn a_client_in_rust_writes_events_and_acts_once() {
    let client = example("client");
    writes_events_and_acts_once("postgres", || Command::new(&client));
}

#[test]
fn a_client_in_python_writes_events_and_acts_once() {
    let driver = run::fetched("psycopg");
    writes_events_and_acts_once("postgres", || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", &driver).env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONIOENCODING", "utf-8");
        python.arg(source("python/client.py"));
        python
    });
}

#[test]
fn a_client_in_java_writes_events_and_acts_once() {
    let driver = run::fetched("jdbc");
    writes_events_and_acts_once("jdbc", || {
        let mut java = Command::new("java");
        java.args(["-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-cp"]).arg(driver.join("*"));
        java.arg(source("java/Client.java"));
        java
    });
}

#[test]
fn a_client_in_go_writes_events_and_acts_once() {
    let client = built_by_go(&source("go"));
    writes_events_and_acts_once("postgres", || Command::new(&client));
}

#[test]
fn a_client_in_node_writes_events_and_acts_once() {
    let driver = run::fetched("node-pg");
    writes_events_and_acts_once("postgres", || {
        let mut node = Command::new("node");
        node.env("NODE_PATH", driver.join("node_modules")).arg(source("node/client.js"));
        node
    });
}

#[test]
fn what_the_documentation_shows_is_what_is_tested() {
    let trimmed = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let mut shown = 0;
    for part in DOCUMENTATION.split("\nFrom [").skip(1) {
        let (_, path) = part.split_once("](../tests/clients/").expect("a link to the source");
        let (path, rest) = path.split_once("):\n\n```").expect("a code block");
        let (_, code) = rest.split_once('\n').expect("the language");
        let (code, _) = code.split_once("\n```").expect("the end of the block");
        let source = fs::read_to_string(source(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(trimmed(&source).contains(&trimmed(code)), "not in {path}:\n{code}");
        shown += 1;
    }
    assert_eq!(DOCUMENTATION.matches("```").count(), 2 * shown, "each block says where it is from");
}

/// The tables of a business, and a role of its own for each client.
pub struct Business {
    /// Its outbox.
    pub outbox: Outbox<'static>,
    topic: String,
}

impl Business {
    /// Nothing is in it yet.
    pub fn open() -> Self {
        let outbox = initialised(Version::NEWEST);
        let name = outbox.database.name();
        outbox.execute(ROLES);
        outbox.execute(&format!(
            "CREATE TABLE orders (id bigint PRIMARY KEY);
             CREATE TABLE shipments (event_id uuid NOT NULL);
             CREATE ROLE {name}_shop LOGIN IN ROLE walpost_app;
             GRANT SELECT, INSERT, DELETE ON orders TO {name}_shop;
             CREATE ROLE {name}_shipping LOGIN IN ROLE walpost_consumer;
             REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC"
        ));
        let topic = outbox.topic("events", 1);
        Self { outbox, topic }
    }

    /// Runs statements about the role `shipping`.
    pub fn of_shipping(&self, sql: &str) {
        self.outbox.execute(&sql.replace("shipping", &format!("{}_shipping", self.outbox.database.name())));
    }

    /// The URL of the database for the role `shop` or `shipping`; `scheme` is that of the driver's URLs.
    pub fn url(&self, scheme: &str, role: &str) -> String {
        let database = &self.outbox.database;
        let role = format!("{}_{role}", database.name());
        if scheme == "jdbc" {
            return format!("jdbc:postgresql://127.0.0.1:{}/{}?user={role}", database.server().port(), database.name());
        }
        database.url_as(&role)
    }

    /// What is in Kafka when everything that was committed has arrived.
    fn records(&self, count: usize) -> Vec<Received> {
        self.outbox.kafka.read_until(&[&self.topic], PATIENCE, |records| records.len() >= count);
        self.outbox.wait_until_confirmed();
        self.outbox.kafka.read_all(&[&self.topic])
    }
}

/// Runs a client through both of its commands; `scheme` is that of its driver's URLs.
fn writes_events_and_acts_once(scheme: &str, client: impl Fn() -> Command) {
    let business = Business::open();
    let _walpost = business.outbox.relay(&[("WALPOST_ROUTE_TOPIC", &business.topic)]);
    let run = |role: &str, arguments: &[&str]| {
        let mut command = client();
        command.env("DATABASE_URL", business.url(scheme, role)).args(arguments);
        run_to_end(&mut command)
    };
    let ids = run("shop", &["write"]).unwrap_or_else(|log| panic!("write failed:\n{log}"));
    assert_eq!(business.outbox.text("SELECT string_agg(id::text, ' ') FROM orders"), "2");
    assert_records(&business.records(ids.len()), &ids);

    let consume = ["consume", &ids[0], &ids[1], &ids[0], STRANGER];
    // where the action fails, the mark vanishes with it
    run("shipping", &consume).expect_err("shipping may not write shipments yet");
    assert_eq!(business.outbox.text("SELECT count(*) FROM inbox"), "0");
    business.of_shipping("GRANT INSERT ON shipments TO shipping");
    let outcomes = run("shipping", &consume).unwrap_or_else(|log| panic!("consume failed:\n{log}"));
    let said = |id: &str, outcome: &str| format!("{id} {outcome}");
    let first = [(&*ids[0], "shipped"), (&*ids[1], "shipped"), (&*ids[0], "repeated"), (STRANGER, "shipped")];
    assert_eq!(outcomes, first.map(|(id, outcome)| said(id, outcome)));
    let again = run("shipping", &["consume", &ids[1], STRANGER]).unwrap_or_else(|log| panic!("consume failed:\n{log}"));
    assert_eq!(again, [said(&ids[1], "repeated"), said(STRANGER, "repeated")]);
    let shipments = "SELECT string_agg(event_id::text, ' ' ORDER BY event_id) FROM shipments";
    let mut expected = [ids[0].as_str(), ids[1].as_str(), STRANGER];
    expected.sort_unstable();
    assert_eq!(business.outbox.text(shipments), expected.join(" "));
}

/// The three events that were committed, in their order, and nothing of the fourth.
fn assert_records(records: &[Received], ids: &[String]) {
    let text = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let found: Vec<_> = records
        .iter()
        .map(|record| {
            let headers = ["id", "event_type", "traceparent"].map(|name| record.header(name));
            assert_eq!(record.headers.len(), if headers[2].is_some() { 4 } else { 3 }, "{record:?}");
            (headers, text(record.key.as_deref()), text(record.value.as_deref()))
        })
        .collect();
    assert_eq!(ids.len(), 3, "{ids:?}");
    let expected = [
        ("order.placed", None, "1", Some(r#"{"order": 1,  "drink": "☕"}"#)),
        ("order.placed", Some(TRACE), "2", Some(r#"{"items": ["tea", "cup"], "order": 2}"#)),
        ("order.forgotten", None, "1", None),
    ];
    let expected = ids.iter().zip(expected).map(|(id, (event_type, trace, key, value))| {
        ([Some(id.as_str()), Some(event_type), trace], Some(key.to_owned()), value.map(str::to_owned))
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
}

/// The lines that it printed; its log where it failed.
fn run_to_end(command: &mut Command) -> Result<Vec<String>, String> {
    // settings of the machine would add lines of their own, or lead elsewhere
    for variable in ["JAVA_TOOL_OPTIONS", "CLASSPATH", "NODE_OPTIONS", "PGOPTIONS", "PGHOST", "PGPASSWORD"] {
        command.env_remove(variable);
    }
    let process = Process::start("client", &run::folder("client"), command);
    let status = process.wait(PATIENCE);
    let log = process.log();
    if status.success() { Ok(log.lines().map(str::to_owned).collect()) } else { Err(tail(&log)) }
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(path)
}

/// Builds a Go program with the modules that were fetched, and what was compiled of them then; its path.
fn built_by_go(folder: &Path) -> PathBuf {
    let fetched = run::fetched("pgx");
    let built = run::folder("go");
    let mut go = Command::new("go");
    for file in ["go.mod", "go.sum", "client.go"] {
        fs::copy(folder.join(file), built.join(file)).expect("a file of the client");
    }
    go.args(["build", "-o", "client", "."]);
    go.env("GOMODCACHE", fetched.join("modules")).env("GOCACHE", fetched.join("build")).env("GOPROXY", "off");
    go.env("GOFLAGS", "-modcacherw -trimpath -buildvcs=false");
    go.env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local").env("GOWORK", "off");
    let process = Process::start("go", &built, &mut go);
    let status = process.wait(BUILD_PATIENCE);
    assert!(status.success(), "go build failed:\n{}", tail(&process.log()));
    built.join("client")
}

/// Builds an example of this crate, which costs nothing where cargo has built it already; its path.
pub fn example(name: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--message-format=json", "--example", name, "--manifest-path"]);
    cargo.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"));
    let process = Process::start("cargo", &run::folder("example"), &mut cargo);
    let status = process.wait(BUILD_PATIENCE);
    let log = process.log();
    assert!(status.success(), "cargo build --example {name} failed:\n{}", tail(&log));
    let mut messages = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let path = messages.find_map(|message| {
        let is_ours = message["target"]["name"] == name;
        is_ours.then_some(PathBuf::from(message["executable"].as_str()?))
    });
    path.unwrap_or_else(|| panic!("cargo named no executable:\n{log}"))
}
