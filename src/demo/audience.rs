//! The audience: a consumer in this process, with a thread of its own, that notes each record as it arrives.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use rdkafka::{
    Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    message::{BorrowedMessage, Headers},
};
use tokio::{
    sync::{mpsc::UnboundedSender, oneshot},
    time::Instant,
};

use super::{
    DemoError,
    book::{Note, Tally},
    broker::{Broker, PARTITIONS, client_config},
    judge::Arrival,
};

/// The longest wait for a record before other things are looked after.
const POLL: Duration = Duration::from_millis(20);
/// How long the broker may take to say where a partition ends.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long reading to the end may take.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(20);

/// Reads all partitions of some topics from their beginning, without a group.
pub struct Reader {
    consumer: BaseConsumer,
    /// Topic and partition → the offset that comes next.
    next: HashMap<(String, i32), i64>,
}

impl Reader {
    /// Assigns the topics.
    pub fn new(broker: &Broker, topics: &[String]) -> Result<Self, DemoError> {
        let failed = || DemoError::kafka("start a consumer");
        let wait = broker.fetch_wait_ms().to_string();
        let mut config = client_config(&broker.brokers);
        config.set("group.id", "walpost-demo").set("enable.auto.commit", "false");
        config.set("fetch.wait.max.ms", wait).set("fetch.error.backoff.ms", "50");
        let consumer: BaseConsumer = config.create().map_err(failed())?;
        let partitions = topics.iter().flat_map(|topic| (0..PARTITIONS).map(move |partition| (topic, partition)));
        let mut assignment = TopicPartitionList::new();
        for (topic, partition) in partitions.clone() {
            assignment.add_partition_offset(topic, partition, Offset::Beginning).map_err(failed())?;
        }
        consumer.assign(&assignment).map_err(failed())?;
        Ok(Self { consumer, next: partitions.map(|(topic, partition)| ((topic.clone(), partition), 0)).collect() })
    }

    /// The next record, if one comes soon. Errors are waited out: librdkafka keeps trying, and whoever waits has a limit.
    pub fn next(&mut self) -> Option<Arrival> {
        let message = self.consumer.poll(POLL)?.ok()?;
        let at = Instant::now();
        self.next.insert((message.topic().to_owned(), message.partition()), message.offset() + 1);
        Some(arrival(&message, at))
    }

    /// Reads up to where the partitions end now; each record goes to `note`.
    pub fn read_to_end(&mut self, mut note: impl FnMut(Arrival)) -> Result<(), DemoError> {
        let ends = self.ends().map_err(DemoError::kafka("ask where the topics end"))?;
        let began = Instant::now();
        while ends.iter().any(|(partition, end)| self.next.get(partition).is_some_and(|next| next < end)) {
            if let Some(arrival) = self.next() {
                note(arrival);
            }
            if began.elapsed() > CATCH_UP_LIMIT {
                return Err(DemoError::InVain {
                    what: "the consumer reached the end of its topics",
                    log: String::new(),
                });
            }
        }
        Ok(())
    }

    fn ends(&self) -> Result<HashMap<(String, i32), i64>, KafkaError> {
        let end = |(topic, partition): &(String, i32)| {
            let (_, high) = self.consumer.fetch_watermarks(topic, *partition, ANSWER_LIMIT)?;
            Ok(((topic.clone(), *partition), high))
        };
        self.next.keys().map(end).collect()
    }
}

fn arrival(message: &BorrowedMessage<'_>, at: Instant) -> Arrival {
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    let id = message.headers().and_then(|headers| headers.iter().find(|header| header.key == "id")?.value);
    Arrival {
        id: text(id),
        topic: message.topic().to_owned(),
        key: text(message.key()),
        payload: text(message.payload()),
        at,
    }
}

type Answer = Result<Tally, DemoError>;

/// The reading thread; it ends when this is dropped.
pub struct Audience {
    questions: Sender<oneshot::Sender<Answer>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Audience {
    /// Starts to read.
    pub fn start(reader: Reader, notes: UnboundedSender<Note>) -> Result<Self, DemoError> {
        let (questions, asked) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("audience".into());
        let thread = thread.spawn(move || listen(reader, &notes, &asked, &told));
        Ok(Self { questions, stop, thread: Some(thread.map_err(DemoError::io("start a thread"))?) })
    }

    /// Reads everything that is in the topics now, and says how it stands then.
    pub async fn catch_up(&self) -> Answer {
        let (reply, answer) = oneshot::channel();
        // where the thread is gone, the answer says so
        let _ = self.questions.send(reply);
        answer.await.unwrap_or(Err(DemoError::Gone("consumer")))
    }
}

impl Drop for Audience {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // it panicked, if at all, with its own message
            let _ = thread.join();
        }
    }
}

fn listen(
    mut reader: Reader,
    notes: &UnboundedSender<Note>,
    questions: &Receiver<oneshot::Sender<Answer>>,
    stop: &AtomicBool,
) {
    // the book is kept for as long as anybody writes into it
    let note = |arrival| drop(notes.send(Note::Arrived(arrival)));
    while !stop.load(Relaxed) {
        if let Some(arrival) = reader.next() {
            note(arrival);
        }
        if let Ok(reply) = questions.try_recv() {
            match reader.read_to_end(note) {
                Err(error) => drop(reply.send(Err(error))),
                Ok(()) => count(notes, reply),
            }
        }
    }
}

/// The book's answer comes behind everything noted so far.
fn count(notes: &UnboundedSender<Note>, reply: oneshot::Sender<Answer>) {
    let (ask, tally) = oneshot::channel();
    let _ = notes.send(Note::Count(ask));
    let _ = reply.send(tally.blocking_recv().map_err(|_| DemoError::Gone("book")));
}
