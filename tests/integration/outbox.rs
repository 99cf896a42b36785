//! What most tests begin with: an outbox in a database of its own, its topics, and a walpost between them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::services::{
    complete,
    database::Database,
    kafka::Kafka,
    postgres::{Postgres, Version},
    topics::Received,
    wait_until,
    walpost::{Ended, Walpost, with_environment},
};

/// How long anything that should happen may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How often a lasting condition is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The table that `walpost init` creates.
pub const DEFAULT_TABLE: &str = include_str!("../../sql/outbox.sql");

/// Claims something of the newest and of the oldest major, at the same time.
pub fn at_both_ends(claim: impl Fn(Version) + Sync) {
    let claim = &claim;
    thread::scope(|scope| {
        for version in [Version::NEWEST, Version::OLDEST] {
            scope.spawn(move || claim(version));
        }
    });
}

/// Claims that a condition holds all through a while.
pub fn stays(long: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + long;
    while Instant::now() < end {
        assert!(condition(), "was to stay for {long:?}, and did not: {what}");
        thread::sleep(LOOK_INTERVAL);
    }
}

/// A position in the WAL as a number.
pub fn lsn(text: &str) -> u64 {
    let (high, low) = text.split_once('/').unwrap_or_else(|| panic!("no LSN: {text}"));
    let half = |digits: &str| u64::from_str_radix(digits, 16).expect("hexadecimal digits");
    half(high) << 32 | half(low)
}

/// How often each event is among the records, by the header `id`.
pub fn deliveries(records: &[Received]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for record in records {
        *counts.entry(record.header("id").expect("every record has an id").to_owned()).or_default() += 1;
    }
    counts
}

/// An outbox of a test's own; slot, publication and the topics' prefix are named after its database.
pub struct Outbox<'a> {
    /// Its database.
    pub database: Database<'a>,
    /// Where its events go.
    pub kafka: &'a Kafka,
    client: Mutex<Option<Arc<Client>>>,
}

impl<'a> Outbox<'a> {
    /// An outbox in the default table.
    pub fn new(server: &'a Postgres, kafka: &'a Kafka) -> Self {
        Self::with(server, kafka, DEFAULT_TABLE)
    }

    /// An outbox in the default table of a server that all tests share.
    pub fn shared(version: Version) -> Outbox<'static> {
        Outbox::new(Postgres::shared(version), Kafka::shared())
    }

    /// An outbox in tables of the test's own making.
    pub fn with(server: &'a Postgres, kafka: &'a Kafka, tables: &str) -> Self {
        let outbox = Self { database: server.database(), kafka, client: Mutex::default() };
        outbox.execute(tables);
        outbox
    }

    /// The same outbox on a standby of its server.
    pub fn on<'b>(&self, standby: &'b Postgres) -> Outbox<'b>
    where
        'a: 'b,
    {
        Outbox { database: self.database.on(standby), kafka: self.kafka, client: Mutex::default() }
    }

    /// Creates a topic with so many partitions and returns its whole name.
    pub fn topic(&self, event_type: &str, partitions: i32) -> String {
        let name = self.topic_name(event_type);
        // some records are dated years back, and the broker looks for what is too old half a minute after its start
        self.kafka.create_topic(&name, partitions, &[("retention.ms", "-1")]);
        name
    }

    /// The topic that events of this type go to.
    pub fn topic_name(&self, event_type: &str) -> String {
        format!("{}.{event_type}", self.database.name())
    }

    /// Starts a walpost and waits until it streams.
    pub fn relay(&self, env: &[(&str, &str)]) -> Walpost {
        let walpost = Walpost::relay(&self.database, self.kafka, env);
        walpost.wait_for_log(PATIENCE, "streaming slot=");
        walpost
    }

    /// Runs a command of walpost for this outbox to its end.
    pub fn command(&self, args: &[&str], env: &[(&str, &str)]) -> Ended {
        with_environment(&self.database, self.kafka, env, |env| Walpost::run_to_end(args, env))
    }

    /// Starts a command of walpost for this outbox.
    pub fn start(&self, args: &[&str], env: &[(&str, &str)]) -> Walpost {
        with_environment(&self.database, self.kafka, env, |env| Walpost::start_with(args, env))
    }

    /// Runs statements, in one transaction unless they say otherwise.
    pub fn execute(&self, sql: &str) {
        self.query(sql);
    }

    /// The first column of the first row.
    pub fn value(&self, sql: &str) -> Option<String> {
        let row = self.query(sql).into_iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        row.unwrap_or_else(|| panic!("{sql}: no row")).get(0).map(str::to_owned)
    }

    /// The first column of the first row, which is not NULL.
    pub fn text(&self, sql: &str) -> String {
        self.value(sql).unwrap_or_else(|| panic!("{sql}: NULL"))
    }

    /// Waits until a query says `t`.
    pub fn wait_until_true(&self, limit: Duration, condition: &str) {
        wait_until(limit, condition, || self.value(&format!("SELECT ({condition})")).as_deref() == Some("t"));
    }

    /// The end of what has been written to the WAL.
    pub fn wal_end(&self) -> u64 {
        lsn(&self.text("SELECT pg_current_wal_insert_lsn()"))
    }

    /// What the slot has confirmed.
    pub fn confirmed(&self) -> u64 {
        lsn(&self.text(&self.of_slot("confirmed_flush_lsn")))
    }

    /// The process that streams from the slot; `None` while there is none.
    pub fn walsender(&self) -> Option<i32> {
        let pid = self.value(&self.of_slot("max(active_pid)"))?;
        Some(pid.parse().expect("a process id"))
    }

    /// Waits until everything that has been written by now is confirmed.
    pub fn wait_until_confirmed(&self) {
        let end = self.wal_end();
        wait_until(PATIENCE, "all that was written is confirmed", || self.confirmed() >= end);
    }

    fn of_slot(&self, what: &str) -> String {
        format!("SELECT {what} FROM pg_replication_slots WHERE slot_name = '{}'", self.database.name())
    }

    fn query(&self, sql: &str) -> Vec<SimpleQueryMessage> {
        let ask = || {
            let (client, query) = (self.client(), sql.to_owned());
            complete(async move { client.simple_query(&query).await })
        };
        let messages = match ask() {
            // the server was restarted since the last question
            Err(error) if error.is_closed() => ask(),
            messages => messages,
        };
        messages.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    /// The connection lasts until the server ends it.
    fn client(&self) -> Arc<Client> {
        let mut client = self.client.lock().expect("no panic while the lock is held");
        if client.as_ref().is_none_or(|client| client.is_closed()) {
            *client = Some(Arc::new(self.database.connect()));
        }
        client.as_ref().map(Arc::clone).expect("just made")
    }
}
