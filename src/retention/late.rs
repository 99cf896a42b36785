//! [`Late`]: partitions that were attached after they were made, on a server before 15.
//!
//! There pgoutput decides at the first row of a table, once a session, whether the table is published; and nothing about its
//! being attached later makes it decide again. If that row came while the partition stood apart, nothing of the partition is
//! published for the rest of the session. Walpost cannot see from here whether there was such a row, so it does two things. It
//! proves nothing for these partitions: their rows stay. And it has the stream begin anew behind the moment at which a
//! partition was found attached: that session never meets a row from before.

use super::{
    Witness,
    fence::{Leaf, Look, Standing},
};
use crate::lsn::Lsn;

/// The late partitions that are known, and where they were found.
#[derive(Debug)]
pub struct Late {
    /// `None`: the server has no such fault, or no table has partitions.
    known: Option<Vec<Leaf>>,
    /// Every known one was attached before this position.
    from: Lsn,
}

impl Default for Late {
    fn default() -> Self {
        Self { known: Some(Vec::new()), from: Lsn::ZERO }
    }
}

impl Late {
    /// Whether it has to be looked for them, also while nothing is delivered.
    pub fn is_watching(&self) -> bool {
        self.known.is_some()
    }

    /// Takes in a look's, says so, and has the stream begin anew when that is due.
    pub fn attend(&mut self, (look, standing): (&mut Look, Standing), witness: &Witness) {
        if self.observe(look.late.take(), look.wal_end) {
            tracing::warn!(
                "partitions of an outbox were attached after they were made: if they had got rows before, Postgres 14 publishes \
                 nothing of them in the same session, so another one begins soon; their rows are never deleted"
            );
        }
        if self.outdates(witness.session(), standing) {
            witness.ask_for_renewal();
        }
    }

    /// Takes in what a look has found, as of `wal_end`. Returns whether there is one that was not known.
    fn observe(&mut self, found: Option<Vec<Leaf>>, wal_end: Lsn) -> bool {
        let known = self.known.as_deref().unwrap_or_default();
        let has_new = found.iter().flatten().any(|leaf| !known.contains(leaf));
        if has_new {
            self.from = wal_end;
        }
        self.known = found;
        has_new
    }

    /// Whether the stream has to begin anew: the session began, at `session`, before one was found, and all before that is
    /// confirmed.
    fn outdates(&self, session: Lsn, standing: Standing) -> bool {
        let has_some = self.known.as_ref().is_some_and(|known| !known.is_empty());
        has_some && session < self.from && standing.confirmed.min(standing.slot) >= self.from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(relation: u32) -> Leaf {
        Leaf { relation, shape: "s".into() }
    }

    fn at(confirmed: u64, slot: u64) -> Standing {
        Standing { begun: Lsn(1), confirmed: Lsn(confirmed), slot: Lsn(slot) }
    }

    #[test]
    fn a_session_is_outdated_once_all_before_the_look_is_confirmed() {
        let mut late = Late::default();
        assert!(late.is_watching(), "nothing is known of the server yet");
        assert!(!late.observe(Some(Vec::new()), Lsn(5)) && !late.outdates(Lsn(1), at(9, 9)));
        assert!(late.observe(Some(vec![leaf(1)]), Lsn(10)));
        assert!(!late.outdates(Lsn(1), at(10, 9)), "it would begin before the look");
        assert!(!late.outdates(Lsn(1), at(9, 10)));
        assert!(late.outdates(Lsn(1), at(10, 10)));
        assert!(!late.outdates(Lsn(10), at(12, 12)), "it has begun behind it");
        assert!(!late.observe(Some(vec![leaf(1)]), Lsn(20)), "known");
        assert!(!late.outdates(Lsn(10), at(30, 30)));
        let renewed = Leaf { shape: "t".into(), ..leaf(1) };
        assert!(late.observe(Some(vec![renewed]), Lsn(40)), "detached and attached again");
        assert!(late.outdates(Lsn(10), at(40, 40)));
        assert!(!late.observe(Some(Vec::new()), Lsn(50)) && !late.outdates(Lsn(10), at(50, 50)));
        assert!(late.is_watching());
        assert!(!late.observe(None, Lsn(60)) && !late.is_watching(), "15 or later");
    }
}
