//! The services keep their word: what the other tests rely on.

use std::{
    io::{BufRead, BufReader},
    net::TcpStream,
    path::Path,
    pin::pin,
    process::{Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use openssl::{
    ssl::{SslConnector, SslMethod},
    x509::X509,
};
use postgres_openssl::MakeTlsConnector;
use rdkafka::{
    ClientContext,
    error::KafkaError,
    message::DeliveryResult,
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};
use tokio::time::timeout;
use tokio_postgres::{
    NoTls, Socket,
    tls::{MakeTlsConnect, TlsConnect},
};

use crate::services::{
    certificates::Authority,
    complete,
    kafka::{self, Kafka},
    postgres::{Postgres, Settings, Stop, Version},
    wait_until,
    walpost::Walpost,
};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn every_major_starts_with_logical_wal() {
    for version in Version::MAJORS {
        let database = Postgres::shared(version).database();
        assert_eq!(database.value("SHOW wal_level").as_deref(), Some("logical"));
        let Version::Major(major) = version else { unreachable!("MAJORS holds majors") };
        let number: u32 = database.value("SHOW server_version_num").expect("a number").parse().expect("a number");
        assert_eq!(number / 10_000, u32::from(major));
    }
}

#[test]
fn the_systems_server_starts_with_logical_wal() {
    let database = Postgres::shared(Version::System).database();
    assert_eq!(database.value("SHOW wal_level").as_deref(), Some("logical"));
}

#[test]
fn a_database_goes_with_its_slots() {
    let server = Postgres::shared(Version::NEWEST);
    let witness = server.database();
    let database = server.database();
    let name = database.name().to_owned();
    database.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
    drop(database);
    let left = format!(
        "SELECT (SELECT count(*) FROM pg_database WHERE datname = '{name}')
              + (SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}')"
    );
    assert_eq!(witness.value(&left).as_deref(), Some("0"));
}

#[test]
fn a_server_of_ones_own_obeys_its_settings_and_comes_back_on_its_port() {
    let settings = Settings::default().set("wal_sender_timeout", "5s").hba("host all all 127.0.0.1/32 reject");
    let server = Postgres::start(Version::NEWEST, &settings);
    let database = server.database();
    assert_eq!(database.value("SHOW wal_sender_timeout").as_deref(), Some("5s"));
    database.execute("CREATE TABLE kept (a int)");
    server.stop(Stop::Fast);
    server.start_again();
    server.stop(Stop::Immediate);
    server.start_again();
    assert_eq!(database.value("SELECT count(*) FROM kept").as_deref(), Some("0"));
    assert!(server.log().contains("immediate shutdown"));
}

#[test]
fn a_server_speaks_tls_with_a_certificate_of_ones_own() {
    let authority = Authority::new();
    let issued = authority.server("localhost");
    let settings = Settings::default()
        .set("ssl", "on")
        .file("server.crt", issued.certificate)
        .file("server.key", issued.key)
        .hba("hostssl all all 127.0.0.1/32 trust");
    let server = Postgres::start(Version::OLDEST, &settings);
    let database = server.database();
    let mut connector = SslConnector::builder(SslMethod::tls()).expect("OpenSSL is there");
    let root = X509::from_pem(&authority.certificate()).expect("our own certificate");
    connector.cert_store_mut().add_cert(root).expect("an empty store takes it");
    let url = format!("{}?hostaddr=127.0.0.1&sslmode=require", database.url().replace("127.0.0.1", "localhost"));

    let with_tls = connect_as(url.clone(), MakeTlsConnector::new(connector.build()));
    assert!(with_tls.expect("the certificate is good"), "the connection is encrypted");
    assert!(connect_as(url.replace("require", "disable"), NoTls).is_err(), "pg_hba.conf asks for TLS");
}

#[tokio::test]
async fn a_frozen_server_is_silent_and_goes_on() {
    let server = Postgres::start(Version::System, &Settings::default());
    let database = server.database();
    let client = database.connect();
    server.freeze();
    let mut answer = pin!(client.simple_query("SELECT 1"));
    assert!(timeout(Duration::from_millis(200), &mut answer).await.is_err());
    server.thaw();
    assert!(timeout(PATIENCE, answer).await.expect("an answer in time").is_ok());
}

#[test]
fn a_frozen_broker_is_silent_and_goes_on() {
    let kafka = Kafka::start(&kafka::Settings::default());
    kafka.create_topic("t", 1, &[]);
    let producer: BaseProducer = kafka.client_config().create().expect("a producer");
    kafka.freeze();
    producer.send(BaseRecord::<(), str>::to("t").payload("frozen")).expect("room in the queue");
    assert!(producer.flush(Duration::from_millis(500)).is_err());
    kafka.thaw();
    producer.flush(PATIENCE).expect("the broker takes it");
    kafka.kill();
    kafka.start_again();
    assert_eq!(kafka.read_all(&["t"])[0].value.as_deref(), Some(&b"frozen"[..]));
}

#[tokio::test]
async fn the_services_can_be_called_from_async_tests() {
    let database = Postgres::shared(Version::NEWEST).database();
    let client = database.connect();
    let row = client.query_one("SELECT 1 + 1", &[]).await.expect("a row");
    assert_eq!(row.get::<_, i32>(0), 2);
}

#[test]
fn kafka_takes_and_returns_records() {
    let kafka = Kafka::shared();
    let database = Postgres::shared(Version::NEWEST).database();
    let (one, two) = (format!("{}.one", database.name()), format!("{}.two", database.name()));
    kafka.create_topic(&one, 3, &[("cleanup.policy", "compact")]);
    kafka.create_topic(&two, 1, &[]);
    produce(kafka, &one, 100);
    produce(kafka, &two, 10);
    assert_eq!(kafka.record_count(&one), 100);
    let mut records = kafka.read_all(&[&one, &two]);
    assert_eq!(records.len(), 110);
    records.retain(|record| record.topic == two);
    assert_eq!(records.iter().map(|record| record.offset).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert_eq!(records[7].value.as_deref(), Some(&b"7"[..]));
    assert_eq!(kafka.read_until(&[&two], PATIENCE, |records| records.len() >= 5).len() / 5, 2);
    kafka.alter_topic(&two, &[("max.message.bytes", "10")]);
    assert!(try_produce(kafka, &two, 1).is_err(), "no batch is that small");
    kafka.delete_topic(&two);
    assert_eq!(kafka.partitions(&two), None);
}

#[test]
fn three_brokers_survive_the_loss_of_one() {
    let kafka = Kafka::start(&kafka::Settings::default().nodes(3).set("min.insync.replicas", "2"));
    kafka.create_topic("t", 3, &[]);
    kafka.nodes()[0].kill();
    produce(&kafka, "t", 10);
    kafka.nodes()[0].start_again();
    kafka.wait_until_up();
    assert_eq!(kafka.read_all(&["t"]).len(), 10);
}

#[test]
fn a_command_is_run_to_its_end() {
    let ended = Walpost::run_to_end(&["--version"], &[]);
    assert_eq!((ended.code, ended.output.trim()), (Some(0), concat!("walpost ", env!("CARGO_PKG_VERSION"))));
}

/// The run that is killed is this very test in a process of its own.
#[test]
fn killed_run_leaves_no_process() {
    const HOLD: &str = "WALPOST_TEST_HOLD";
    if std::env::var_os(HOLD).is_some() {
        let (postgres, kafka) = (Postgres::start(Version::NEWEST, &Settings::default()), Kafka::shared());
        println!("\nholding {} {}", postgres.socket_folder().display(), kafka.brokers());
        loop {
            std::thread::park();
        }
    }
    let mut run = Command::new(std::env::current_exe().expect("our own path"));
    run.args(["--exact", "servers::killed_run_leaves_no_process", "--nocapture"]);
    let mut run = run.env(HOLD, "1").stdout(Stdio::piped()).spawn().expect("a second run");
    let mut lines = BufReader::new(run.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let line = lines.find_map(|line| Some(line.strip_prefix("holding ")?.to_owned())).expect("both servers start");
    let (folder, brokers) = line.split_once(' ').expect("a folder and an address");
    let run_folder = Path::new(folder).parent().expect("it lies below the run's folder");
    assert!(run_folder.exists() && TcpStream::connect(brokers).is_ok());

    run.kill().expect("our own child");
    run.wait().expect("our own child");
    wait_until(PATIENCE, "the folder of the killed run is gone", || !run_folder.exists());
    assert!(TcpStream::connect(brokers).is_err(), "Kafka still listens");
    let workers = std::fs::read_dir("/proc").expect("/proc").flatten();
    let mut folders = workers.filter_map(|process| std::fs::read_link(process.path().join("cwd")).ok());
    assert_eq!(folders.find(|cwd| cwd.starts_with(run_folder)), None);
}

/// Connects and says whether the connection is encrypted.
fn connect_as<T>(url: String, tls: T) -> Result<bool, tokio_postgres::Error>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    complete(async move {
        let (client, connection) = tokio_postgres::connect(&url, tls).await?;
        tokio::spawn(connection);
        let row = client.query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await?;
        Ok(row.get(0))
    })
}

fn produce(kafka: &Kafka, topic: &str, count: usize) {
    try_produce(kafka, topic, count).expect("the broker takes them all");
}

fn try_produce(kafka: &Kafka, topic: &str, count: usize) -> Result<(), KafkaError> {
    let config = kafka.client_config().set("enable.idempotence", "true").clone();
    let producer: BaseProducer<Failures> = config.create_with_context(Failures::default())?;
    for number in 0..count {
        let (key, value) = (format!("k{}", number % 10), number.to_string());
        producer.send(BaseRecord::to(topic).key(&key).payload(&value)).map_err(|(error, _)| error)?;
    }
    producer.flush(PATIENCE)?;
    let mut failures = producer.context().0.lock().expect("no panic in the callback");
    failures.pop().map_or(Ok(()), Err)
}

/// Errors of delivery reports.
#[derive(Default)]
struct Failures(Mutex<Vec<KafkaError>>);

impl ClientContext for Failures {}

impl ProducerContext for Failures {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if let Err((error, _)) = result {
            self.0.lock().expect("no panic while the lock is held").push(error.clone());
        }
    }
}
