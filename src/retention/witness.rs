//! [`Witness`]: what this process has seen of the slot, written by the pipeline's thread, and what it asks of that.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use tokio::sync::Notify;

use crate::{lsn::Lsn, sink::Buried};

/// From where on this process has delivered everything itself, and which events ended as dead letters.
#[derive(Debug, Default)]
pub struct Witness {
    begun: AtomicU64,
    /// Where the present session began.
    session: AtomicU64,
    renewal: Notify,
    /// Dead letters.
    pub buried: Arc<Buried>,
}

impl Witness {
    /// A session begins at `found`, the slot's position; `ours` is what this process has confirmed itself, `0/0` before
    /// the first time. A slot that stands further than that was moved by someone else.
    pub fn session_begins(&self, found: Lsn, ours: Lsn) {
        if ours == Lsn::ZERO || found > ours {
            self.begun.store(found.0, SeqCst);
        }
        self.session.store(found.0, SeqCst);
    }

    /// Where the present session began, or the last one.
    pub fn session(&self) -> Lsn {
        Lsn(self.session.load(SeqCst))
    }

    /// Has the present session end, so that another one begins where it stands.
    pub fn ask_for_renewal(&self) {
        self.renewal.notify_one();
    }

    /// Ends when the session is to.
    pub async fn renewal(&self) {
        self.renewal.notified().await;
    }

    /// Everything committed from here to what this process has confirmed was delivered by it; `None` before the first
    /// session.
    pub fn begun(&self) -> Option<Lsn> {
        Some(Lsn(self.begun.load(SeqCst))).filter(|lsn| *lsn > Lsn::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reconnect_goes_on_and_a_slot_that_was_moved_begins_anew() {
        let witness = Witness::default();
        assert_eq!(witness.begun(), None);
        witness.session_begins(Lsn(10), Lsn::ZERO);
        witness.session_begins(Lsn(15), Lsn(20));
        assert_eq!(witness.begun(), Some(Lsn(10)), "the server may forget the last confirms");
        witness.session_begins(Lsn(21), Lsn(20));
        assert_eq!(witness.begun(), Some(Lsn(21)));
    }
}
