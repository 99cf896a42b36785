//! [`Recorder`]: adds up what goes in, by transaction, and lets it go as one batch when the acknowledged position has moved over
//! it. On the pipeline's thread: it never waits, and what the queue has no room for is counted and dropped.

use std::{collections::VecDeque, sync::Arc};

use prometheus::IntCounter;
use tokio::sync::mpsc;

use super::{
    batch::{Batch, Failure},
    link::Link,
};
use crate::{
    clock, codes,
    encode::Record,
    error::chain,
    lsn::Lsn,
    pipeline::SessionError,
    sink::{Failed, Queued},
};

/// So many transactions are kept apart; with more the last ones are one batch.
const MOST_PARTS: usize = 1_024;
/// An event that the producer takes no sooner was held back.
const HELD_US: i64 = 1_000_000;

/// Adds up batches until they are acknowledged.
#[derive(Debug)]
pub struct Recorder {
    sender: mpsc::Sender<Batch>,
    dropped: IntCounter,
    one_in: u32,
    /// The transaction that is being received.
    open: Option<Batch>,
    /// Those that wait for their acknowledgement, in order.
    parts: VecDeque<Batch>,
    /// Since when an event has waited for room (Unix µs); 0: none does.
    held_since_us: i64,
    /// Why the session before failed, for the first batch of this one.
    retried: Option<Failure>,
    /// Events that were let go, by their place.
    let_go: Vec<(Lsn, Failure)>,
    /// Kept, since the next event mostly goes there as well.
    topic: Arc<str>,
}

impl Recorder {
    pub(super) fn new(sender: mpsc::Sender<Batch>, one_in: u32, dropped: IntCounter) -> Self {
        Self {
            sender,
            dropped,
            one_in,
            open: None,
            parts: VecDeque::new(),
            held_since_us: 0,
            retried: None,
            let_go: Vec::new(),
            topic: "".into(),
        }
    }

    /// A record was handed over, or there was no room for it.
    pub(super) fn handed_over(&mut self, queued: Queued, record: &Record<'_>) {
        if queued == Queued::Full {
            if self.held_since_us == 0 {
                self.held_since_us = clock::unix_us();
            }
            return;
        }
        let mut batch = self.open.take().unwrap_or_else(|| self.begin(record.topic));
        self.held_since_us = 0;
        batch.events += 1;
        batch.bytes += (record.weight() - Record::OVERHEAD) as u64;
        batch.goes_to(record.topic);
        if let Some(link) = record.headers.get(b"traceparent").and_then(Link::parse) {
            batch.leads_to(link);
        }
        self.open = Some(batch);
    }

    /// With the time at which its first event was first handed over.
    fn begin(&mut self, topic: &str) -> Batch {
        if *self.topic != *topic {
            self.topic = topic.into();
        }
        let now_us = clock::unix_us();
        let began_us = if self.held_since_us == 0 { now_us } else { self.held_since_us.min(now_us) };
        let mut batch = Batch::begin(began_us, Arc::clone(&self.topic));
        batch.held_us = Some(now_us - began_us).filter(|held_us| *held_us >= HELD_US).unwrap_or(0);
        batch.retried = self.retried.take();
        batch
    }

    /// A transaction ends here.
    pub(super) fn seal(&mut self, end: Lsn) {
        let Some(mut batch) = self.open.take() else { return };
        batch.end = end;
        let many = self.parts.len() >= MOST_PARTS;
        match self.parts.back_mut().filter(|_| many) {
            Some(last) => last.absorb(batch),
            None => self.parts.push_back(batch),
        }
    }

    /// Records that were handed over have come back, and hold nothing up.
    pub(super) fn let_go(&mut self, failed: &[Failed]) {
        let failure = |failed: &Failed| Failure {
            at_us: clock::unix_us(),
            code: failed.code.clone(),
            text: format!("topic {:?} takes no such record: {}", failed.topic, failed.code),
        };
        self.let_go.extend(failed.iter().map(|failed| (failed.commit_lsn, failure(failed))));
    }

    /// Everything before this position is acknowledged, or was let go.
    pub(super) fn advance(&mut self, durable: Lsn) {
        let mut done: Option<Batch> = None;
        while let Some(part) = self.parts.pop_front_if(|part| part.end <= durable) {
            match &mut done {
                Some(done) => done.absorb(part),
                None => done = Some(part),
            }
        }
        let Some(mut batch) = done else { return };
        for (_, failure) in self.let_go.extract_if(.., |(place, _)| *place < durable) {
            batch.failed += 1;
            batch.failure.get_or_insert(failure);
        }
        self.finish(batch);
    }

    /// The session is over: what is not acknowledged comes again.
    pub fn session_over(&mut self, error: Option<&SessionError>) {
        let (code, text) = match error {
            Some(error) => (codes::of_session(error).to_string(), chain(error)),
            None => ("stopped".to_owned(), "not acknowledged before the end; it comes again".to_owned()),
        };
        self.let_go.clear();
        self.held_since_us = 0;
        let failure = Failure { at_us: clock::unix_us(), code, text };
        let left = self.parts.drain(..).chain(self.open.take()).reduce(|mut all, later| {
            all.absorb(later);
            all
        });
        if let Some(mut batch) = left {
            batch.failure = Some(failure.clone());
            self.finish(batch);
            self.retried = Some(failure);
        }
    }

    /// Failed batches are always told.
    fn finish(&mut self, mut batch: Batch) {
        let chosen = batch.failure.is_some() || self.one_in <= 1 || fastrand::u32(..self.one_in) == 0;
        if !chosen {
            return;
        }
        batch.ended_us = clock::unix_us().max(batch.began_us);
        if self.sender.try_send(batch).is_err() {
            self.dropped.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::batch::Destination, *};
    use crate::{encode::Headers, sink::SinkError};

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn recorder(room: usize, one_in: u32) -> (Recorder, mpsc::Receiver<Batch>, IntCounter) {
        let (sender, receiver) = mpsc::channel(room);
        let dropped = IntCounter::new("dropped", "dropped").unwrap();
        (Recorder::new(sender, one_in, dropped.clone()), receiver, dropped)
    }

    /// A transaction with one event of 3 bytes beside its headers.
    fn transaction(recorder: &mut Recorder, topic: &str, end: u64) {
        let mut headers = Headers::default();
        headers.append(b"traceparent", PARENT.as_bytes());
        let record = Record {
            topic,
            key: Some(b"k"),
            value: Some(b"vv"),
            headers: &headers,
            timestamp_ms: 1,
            event_id: b"1",
            dead: None,
        };
        recorder.handed_over(Queued::Full, &record);
        recorder.handed_over(Queued::Accepted, &record);
        recorder.seal(Lsn(end));
    }

    #[test]
    fn what_one_step_moves_over_is_one_batch_and_nothing_more() {
        let (mut recorder, mut batches, dropped) = recorder(8, 1);
        (1..=4).for_each(|end| transaction(&mut recorder, if end < 3 { "t" } else { "u" }, end * 10));
        recorder.seal(Lsn(45));
        recorder.advance(Lsn(9));
        assert!(batches.try_recv().is_err(), "nothing is acknowledged");
        recorder.advance(Lsn(29));
        let batch = batches.try_recv().unwrap();
        assert_eq!((batch.events, batch.end, batch.destination), (2, Lsn(20), Destination::One("t".into())));
        assert_eq!((batch.bytes, batch.links.len()), (2 * (3 + 66), 1), "each trace once");
        recorder.advance(Lsn(45));
        let batch = batches.try_recv().unwrap();
        assert_eq!((batch.events, batch.end, batch.failure), (2, Lsn(40), None));
        recorder.advance(Lsn(60));
        assert!(batches.try_recv().is_err(), "the empty ones are nobody's");
        assert_eq!(dropped.get(), 0);
    }

    #[test]
    fn what_the_queue_has_no_room_for_is_dropped_and_counted() {
        let (mut recorder, mut batches, dropped) = recorder(1, 1);
        for end in 1..=3 {
            transaction(&mut recorder, "t", end);
            recorder.advance(Lsn(end));
        }
        assert_eq!((batches.try_recv().unwrap().end, dropped.get()), (Lsn(1), 2));
        drop(batches);
        transaction(&mut recorder, "t", 4);
        recorder.advance(Lsn(4));
        assert_eq!(dropped.get(), 3, "nobody takes them any more");
    }

    #[test]
    fn a_failed_batch_is_told_whatever_the_sample_and_the_next_says_so() {
        let (mut recorder, mut batches, _) = recorder(8, u32::MAX);
        transaction(&mut recorder, "t", 10);
        recorder.advance(Lsn(10));
        transaction(&mut recorder, "t", 20);
        transaction(&mut recorder, "u", 30);
        let error = SessionError::Sink(SinkError::Producer { code: "Fatal".into() });
        recorder.session_over(Some(&error));
        let failed = batches.try_recv().unwrap();
        assert_eq!((failed.events, &failed.destination), (2, &Destination::Several));
        let failure = failed.failure.unwrap();
        assert_eq!(failure.code, codes::of_session(&error).to_string());
        recorder.advance(Lsn(30));
        assert!(batches.try_recv().is_err(), "it is told once");
        recorder.one_in = 1;
        transaction(&mut recorder, "t", 20);
        recorder.advance(Lsn(20));
        assert_eq!(batches.try_recv().unwrap().retried, Some(failure));
        transaction(&mut recorder, "t", 30);
        recorder.advance(Lsn(30));
        assert_eq!(batches.try_recv().unwrap().retried, None);
    }

    #[test]
    fn what_was_let_go_counts_for_the_batch_that_it_is_in() {
        let (mut recorder, mut batches, _) = recorder(8, 1);
        (1..=3).for_each(|end| transaction(&mut recorder, "t", end));
        let (topic, code) = ("t".to_owned(), "InvalidRecord".to_owned());
        recorder.let_go(&[Failed { commit_lsn: Lsn(1), topic, code, is_refusal: false }]);
        recorder.advance(Lsn(1));
        let first = batches.try_recv().unwrap();
        assert_eq!((first.events, first.failed), (1, 0));
        recorder.advance(Lsn(3));
        let second = batches.try_recv().unwrap();
        assert_eq!((second.events, second.failed), (2, 1));
        assert_eq!(second.failure.unwrap().code, "InvalidRecord");
    }

    #[test]
    fn a_batch_begins_when_its_first_event_was_offered_and_says_for_how_long_it_was_held() {
        let (mut recorder, mut batches, _) = recorder(8, 1);
        let before = clock::unix_us();
        recorder.held_since_us = before - 2 * HELD_US;
        transaction(&mut recorder, "t", 10);
        transaction(&mut recorder, "t", 20);
        recorder.advance(Lsn(10));
        let held = batches.try_recv().unwrap();
        assert_eq!(held.began_us, before - 2 * HELD_US);
        assert!(held.held_us >= 2 * HELD_US && held.ended_us >= before, "{held:?}");
        recorder.advance(Lsn(20));
        let prompt = batches.try_recv().unwrap();
        assert!(prompt.held_us == 0 && prompt.began_us >= before, "{prompt:?}");
    }

    #[test]
    fn what_is_kept_has_a_bound_and_the_sums_are_right() {
        let (mut recorder, mut batches, _) = recorder(8, 1);
        (1..=5_000).for_each(|end| transaction(&mut recorder, "t", end));
        assert_eq!(recorder.parts.len(), MOST_PARTS);
        recorder.advance(Lsn(4_999));
        recorder.advance(Lsn(5_000));
        let all = [batches.try_recv().unwrap(), batches.try_recv().unwrap()];
        assert_eq!(all.map(|batch| batch.events).iter().sum::<u64>(), 5_000);
    }
}
