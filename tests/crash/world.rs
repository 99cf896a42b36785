//! The servers, the outbox, and the walpost between them.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use tokio_postgres::Client;

use crate::{
    services::{
        database::Database,
        kafka::{Kafka, Settings as KafkaSettings},
        postgres::{Postgres, Settings},
        proxy::{Proxy, Weather},
        wait,
        walpost::{Walpost, with_environment},
    },
    watch::Watch,
    writers::Writers,
};

pub const PARTITIONS: i32 = 3;
/// What retention deletes is noted, with the time of it.
const TABLES: &str = "
    CREATE TABLE outbox (id text PRIMARY KEY, event_type text NOT NULL, key text, payload text,
        created_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX ON outbox (created_at);
    CREATE TABLE gone (id text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
    CREATE FUNCTION note_gone() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO public.gone (id) VALUES (OLD.id); RETURN NULL; END $$;
    CREATE TRIGGER note_gone AFTER DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION note_gone();
    CREATE TABLE other (a text)";
/// How long everything may take to be confirmed once nothing is broken any more.
const HEALED_WITHIN: Duration = Duration::from_mins(2);

/// What writers and watch share with it.
pub struct Shared {
    pub postgres: Postgres,
    pub kafka: Kafka,
    /// Name of the database, slot and publication.
    pub name: String,
    /// The topic that new events go to, by number.
    pub topic: AtomicU32,
    pub stop: AtomicBool,
    /// Exactly-once delivery.
    pub once: bool,
}

impl Shared {
    /// The whole name of a topic.
    pub fn topic_name(&self, number: u32) -> String {
        format!("{}.t{number}", self.name)
    }

    /// All topics so far.
    pub fn topics(&self) -> Vec<String> {
        (0..=self.topic.load(Relaxed)).map(|number| self.topic_name(number)).collect()
    }

    /// A link of its own; `None` while the server is away.
    pub fn connect(&self) -> Option<Client> {
        Database::named(&self.postgres, &self.name).try_connect()
    }
}

/// Everything that runs.
pub struct World {
    pub shared: Arc<Shared>,
    /// Between walpost and Postgres.
    pub postgres_link: Proxy,
    walpost: Mutex<Option<Walpost>>,
    pub writers: Writers,
    pub watch: Watch,
    bug: Option<&'static str>,
}

impl World {
    /// Starts servers, writers and a walpost. `giant`: one transaction of 200,000 rows is among what is written.
    pub fn start(writers: usize, giant: bool, once: bool) -> Self {
        Self::with(writers, giant, once, None)
    }

    /// The same with a deliberate bug in walpost.
    pub fn with_bug(writers: usize, bug: Option<&'static str>) -> Self {
        Self::with(writers, false, false, bug)
    }

    fn with(writers: usize, giant: bool, once: bool, bug: Option<&'static str>) -> Self {
        let settings = Settings::default().set("max_prepared_transactions", "50").set("wal_sender_timeout", "20s");
        let postgres = Postgres::start(crate::services::postgres::Version::NEWEST, &settings);
        let brokers = std::env::var("CRASH_BROKERS").ok().map_or(1, |text| text.parse().expect("CRASH_BROKERS"));
        let kafka = KafkaSettings::default().nodes(brokers).proxied();
        // for the judge: when a record was there
        let kafka = kafka.set("log.message.timestamp.type", "LogAppendTime");
        let kafka = if brokers >= 3 { kafka.set("min.insync.replicas", "2") } else { kafka };
        let kafka = Kafka::start(&kafka);
        let name = postgres.database().into_name();
        let postgres_link = Proxy::before(postgres.port());
        let shared = Shared { postgres, kafka, name, topic: AtomicU32::new(0), stop: AtomicBool::new(false), once };
        let shared = Arc::new(shared);
        let client = shared.connect().expect("the server runs");
        crate::services::complete(async move { client.batch_execute(TABLES).await }).expect("a new database");
        shared.kafka.create_topic(&shared.topic_name(0), PARTITIONS, &[]);
        let ledgers = Writers::new(&shared);
        let world = Self {
            postgres_link,
            walpost: Mutex::default(),
            watch: Watch::start(&shared, &ledgers.ledger),
            writers: ledgers,
            shared,
            bug,
        };
        // the slot first: what is older than it is another matter
        world.with_walpost(|walpost| walpost.wait_for_log(HEALED_WITHIN, "streaming slot="));
        world.writers.start(writers, giant);
        world
    }

    /// Later events go to a new topic: its first batches meet a broker that knows nothing of the producer. None is made while
    /// the brokers cannot.
    pub fn new_topic(&self) {
        let next = self.shared.topic.load(Relaxed) + 1;
        if self.shared.kafka.try_create_topic(&self.shared.topic_name(next), PARTITIONS) {
            self.shared.topic.store(next, Relaxed);
        }
    }

    fn spawn(&self, extra: &[(&str, &str)]) -> Walpost {
        let database = Database::named(&self.shared.postgres, &self.shared.name);
        let url = format!("postgres://postgres@127.0.0.1:{}/{}", self.postgres_link.port(), self.shared.name);
        let brokers = self.shared.kafka.proxied_brokers();
        let mut env = vec![
            ("WALPOST_POSTGRES_URL", url.as_str()),
            ("WALPOST_KAFKA_BROKERS", &brokers),
            ("WALPOST_RETENTION_KEEP", "0s"),
            ("WALPOST_RETENTION_INTERVAL", "1s"),
        ];
        if self.shared.once {
            env.push(("WALPOST_KAFKA_DELIVERY", "exactly_once"));
        }
        env.extend(self.bug.map(|bug| ("CRASH_BUG", bug)));
        env.extend(extra);
        with_environment(&database, &self.shared.kafka, &env, Walpost::start)
    }

    /// Starts a walpost if none runs.
    pub fn run_walpost(&self) {
        self.with_walpost(|_| ());
    }

    /// Ends the walpost that runs and starts one with these variables.
    pub fn replace_walpost(&self, extra: &[(&str, &str)]) {
        let mut place = self.walpost.lock().expect("no panic while the lock is held");
        if let Some(walpost) = place.take() {
            assert_no_failure(&walpost);
            walpost.kill9();
        }
        *place = Some(self.spawn(extra));
    }

    /// Starts a walpost beside the one that runs, which is returned.
    pub fn second_walpost(&self) -> Option<Walpost> {
        let mut place = self.walpost.lock().expect("no panic while the lock is held");
        place.replace(self.spawn(&[]))
    }

    /// Acts on the walpost that runs; starts one first if the last has ended. One that ended by itself is a failure.
    pub fn with_walpost<T>(&self, act: impl FnOnce(&Walpost) -> T) -> T {
        let mut place = self.walpost.lock().expect("no panic while the lock is held");
        if let Some(ended) = place.take_if(|walpost| walpost.process().exit_status().is_some()) {
            assert_no_failure(&ended);
        }
        act(place.get_or_insert_with(|| self.spawn(&[])))
    }

    /// Signals the walpost that runs, if one does.
    pub fn signal(&self, signal: Signal) {
        let place = self.walpost.lock().expect("no panic while the lock is held");
        if let Some(walpost) = &*place {
            walpost.process().signal(signal);
        }
    }

    /// Whether the walpost that runs has ended.
    pub fn walpost_has_ended(&self) -> bool {
        let place = self.walpost.lock().expect("no panic while the lock is held");
        place.as_ref().is_none_or(|walpost| walpost.process().exit_status().is_some())
    }

    /// Ends what is broken, stops the writers, and waits until everything is confirmed.
    pub fn heal(&self) {
        self.postgres_link.set(Weather::Clear);
        for node in self.shared.kafka.nodes() {
            node.proxy().set(Weather::Clear);
        }
        self.run_walpost();
        self.writers.stop();
        let client = self.shared.connect().expect("the server runs");
        let end = one(&client, "SELECT pg_current_wal_insert_lsn() - '0/0'");
        let confirmed = format!(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = '{}'",
            self.shared.name
        );
        let since = Instant::now();
        while one(&client, &confirmed) < end {
            assert!(
                since.elapsed() < HEALED_WITHIN,
                "not everything is confirmed; walpost's log:\n{}",
                self.log_tail()
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// The end of walpost's log.
    pub fn log_tail(&self) -> String {
        let log = self.with_walpost(Walpost::log);
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// Killed, stopped as asked, or still running.
fn assert_no_failure(walpost: &Walpost) {
    if let Some(ended) = walpost.process().exit_status() {
        assert!(matches!(ended.code(), None | Some(0)), "walpost ended with {ended}:\n{}", walpost.log());
    }
}

/// A number from the database.
pub fn one(client: &Client, sql: &str) -> f64 {
    let text = text(client, sql);
    text.parse().unwrap_or_else(|_| panic!("{sql}: {text:?} is no number"))
}

fn text(client: &Client, sql: &str) -> String {
    let messages = wait(client.simple_query(sql)).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    messages
        .iter()
        .find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
        .unwrap_or_default()
}
