//! Writers that keep a ledger of what they have committed, outside of the database, and a judge that holds it against Kafka.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio_postgres::Client;

use crate::{
    outbox::{Outbox, deliveries},
    services::{complete, topics::Received},
};

/// The table that the writers write to.
pub const TABLE: &str = "CREATE TABLE outbox (id text NOT NULL, event_type text NOT NULL, key text, payload text)";

/// The event type of all that they write.
pub const EVENT_TYPE: &str = "t";

/// How often each writer begins a transaction.
const PACE: Duration = Duration::from_millis(5);
const KEYS_OF_A_WRITER: u64 = 4;

/// What was committed: event ids.
type Ledger = Arc<Mutex<BTreeSet<String>>>;

/// Writers at work, each with keys of its own.
pub struct Writers {
    ledger: Ledger,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Starts so many.
    pub fn start(outbox: &Outbox<'_>, count: usize) -> Self {
        let (ledger, stop) = (Ledger::default(), Arc::<AtomicBool>::default());
        let start = |writer| {
            let (client, ledger, stop) = (outbox.database.connect(), Arc::clone(&ledger), Arc::clone(&stop));
            thread::spawn(move || complete(write(client, writer, ledger, stop)))
        };
        let threads = (0..count).map(start).collect();
        Self { ledger, stop, threads }
    }

    /// Stops them and says what they have committed.
    pub fn stop(self) -> BTreeSet<String> {
        self.stop.store(true, Relaxed);
        for thread in self.threads {
            thread.join().expect("the writer wrote");
        }
        std::mem::take(&mut self.ledger.lock().expect("no writer panicked"))
    }
}

async fn write(client: Client, writer: usize, ledger: Ledger, stop: Arc<AtomicBool>) {
    let mut pace = tokio::time::interval(PACE);
    for number in 1.. {
        if stop.load(Relaxed) {
            return;
        }
        pace.tick().await;
        let (sql, committed) = transaction(writer, number);
        client.batch_execute(&sql).await.expect("the server takes it");
        // only now: what is in the ledger was committed for certain, and the server is not killed meanwhile
        ledger.lock().expect("no writer panicked").extend(committed);
    }
}

/// The statements of a transaction and the ids that it commits. Ids are `<key>/<number>`, numbers rise with each commit.
fn transaction(writer: usize, number: u64) -> (String, Vec<String>) {
    let key = format!("w{writer}-{}", number % KEYS_OF_A_WRITER);
    let id = |row: u64| format!("{key}/{}", number * 10 + row);
    let insert = |id: &str| format!("INSERT INTO outbox VALUES ('{id}', '{EVENT_TYPE}', '{key}', 'of {id}');");
    let (one, two) = (insert(&id(1)), insert(&id(2)));
    let undone = insert(&format!("{key}/undone-{number}"));
    match number % 5 {
        0 => (format!("BEGIN; {undone} ROLLBACK"), vec![]),
        1 => (format!("BEGIN; {one} SAVEPOINT s; {undone} ROLLBACK TO s; {two} COMMIT"), vec![id(1), id(2)]),
        2 => (format!("BEGIN; SAVEPOINT s; {one} RELEASE s; {two} COMMIT"), vec![id(1), id(2)]),
        3 => (format!("BEGIN; SAVEPOINT s; {undone} ROLLBACK TO s; ROLLBACK"), vec![]),
        _ => (one, vec![id(1)]),
    }
}

/// What Kafka holds, against the ledger.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Committed and not in Kafka.
    pub lost: Vec<String>,
    /// In Kafka and never committed.
    pub phantoms: Vec<String>,
    /// First deliveries that came after a later one of their key, or in another partition.
    pub inversions: Vec<String>,
    /// Deliveries beyond the first.
    pub duplicates: usize,
}

impl Verdict {
    /// Judges the records of one topic.
    pub fn on(records: &[Received], committed: &BTreeSet<String>) -> Self {
        let delivered = deliveries(records);
        let mut verdict = Self {
            lost: committed.iter().filter(|id| !delivered.contains_key(*id)).cloned().collect(),
            phantoms: delivered.keys().filter(|id| !committed.contains(*id)).cloned().collect(),
            duplicates: records.len() - delivered.len(),
            ..Self::default()
        };
        let (mut seen, mut last) = (BTreeSet::new(), BTreeMap::new());
        for record in records {
            let id = record.header("id").expect("every record has an id");
            if !seen.insert(id) {
                continue;
            }
            let (key, number) = id.split_once('/').expect("an id of ours");
            let place = (record.partition, number.parse::<u64>().unwrap_or_default());
            let (partition, before) = last.insert(key, place).unwrap_or(place);
            if partition != place.0 || before > place.1 {
                verdict.inversions.push(id.to_owned());
            }
        }
        verdict
    }

    /// The same without the duplicates, which a crash may leave.
    pub fn forgiving_duplicates(self) -> Self {
        Self { duplicates: 0, ..self }
    }
}

#[test]
fn the_judge_sees_what_is_wrong() {
    let record = |id: &str, partition| Received {
        topic: String::new(),
        partition,
        offset: 0,
        key: None,
        value: None,
        headers: vec![("id".to_owned(), Some(id.as_bytes().to_vec()))],
        timestamp: None,
    };
    let committed = ["a/1", "a/2", "a/3", "b/1", "b/2"].map(str::to_owned).into();
    let records = [("a/1", 0), ("a/3", 0), ("a/2", 0), ("b/1", 1), ("a/1", 0), ("b/2", 0), ("c/1", 0)];
    let verdict = Verdict::on(&records.map(|(id, partition)| record(id, partition)), &committed);
    assert_eq!((verdict.lost.len(), verdict.duplicates), (0, 1));
    assert_eq!((verdict.phantoms, verdict.inversions), (vec!["c/1".to_owned()], vec!["a/2".into(), "b/2".into()]));
    assert_eq!(Verdict::on(&[], &committed).lost.len(), 5);
}
