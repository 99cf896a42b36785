//! The loop against a scripted source and sink.
//!
//! The source behaves as a walsender does: it resumes at the first transaction whose commit record is not before the
//! confirmed position, and puts keepalives anywhere. The sink behaves as a broker does: partitions complete in any order
//! among each other, a lost producer has delivered any prefix of each. The judge looks at every status update.
//!
//! Cases 1, 2, 13 and 55: whatever breaks within a transaction, it comes again as a whole and in order.

use std::{
    collections::{HashMap, VecDeque},
    io,
};

use proptest::prelude::*;

use super::*;
use crate::{
    ack::{AckTracker, Bounds, Load, Ticket},
    config::{self, Config},
    encode::Record,
    sink::Queued,
    source::{
        feedback::StatusUpdate,
        pgoutput::{self, Column, Message, Relation},
    },
};

const PARTITIONS: u64 = 3;

/// A committed transaction: its commit record and end, and how many events it holds.
#[derive(Debug, Clone)]
struct Tx {
    commit_lsn: Lsn,
    end_lsn: Lsn,
    ids: Vec<u64>,
}

/// One step of what the server sends.
#[derive(Debug, Clone)]
enum Step {
    Describe,
    Begin(Lsn),
    Insert(Vec<u8>),
    Commit(Lsn),
    Keepalive(Lsn, bool),
}

/// What a session has to live through.
#[derive(Debug, Clone)]
struct Faults {
    /// The link breaks when so many steps were sent.
    link_after: Option<usize>,
    /// The producer dies at this tick.
    sink_after: Option<usize>,
}

/// The world outside of the loop, which survives sessions.
#[derive(Default)]
struct World {
    log: Vec<Vec<u64>>,
    delivered: HashMap<u64, usize>,
    confirmed: Lsn,
    violations: Vec<String>,
    replies_owed: u32,
}

impl World {
    fn append(&mut self, partition: usize, id: u64) {
        self.log.resize(usize::try_from(PARTITIONS).unwrap(), Vec::new());
        self.log[partition].push(id);
        *self.delivered.entry(id).or_default() += 1;
    }
}

type Shared<T> = std::rc::Rc<std::cell::RefCell<T>>;

struct ScriptedSource {
    steps: VecDeque<Step>,
    arrived: usize,
    relation: Relation,
    history: Vec<Tx>,
    world: Shared<World>,
    faults: Faults,
    sent: usize,
    finish: watch::Sender<Wish>,
}

impl ScriptedSource {
    fn new(history: &[Tx], world: &Shared<World>, faults: Faults, seed: u64) -> (Self, watch::Receiver<Wish>) {
        let mut random = fastrand::Rng::with_seed(seed);
        let confirmed = world.borrow().confirmed;
        let mut steps = VecDeque::from([Step::Describe]);
        let mut position = confirmed;
        for tx in history.iter().filter(|tx| tx.commit_lsn >= confirmed) {
            if random.bool() {
                // anywhere up to the next commit record, which it may equal
                let wal_end = Lsn(random.u64(position.0..=tx.commit_lsn.0));
                steps.push_back(Step::Keepalive(wal_end, random.bool()));
            }
            steps.push_back(Step::Begin(tx.commit_lsn));
            for id in &tx.ids {
                if random.u8(0..8) == 0 {
                    // a server says at most the commit record's position here; a worse one must do no harm
                    let wal_end = Lsn(random.u64(tx.commit_lsn.0..=tx.end_lsn.0));
                    steps.push_back(Step::Keepalive(wal_end, random.bool()));
                }
                steps.push_back(Step::Insert(row_of(*id)));
            }
            steps.push_back(Step::Commit(tx.end_lsn));
            position = tx.end_lsn;
        }
        let (finish, wish) = watch::channel(Wish::Run);
        let source = Self {
            steps,
            arrived: 0,
            relation: relation(),
            history: history.to_vec(),
            world: world.clone(),
            faults,
            sent: 0,
            finish,
        };
        (source, wish)
    }
}

fn relation() -> Relation {
    let column = |name: &str| Column { name: name.into(), type_oid: 25 };
    let columns = ["id", "event_type", "payload"].map(column).to_vec();
    Relation { oid: 7, schema: "public".into(), table: "outbox".into(), columns }
}

fn row_of(id: u64) -> Vec<u8> {
    let mut bytes = b"I\0\0\0\x07N\0\x03".to_vec();
    for value in [id.to_string(), "t".into(), "{}".into()] {
        bytes.push(b't');
        bytes.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
        bytes.extend(value.bytes());
    }
    bytes
}

impl Source for ScriptedSource {
    fn peek(&mut self) -> Result<Option<Event<'_>>, SourceError> {
        if self.arrived == 0 {
            return Ok(None);
        }
        let Some(step) = self.steps.front() else { return Ok(None) };
        Ok(Some(match step {
            Step::Describe => Event::Relation(&self.relation),
            Step::Begin(commit_lsn) => Event::Begin { commit_lsn: *commit_lsn, commit_us: 1, sent_us: 1 },
            Step::Commit(end_lsn) => Event::Commit { end_lsn: *end_lsn },
            Step::Keepalive(wal_end, reply) => {
                Event::Keepalive { wal_end: *wal_end, sent_us: 1, reply_requested: *reply }
            }
            Step::Insert(bytes) => match pgoutput::parse(bytes)? {
                Message::Insert { row, .. } => Event::Insert { relation: &self.relation, row },
                _ => unreachable!("the script holds inserts"),
            },
        }))
    }

    fn consume(&mut self) {
        self.arrived -= 1;
        if let Some(Step::Keepalive(_, true)) = self.steps.pop_front() {
            self.world.borrow_mut().replies_owed += 1;
        }
    }

    async fn drive(&mut self, read: bool, _behind: bool) -> Result<(), SourceError> {
        if !read {
            return Ok(());
        }
        if self.faults.link_after.is_some_and(|limit| self.sent >= limit) {
            return Err(SourceError::Io(io::ErrorKind::ConnectionReset.into()));
        }
        if self.arrived == self.steps.len() {
            self.finish.send_replace(Wish::Drain);
            return std::future::pending().await;
        }
        tokio::task::yield_now().await;
        let more = (self.steps.len() - self.arrived).min(5);
        self.arrived += more;
        self.sent += more;
        Ok(())
    }

    fn owes(&self) -> bool {
        false
    }

    fn send_status(&mut self, update: StatusUpdate) {
        let mut world = self.world.borrow_mut();
        world.replies_owed = 0;
        let confirmed = update.confirmed;
        if confirmed < world.confirmed || confirmed == Lsn::ZERO {
            let text = format!("confirmed went from {} to {confirmed}", world.confirmed);
            world.violations.push(text);
        }
        for tx in self.history.iter().filter(|tx| tx.commit_lsn < confirmed) {
            if let Some(id) = tx.ids.iter().find(|id| !world.delivered.contains_key(id)) {
                let text = format!("confirmed {confirmed} before event {id} of {} was delivered", tx.commit_lsn);
                world.violations.push(text);
            }
        }
        world.confirmed = world.confirmed.max(confirmed);
    }

    async fn finish(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    fn last_received(&self) -> Instant {
        Instant::now()
    }

    fn forgive_silence(&mut self) {}
}

struct ScriptedSink {
    tracker: AckTracker,
    partitions: Vec<VecDeque<(Ticket, u64)>>,
    random: fastrand::Rng,
    world: Shared<World>,
    faults: Faults,
    ticks: usize,
}

impl ScriptedSink {
    fn new(world: &Shared<World>, faults: Faults, seed: u64) -> Self {
        Self {
            tracker: AckTracker::new(Bounds { events: 6, bytes: 1 << 20 }),
            partitions: vec![VecDeque::new(); usize::try_from(PARTITIONS).unwrap()],
            random: fastrand::Rng::with_seed(seed),
            world: world.clone(),
            faults,
            ticks: 0,
        }
    }

    /// Each partition appends some of what it holds; the reports come with it, or never when the producer dies.
    fn deliver(&mut self, report: bool) {
        for (number, partition) in self.partitions.iter_mut().enumerate() {
            for _ in 0..self.random.usize(0..=2) {
                let Some((ticket, id)) = partition.pop_front() else { break };
                self.world.borrow_mut().append(number, id);
                if report {
                    self.tracker.complete(ticket);
                }
            }
        }
    }
}

impl Sink for ScriptedSink {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        self.tracker.open(confirmed);
        Ok(())
    }

    fn enqueue(&mut self, _: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        let Some(ticket) = self.tracker.track(Load { weight: 1, commit_us, ..Load::default() }) else {
            return Ok(Queued::Full);
        };
        let id: u64 = std::str::from_utf8(record.event_id).unwrap().parse().unwrap();
        self.partitions[usize::try_from(id % PARTITIONS).unwrap()].push_back((ticket, id));
        Ok(Queued::Accepted)
    }

    fn seal(&mut self, end: Lsn) {
        self.tracker.seal(end);
    }

    fn durable(&self) -> Lsn {
        self.tracker.watermark()
    }

    fn tick(&mut self, _: i64) -> Result<(), SinkError> {
        self.ticks += 1;
        if self.faults.sink_after.is_some_and(|limit| self.ticks >= limit) {
            self.deliver(false);
            return Err(SinkError::Producer { code: "Scripted".into() });
        }
        self.deliver(true);
        Ok(())
    }

    async fn ready(&self) {
        tokio::task::yield_now().await;
    }

    fn in_flight(&self) -> (u64, u64) {
        self.tracker.in_flight()
    }

    fn oldest_commit_us(&self) -> i64 {
        self.tracker.oldest_commit_us()
    }
}

fn configuration() -> Config {
    let environment = [("WALPOST_POSTGRES_URL", "postgres://u@localhost/d"), ("WALPOST_ROUTE_TOPIC", "t")];
    let environment = environment.map(|(name, value)| (name.into(), value.into()));
    config::load_from(None, environment, &[]).expect("a valid configuration")
}

fn history(sizes: &[(usize, u64)]) -> Vec<Tx> {
    let (mut position, mut next_id) = (10, 0);
    let tx = |(events, gap): &(usize, u64)| {
        let commit_lsn = Lsn(position + gap);
        position = commit_lsn.0 + 5; // with gap 0 the next commit record begins where this one ends
        let ids = (next_id..).take(*events).collect();
        next_id += *events as u64;
        Tx { commit_lsn, end_lsn: Lsn(position), ids }
    };
    sizes.iter().map(tx).collect()
}

fn session(history: &[Tx], world: &Shared<World>, faults: &Faults, seed: u64, stages: &mut Stages) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let (metrics, progress) = (Metrics::new(), Progress::default());
    let outcome = runtime.block_on(async {
        let (mut source, wish) = ScriptedSource::new(history, world, faults.clone(), seed);
        let mut sink = ScriptedSink::new(world, faults.clone(), seed);
        let (_server, server) = watch::channel(ServerState::Up);
        let mut signals =
            Signals { wish, server, pause: watch::channel(false).1, drain_timeout: Duration::from_secs(10) };
        let telltale = Telltale { metrics: &metrics, progress: &progress };
        let confirmed = world.borrow().confirmed;
        run_session(&mut source, &mut sink, (stages, confirmed), &mut signals, telltale).await
    });
    match outcome {
        Ok(()) => assert_eq!(progress.in_flight(), (0, 0), "a clean stop leaves nothing in flight"),
        Err(SessionError::Source(SourceError::Io(_)) | SessionError::Sink(SinkError::Producer { .. })) => {}
        Err(error) => panic!("{error:?}"),
    }
}

fn first_deliveries(log: &[u64]) -> Vec<u64> {
    let mut seen = std::collections::HashSet::new();
    log.iter().copied().filter(|id| seen.insert(*id)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn whatever_breaks_nothing_is_lost_confirmed_early_or_overtaken(
        sizes in prop::collection::vec((0_usize..9, 0_u64..4), 1..25),
        sessions in prop::collection::vec((prop::option::of(0_usize..80), prop::option::of(1_usize..40)), 0..6),
        seed in any::<u64>(),
    ) {
        let history = history(&sizes);
        let world = Shared::<World>::default();
        world.borrow_mut().confirmed = Lsn(10);
        let mut stages = Stages::new(&configuration()).unwrap();
        let faulty = sessions.into_iter().map(|(link_after, sink_after)| Faults { link_after, sink_after });
        let calm = Faults { link_after: None, sink_after: None };
        for (number, faults) in faulty.chain([calm]).enumerate() {
            session(&history, &world, &faults, seed.wrapping_add(number as u64), &mut stages);
        }
        let world = world.borrow();
        prop_assert_eq!(&world.violations, &Vec::<String>::new());
        let written: Vec<u64> = history.iter().flat_map(|tx| tx.ids.clone()).collect();
        for id in &written {
            prop_assert!(world.delivered.contains_key(id), "event {} is lost", id);
        }
        for log in &world.log {
            let first = first_deliveries(log);
            prop_assert!(first.is_sorted(), "a later event overtook an earlier one: {:?}", first);
        }
        prop_assert_eq!(world.confirmed, history.last().unwrap().end_lsn, "a clean stop confirms everything");
    }
}
