//! The services keep their word: what the other tests rely on.

use std::{
    io::{BufRead, BufReader},
    net::TcpStream,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::services::{
    kafka::{self, Kafka},
    postgres::{Postgres, Settings, Stop, Version},
    wait_until,
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

fn produce(kafka: &Kafka, topic: &str, count: usize) {
    let producer: BaseProducer = kafka.client_config().set("enable.idempotence", "true").create().expect("a producer");
    for number in 0..count {
        let (key, value) = (format!("k{}", number % 10), number.to_string());
        producer.send(BaseRecord::to(topic).key(&key).payload(&value)).expect("room in the queue");
    }
    producer.flush(PATIENCE).expect("the broker takes them all");
}
