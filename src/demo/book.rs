//! [`Book`]: what was committed, what was rolled back, and what arrived, in one place with one owner.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::{
    sync::{mpsc::UnboundedReceiver, oneshot, watch},
    time::Instant,
};

use super::{
    judge::{Arrival, Written},
    report::Screen,
};

/// The pause between two events that are shown.
const SHOW_EVERY: Duration = Duration::from_millis(400);

/// Something that the book has to know.
pub enum Note {
    /// A transaction was committed with these events.
    Committed(Vec<Written>),
    /// A transaction was rolled back with that many events.
    RolledBack(usize),
    /// The consumer received a record.
    Arrived(Arrival),
    /// Everything the asker wants to have counted was noted before this.
    Count(oneshot::Sender<Tally>),
}

/// How it stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Committed events.
    pub committed: usize,
    /// Events of transactions that were rolled back.
    pub rolled_back: usize,
    /// Distinct events that arrived.
    pub delivered: usize,
    /// Records beyond the first of each event.
    pub twice: usize,
}

impl Tally {
    /// Committed events that have not arrived yet.
    pub fn missing(&self) -> usize {
        self.committed.saturating_sub(self.delivered)
    }
}

/// The whole record.
#[derive(Default)]
pub struct Book {
    /// Committed events by id.
    pub written: HashMap<String, Written>,
    /// What arrived, in the order of arrival.
    pub arrivals: Vec<Arrival>,
    seen: HashSet<String>,
    rolled_back: usize,
}

impl Book {
    /// Keeps the book until nobody writes notes any more. Shows an event now and then.
    pub async fn keep(mut notes: UnboundedReceiver<Note>, tally: watch::Sender<Tally>, screen: Screen) -> Self {
        let mut book = Self::default();
        let mut shown: Option<Instant> = None;
        while let Some(note) = notes.recv().await {
            match note {
                Note::Committed(events) => {
                    book.written.extend(events.into_iter().map(|event| (event.id.clone(), event)));
                }
                Note::RolledBack(events) => book.rolled_back += events,
                Note::Arrived(arrival) => {
                    let first = book.seen.insert(arrival.id.clone());
                    if let Some(event) = book.written.get(&arrival.id)
                        && first
                        && shown.is_none_or(|at| at.elapsed() >= SHOW_EVERY)
                    {
                        screen.event(event, arrival.at.duration_since(event.committing));
                        shown = Some(Instant::now());
                    }
                    book.arrivals.push(arrival);
                }
                // who asked may have given up
                Note::Count(reply) => drop(reply.send(book.tally())),
            }
            tally.send_replace(book.tally());
        }
        book
    }

    /// How it stands.
    pub fn tally(&self) -> Tally {
        Tally {
            committed: self.written.len(),
            rolled_back: self.rolled_back,
            delivered: self.seen.len(),
            twice: self.arrivals.len() - self.seen.len(),
        }
    }
}
