//! [`Progress`]: what the progress topic says, and what follows from it at a start.
//!
//! The record is written in the same Kafka transaction as the events before it, so it, and not the slot, is the truth about
//! what was published. It is of use only for the very log that it was written for, and each way in which it may not be has a
//! refusal of its own: going on would leave events out, or publish them twice.

use serde::{Deserialize, Serialize};

use crate::{event::Position, lsn::Lsn, source::whereabouts::Whereabouts};

/// Of a transaction that is written whole.
const WHOLE: u64 = u64::MAX;

/// The format of the record.
const VERSION: u32 = 1;

/// How far the log is published.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mark {
    /// Every event before this position is written.
    pub through: Position,
    /// The last event that is, where its transaction is not written whole; else empty.
    pub last_id: String,
    /// The server need not go back before this.
    pub end: Lsn,
}

impl Mark {
    /// An event was written.
    pub fn write(&mut self, position: Position, event_id: &[u8]) {
        self.through = Position { ordinal: position.ordinal + 1, ..position };
        self.last_id.clear();
        self.last_id.push_str(&String::from_utf8_lossy(event_id));
    }

    /// A transaction, if one is open, is written whole; the server has nothing before `end`.
    pub fn seal(&mut self, is_open: bool, end: Lsn) {
        if is_open {
            self.through.ordinal = WHOLE;
            self.last_id.clear();
        }
        self.end = self.end.max(end);
    }

    /// Whether the transaction that it stands in is written in part.
    pub fn is_partial(&self) -> bool {
        !matches!(self.through.ordinal, 0 | WHOLE)
    }
}

/// A record of the progress topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    version: u32,
    system: String,
    timeline: u32,
    database: String,
    /// Also the record's key.
    slot: String,
    /// `None`: the slot is about to be created, and nothing is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<Written>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    commit_lsn: String,
    /// How many events of the transaction are written; absent when all are.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<u64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    last_id: String,
    end_lsn: String,
}

impl Progress {
    /// Of a slot that is about to be created.
    pub fn none(here: &Whereabouts, slot: &str) -> Self {
        Self {
            version: VERSION,
            system: here.system.clone(),
            timeline: here.timeline,
            database: here.database.clone(),
            slot: slot.to_owned(),
            written: None,
        }
    }

    /// Up to a mark.
    pub fn at(here: &Whereabouts, slot: &str, mark: &Mark) -> Self {
        let Mark { through, last_id, end } = mark;
        let events = mark.is_partial().then_some(through.ordinal);
        let last_id = last_id.clone();
        let (commit_lsn, end_lsn) = (through.commit_lsn.to_string(), end.to_string());
        Self { written: Some(Written { commit_lsn, events, last_id, end_lsn }), ..Self::none(here, slot) }
    }

    /// The record's value.
    pub fn to_bytes(&self) -> Vec<u8> {
        // strings and numbers: nothing in it can fail
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads a record's value.
    pub fn from_bytes(value: &[u8]) -> Result<Self, String> {
        let progress: Self = serde_json::from_slice(value).map_err(|error| error.to_string())?;
        match progress.version {
            VERSION => progress.mark().map(|_| progress).ok_or_else(|| "a position is malformed".to_owned()),
            version => Err(format!("its format is {version}, and this walpost knows {VERSION}")),
        }
    }

    /// Its database and ours in words, where they are not the same.
    fn differs_from(&self, here: &Whereabouts) -> Option<(String, String)> {
        let name = |system: &str, database: &str| format!("database {database:?} of cluster {system}");
        let same = (&self.system, &self.database) == (&here.system, &here.database);
        (!same).then(|| (name(&self.system, &self.database), name(&here.system, &here.database)))
    }

    /// Where it stands; `None` when a position is malformed, the mark at zero when nothing is published.
    pub fn mark(&self) -> Option<Mark> {
        let Some(written) = &self.written else { return Some(Mark::default()) };
        let commit_lsn: Lsn = written.commit_lsn.parse().ok()?;
        // before the first event there is no transaction to be whole
        let whole = if commit_lsn == Lsn::ZERO { 0 } else { WHOLE };
        let through = Position { commit_lsn, ordinal: written.events.unwrap_or(whole) };
        Some(Mark { through, last_id: written.last_id.clone(), end: written.end_lsn.parse().ok()? })
    }
}

/// What an operator has accepted for one start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accepted {
    /// Events that are published already may come again.
    pub duplicates: bool,
    /// Events may be missing, as far as anyone can tell.
    pub gap: bool,
}

/// Why nothing is published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is a slot and no record of what was published from it.
    #[error(
        "slot {slot:?} stands at {confirmed}, and topic {topic:?} says nothing of what was published from it: it was deleted, or \
         delivery was at_least_once until now; after a clean stop nothing comes twice. To publish from {confirmed} on, start \
         once with: walpost run --accept-duplicates"
    )]
    NoRecord {
        /// The slot.
        slot: String,
        /// Its position.
        confirmed: Lsn,
        /// The progress topic.
        topic: String,
    },
    /// The record cannot be read.
    #[error(
        "the record of slot {slot:?} in topic {topic:?} cannot be read: {why}. To publish from {confirmed} on, whatever was \
         published before, start once with: walpost run --accept-duplicates"
    )]
    Unreadable {
        /// The slot.
        slot: String,
        /// Its position.
        confirmed: Lsn,
        /// The progress topic.
        topic: String,
        /// Why.
        why: String,
    },
    /// The record is of another log.
    #[error(
        "topic {topic:?} is the record of {theirs}, and this is {ours}: another slot uses the same topic (set \
         kafka.progress_topic), or the database was restored or replaced; then events may be missing. To publish from {confirmed} \
         on, start once with: walpost run --accept-gap"
    )]
    Foreign {
        /// The progress topic.
        topic: String,
        /// Whose record it is.
        theirs: String,
        /// Who we are.
        ours: String,
        /// The slot's position.
        confirmed: Lsn,
    },
    /// Events were published that the new primary does not have.
    #[error(
        "events up to {published} were published from timeline {theirs}, and this server left it at {switch}: what came after \
         was lost with the old primary, and is in kafka. To publish what this server has from {confirmed} on, start once with: \
         walpost run --accept-gap"
    )]
    LostTimeline {
        /// The last position.
        published: Lsn,
        /// The timeline of the record.
        theirs: u32,
        /// Where this server's history leaves it.
        switch: Lsn,
        /// The slot's position.
        confirmed: Lsn,
    },
    /// The slot was moved, or is another one of the same name.
    #[error(
        "slot {slot:?} stands at {confirmed}, beyond {end}, up to where events were published: it was moved, dropped and created \
         again, or used with delivery = \"at_least_once\"; events in between may be missing (their rows are still in the outbox \
         table). To publish from {confirmed} on, start once with: walpost run --accept-gap"
    )]
    SlotBeyond {
        /// The slot.
        slot: String,
        /// Its position.
        confirmed: Lsn,
        /// The end of what is published.
        end: Lsn,
    },
    /// The log ends before what was published from it.
    #[error(
        "events up to {end} were published, and the server's log ends at {wal_end}: it was restored to an earlier time. To publish \
         from {confirmed} on, start once with: walpost run --accept-gap"
    )]
    BeyondLog {
        /// The end of what is published.
        end: Lsn,
        /// The end of the log.
        wal_end: Lsn,
        /// The slot's position.
        confirmed: Lsn,
    },
    /// The slot is missing, and there was one.
    #[error(
        "slot {slot:?} does not exist, but events up to {end} were published from it: it was dropped, or this server is a standby \
         that was promoted without it. Events since then may be missing (their rows are still in the outbox table). To begin \
         with a new slot: walpost init"
    )]
    SlotGone {
        /// The slot.
        slot: String,
        /// The end of what is published.
        end: Lsn,
    },
    /// A slot is to be created, and the topic is the record of another one.
    #[error(
        "topic {topic:?} is the record of {theirs}, and this is {ours}: set kafka.progress_topic to a name of its own, or delete \
         the topic if that database is no more"
    )]
    Taken {
        /// The progress topic.
        topic: String,
        /// Whose record it is.
        theirs: String,
        /// Who we are.
        ours: String,
    },
    /// A transaction that was written in part comes back different.
    #[error(
        "a transaction that was published in part does not come back as it was: its event {ordinal} is {found:?} and was \
         {expected:?}. Was a table added to or taken from the outboxes? Restore the configuration until this transaction is through"
    )]
    Different {
        /// The event's place in the transaction.
        ordinal: u64,
        /// The event now.
        found: String,
        /// The event then.
        expected: String,
    },
}

/// Where a start begins: what is written already, or why it must not go on.
///
/// `confirmed` is the slot's position. What was accepted is told before it is done.
pub fn begin(
    stored: Result<Option<&Progress>, &str>,
    (here, slot, topic): (&Whereabouts, &str, &str),
    confirmed: Lsn,
    accepted: Accepted,
) -> Result<Mark, Refusal> {
    match judge(stored, (here, slot, topic), confirmed) {
        Err(Refusal::NoRecord { .. } | Refusal::Unreadable { .. }) if accepted.duplicates => {
            tracing::warn!(
                slot,
                from = %confirmed,
                "accepted: everything from here on is published, whatever was published before; some events may come twice"
            );
            Ok(Mark { end: confirmed, ..Mark::default() })
        }
        Err(refusal) if accepted.gap && !matches!(refusal, Refusal::NoRecord { .. } | Refusal::Unreadable { .. }) => {
            let reason = refusal.to_string();
            tracing::warn!(slot, from = %confirmed, reason, "accepted: everything from here on is published, and nothing before");
            Ok(Mark { end: confirmed, ..Mark::default() })
        }
        judged => judged,
    }
}

fn judge(
    stored: Result<Option<&Progress>, &str>,
    (here, slot, topic): (&Whereabouts, &str, &str),
    confirmed: Lsn,
) -> Result<Mark, Refusal> {
    let named = || (slot.to_owned(), topic.to_owned());
    let stored = match stored {
        Ok(Some(stored)) => stored,
        Ok(None) => {
            let (slot, topic) = named();
            return Err(Refusal::NoRecord { slot, confirmed, topic });
        }
        Err(why) => {
            let (slot, topic) = named();
            return Err(Refusal::Unreadable { slot, confirmed, topic, why: why.to_owned() });
        }
    };
    if let Some((theirs, ours)) = stored.differs_from(here) {
        return Err(Refusal::Foreign { topic: topic.to_owned(), theirs, ours, confirmed });
    }
    let mark = stored.mark().unwrap_or_default();
    if stored.written.is_none() {
        return Ok(Mark { end: confirmed, ..mark });
    }
    if stored.timeline != here.timeline {
        let switch = here.switches.iter().find(|(timeline, _)| *timeline == stored.timeline);
        let switch = switch.map_or(Lsn::ZERO, |(_, switch)| *switch);
        // what was confirmed beyond the last event was no event
        if mark.through.commit_lsn >= switch {
            let published = mark.through.commit_lsn;
            return Err(Refusal::LostTimeline { published, theirs: stored.timeline, switch, confirmed });
        }
    } else if mark.end > here.wal_end {
        return Err(Refusal::BeyondLog { end: mark.end, wal_end: here.wal_end, confirmed });
    }
    if confirmed > mark.end {
        return Err(Refusal::SlotBeyond { slot: slot.to_owned(), confirmed, end: mark.end });
    }
    Ok(mark)
}

/// Whether a slot that is missing may be created, as far as the progress topic knows. `replace`: a record of an earlier slot of
/// this name in this database does not stand against it.
pub fn may_create(
    stored: Result<Option<&Progress>, &str>,
    (here, slot, topic): (&Whereabouts, &str, &str),
    replace: bool,
) -> Result<(), Refusal> {
    let named = || (slot.to_owned(), topic.to_owned());
    match stored {
        Ok(None) => Ok(()),
        Ok(Some(stored)) => {
            if let Some((theirs, ours)) = stored.differs_from(here) {
                return Err(Refusal::Taken { topic: topic.to_owned(), theirs, ours });
            }
            match stored.mark().filter(|_| stored.written.is_some()) {
                Some(mark) if !replace => Err(Refusal::SlotGone { slot: slot.to_owned(), end: mark.end }),
                _ => Ok(()),
            }
        }
        Err(_) if replace => Ok(()),
        Err(why) => {
            let ((slot, topic), why) = (named(), why.to_owned());
            Err(Refusal::Unreadable { slot, confirmed: here.wal_end, topic, why })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Whereabouts {
        let switches = vec![(1, Lsn(50)), (2, Lsn(100))];
        Whereabouts { system: "s".into(), timeline: 3, database: "d".into(), wal_end: Lsn(500), switches }
    }

    fn mark(commit: u64, end: u64) -> Mark {
        Mark { through: Position { commit_lsn: Lsn(commit), ordinal: WHOLE }, last_id: String::new(), end: Lsn(end) }
    }

    fn begun(stored: &Progress, confirmed: u64, accepted: Accepted) -> Result<Mark, Refusal> {
        begin(Ok(Some(stored)), (&here(), "w", "t"), Lsn(confirmed), accepted)
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let mut partial = mark(7, 9);
        partial.write(Position { commit_lsn: Lsn(80), ordinal: 4 }, b"id");
        for mark in [Mark { end: Lsn(3), ..Mark::default() }, mark(7, 9), partial] {
            let progress = Progress::at(&here(), "w", &mark);
            let read = Progress::from_bytes(&progress.to_bytes()).unwrap();
            assert_eq!((read.mark(), &read), (Some(mark), &progress));
        }
        let none = Progress::none(&here(), "w");
        assert_eq!(Progress::from_bytes(&none.to_bytes()).unwrap(), none);
    }

    #[test]
    fn what_is_no_record_is_told_and_not_taken_for_none() {
        let mut later = Progress::none(&here(), "w");
        later.version = 2;
        for bytes in [b"".to_vec(), b"{}".to_vec(), later.to_bytes()] {
            let why = Progress::from_bytes(&bytes).unwrap_err();
            let begun = begin(Err(&why), (&here(), "w", "t"), Lsn(1), Accepted { duplicates: false, gap: true });
            assert!(matches!(begun, Err(Refusal::Unreadable { .. })), "{begun:?}");
        }
    }

    #[test]
    fn a_start_goes_on_where_the_record_ends() {
        let none = Accepted::default();
        assert_eq!(begun(&Progress::at(&here(), "w", &mark(300, 310)), 290, none), Ok(mark(300, 310)));
        assert_eq!(begun(&Progress::none(&here(), "w"), 290, none), Ok(Mark { end: Lsn(290), ..Mark::default() }));
    }

    #[test]
    fn each_doubt_is_refused_until_it_is_accepted() {
        let at = |mark: &Mark| Progress::at(&here(), "w", mark);
        let old = Whereabouts { timeline: 2, ..here() };
        let (lost, kept) = (Progress::at(&old, "w", &mark(100, 300)), Progress::at(&old, "w", &mark(99, 300)));
        let mut foreign = at(&mark(1, 400));
        foreign.database = "other".into();
        let gap = Accepted { duplicates: false, gap: true };
        let duplicates = Accepted { duplicates: true, gap: false };
        for stored in [&foreign, &lost, &at(&mark(300, 310)), &at(&mark(510, 520))] {
            assert!(begun(stored, 311, Accepted::default()).is_err(), "{stored:?}");
            assert!(begun(stored, 311, duplicates).is_err(), "{stored:?}");
            assert_eq!(begun(stored, 311, gap), Ok(Mark { end: Lsn(311), ..Mark::default() }));
        }
        assert_eq!(begun(&kept, 290, Accepted::default()), Ok(mark(99, 300)), "no event was lost with the old primary");
        let absent = |accepted| begin(Ok(None), (&here(), "w", "t"), Lsn(5), accepted);
        assert!(absent(Accepted::default()).is_err() && absent(gap).is_err() && absent(duplicates).is_ok());
    }

    #[test]
    fn a_slot_that_published_is_not_created_again_unasked() {
        let may = |stored: Option<&Progress>, replace| may_create(Ok(stored), (&here(), "w", "t"), replace);
        let (none, some) = (Progress::none(&here(), "w"), Progress::at(&here(), "w", &mark(3, 4)));
        assert_eq!((may(None, false), may(Some(&none), false), may(Some(&some), true)), (Ok(()), Ok(()), Ok(())));
        assert!(matches!(may(Some(&some), false), Err(Refusal::SlotGone { .. })));
        let elsewhere = Whereabouts { system: "other".into(), ..here() };
        let theirs = Progress::none(&elsewhere, "w");
        assert!(
            matches!(may(Some(&theirs), true), Err(Refusal::Taken { .. })),
            "nor is the record of another replaced"
        );
    }
}
