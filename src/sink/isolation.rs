//! [`Isolation`]: how far a session that sends each record alone has to go, and what may fly in it at once.
//!
//! A record that is refused alone leaves a gap that the producer does not mind here. So the order of a key is kept by hand: of
//! one key only one record is on its way, until it, or the dead letter in its stead, is acknowledged.

use std::{
    collections::VecDeque,
    hash::{BuildHasher, RandomState},
};

use crate::{ack::Ticket, encode::Record, event::Position, lsn::Lsn};

/// After a culprit so many records in a row must be taken before batches are tried again: where one is, more follow.
const CLEAN_RUN: u32 = 1000;

/// A session in which each record is alone in its batch.
#[derive(Debug)]
pub struct Isolation {
    /// Everything before this was in a refused batch, or beside it.
    until: Lsn,
    convicted: u64,
    clean_run: u32,
    hasher: RandomState,
    /// The keys that are on their way, with their topics; few.
    flying: VecDeque<(Ticket, u64)>,
}

impl Isolation {
    /// Up to a position at least.
    pub fn until(until: Lsn) -> Self {
        let (hasher, flying) = (RandomState::new(), VecDeque::new());
        Self { until, convicted: 0, clean_run: CLEAN_RUN, hasher, flying }
    }

    /// A record was handed over.
    pub fn sent(&mut self, ticket: Ticket, record: &Record<'_>) {
        if let Some(key) = self.key(record) {
            self.flying.push_back((ticket, key));
        }
    }

    /// A record, or the dead letter in its stead, was taken.
    pub fn through(&mut self, ticket: Ticket) {
        self.clean_run = self.clean_run.saturating_add(1);
        self.flying.retain(|(flying, _)| *flying != ticket);
    }

    /// So many records were committed.
    pub fn through_many(&mut self, records: u64) {
        self.clean_run = self.clean_run.saturating_add(u32::try_from(records).unwrap_or(u32::MAX));
    }

    /// A record was refused.
    pub fn convict(&mut self) {
        self.convicted += 1;
        self.clean_run = 0;
    }

    /// How many were refused.
    pub fn convicted(&self) -> u64 {
        self.convicted
    }

    /// Whether a record is for the session after, or has to wait for an earlier one of its key.
    pub fn must_wait(&self, position: Position, record: &Record<'_>) -> bool {
        let behind = position.commit_lsn >= self.until && self.clean_run >= CLEAN_RUN;
        behind || self.key(record).is_some_and(|key| self.flying.iter().any(|(_, flying)| *flying == key))
    }

    /// Whether it is over, with nothing in flight and everything before `durable` through.
    pub fn is_over(&self, durable: Lsn) -> bool {
        durable >= self.until
    }

    /// Records without a key are promised no order.
    fn key(&self, record: &Record<'_>) -> Option<u64> {
        record.key.map(|key| self.hasher.hash_one((record.topic, key)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ack::{AckTracker, Bounds, Load},
        encode::Headers,
    };

    fn record<'a>(key: Option<&'a [u8]>, headers: &'a Headers) -> Record<'a> {
        Record { topic: "t", key, value: None, headers, timestamp_ms: 1, event_id: b"", dead: None }
    }

    fn position(lsn: u64) -> Position {
        Position { commit_lsn: Lsn(lsn), ordinal: 0 }
    }

    fn tickets() -> impl FnMut() -> Ticket {
        let mut tracker = AckTracker::new(Bounds { events: 2000, bytes: 2000 });
        move || tracker.track(Load::default()).unwrap()
    }

    #[test]
    fn it_goes_on_behind_a_culprit_until_records_are_taken_again() {
        let (headers, mut ticket) = (Headers::default(), tickets());
        let record = record(None, &headers);
        let mut isolation = Isolation::until(Lsn(10));
        assert!(!isolation.must_wait(position(9), &record) && isolation.must_wait(position(10), &record));
        isolation.convict();
        assert!(!isolation.must_wait(position(10), &record));
        (0..CLEAN_RUN).for_each(|_| isolation.through(ticket()));
        assert!(isolation.must_wait(position(10), &record));
        assert_eq!((isolation.convicted(), isolation.is_over(Lsn(9)), isolation.is_over(Lsn(10))), (1, false, true));
    }

    #[test]
    fn of_one_key_one_record_is_on_its_way() {
        let (headers, mut ticket) = (Headers::default(), tickets());
        let mut isolation = Isolation::until(Lsn(10));
        let [a, b, none] = [Some(&b"a"[..]), Some(b"b"), None].map(|key| record(key, &headers));
        let first = ticket();
        isolation.sent(first, &a);
        isolation.sent(ticket(), &none);
        let waits = [&a, &b, &none].map(|record| isolation.must_wait(position(1), record));
        assert_eq!(waits, [true, false, false]);
        isolation.convict();
        assert!(isolation.must_wait(position(1), &a), "its dead letter is not acknowledged");
        isolation.through(first);
        assert!(!isolation.must_wait(position(1), &a));
    }
}
