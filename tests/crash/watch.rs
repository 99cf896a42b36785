//! Watches what the slot confirms against what the broker holds, independently of walpost.
//!
//! The slot is looked at first, the ends of all partitions after it. Every event whose transaction had ended at or before the
//! confirmed position must then lie before those ends: else it was confirmed before the broker had it, whatever comes later.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::Headers,
    topic_partition_list::TopicPartitionListElem,
};
use tokio_postgres::Client;

use crate::{
    world::{PARTITIONS, Shared},
    writers::Ledger,
};

const INTERVAL: Duration = Duration::from_millis(100);
/// How long the broker may take to name the end of a partition; one that is frozen tells nothing.
const ANSWER_LIMIT: Duration = Duration::from_millis(800);
/// How long reading up to those ends may take.
const READ_LIMIT: Duration = Duration::from_secs(30);

type Place = (String, i32);

/// What it found so far.
#[derive(Debug, Default, Clone)]
pub struct Found {
    /// Looks that led to a verdict.
    pub looks: u64,
    /// Events that were confirmed too early.
    pub early: Vec<String>,
}

/// The watch, in a thread of its own.
pub struct Watch {
    found: Arc<Mutex<Found>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watch {
    /// Starts it.
    pub fn start(shared: &Arc<Shared>, ledger: &Ledger) -> Self {
        let found = Arc::<Mutex<Found>>::default();
        let watcher = Watcher {
            shared: Arc::clone(shared),
            found: Arc::clone(&found),
            ledger: Arc::clone(ledger),
            consumer: shared
                .kafka
                .client_config()
                .set("group.id", "watch")
                .set("enable.auto.commit", "false")
                .create()
                .expect("a consumer needs no broker to be made"),
            topics: 0,
            read: HashMap::new(),
            seen: HashMap::new(),
        };
        Self { found, thread: Mutex::new(Some(thread::spawn(|| watcher.watch()))) }
    }

    /// What it found so far.
    pub fn found(&self) -> Found {
        self.found.lock().expect("no panic").clone()
    }

    /// Waits for its end, once the writers are told to stop.
    pub fn join(&self) -> Found {
        if let Some(thread) = self.thread.lock().expect("no panic").take() {
            thread.join().expect("the watch watched");
        }
        self.found()
    }
}

struct Watcher {
    shared: Arc<Shared>,
    found: Arc<Mutex<Found>>,
    ledger: Ledger,
    consumer: BaseConsumer,
    /// How many topics are read.
    topics: usize,
    /// The next offset of each partition.
    read: HashMap<Place, i64>,
    /// Where each event was first seen.
    seen: HashMap<String, (Place, i64)>,
}

impl Watcher {
    fn watch(mut self) {
        let mut link: Option<Client> = None;
        while !self.shared.stop.load(Relaxed) {
            thread::sleep(INTERVAL);
            if link.as_ref().is_none_or(Client::is_closed) {
                link = self.shared.connect();
            }
            let confirmed = link.as_ref().and_then(|client| confirmed(client, &self.shared.name));
            if let Some(confirmed) = confirmed
                && let Some(ends) = self.ends()
                && self.read_to(&ends)
            {
                self.judge(confirmed, &ends);
            }
        }
    }

    /// The end of each partition, asked for in one go; `None` when a broker does not say.
    fn ends(&self) -> Option<HashMap<Place, i64>> {
        let mut asked = TopicPartitionList::new();
        for topic in self.shared.topics() {
            for partition in 0..PARTITIONS {
                // as a time it means the latest
                asked.add_partition_offset(&topic, partition, Offset::End).ok()?;
            }
        }
        let answer = self.consumer.offsets_for_times(asked, ANSWER_LIMIT).ok()?;
        let end = |element: &TopicPartitionListElem<'_>| match (element.error(), element.offset()) {
            (Ok(()), Offset::Offset(end)) => Some(((element.topic().to_owned(), element.partition()), end)),
            _ => None,
        };
        answer.elements().iter().map(end).collect()
    }

    fn read_to(&mut self, ends: &HashMap<Place, i64>) -> bool {
        let topics = self.shared.topics();
        if topics.len() > self.topics {
            self.topics = topics.len();
            let mut all = TopicPartitionList::new();
            for topic in &topics {
                for partition in 0..PARTITIONS {
                    let next = *self.read.entry((topic.clone(), partition)).or_default();
                    all.add_partition_offset(topic, partition, Offset::Offset(next)).expect("a legal offset");
                }
            }
            self.consumer.assign(&all).expect("a legal assignment");
        }
        let since = Instant::now();
        let behind =
            |read: &HashMap<Place, i64>| ends.iter().any(|(place, end)| read.get(place).is_none_or(|next| next < end));
        while behind(&self.read) {
            if since.elapsed() > READ_LIMIT || self.shared.stop.load(Relaxed) {
                return false;
            }
            let Some(Ok(message)) = self.consumer.poll(Duration::from_millis(50)) else { continue };
            let place = (message.topic().to_owned(), message.partition());
            let id = message.headers().into_iter().flat_map(|headers| headers.iter()).find(|header| header.key == "id");
            let id = id.and_then(|header| header.value).map(|id| String::from_utf8_lossy(id).into_owned());
            self.read.insert(place.clone(), message.offset() + 1);
            self.seen.entry(id.expect("every record has an id")).or_insert((place, message.offset()));
        }
        true
    }

    fn judge(&self, confirmed: u64, ends: &HashMap<Place, i64>) {
        let held = |id: &String| {
            self.seen.get(id).is_some_and(|(place, offset)| ends.get(place).is_some_and(|end| offset < end))
        };
        let early: Vec<String> = {
            let ledger = self.ledger.lock().expect("no panic");
            ledger.iter().filter(|(id, end)| **end <= confirmed && !held(id)).map(|(id, _)| id.clone()).collect()
        };
        let mut found = self.found.lock().expect("no panic");
        found.looks += 1;
        let new: Vec<_> = early.into_iter().filter(|id| !found.early.contains(id)).collect();
        found.early.extend(new);
    }
}

fn confirmed(client: &Client, slot: &str) -> Option<u64> {
    let sql = format!(
        "SELECT (confirmed_flush_lsn - '0/0')::text FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn IS NOT NULL"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let limit = Duration::from_secs(2);
    let row = runtime.block_on(async { tokio::time::timeout(limit, client.query_opt(&sql, &[])).await });
    row.ok()?.ok()??.get::<_, String>(0).parse().ok()
}
