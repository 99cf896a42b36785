//! [`AckTracker`]: which prefix of the stream is delivered.
//!
//! The product's invariant lives here: the watermark is the end of the longest prefix of *sealed* transactions whose every
//! record is complete. Completion may come in any order, twice, or from an earlier session; the watermark only ever moves
//! over records that are complete, and stops at the first that is not. Pure: no I/O, no clock, and no allocation in steady
//! state.
//!
//! A record takes one slot in a ring, from [`AckTracker::track`] until everything before it is complete as well. The ring
//! is the bound: when it is full, or the bytes in it are, nothing more is tracked.

use std::collections::VecDeque;

use crate::{
    fault::{self, Bug},
    lsn::Lsn,
};

/// Stands for one record on its way: the session it belongs to, and its number in it.
///
/// Fits the producer's opaque word: 16 bits of session, 48 bits of number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

impl Ticket {
    const NUMBER_BITS: u32 = 48;

    fn new(session: u16, number: u64) -> Self {
        Self(u64::from(session) << Self::NUMBER_BITS | number & ((1 << Self::NUMBER_BITS) - 1))
    }

    /// The ticket as the word that travels through the producer.
    pub fn to_word(self) -> u64 {
        self.0
    }

    /// The ticket from that word.
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    fn session(self) -> u16 {
        (self.0 >> Self::NUMBER_BITS) as u16
    }
}

/// Bounds on what is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Records at most; at least 1.
    pub events: usize,
    /// Bytes at most. One record that is larger still travels, alone.
    pub bytes: usize,
}

/// The end of a transaction, or a keepalive: everything tracked before `upto` belongs to it or to earlier ones.
#[derive(Debug, Clone, Copy)]
struct Seal {
    upto: u64,
    end: Lsn,
    commit_us: i64,
}

/// What is remembered of a record while it flies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Bytes it counts for.
    pub weight: u32,
    /// Where it goes, in the sink's own numbering.
    pub account: u32,
    /// What the event is known by from session to session; the sink's own.
    pub identity: u64,
    /// Of its transaction.
    pub commit_lsn: Lsn,
    /// When its transaction was committed, in the caller's unit; 0 counts as unknown.
    pub commit_us: i64,
}

/// Load and state of the record in a slot of the ring.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    load: Load,
    complete: bool,
}

/// Tracks the records of one session between sending and acknowledgement.
#[derive(Debug)]
pub struct AckTracker {
    session: u16,
    bounds: Bounds,
    ring: Box<[Slot]>,
    /// Number of the oldest record that is not complete; everything before is.
    head: u64,
    /// Number of the next record.
    next: u64,
    /// Everything before this number is part of what the watermark stands for.
    confirmed: u64,
    /// Weight of all between `head` and `next`.
    bytes: u64,
    /// How many of them are not complete.
    incomplete: u64,
    seals: VecDeque<Seal>,
    watermark: Lsn,
    /// Commit time of the transaction that is not sealed yet.
    open_us: i64,
}

impl AckTracker {
    /// A tracker for the first session.
    pub fn new(bounds: Bounds) -> Self {
        let slots = bounds.events.max(1).next_power_of_two();
        Self {
            session: 0,
            bounds,
            ring: vec![Slot::default(); slots].into_boxed_slice(),
            head: 0,
            next: 0,
            confirmed: 0,
            bytes: 0,
            incomplete: 0,
            seals: VecDeque::new(),
            watermark: Lsn::ZERO,
            open_us: 0,
        }
    }

    /// Begins a session at the slot's confirmed position. Every ticket of an earlier session is void.
    pub fn open(&mut self, confirmed: Lsn) {
        *self = Self { session: self.session.wrapping_add(1), watermark: confirmed, ..Self::new(self.bounds) };
    }

    /// Takes in a record, or `None` when that would break a bound.
    pub fn track(&mut self, load: Load) -> Option<Ticket> {
        let flying = self.next - self.head;
        let full =
            flying >= self.bounds.events as u64 || self.bytes + u64::from(load.weight) > self.bounds.bytes as u64;
        if full && flying > 0 {
            return None;
        }
        *self.slot(self.next) = Slot { load, complete: false };
        self.bytes += u64::from(load.weight);
        self.incomplete += 1;
        self.open_us = load.commit_us;
        let ticket = Ticket::new(self.session, self.next);
        self.next += 1;
        Some(ticket)
    }

    /// Takes the last record back: it was never sent.
    pub fn untrack(&mut self, ticket: Ticket) {
        if self.next > self.head && ticket == Ticket::new(self.session, self.next - 1) {
            self.next -= 1;
            self.incomplete -= 1;
            self.bytes -= u64::from(self.slot(self.next).load.weight);
        }
    }

    /// Everything tracked so far belongs to transactions that end at or before `end`.
    pub fn seal(&mut self, end: Lsn) {
        let commit_us = std::mem::take(&mut self.open_us);
        match self.seals.back_mut() {
            // nothing was tracked in between: one step of the watermark will do
            Some(last) if last.upto == self.next => last.end = last.end.max(end),
            _ if self.head == self.next => {
                self.watermark = self.watermark.max(end);
                self.confirmed = self.next;
            }
            _ => self.seals.push_back(Seal { upto: self.next, end, commit_us }),
        }
    }

    /// The record of this ticket is delivered; returns its load. Tickets of other sessions, and repeated ones, change
    /// nothing and return `None`.
    pub fn complete(&mut self, ticket: Ticket) -> Option<Load> {
        if fault::bug(Bug::UnorderedWatermark) {
            self.complete_all_before(ticket);
        }
        let slot = self.incomplete_slot(ticket)?;
        slot.complete = true;
        let load = slot.load;
        self.incomplete -= 1;
        self.advance();
        Some(load)
    }

    /// A deliberate bug, for the tests that must see it.
    fn complete_all_before(&mut self, ticket: Ticket) {
        for number in self.head..self.next {
            let other = Ticket::new(self.session, number);
            if other == ticket {
                break;
            }
            if let Some(slot) = self.incomplete_slot(other) {
                slot.complete = true;
                self.incomplete -= 1;
            }
        }
    }

    fn incomplete_slot(&mut self, ticket: Ticket) -> Option<&mut Slot> {
        // within a session fewer than 2^48 records fly at once, so the distance is exact
        let distance = ticket.0.wrapping_sub(Ticket::new(self.session, self.head).0) & ((1 << Ticket::NUMBER_BITS) - 1);
        if ticket.session() != self.session || distance >= self.next - self.head {
            return None;
        }
        Some(self.slot(self.head + distance)).filter(|slot| !slot.complete)
    }

    fn advance(&mut self) {
        while self.head < self.next && self.slot(self.head).complete {
            self.bytes -= u64::from(self.slot(self.head).load.weight);
            self.head += 1;
        }
        while let Some(seal) = self.seals.front()
            && seal.upto <= self.head
        {
            self.watermark = self.watermark.max(seal.end);
            self.confirmed = seal.upto;
            self.seals.pop_front();
        }
    }

    /// The record of this ticket goes elsewhere; false when it is not in flight.
    pub fn redirect(&mut self, ticket: Ticket, account: u32) -> bool {
        let found = self.incomplete_slot(ticket);
        let redirected = found.is_some();
        if let Some(slot) = found {
            slot.load.account = account;
        }
        redirected
    }

    /// The load of a record that is in flight.
    pub fn load(&mut self, ticket: Ticket) -> Option<Load> {
        self.incomplete_slot(ticket).map(|slot| slot.load)
    }

    /// The records that are delivered and not before the watermark: their transaction is not complete, or one before it. All
    /// of them, or `None` where the ring does not hold those of a large transaction any more. Part of them would not do: who
    /// sends an early record of a key again and leaves out a later one puts old behind new.
    pub fn delivered_ahead(&self) -> Option<impl Iterator<Item = Load>> {
        let (mask, numbers) = (self.ring.len() - 1, self.confirmed..self.next);
        let slots = numbers.map(move |number| &self.ring[usize::try_from(number).unwrap_or_default() & mask]);
        let held = self.next - self.confirmed <= self.ring.len() as u64;
        held.then(|| slots.filter(|slot| slot.complete).map(|slot| slot.load))
    }

    /// Everything before this position is delivered.
    pub fn watermark(&self) -> Lsn {
        self.watermark
    }

    /// Records and bytes between the watermark and the newest record.
    pub fn in_flight(&self) -> (u64, u64) {
        (self.next - self.head, self.bytes)
    }

    /// Records whose completion is awaited: those in flight, less those that only wait for an earlier one.
    pub fn incomplete(&self) -> u64 {
        self.incomplete
    }

    /// Commit time (µs, as given) of the oldest transaction that is not delivered, 0 when all are.
    pub fn oldest_commit_us(&self) -> i64 {
        self.seals.front().map_or(self.open_us, |seal| seal.commit_us)
    }

    fn slot(&mut self, number: u64) -> &mut Slot {
        let mask = self.ring.len() - 1; // a power of two
        &mut self.ring[usize::try_from(number).unwrap_or_default() & mask]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds { events: 8, bytes: 100 };

    fn load(weight: u32, commit_us: i64) -> Load {
        Load { weight, commit_us, ..Load::default() }
    }

    fn ahead(tracker: &AckTracker) -> Option<Vec<u64>> {
        tracker.delivered_ahead().map(|loads| loads.map(|load| load.identity).collect())
    }

    #[test]
    fn what_is_delivered_of_an_incomplete_transaction_is_known_from_its_beginning_or_not_at_all() {
        let mut tracker = opened();
        let track = |tracker: &mut AckTracker, identity| tracker.track(Load { identity, ..load(1, 0) }).unwrap();
        let tickets: Vec<_> = (1..=4).map(|identity| track(&mut tracker, identity)).collect();
        tracker.complete(tickets[0]);
        tracker.seal(Lsn(20));
        tracker.complete(tickets[1]);
        assert_eq!(ahead(&tracker), Some(vec![1, 2]), "the transaction comes again from its first record on");
        tracker.complete(tickets[3]);
        assert_eq!(ahead(&tracker), Some(vec![1, 2, 4]));
        tracker.complete(tickets[2]);
        assert_eq!(ahead(&tracker), Some(vec![]), "it is before the watermark");
        for identity in 5..=12 {
            let ticket = track(&mut tracker, identity);
            tracker.complete(ticket);
        }
        assert_eq!(ahead(&tracker), Some((5..=12).collect()));
        let ticket = track(&mut tracker, 13);
        tracker.complete(ticket);
        assert_eq!(ahead(&tracker), None, "the first is not held any more");
        tracker.seal(Lsn(30));
        assert_eq!(ahead(&tracker), Some(vec![]));
    }

    fn opened() -> AckTracker {
        let mut tracker = AckTracker::new(BOUNDS);
        tracker.open(Lsn(1));
        tracker
    }

    /// Case 1.
    #[test]
    fn the_watermark_stops_at_the_first_incomplete_record() {
        let mut tracker = opened();
        let first = tracker.track(load(1, 10)).unwrap();
        tracker.seal(Lsn(10));
        let second = tracker.track(load(1, 20)).unwrap();
        tracker.seal(Lsn(20));
        tracker.complete(second);
        assert_eq!(tracker.watermark(), Lsn(1), "completion out of order moved the watermark");
        assert_eq!(tracker.oldest_commit_us(), 10);
        tracker.complete(first);
        assert_eq!((tracker.watermark(), tracker.oldest_commit_us()), (Lsn(20), 0));
    }

    #[test]
    fn an_unsealed_transaction_moves_nothing() {
        let mut tracker = opened();
        let ticket = tracker.track(load(1, 10)).unwrap();
        tracker.complete(ticket);
        assert_eq!(tracker.watermark(), Lsn(1));
        tracker.seal(Lsn(10));
        assert_eq!(tracker.watermark(), Lsn(10));
    }

    /// Case 2.
    #[test]
    fn a_keepalive_waits_for_what_came_before_it() {
        let mut tracker = opened();
        tracker.seal(Lsn(5));
        assert_eq!(tracker.watermark(), Lsn(5), "idle");
        let ticket = tracker.track(load(1, 10)).unwrap();
        tracker.seal(Lsn(10));
        tracker.seal(Lsn(12));
        assert_eq!(tracker.watermark(), Lsn(5));
        tracker.complete(ticket);
        assert_eq!(tracker.watermark(), Lsn(12));
    }

    /// Case 55.
    #[test]
    fn reports_of_an_earlier_session_complete_nothing() {
        let mut tracker = opened();
        let old = tracker.track(load(1, 10)).unwrap();
        tracker.open(Lsn(1));
        let new = tracker.track(load(1, 10)).unwrap();
        tracker.seal(Lsn(10));
        assert_eq!(tracker.complete(old), None);
        assert_eq!(tracker.watermark(), Lsn(1));
        assert_eq!(tracker.complete(new), Some(load(1, 10)));
        assert_eq!(tracker.complete(new), None, "twice");
        assert_eq!(tracker.watermark(), Lsn(10));
    }

    #[test]
    fn bounds_hold_and_a_giant_travels_alone() {
        let mut tracker = opened();
        let giant = tracker.track(load(1000, 1)).unwrap();
        assert_eq!(tracker.track(load(1, 1)), None, "beside a giant");
        tracker.complete(giant);
        for _ in 0..8 {
            tracker.track(load(1, 1)).unwrap();
        }
        assert_eq!(tracker.track(load(1, 1)), None, "the ninth");
        assert_eq!(tracker.in_flight(), (8, 8));
    }

    #[test]
    fn what_was_never_sent_can_be_taken_back() {
        let mut tracker = opened();
        let ticket = tracker.track(load(7, 1)).unwrap();
        tracker.untrack(ticket);
        assert_eq!(tracker.in_flight(), (0, 0));
        assert_eq!(tracker.complete(ticket), None);
    }

    /// The rule in its plainest form: a list of everything, walked from the front.
    #[derive(Default)]
    struct Naive {
        items: Vec<Item>,
        start: Lsn,
    }

    enum Item {
        Record { ticket: Ticket, complete: bool },
        Seal(Lsn),
    }

    impl Naive {
        fn watermark(&self) -> Lsn {
            let prefix = self.items.iter().take_while(|item| !matches!(item, Item::Record { complete: false, .. }));
            prefix.fold(self.start, |mark, item| match item {
                Item::Seal(end) => mark.max(*end),
                Item::Record { .. } => mark,
            })
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Track(u32),
        Seal(u64),
        Complete(prop::sample::Index),
        Reopen,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0_u32..40).prop_map(Step::Track),
            3 => (0_u64..20).prop_map(Step::Seal),
            8 => any::<prop::sample::Index>().prop_map(Step::Complete),
            1 => Just(Step::Reopen),
        ];
        prop::collection::vec(step, 0..300)
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model_in_any_interleaving(steps in steps()) {
            let (mut tracker, mut naive) = (opened(), Naive { start: Lsn(1), ..Naive::default() });
            let (mut every_ticket, mut end) = (Vec::new(), 1);
            for step in steps {
                match step {
                    Step::Track(weight) => if let Some(ticket) = tracker.track(load(weight, 1)) {
                        every_ticket.push(ticket);
                        naive.items.push(Item::Record { ticket, complete: false });
                    },
                    Step::Seal(more) => {
                        end += more;
                        tracker.seal(Lsn(end));
                        naive.items.push(Item::Seal(Lsn(end)));
                    }
                    // any ticket ever handed out: of this session or an earlier one, new or repeated
                    Step::Complete(index) => if !every_ticket.is_empty() {
                        let chosen = *index.get(&every_ticket);
                        tracker.complete(chosen);
                        for item in &mut naive.items {
                            if let Item::Record { ticket, complete } = item && *ticket == chosen {
                                *complete = true;
                            }
                        }
                    },
                    Step::Reopen => {
                        naive = Naive { start: naive.watermark(), ..Naive::default() };
                        tracker.open(naive.start);
                    }
                }
                prop_assert_eq!(tracker.watermark(), naive.watermark());
                prop_assert!(tracker.in_flight().0 <= BOUNDS.events as u64);
            }
        }
    }
}
