//! The retention fence: which transactions are known to have been delivered. Pure.
//!
//! A look at the server gives two xids and a position: every transaction below `oldest_running` has ended, and, as the
//! position is read afterwards, its commit record lies before it. Once walpost has confirmed that position, all of them
//! that committed since walpost took over the slot have been delivered. Transactions from `next` on, at the look, had
//! not begun: their commit records lie behind every position that was known before the look.
//!
//! Xids rather than snapshots: a row written under a savepoint has a sub-xid, which no snapshot lists; but it is always
//! larger than that of its transaction, so a transaction that runs keeps all of its rows above `oldest_running`.
//!
//! Invariant: a row is in `since..until` of an [`Interval`] only if its transaction's commit was streamed and confirmed
//! by a walpost that owned the slot all the way from before it.

use crate::lsn::Lsn;

/// A table that holds rows: an outbox, or a partition of one, with what must not change under a proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// Its oid.
    pub relation: u32,
    /// Its file and how it is published: a rewrite gives all rows a new xid, a publication may leave rows out.
    pub shape: String,
}

/// A look at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Every transaction below has ended.
    pub oldest_running: u64,
    /// No transaction from here on has begun.
    pub next: u64,
    /// The end of the WAL, read after the xids.
    pub wal_end: Lsn,
    /// The tables; empty while their inserts are not all published.
    pub leaves: Vec<Leaf>,
    /// More of them, for which nothing can be proven: see [`super::late`]. `None` where the server has no such fault, or no table has partitions.
    pub late: Option<Vec<Leaf>>,
}

/// Where walpost stands, read before the look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Everything from here on was delivered by this process.
    pub begun: Lsn,
    /// … up to here.
    pub confirmed: Lsn,
    /// What the slot has confirmed, on the server of the look.
    pub slot: Lsn,
}

/// Transactions `since..until` that wrote to a leaf have been delivered; and walpost has gone on to `confirmed`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interval {
    /// The table.
    pub leaf: Leaf,
    /// The first xid.
    pub since: u64,
    /// The first xid that is not known to be delivered.
    pub until: u64,
    /// Every commit from that of `since` to here was delivered, or is on its way through a walpost that took over here.
    pub confirmed: Lsn,
}

/// The present intervals, one a leaf, and the look that waits for its position to be confirmed.
#[derive(Debug, Default)]
pub struct Fence {
    intervals: Vec<Interval>,
    waiting: Option<(Look, Lsn)>,
    /// Not idle until every interval reaches this xid.
    wanted: u64,
}

impl Fence {
    /// Goes on from the last interval of each leaf, as recorded.
    pub fn resume(intervals: Vec<Interval>) -> Self {
        Self { intervals, waiting: None, wanted: 0 }
    }

    /// Where nobody knows yet what became of the slot: what a stream that begins at `slot`, which was read before the
    /// look, may be counted from. Returns the intervals that are new.
    pub fn open(&mut self, look: &Look, slot: Lsn) -> Vec<Interval> {
        self.begin(look, slot)
    }

    /// Takes in where walpost stands: what this proves of the look that waits. Returns the intervals that have grown.
    pub fn prove(&mut self, standing: Standing) -> Vec<Interval> {
        let Some((look, begun)) = self.waiting.take() else { return Vec::new() };
        if standing.begun != begun {
            return Vec::new();
        }
        if standing.confirmed < look.wal_end || standing.slot < look.wal_end {
            self.waiting = Some((look, begun));
            return Vec::new();
        }
        let mut grown = Vec::new();
        for interval in &mut self.intervals {
            if !look.leaves.contains(&interval.leaf) || begun > interval.confirmed {
                continue;
            }
            interval.confirmed = interval.confirmed.max(standing.confirmed.min(standing.slot));
            if look.oldest_running > interval.until {
                interval.until = look.oldest_running;
                grown.push(interval.clone());
            }
        }
        grown
    }

    /// Takes in a look, unless an earlier one waits still. Returns the intervals that begin with it.
    pub fn observe(&mut self, look: Look, standing: Standing) -> Vec<Interval> {
        if standing.slot > look.wal_end || standing.begun > look.wal_end {
            return Vec::new(); // another server's, or a position from nowhere
        }
        let begun = self.begin(&look, standing.begun);
        if self.waiting.is_none() {
            self.waiting = Some((look, standing.begun));
        }
        begun
    }

    /// A leaf without an interval that a stream from `begun` continues gets one: from the first transaction that had
    /// not begun.
    fn begin(&mut self, look: &Look, begun: Lsn) -> Vec<Interval> {
        self.intervals.retain(|interval| look.leaves.contains(&interval.leaf) && begun <= interval.confirmed);
        let mut fresh = Vec::new();
        for leaf in &look.leaves {
            if !self.intervals.iter().any(|interval| interval.leaf == *leaf) {
                fresh.push(Interval { leaf: leaf.clone(), since: look.next, until: look.next, confirmed: begun });
            }
        }
        self.intervals.extend(fresh.iter().cloned());
        fresh
    }

    /// Something was delivered of which the rows cannot be told from others: what was written up to now counts as
    /// unproven.
    pub fn forget(&mut self) {
        self.intervals.clear();
        self.waiting = None;
    }

    /// Everything that was written before the look is wanted.
    pub fn want(&mut self, xid: u64) {
        self.wanted = self.wanted.max(xid);
    }

    /// Whether there is nothing left to prove.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_none() && self.intervals.iter().all(|interval| interval.until >= self.wanted)
    }

    /// The intervals of a process that ends having confirmed so much, for its successor to go on from.
    pub fn close(&mut self, begun: Lsn, confirmed: Lsn) -> Vec<Interval> {
        let mut closed = Vec::new();
        for interval in self.intervals.iter_mut().filter(|interval| begun <= interval.confirmed) {
            if confirmed > interval.confirmed {
                interval.confirmed = confirmed;
                closed.push(interval.clone());
            }
        }
        closed
    }
}

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
