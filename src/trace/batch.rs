//! [`Batch`]: what a span says, added up.

use std::sync::Arc;

use super::link::Link;
use crate::lsn::Lsn;

/// So many traces a span leads to; of more only the number is kept.
pub(super) const MOST_LINKS: usize = 32;

/// Where the events of a batch went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Destination {
    One(Arc<str>),
    Several,
}

/// What has gone wrong, and when (Unix µs).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub at_us: i64,
    /// Of a list that is bounded: what a query groups by.
    pub code: String,
    pub text: String,
}

/// A batch. Times are Unix µs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Batch {
    pub began_us: i64,
    pub ended_us: i64,
    pub destination: Destination,
    pub events: u64,
    /// Of these, how many were not delivered and hold nothing else up.
    pub failed: u64,
    pub bytes: u64,
    /// Where its last transaction ends.
    pub end: Lsn,
    pub links: Vec<Link>,
    pub links_left_out: u32,
    /// How long its first event was held back before the producer took it, where that was long.
    pub held_us: i64,
    /// Why the session before this one failed: the batch is sent once more, in part or whole.
    pub retried: Option<Failure>,
    /// Why it was not acknowledged.
    pub failure: Option<Failure>,
}

impl Batch {
    /// With nothing in it.
    pub fn begin(began_us: i64, topic: Arc<str>) -> Self {
        Self {
            began_us,
            ended_us: began_us,
            destination: Destination::One(topic),
            events: 0,
            failed: 0,
            bytes: 0,
            end: Lsn::ZERO,
            links: Vec::new(),
            links_left_out: 0,
            held_us: 0,
            retried: None,
            failure: None,
        }
    }

    pub fn goes_to(&mut self, topic: &str) {
        if !matches!(&self.destination, Destination::One(one) if **one == *topic) {
            self.destination = Destination::Several;
        }
    }

    pub fn leads_to(&mut self, link: Link) {
        if self.links.contains(&link) {
            return;
        }
        if self.links.len() < MOST_LINKS {
            self.links.push(link);
        } else {
            self.links_left_out = self.links_left_out.saturating_add(1);
        }
    }

    /// Takes in the batch behind this one.
    pub fn absorb(&mut self, later: Self) {
        if self.destination != later.destination {
            self.destination = Destination::Several;
        }
        self.events += later.events;
        self.failed += later.failed;
        self.bytes += later.bytes;
        self.end = self.end.max(later.end);
        later.links.into_iter().for_each(|link| self.leads_to(link));
        self.links_left_out = self.links_left_out.saturating_add(later.links_left_out);
        self.held_us = self.held_us.max(later.held_us);
        self.retried = self.retried.take().or(later.retried);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_a_bound_and_those_beyond_are_counted() {
        let link = |number: u8| Link { trace_id: [number; 16], span_id: [1; 8], flags: 0 };
        let begin = || Batch::begin(0, "t".into());
        let (mut first, mut second) = (begin(), begin());
        (1..=20).for_each(|number| first.leads_to(link(number)));
        (11..=50).for_each(|number| second.leads_to(link(number)));
        assert_eq!((second.links.len(), second.links_left_out), (MOST_LINKS, 8));
        first.absorb(second);
        assert_eq!((first.links.len(), first.links_left_out), (MOST_LINKS, 18));
    }
}
