//! Writers that keep a ledger of what was committed, outside of the database.

use std::{
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    thread::{self, JoinHandle},
    time::Duration,
};

use futures_util::SinkExt;
use tokio_postgres::{Client, Error, SimpleQueryMessage};

use crate::{
    services::{complete, wait},
    world::Shared,
};

/// How often a writer begins a transaction.
const PACE: Duration = Duration::from_millis(20);
const KEYS_OF_A_WRITER: u64 = 3;
/// Ids have so many numbers to a transaction.
const STRIDE: u64 = 1_000_000;
const LARGE: u64 = 5_000;
const GIANT: u64 = 200_000;

/// Committed for certain: the id, and a position at which its transaction had ended. Entries are added and stay.
pub type Ledger = Arc<Mutex<Vec<(String, u64)>>>;

/// Kinds of transactions, by number.
const KINDS: u64 = 16;
const WITHOUT_VALUE: u64 = 10;
const BIG_VALUE: u64 = 11;
const TWO_KEYS: u64 = 12;
/// How often the text is repeated in a big value.
const REPEATED: usize = 2_000;

/// The payload of an event, which the judge can tell from its id: `topic/key/number`.
pub fn payload(id: &str) -> Option<String> {
    let number = id.rsplit_once('/').and_then(|(_, number)| number.parse::<u64>().ok()).unwrap_or_default();
    match number / STRIDE % KINDS {
        WITHOUT_VALUE => None,
        BIG_VALUE => Some(format!("payload of {id}").repeat(REPEATED)),
        _ => Some(format!("payload of {id}")),
    }
}

/// The number of the topic that an event belongs to.
pub fn topic_of(id: &str) -> u32 {
    id.split('/').next().and_then(|topic| topic.parse().ok()).expect("an id of ours")
}

/// Writers at work.
pub struct Writers {
    shared: Arc<Shared>,
    pub ledger: Ledger,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Writers {
    /// None yet.
    pub fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), ledger: Ledger::default(), threads: Mutex::default() }
    }

    /// Starts so many, and one that writes elsewhere.
    pub fn start(&self, count: usize, giant: bool) {
        let writer = |writer| {
            let (shared, ledger) = (Arc::clone(&self.shared), Arc::clone(&self.ledger));
            thread::spawn(move || Writer { shared, ledger, number: writer, giant: giant && writer == 0 }.write())
        };
        let noise = Arc::clone(&self.shared);
        let mut threads = self.threads.lock().expect("no panic while the lock is held");
        threads.extend((0..count).map(writer));
        threads.push(thread::spawn(move || make_noise(&noise)));
    }

    /// Stops them all.
    pub fn stop(&self) {
        self.shared.stop.store(true, Relaxed);
        for thread in self.threads.lock().expect("no panic while the lock is held").drain(..) {
            thread.join().expect("the writer wrote");
        }
    }
}

struct Writer {
    shared: Arc<Shared>,
    ledger: Ledger,
    number: usize,
    giant: bool,
}

impl Writer {
    /// One transaction after the other; after a lost link the next has a new number, so what became of the last is for the
    /// table to say.
    fn write(mut self) {
        let mut link: Option<Arc<Client>> = None;
        for number in 1.. {
            if self.shared.stop.load(Relaxed) {
                break;
            }
            thread::sleep(PACE);
            if link.as_ref().is_none_or(|client| client.is_closed()) {
                link = self.shared.connect().map(Arc::new);
                if let Some(client) = &link {
                    self.forget_prepared(client);
                }
            }
            let Some(client) = link.clone() else { continue };
            let transaction = self.transaction(number);
            let ids = transaction.ids.clone();
            // a fault of the statement itself would be a fault of this kit
            match complete(async move { run(&client, transaction).await }) {
                Ok(end) => self.ledger.lock().expect("no panic").extend(ids.into_iter().map(|id| (id, end))),
                Err(error) => {
                    let gone =
                        error.code().is_none_or(|code| code.code().starts_with("57") || code.code().starts_with("08"));
                    assert!(gone, "{error:?}");
                    link = None;
                }
            }
        }
        if let Some(client) = self.shared.connect() {
            self.forget_prepared(&client);
        }
    }

    /// What was prepared when the link broke is rolled back; a later transaction of its keys must not overtake it.
    fn forget_prepared(&self, client: &Client) {
        let gids = format!("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE 'w{}-%'", self.number);
        wait(async {
            for message in client.simple_query(&gids).await.unwrap_or_default() {
                if let SimpleQueryMessage::Row(row) = message {
                    let _ =
                        client.batch_execute(&format!("ROLLBACK PREPARED '{}'", row.get(0).unwrap_or_default())).await;
                }
            }
        });
    }

    fn transaction(&mut self, number: u64) -> Transaction {
        let key = format!("w{}k{}", self.number, number % KEYS_OF_A_WRITER);
        let other_key = format!("w{}k{}", self.number, (number + 1) % KEYS_OF_A_WRITER);
        let topic = self.shared.topic.load(Relaxed);
        let id = |row: u64| format!("{topic}/{key}/{}", number * STRIDE + row);
        let insert_as = |id: &str, key: &str| {
            let payload = payload(id).map_or("NULL".to_owned(), |payload| format!("'{payload}'"));
            format!("INSERT INTO outbox VALUES ('{id}', 't{topic}', '{key}', {payload});")
        };
        let insert = |id: &str| insert_as(id, &key);
        let undone = insert(&format!("{topic}/{key}/undone{number}"));
        let series = |rows: u64| {
            let base = number * STRIDE;
            format!(
                "INSERT INTO outbox SELECT i, 't{topic}', '{key}', 'payload of ' || i
                 FROM (SELECT '{topic}/{key}/' || {base} + n AS i FROM generate_series(1, {rows}) n) ids"
            )
        };
        let (one, two) = (insert(&id(1)), insert(&id(2)));
        let gid = format!("w{}-{number}", self.number);
        let (sql, rows) = match number % KINDS {
            0 => (format!("BEGIN; {undone} ROLLBACK"), 0),
            1 | 2 => (format!("BEGIN; {one} SAVEPOINT s; {undone} ROLLBACK TO s; {two} COMMIT"), 2),
            3 => (format!("BEGIN; {one} INSERT INTO other VALUES ('{gid}'); {two} COMMIT"), 2),
            4 => (format!("BEGIN; SAVEPOINT s; {undone} ROLLBACK TO s; ROLLBACK"), 0),
            5 => (format!("BEGIN; {one} PREPARE TRANSACTION '{gid}'; COMMIT PREPARED '{gid}'"), 1),
            6 => (format!("BEGIN; {undone} PREPARE TRANSACTION '{gid}'; ROLLBACK PREPARED '{gid}'"), 0),
            7 => (series(20), 20),
            8 if self.giant && number > 1000 => {
                self.giant = false;
                (series(GIANT), GIANT)
            }
            8 if number % 640 == 8 && self.number == 1 => (series(LARGE), LARGE),
            TWO_KEYS => {
                let other = format!("{topic}/{other_key}/{}", number * STRIDE + 2);
                let sql = format!("BEGIN; {one} {} COMMIT", insert_as(&other, &other_key));
                return Transaction { sql, copy: None, ids: vec![id(1), other] };
            }
            9 => {
                let ids: Vec<_> = (1..=30).map(id).collect();
                let lines = ids.iter().map(|id| format!("{id}\tt{topic}\t{key}\tpayload of {id}\n"));
                return Transaction { sql: String::new(), copy: Some(lines.collect()), ids };
            }
            _ => (one, 1),
        };
        Transaction { sql, copy: None, ids: (1..=rows).map(id).collect() }
    }
}

struct Transaction {
    sql: String,
    /// The lines of a COPY.
    copy: Option<String>,
    ids: Vec<String>,
}

/// Runs it and says by which position it had ended.
async fn run(client: &Client, transaction: Transaction) -> Result<u64, Error> {
    match transaction.copy {
        Some(lines) => {
            let sink =
                client.copy_in::<_, bytes::Bytes>("COPY outbox (id, event_type, key, payload) FROM STDIN").await?;
            let mut sink = std::pin::pin!(sink);
            sink.send(lines.into()).await?;
            sink.finish().await?;
        }
        None if transaction.sql.contains("PREPARE") => {
            // these may not share a message with others
            for statement in transaction.sql.split("; ") {
                client.batch_execute(statement).await?;
            }
        }
        None => client.batch_execute(&transaction.sql).await?,
    }
    let end: String = client.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::text", &[]).await?.get(0);
    Ok(end.parse().expect("a number"))
}

/// Other tables, another database, logical messages.
fn make_noise(shared: &Shared) {
    let mut link: Option<Client> = None;
    while !shared.stop.load(Relaxed) {
        thread::sleep(PACE);
        if link.as_ref().is_none_or(Client::is_closed) {
            link = crate::services::database::Database::named(&shared.postgres, "postgres").try_connect();
        }
        let Some(client) = &link else { continue };
        let sql = "CREATE TABLE IF NOT EXISTS elsewhere (a text); INSERT INTO elsewhere VALUES (repeat('x', 500));
             SELECT pg_logical_emit_message(false, 'noise', 'x')";
        let _ = wait(client.batch_execute(sql));
    }
}
