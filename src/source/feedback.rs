//! [`Feedback`]: when to tell the server what.
//!
//! Pure. The rules: a changed confirm point goes out within [`INTERVAL`]; something goes out every [`ASK_AFTER`] of silence,
//! with a request for an answer; at once when the server asks; and never anything lower than before, nor `0/0`.
//! What may be confirmed is the sink's `durable()` and nothing else; the caller passes it in.

use std::time::Duration;

use tokio::time::Instant;

use crate::lsn::Lsn;

/// How long a changed position may wait to be sent.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// After this much silence of either side, a status update asks for an answer.
pub const ASK_AFTER: Duration = Duration::from_secs(4);
/// After this much silence of the server, though asked, the link counts as lost. The server's own keepalives come after
/// half of `wal_sender_timeout`, which walpost pins to 15 s, so this is more than an idle link can need.
pub const LOST_AFTER: Duration = Duration::from_secs(15);
/// Replies asked for at one position, within a second, that say "I am shutting down and wait for you".
const SHUTDOWN_REPLIES: u32 = 50;
/// How long a server that shuts down is given for what is in flight before its stream is left.
pub const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(2);

/// A standby status update to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusUpdate {
    /// The furthest position received.
    pub received: Lsn,
    /// The position up to which everything is delivered: where the server may resume from.
    pub confirmed: Lsn,
    /// Ask for an answer.
    pub request_reply: bool,
}

/// When to send which status update.
#[derive(Debug)]
pub struct Feedback {
    sent: Option<(Instant, Lsn)>,
    confirmed: Lsn,
    reply_owed: bool,
    asked: (Instant, Lsn, u32),
    stopping_since: Option<Instant>,
}

impl Feedback {
    /// Starts at the slot's own confirmed position.
    pub fn new(now: Instant, slot_confirmed: Lsn) -> Self {
        let asked = (now, Lsn::ZERO, 0);
        Self { sent: None, confirmed: slot_confirmed, reply_owed: false, asked, stopping_since: None }
    }

    /// The highest position ever handed out for sending.
    pub fn confirmed(&self) -> Lsn {
        self.confirmed
    }

    /// The server sent a keepalive.
    pub fn keepalive(&mut self, now: Instant, wal_end: Lsn, reply_requested: bool) {
        if !reply_requested {
            return;
        }
        self.reply_owed = true;
        let (since, position, count) = &mut self.asked;
        if *position == wal_end && now.duration_since(*since) < Duration::from_secs(1) {
            *count += 1;
        } else {
            if *position != wal_end {
                self.stopping_since = None;
            }
            (*since, *position, *count) = (now, wal_end, 1);
        }
        if *count > SHUTDOWN_REPLIES {
            self.stopping_since.get_or_insert(now);
        }
    }

    /// True when the server is shutting down, waits for a confirm that we cannot give, and has waited long enough: leave it.
    pub fn blocks_shutdown(&self, now: Instant) -> bool {
        self.stopping_since.is_some_and(|since| now.duration_since(since) >= SHUTDOWN_PATIENCE)
    }

    /// The update that is due now, if any. `durable` may be behind what was confirmed before; it is then not repeated.
    pub fn due(&mut self, now: Instant, received: Lsn, durable: Lsn) -> Option<StatusUpdate> {
        let silent = |since: Instant, limit| now.duration_since(since) >= limit;
        let (changed_due, ask) = match self.sent {
            None => (true, false),
            Some((at, confirmed)) => (durable > confirmed && silent(at, INTERVAL), silent(at, ASK_AFTER)),
        };
        (self.reply_owed || changed_due || ask).then(|| self.force(now, received, durable, ask))
    }

    /// An update regardless of time, for a stop.
    pub fn force(&mut self, now: Instant, received: Lsn, durable: Lsn, request_reply: bool) -> StatusUpdate {
        self.confirmed = self.confirmed.max(durable);
        self.reply_owed = false;
        self.sent = Some((now, self.confirmed));
        StatusUpdate { received: received.max(self.confirmed), confirmed: self.confirmed, request_reply }
    }

    /// When [`Self::due`] should be asked again at the latest.
    pub fn deadline(&self, now: Instant) -> Instant {
        match self.sent {
            None => now,
            Some((at, _)) if at + INTERVAL > now => at + INTERVAL,
            Some(_) => now + INTERVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    #[test]
    fn a_requested_reply_goes_out_at_once_and_once() {
        let start = Instant::now();
        let mut feedback = Feedback::new(start, Lsn(5));
        assert!(feedback.due(start, Lsn(9), Lsn(5)).is_some(), "the first update");
        assert_eq!(feedback.due(after(start, 1), Lsn(9), Lsn(5)), None);
        feedback.keepalive(after(start, 2), Lsn(9), true);
        let update = feedback.due(after(start, 2), Lsn(9), Lsn(5)).unwrap();
        assert_eq!(update, StatusUpdate { received: Lsn(9), confirmed: Lsn(5), request_reply: false });
        assert_eq!(feedback.due(after(start, 3), Lsn(9), Lsn(5)), None);
    }

    /// Case 18: nobody has to ask.
    #[test]
    fn a_changed_position_waits_for_the_interval_and_silence_asks() {
        let start = Instant::now();
        let mut feedback = Feedback::new(start, Lsn(5));
        feedback.due(start, Lsn(5), Lsn(5));
        assert_eq!(feedback.due(after(start, 99), Lsn(9), Lsn(9)), None);
        assert_eq!(feedback.due(after(start, 100), Lsn(9), Lsn(9)).unwrap().confirmed, Lsn(9));
        assert_eq!(feedback.due(after(start, 4099), Lsn(9), Lsn(9)), None);
        assert!(feedback.due(after(start, 4100), Lsn(9), Lsn(9)).unwrap().request_reply);
    }

    /// Case 47.
    #[test]
    fn a_stopping_server_is_left_after_a_while_and_a_busy_one_is_not() {
        let start = Instant::now();
        let mut feedback = Feedback::new(start, Lsn(5));
        for millis in 0..1000 {
            feedback.keepalive(after(start, millis), Lsn(100 + millis), true);
        }
        assert!(!feedback.blocks_shutdown(after(start, 60_000)), "positions move: no shutdown");
        for millis in 1000..1100 {
            feedback.keepalive(after(start, millis), Lsn(7), true);
        }
        assert!(!feedback.blocks_shutdown(after(start, 1100)));
        assert!(feedback.blocks_shutdown(after(start, 3100)));
    }

    proptest! {
        #[test]
        fn confirms_never_go_back_and_are_never_zero(steps in proptest::collection::vec((0_u64..500, 0_u64..50, any::<bool>()), 1..100)) {
            let (mut now, mut last) = (Instant::now(), Lsn(1));
            let mut feedback = Feedback::new(now, Lsn(1));
            for (millis, durable, asked) in steps {
                now = after(now, millis);
                feedback.keepalive(now, Lsn(99), asked);
                if let Some(update) = feedback.due(now, Lsn(durable + 3), Lsn(durable)) {
                    prop_assert!(update.confirmed >= last && update.received >= update.confirmed);
                    last = update.confirmed;
                } else {
                    prop_assert!(!asked, "a requested reply was not sent");
                }
            }
        }
    }
}
