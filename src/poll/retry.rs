//! [`Retry`]: when the events of a table are tried again whose delivery failed.

use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;

/// The longest wait; longer where the polling interval is.
const LONGEST_WAIT: Duration = Duration::from_mins(1);

/// Waits that grow as long as nothing of what failed can be delivered.
#[derive(Debug, Clone)]
pub struct Retry {
    due: Instant,
    backoff: Backoff,
}

impl Retry {
    /// Due at once; the first wait is about `first`.
    pub fn new(first: Duration) -> Self {
        Self { due: Instant::now(), backoff: Backoff::new(first, LONGEST_WAIT.max(first)) }
    }

    /// When they are tried again.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Whether that is now.
    pub fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Some have failed for the first time; `only_they`: nothing else was waiting to be tried again.
    pub fn plan_first(&mut self, only_they: bool) {
        if only_they {
            self.backoff.reset();
            self.due = Instant::now() + self.backoff.next_wait();
        }
    }

    /// Some were tried again.
    pub fn note(&mut self, delivered: u64, failed: u64) {
        if delivered > 0 {
            self.backoff.reset();
        }
        self.due = Instant::now();
        if failed > 0 {
            self.due += self.backoff.next_wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_grow_while_nothing_of_it_can_be_delivered() {
        let mut retry = Retry::new(Duration::from_secs(1));
        assert!(retry.is_due(), "what an earlier process left is tried at once");
        retry.plan_first(true);
        assert!(!retry.is_due());
        retry.plan_first(false);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(retry.is_due());
        for _ in 0..10 {
            retry.note(0, 1);
        }
        tokio::time::advance(Duration::from_secs(29)).await;
        assert!(!retry.is_due());
        tokio::time::advance(Duration::from_secs(31)).await;
        assert!(retry.is_due());
        retry.note(1, 1);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(retry.is_due());
    }
}
