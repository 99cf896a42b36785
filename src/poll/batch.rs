//! [`Batch`]: the rows of one transaction, and what became of each.

use std::collections::HashSet;

use crate::{
    error::chain,
    observe::log::Sparse,
    sink::Failed,
    source::queue::{Claimed, Place},
};

/// What became of a row so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It was handed over under this number.
    Sent(u64),
    /// It cannot be delivered now.
    Failed,
}

#[derive(Debug)]
struct Member {
    place: Place,
    key: Option<Vec<u8>>,
    event_id: String,
    state: State,
}

/// The rows of one transaction, in their order.
#[derive(Debug)]
pub(super) struct Batch {
    /// The number that the next row is handed over under.
    next: u64,
    now_us: i64,
    members: Vec<Member>,
    /// Keys of rows that have failed: later rows of theirs stay where they are.
    held: HashSet<Vec<u8>>,
    read: u64,
    refused: Option<String>,
}

impl Batch {
    /// Empty. `now_us`: the server's clock.
    pub fn new(next: u64, now_us: i64) -> Self {
        Self { next, now_us, members: Vec::new(), held: HashSet::new(), read: 0, refused: None }
    }

    /// The server's clock as the transaction began, Unix µs.
    pub fn now_us(&self) -> i64 {
        self.now_us
    }

    /// Whether a row has to wait behind one of its key.
    pub fn holds_back(&self, key: Option<&[u8]>) -> bool {
        key.is_some_and(|key| self.held.contains(key))
    }

    /// A row was read.
    pub fn count(&mut self) {
        self.read += 1;
    }

    /// Rows that were read.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// The first failure that was the topic's, in words.
    pub fn into_refusal(self) -> Option<String> {
        self.refused
    }

    /// A row was handed over.
    pub fn sent(&mut self, claimed: &Claimed<'_>) {
        self.members.push(member(claimed, State::Sent(self.next)));
        self.next += 1;
    }

    /// A row cannot be handed over. `refused`: its topic takes no records.
    pub fn unfit(&mut self, claimed: &Claimed<'_>, error: &dyn std::error::Error, refused: bool) {
        let (member, error) = (member(claimed, State::Failed), chain(error));
        tell(&member.event_id, &error);
        self.held.extend(member.key.clone());
        self.members.push(member);
        if refused {
            self.refused.get_or_insert(error);
        }
    }

    /// Records that were handed over have come back.
    pub fn note(&mut self, failures: Vec<Failed>) {
        for failed in failures {
            let number = State::Sent(failed.commit_lsn.0);
            // few fail, so a search costs nothing
            let Some(member) = self.members.iter_mut().find(|member| member.state == number) else { continue };
            member.state = State::Failed;
            self.held.extend(member.key.clone());
            let error = format!("topic {:?} takes no such record: {}", failed.topic, failed.code);
            tell(&member.event_id, &error);
            if failed.is_refusal {
                self.refused.get_or_insert(error);
            }
        }
    }

    /// Which rows the brokers have, and which were tried in vain. Of each key only the first of these counts: those behind it
    /// would have had to wait for it. `durable`: rows before this number, and those `ahead`, are acknowledged.
    pub fn judge(&self, durable: u64, ahead: &HashSet<u64>) -> (Vec<&Place>, Vec<&Place>) {
        let (mut delivered, mut failed, mut keys) = (Vec::new(), Vec::new(), HashSet::new());
        for member in &self.members {
            match member.state {
                State::Sent(number) if number < durable || ahead.contains(&number) => delivered.push(&member.place),
                State::Sent(_) => {}
                State::Failed => {
                    if member.key.as_deref().is_none_or(|key| keys.insert(key)) {
                        failed.push(&member.place);
                    }
                }
            }
        }
        (delivered, failed)
    }
}

fn member(claimed: &Claimed<'_>, state: State) -> Member {
    Member {
        place: claimed.place.clone(),
        key: claimed.key.map(<[u8]>::to_vec),
        event_id: String::from_utf8_lossy(claimed.id.unwrap_or_default()).into_owned(),
        state,
    }
}

/// Logs it; in a flood only some.
fn tell(event_id: &str, error: &str) {
    static SPARSE: Sparse = Sparse::new();
    let Some(untold) = SPARSE.turn() else { return };
    tracing::warn!(event_id, error, untold, "an event was not delivered; it stays in the table and is tried again");
}
