//! [`Delivered`]: what the brokers have although the slot does not confirm it yet.
//!
//! When a session ends while an early record is still open, later ones of other partitions may be acknowledged already. The
//! stream brings them again; within one process they need not be sent again. Only a session whose producer leaves no gaps may
//! fill this: then what is acknowledged of a partition is all that was sent before it, and skipping it keeps the order of
//! each key. All that is acknowledged and will come again must be in it, or nothing: an early record of a key that is sent
//! again while a later one is left out would put old behind new. An event is known by its position together with its id, so a stream that comes back different is sent as it is.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

use crate::{ack::Load, event::Position, lsn::Lsn};

/// Events that the brokers have, by identity; the value is the commit LSN of their transaction.
#[derive(Debug, Default)]
pub struct Delivered {
    hasher: RandomState,
    events: HashMap<u64, Lsn>,
    /// It holds all that is acknowledged from here on.
    since: Lsn,
}

impl Delivered {
    /// What an event is known by.
    pub fn identity(&self, position: Position, event_id: &[u8]) -> u64 {
        self.hasher.hash_one((position.commit_lsn.0, position.ordinal, event_id))
    }

    /// Whether the brokers have this event; then it is forgotten here.
    pub fn take(&mut self, identity: u64) -> bool {
        !self.events.is_empty() && self.events.remove(&identity).is_some()
    }

    /// The stream resumes here. Where the server has not heard of all that was confirmed, that comes again as well, and so
    /// must everything behind it.
    pub fn resume(&mut self, confirmed: Lsn) {
        if confirmed < self.since {
            self.events.clear();
        }
    }

    /// Forgets what the stream cannot bring again, and adds what a session leaves. Bounded by what may be in flight.
    pub fn remember(&mut self, confirmed: Lsn, ahead: impl Iterator<Item = Load>) {
        self.since = confirmed;
        self.events.retain(|_, commit_lsn| *commit_lsn >= confirmed);
        self.events.extend(ahead.map(|load| (load.identity, load.commit_lsn)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_skipped_once_and_only_where_position_and_id_agree() {
        let mut delivered = Delivered::default();
        let position = |ordinal| Position { commit_lsn: Lsn(7), ordinal };
        let identity = delivered.identity(position(1), b"a");
        delivered.remember(Lsn(7), [Load { identity, commit_lsn: Lsn(7), ..Load::default() }].into_iter());
        for (other, id) in [(position(0), &b"a"[..]), (position(1), b"b")] {
            let other = delivered.identity(other, id);
            assert!(!delivered.take(other));
        }
        assert!(delivered.take(identity));
        assert!(!delivered.take(identity), "twice");
    }

    #[test]
    fn a_stream_that_resumes_before_it_brings_everything_again() {
        let load = Load { identity: 2, commit_lsn: Lsn(9), ..Load::default() };
        for (resumed, known) in [(6, true), (7, true), (5, false)] {
            let mut delivered = Delivered::default();
            delivered.remember(Lsn(6), [load].into_iter());
            delivered.resume(Lsn(resumed));
            assert_eq!(delivered.take(2), known, "resumed at {resumed}");
        }
    }

    #[test]
    fn what_is_confirmed_is_forgotten() {
        let mut delivered = Delivered::default();
        let load = |identity, lsn| Load { identity, commit_lsn: Lsn(lsn), ..Load::default() };
        delivered.remember(Lsn(0), [load(1, 5), load(2, 9)].into_iter());
        delivered.remember(Lsn(6), std::iter::empty());
        assert!(!delivered.take(1) && delivered.take(2));
    }
}
