//! The fence against a small world of transactions, slots and walposts that come and go: what it calls delivered, was.

use proptest::prelude::*;

use super::*;

/// A row: its xid as it stands in the table now, and where its transaction committed.
#[derive(Debug, Clone, Copy)]
struct Row {
    xid: u64,
    commit: Option<Lsn>,
    delivered: bool,
}

#[derive(Debug, Clone, Copy)]
struct Transaction {
    xid: u64,
}

/// A walpost.
#[derive(Debug)]
struct Process {
    begun: Lsn,
    confirmed: Lsn,
    fence: Fence,
}

/// One table, one slot, at most one walpost.
#[derive(Debug)]
struct World {
    next: u64,
    wal_end: Lsn,
    slot: Lsn,
    shape: u32,
    running: Vec<Transaction>,
    rows: Vec<Row>,
    /// Every row's transaction, while it runs, by index into `rows`.
    unfinished: Vec<(u64, usize)>,
    stored: Vec<Interval>,
    process: Option<Process>,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Begin,
    /// A row, under a savepoint or not.
    Insert(usize, bool),
    Commit(usize),
    Abort(usize),
    OtherWal,
    Start,
    /// Everything up to so many tenths of what is in the WAL is delivered and confirmed.
    Deliver(u64),
    Tick,
    Kill,
    Stop,
    /// A reconnect, which finds the slot where it is.
    Reconnect,
    /// Dropped and made anew, or moved by hand.
    MoveSlot,
    /// The server forgot the last confirms.
    Rewind(u64),
    /// All rows get a new xid.
    Rewrite,
    /// The record is read again, as over a new link.
    Relink,
    /// The slot is made anew, and all rows are published first; the slot is that much older than the snapshot in which
    /// they are read, and transactions run meanwhile. Ends before the slot has its name, or after.
    Backfill(u64, bool),
    /// All rows are published once more, beside a stream or without.
    Again,
}

impl World {
    fn new() -> Self {
        Self {
            next: 700,
            wal_end: Lsn(1000),
            slot: Lsn(1000),
            shape: 0,
            running: Vec::new(),
            rows: Vec::new(),
            unfinished: Vec::new(),
            stored: Vec::new(),
            process: None,
        }
    }

    fn look(&self) -> Look {
        let oldest_running = self.running.iter().map(|it| it.xid).min().unwrap_or(self.next);
        let leaf = Leaf { relation: 1, shape: self.shape.to_string() };
        Look { oldest_running, next: self.next, wal_end: self.wal_end, leaves: vec![leaf], late: None }
    }

    fn xid(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn write(&mut self) -> Lsn {
        self.wal_end.0 += 10;
        self.wal_end
    }

    fn store(&mut self, intervals: Vec<Interval>) {
        for interval in intervals {
            let same =
                |known: &&mut Interval| known.leaf.relation == interval.leaf.relation && known.since == interval.since;
            match self.stored.iter_mut().find(same) {
                Some(known) => {
                    known.until = known.until.max(interval.until);
                    known.confirmed = known.confirmed.max(interval.confirmed);
                }
                None => self.stored.push(interval),
            }
        }
    }

    fn load(&self) -> Fence {
        Fence::resume(self.stored.iter().max_by_key(|interval| interval.since).cloned().into_iter().collect())
    }

    fn finish(&mut self, index: usize, committed: bool) {
        if self.running.is_empty() {
            return;
        }
        let Transaction { xid } = self.running.swap_remove(index % self.running.len());
        let commit = self.write();
        for (_, row) in self.unfinished.extract_if(.., |(of, _)| *of == xid) {
            self.rows[row].commit = committed.then_some(commit);
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Begin => {
                let xid = self.xid();
                self.running.push(Transaction { xid });
            }
            Step::Insert(index, nested) if !self.running.is_empty() => {
                let index = index % self.running.len();
                let top = self.running[index].xid;
                let xid = if nested { self.xid() } else { top };
                self.unfinished.push((top, self.rows.len()));
                self.rows.push(Row { xid, commit: None, delivered: false });
                self.write();
            }
            Step::Commit(index) => self.finish(index, true),
            Step::Abort(index) => self.finish(index, false),
            Step::OtherWal => _ = self.write(),
            Step::Start => self.start(),
            Step::Deliver(tenths) => self.deliver(tenths),
            Step::Tick => self.tick(),
            Step::Kill => self.process = None,
            Step::Stop => {
                if let Some(mut process) = self.process.take() {
                    let closed = process.fence.close(process.begun, process.confirmed.min(self.slot));
                    self.store(closed);
                }
            }
            Step::Reconnect => {
                if let Some(process) = &mut self.process
                    && self.slot > process.confirmed
                {
                    (process.begun, process.confirmed) = (self.slot, self.slot);
                }
            }
            // a walpost that streams holds the slot; it must come back to notice
            Step::MoveSlot => {
                self.write();
                self.slot = self.wal_end;
                self.step(Step::Reconnect);
            }
            Step::Rewind(bytes) => self.slot = Lsn(self.slot.0.saturating_sub(bytes).max(1000)),
            Step::Rewrite => {
                let xid = self.xid();
                self.rows.iter_mut().for_each(|row| row.xid = xid);
                self.shape += 1;
                self.write();
            }
            Step::Relink => {
                let fence = self.load();
                if let Some(process) = &mut self.process {
                    process.fence = fence;
                }
            }
            Step::Backfill(age, named) if self.process.is_none() => {
                let before = self.stored.iter().map(|interval| interval.confirmed).max().unwrap_or_default();
                self.write();
                let point = Lsn(self.wal_end.0.saturating_sub(age)).max(before).max(self.slot);
                self.backfill(Some(point));
                if named {
                    self.slot = point;
                } else {
                    // it is dropped, and another is made without any backfill
                    self.step(Step::MoveSlot);
                }
            }
            Step::Insert(..) | Step::Backfill(..) => {}
            Step::Again => self.backfill(None),
        }
    }

    /// As `backfill::proof` enters it.
    fn backfill(&mut self, point: Option<Lsn>) {
        self.rows.iter_mut().for_each(|row| row.delivered |= row.commit.is_some());
        let Look { oldest_running: until, leaves, .. } = self.look();
        let entry = |since, confirmed| Interval { leaf: leaves[0].clone(), since, until, confirmed };
        self.store(vec![entry(3, Lsn::ZERO)]);
        self.store(point.map(|point| entry(until, point)).into_iter().collect());
    }

    fn start(&mut self) {
        if self.process.is_some() {
            return;
        }
        let mut fence = self.load();
        let fresh = fence.open(&self.look(), self.slot);
        self.store(fresh);
        self.process = Some(Process { begun: self.slot, confirmed: self.slot, fence: self.load() });
    }

    fn deliver(&mut self, tenths: u64) {
        let Some(process) = &mut self.process else { return };
        let span = self.wal_end.0.saturating_sub(process.confirmed.0);
        let to = Lsn(process.confirmed.0 + span * tenths / 10);
        for row in &mut self.rows {
            row.delivered |= row.commit.is_some_and(|commit| commit > process.begun && commit <= to);
        }
        process.confirmed = to;
        self.slot = self.slot.max(to);
    }

    fn tick(&mut self) {
        let look = self.look();
        let Some(process) = &mut self.process else { return };
        let standing = Standing { begun: process.begun, confirmed: process.confirmed, slot: self.slot };
        let mut news = process.fence.prove(standing);
        news.extend(process.fence.observe(look, standing));
        self.store(news);
    }

    /// Rows that a pass would delete now: visible and covered.
    fn doomed(&self) -> impl Iterator<Item = &Row> {
        let covered = |row: &Row| self.stored.iter().any(|it| (it.since..it.until).contains(&row.xid));
        self.rows.iter().filter(move |row| row.commit.is_some() && covered(row))
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Begin),
        6 => (0..4_usize, any::<bool>()).prop_map(|(index, nested)| Step::Insert(index, nested)),
        4 => (0..4_usize).prop_map(Step::Commit),
        1 => (0..4_usize).prop_map(Step::Abort),
        1 => Just(Step::OtherWal),
        2 => Just(Step::Start),
        5 => (1..=10_u64).prop_map(Step::Deliver),
        6 => Just(Step::Tick),
        1 => Just(Step::Kill),
        1 => Just(Step::Stop),
        1 => Just(Step::Reconnect),
        1 => Just(Step::MoveSlot),
        1 => (0..50_u64).prop_map(Step::Rewind),
        1 => Just(Step::Rewrite),
        1 => Just(Step::Relink),
        1 => (0..60_u64, any::<bool>()).prop_map(|(age, named)| Step::Backfill(age, named)),
        1 => Just(Step::Again),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn what_the_fence_calls_delivered_was_delivered(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            for row in world.doomed() {
                prop_assert!(row.delivered, "{row:?} was never delivered\n{world:#?}");
            }
        }
    }
}

fn run(world: &mut World, steps: &[Step]) {
    for step in steps {
        world.step(*step);
    }
}

const INSERT: [Step; 3] = [Step::Begin, Step::Insert(0, false), Step::Commit(0)];
const PROVE: [Step; 3] = [Step::Tick, Step::Deliver(10), Step::Tick];

#[test]
fn what_was_delivered_is_proved_also_after_a_clean_stop_and_a_start() {
    let mut world = World::new();
    run(&mut world, &[Step::Start]);
    run(&mut world, &INSERT);
    run(&mut world, &[Step::Deliver(10), Step::Stop, Step::OtherWal, Step::Start]);
    run(&mut world, &INSERT);
    run(&mut world, &PROVE);
    assert_eq!(world.doomed().count(), 2);
}

#[test]
fn rows_that_are_older_than_the_slot_or_than_a_slot_made_anew_are_never_proved() {
    let mut world = World::new();
    run(&mut world, &INSERT);
    run(&mut world, &[Step::MoveSlot, Step::Start]);
    run(&mut world, &INSERT);
    run(&mut world, &[Step::Kill, Step::MoveSlot, Step::Start]);
    run(&mut world, &INSERT);
    run(&mut world, &PROVE);
    assert_eq!(world.doomed().count(), 1);
}

#[test]
fn what_was_backfilled_is_proved_and_so_is_what_was_written_meanwhile() {
    let mut world = World::new();
    run(&mut world, &INSERT);
    run(&mut world, &[Step::Begin, Step::Insert(0, false), Step::Backfill(20, true)]);
    assert_eq!(world.doomed().count(), 1);
    run(&mut world, &[Step::Commit(0)]);
    run(&mut world, &INSERT);
    run(&mut world, &[Step::Start]);
    run(&mut world, &PROVE);
    assert_eq!(world.doomed().count(), 3);
}

#[test]
fn a_transaction_that_runs_holds_the_proof_of_what_is_younger() {
    let mut world = World::new();
    run(&mut world, &[Step::Start, Step::Begin, Step::Insert(0, true)]);
    run(&mut world, &PROVE);
    run(&mut world, &[Step::Commit(0)]);
    assert_eq!(world.doomed().count(), 0, "it committed behind the look");
    run(&mut world, &PROVE);
    assert_eq!(world.doomed().count(), 1);
}

#[test]
fn it_is_idle_once_all_that_was_wanted_is_proved() {
    let mut world = World::new();
    run(&mut world, &[Step::Start]);
    run(&mut world, &INSERT);
    let next = world.next;
    world.process.as_mut().unwrap().fence.want(next);
    assert!(!world.process.as_ref().unwrap().fence.is_idle());
    run(&mut world, &[Step::Tick, Step::Deliver(10)]);
    assert!(!world.process.as_ref().unwrap().fence.is_idle());
    let standing = Standing { begun: Lsn(1000), confirmed: world.wal_end, slot: world.wal_end };
    let fence = &mut world.process.as_mut().unwrap().fence;
    assert_eq!(fence.prove(standing).len(), 1);
    assert!(fence.is_idle());
}
