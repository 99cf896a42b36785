//! [`Convicts`]: events that a topic has refused, remembered until they are dead letters.
//!
//! In a transaction one refused record spoils all: nothing of it can be committed. So who is refused is only noted, and when
//! the stream brings the event again, its dead letter goes in its place, into the same transaction as its neighbours.

use std::collections::BTreeMap;

use rdkafka::types::RDKafkaErrorCode;

use crate::event::Position;

/// A record that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Convict {
    event_id: Vec<u8>,
    code: RDKafkaErrorCode,
    /// Its dead letter was refused as too large, so that goes without its value.
    is_shrunk: bool,
}

/// How to bury an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sentence {
    /// Why it was refused.
    pub code: RDKafkaErrorCode,
    /// Without its value.
    pub is_shrunk: bool,
}

/// Those whose transaction is not committed.
#[derive(Debug, Default)]
pub struct Convicts {
    by_position: BTreeMap<Position, Convict>,
}

impl Convicts {
    /// Notes one. False when there is nothing left to try: its dead letter was refused although it had no value.
    pub fn add(&mut self, position: Position, event_id: &[u8], code: RDKafkaErrorCode, was_dead: bool) -> bool {
        let known = self.by_position.get(&position).is_some_and(|convict| convict.is_shrunk);
        let (event_id, too_large) = (event_id.to_vec(), code == RDKafkaErrorCode::MessageSizeTooLarge);
        if was_dead && (known || !too_large) {
            return false;
        }
        let before = self.by_position.get(&position).map(|convict| convict.code);
        let convict = Convict { event_id, code: before.unwrap_or(code), is_shrunk: too_large };
        self.by_position.insert(position, convict);
        true
    }

    /// What is to be done with an event, where it was refused.
    pub fn sentence(&self, position: Position, event_id: &[u8]) -> Option<Sentence> {
        let convict = self.by_position.get(&position).filter(|convict| convict.event_id == event_id)?;
        Some(Sentence { code: convict.code, is_shrunk: convict.is_shrunk })
    }

    /// Forgets those before a position: they are written.
    pub fn forget_before(&mut self, through: Position) {
        self.by_position = self.by_position.split_off(&through);
    }

    /// Whether there are at least so many.
    pub fn are_many(&self, count: usize) -> bool {
        self.by_position.len() >= count
    }

    /// Whether none of them comes at or behind a position.
    pub fn are_before(&self, position: Position) -> bool {
        self.by_position.last_key_value().is_none_or(|(last, _)| *last < position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Lsn;

    fn at(lsn: u64) -> Position {
        Position { commit_lsn: Lsn(lsn), ordinal: 0 }
    }

    #[test]
    fn an_event_is_known_by_position_and_id_until_it_is_written() {
        let mut convicts = Convicts::default();
        let code = RDKafkaErrorCode::InvalidRecord;
        assert!(convicts.add(at(7), b"a", code, false) && convicts.add(at(9), b"b", code, false));
        assert_eq!(convicts.sentence(at(7), b"b"), None);
        assert_eq!(convicts.sentence(at(7), b"a"), Some(Sentence { code, is_shrunk: false }));
        assert!(!convicts.are_before(at(9)) && convicts.are_before(at(10)));
        convicts.forget_before(at(8));
        assert_eq!((convicts.sentence(at(7), b"a"), convicts.sentence(at(8), b"")), (None, None));
    }

    #[test]
    fn a_dead_letter_that_is_too_large_is_shrunk_once() {
        let mut convicts = Convicts::default();
        let (invalid, large) = (RDKafkaErrorCode::InvalidRecord, RDKafkaErrorCode::MessageSizeTooLarge);
        assert!(convicts.add(at(7), b"a", invalid, false));
        assert!(convicts.add(at(7), b"a", large, true));
        assert_eq!(convicts.sentence(at(7), b"a"), Some(Sentence { code: invalid, is_shrunk: true }));
        assert!(!convicts.add(at(7), b"a", large, true), "without its value it is refused as well");
        assert!(!convicts.add(at(8), b"b", invalid, true), "the dead-letter topic refuses what no one can mend");
    }
}
