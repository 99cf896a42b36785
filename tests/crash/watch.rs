//! Watches what the slot confirms against what the broker holds, independently of walpost.
//!
//! All that Kafka shows is read, then the slot is looked at. An event whose transaction had ended at or before the confirmed
//! position and which was not read by then is a suspect: the ends of its topic's partitions are asked for at once, and it
//! must lie before them. Else it was confirmed before the broker had it, whatever comes later.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
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
    services::wait,
    world::{PARTITIONS, Shared},
    writers::{Ledger, topic_of},
};

const INTERVAL: Duration = Duration::from_millis(50);
/// How long the broker may take to name the end of a partition; it is asked again then.
const ANSWER_LIMIT: Duration = Duration::from_millis(800);
/// How long a sample is kept while the broker does not answer.
const SAMPLE_LIMIT: Duration = Duration::from_secs(30);

type Place = (String, i32);

/// What it found so far.
#[derive(Debug, Default, Clone)]
pub struct Found {
    /// Looks that led to a verdict.
    pub looks: u64,
    /// Looks that did not: the broker was away for too long.
    pub blind: u64,
    /// Events that were confirmed and were there by then.
    pub checked: usize,
    /// Events that were confirmed too early.
    pub early: BTreeSet<String>,
}

/// The watch, in a thread of its own.
pub struct Watch {
    found: Arc<Mutex<Found>>,
    end: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watch {
    /// Starts it.
    pub fn start(shared: &Arc<Shared>, ledger: &Ledger) -> Self {
        let (found, end) = (Arc::<Mutex<Found>>::default(), Arc::<AtomicBool>::default());
        let watcher = Watcher {
            reader: Reader::new(shared),
            shared: Arc::clone(shared),
            found: Arc::clone(&found),
            end: Arc::clone(&end),
            ledger: Arc::clone(ledger),
            taken: 0,
            owed: HashMap::new(),
        };
        Self { found, end, thread: Mutex::new(Some(thread::spawn(|| watcher.watch()))) }
    }

    /// What it found so far.
    pub fn found(&self) -> Found {
        self.found.lock().expect("no panic").clone()
    }

    /// Lets it look a last time and ends it.
    pub fn finish(&self) -> Found {
        self.end.store(true, Relaxed);
        if let Some(thread) = self.thread.lock().expect("no panic").take() {
            thread.join().expect("the watch watched");
        }
        self.found()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
    }
}

struct Watcher {
    shared: Arc<Shared>,
    found: Arc<Mutex<Found>>,
    end: Arc<AtomicBool>,
    ledger: Ledger,
    /// So many entries of the ledger were taken over.
    taken: usize,
    /// Committed and not read yet: by which position the transaction had ended.
    owed: HashMap<String, u64>,
    reader: Reader,
}

impl Watcher {
    fn watch(mut self) {
        let mut link: Option<Client> = None;
        loop {
            // before the look, so that there is a look after it
            let last = self.end.load(Relaxed);
            if link.as_ref().is_none_or(Client::is_closed) {
                link = self.shared.connect();
            }
            if let Some(client) = &link {
                self.look(client);
            }
            if last {
                return;
            }
            thread::sleep(INTERVAL);
        }
    }

    fn look(&mut self, client: &Client) {
        self.take_ledger();
        self.reader.follow(&self.topics_owed());
        self.reader.read();
        self.settle();
        let Some(confirmed) = confirmed(client, &self.shared.name) else { return };
        let suspects: Vec<String> =
            self.owed.iter().filter(|(_, end)| **end <= confirmed).map(|(id, _)| id.clone()).collect();
        let early = if suspects.is_empty() { Some(Vec::new()) } else { self.reader.missing(suspects) };
        self.settle();
        let mut found = self.found.lock().expect("no panic");
        match early {
            Some(early) => {
                found.looks += 1;
                found.early.extend(early);
            }
            None => found.blind += 1,
        }
    }

    fn take_ledger(&mut self) {
        let ledger = self.ledger.lock().expect("no panic");
        self.owed.extend(ledger[self.taken..].iter().cloned());
        self.taken = ledger.len();
    }

    fn topics_owed(&self) -> BTreeSet<String> {
        let mut numbers: BTreeSet<u32> = self.owed.keys().map(|id| topic_of(id)).collect();
        numbers.insert(self.shared.topic.load(Relaxed));
        numbers.into_iter().map(|number| self.shared.topic_name(number)).collect()
    }

    /// What was read is owed no more.
    fn settle(&mut self) {
        let before = self.owed.len();
        self.owed.retain(|id, _| !self.reader.seen.contains_key(id));
        self.found.lock().expect("no panic").checked += before - self.owed.len();
    }
}

/// Reads the topics that something is owed to.
struct Reader {
    shared: Arc<Shared>,
    consumer: BaseConsumer,
    /// Asks for ends. Those that it is told count what is in the log, though its transaction may not be marked as committed in
    /// each partition yet: the brokers decide first and mark later.
    asker: BaseConsumer,
    topics: BTreeSet<String>,
    /// The next offset of each partition.
    next: HashMap<Place, i64>,
    /// Where each event was first seen.
    seen: HashMap<String, (Place, i64)>,
}

impl Reader {
    fn new(shared: &Arc<Shared>) -> Self {
        Self {
            consumer: consumer(shared, "read_committed"),
            asker: consumer(shared, "read_uncommitted"),
            shared: Arc::clone(shared),
            topics: BTreeSet::new(),
            next: HashMap::new(),
            seen: HashMap::new(),
        }
    }

    /// Reads these topics too. A new consumer: one whose assignment changes while a broker is away has been seen to abort.
    fn follow(&mut self, topics: &BTreeSet<String>) {
        if topics.is_subset(&self.topics) {
            return;
        }
        let mut assignment = TopicPartitionList::new();
        for topic in topics {
            for partition in 0..PARTITIONS {
                let next = *self.next.entry((topic.clone(), partition)).or_default();
                assignment.add_partition_offset(topic, partition, Offset::Offset(next)).expect("a legal offset");
            }
        }
        self.consumer = consumer(&self.shared, "read_committed");
        self.consumer.assign(&assignment).expect("a legal assignment");
        self.topics.clone_from(topics);
    }

    /// Takes what is there.
    fn read(&mut self) {
        while self.read_one(Duration::ZERO) {}
    }

    fn read_one(&mut self, patience: Duration) -> bool {
        let Some(event) = self.consumer.poll(patience) else { return false };
        // it reconnects by itself; each wait has its limit
        let Ok(message) = event else { return true };
        let place = (message.topic().to_owned(), message.partition());
        let id = message.headers().into_iter().flat_map(|headers| headers.iter()).find(|header| header.key == "id");
        let id = id.and_then(|header| header.value).map(|id| String::from_utf8_lossy(id).into_owned());
        self.next.insert(place.clone(), message.offset() + 1);
        self.seen.entry(id.expect("every record has an id")).or_insert((place, message.offset()));
        true
    }

    /// Which of these the broker does not hold now; `None` when it does not answer.
    fn missing(&mut self, suspects: Vec<String>) -> Option<Vec<String>> {
        let since = Instant::now();
        let topics: BTreeSet<String> = suspects.iter().map(|id| self.shared.topic_name(topic_of(id))).collect();
        let ends = loop {
            match self.ends(&topics) {
                Some(ends) => break ends,
                None if since.elapsed() > SAMPLE_LIMIT => return None,
                None => {}
            }
        };
        // behind the last record there may be the end of a transaction, which no reader is shown; so those wait for each
        let once = self.shared.once;
        while !suspects.iter().all(|id| self.seen.contains_key(id)) && (once || !self.has_reached(&ends)) {
            if since.elapsed() > 2 * SAMPLE_LIMIT {
                // what was committed is shown within a minute, unless no broker answers
                self.ends(&topics).filter(|_| once)?;
                break;
            }
            self.read_one(Duration::from_millis(50));
        }
        let held = |id: &String| {
            self.seen.get(id).is_some_and(|(place, offset)| ends.get(place).is_some_and(|end| offset < end))
        };
        Some(suspects.into_iter().filter(|id| !held(id)).collect())
    }

    fn has_reached(&self, ends: &HashMap<Place, i64>) -> bool {
        ends.iter().all(|(place, end)| self.next.get(place).is_some_and(|next| next >= end))
    }

    /// The end of each partition, asked for in one go.
    fn ends(&self, topics: &BTreeSet<String>) -> Option<HashMap<Place, i64>> {
        let mut asked = TopicPartitionList::new();
        for topic in topics {
            for partition in 0..PARTITIONS {
                // as a time it means the latest
                asked.add_partition_offset(topic, partition, Offset::End).ok()?;
            }
        }
        let answer = self.asker.offsets_for_times(asked, ANSWER_LIMIT).ok()?;
        let end = |element: &TopicPartitionListElem<'_>| match (element.error(), element.offset()) {
            (Ok(()), Offset::Offset(end)) => Some(((element.topic().to_owned(), element.partition()), end)),
            _ => None,
        };
        let ends: HashMap<Place, i64> = answer.elements().iter().map(end).collect::<Option<_>>()?;
        (ends.len() == topics.len() * usize::try_from(PARTITIONS).ok()?).then_some(ends)
    }
}

fn consumer(shared: &Shared, isolation: &str) -> BaseConsumer {
    let mut config = shared.kafka.client_config();
    config.set("isolation.level", isolation);
    config.set("group.id", "watch").set("enable.auto.commit", "false");
    // what is there shall be seen at once
    config.set("fetch.error.backoff.ms", "50").set("fetch.queue.backoff.ms", "10");
    config.set("reconnect.backoff.max.ms", "500");
    config.create().expect("a consumer needs no broker to be made")
}

fn confirmed(client: &Client, slot: &str) -> Option<u64> {
    let sql = format!(
        "SELECT (confirmed_flush_lsn - '0/0')::text FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn IS NOT NULL"
    );
    let limit = Duration::from_secs(2);
    let row = wait(async { tokio::time::timeout(limit, client.query_opt(&sql, &[])).await });
    row.ok()?.ok()??.get::<_, String>(0).parse().ok()
}
