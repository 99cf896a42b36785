//! [`Backoff`]: how long to wait before the next try.

use std::time::Duration;

/// Doubling waits with jitter, up to a cap; starts over after progress.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    next: Duration,
}

impl Backoff {
    /// Waits of about `first`, doubling, at most `cap`.
    pub fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, next: first }
    }

    /// The next wait: between half and all of the present step, so that many clients do not come at once.
    pub fn next_wait(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.cap);
        step.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// It worked: the next wait is a short one again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_the_cap_and_start_over_after_progress() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(400));
        for step in [100, 200, 400, 400] {
            let wait = backoff.next_wait();
            assert!(wait >= Duration::from_millis(step / 2) && wait <= Duration::from_millis(step), "{wait:?}");
        }
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_millis(100));
    }
}
