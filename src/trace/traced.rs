//! [`Traced`]: a sink, seen from outside.

use tokio::time::Instant;

use super::Recorder;
use crate::{
    encode::Record,
    event::Position,
    lsn::Lsn,
    sink::{Failed, KafkaSink, Queued, Sink, SinkError},
};

/// Passes everything on to a sink, and tells a recorder, where there is one, what goes in and how far it is durable.
#[derive(Debug)]
pub struct Traced<'a, S> {
    sink: &'a mut S,
    recorder: Option<&'a mut Recorder>,
    /// What is durable is looked at only once the failures are known that it steps over.
    lets_go: bool,
}

impl<'a, S: Sink> Traced<'a, S> {
    /// Around a sink of the stream.
    pub fn new(sink: &'a mut S, recorder: Option<&'a mut Recorder>) -> Self {
        Self { sink, recorder, lets_go: false }
    }

    fn advance(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.advance(self.sink.durable());
        }
    }
}

impl<'a> Traced<'a, KafkaSink> {
    /// Around a sink that lets records go; whoever sends asks for the failures after each look at the deliveries.
    pub fn that_lets_go(sink: &'a mut KafkaSink, recorder: Option<&'a mut Recorder>) -> Self {
        Self { lets_go: true, ..Self::new(sink, recorder) }
    }

    /// [`KafkaSink::take_failures`].
    pub fn take_failures(&mut self) -> Vec<Failed> {
        let failures = self.sink.take_failures();
        if let Some(recorder) = &mut self.recorder {
            recorder.let_go(&failures);
        }
        self.advance();
        failures
    }

    /// [`KafkaSink::delivered_ahead`].
    pub fn delivered_ahead(&self) -> impl Iterator<Item = Lsn> {
        self.sink.delivered_ahead()
    }
}

impl<S: Sink> Sink for Traced<'_, S> {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        self.sink.recover(confirmed)
    }

    fn enqueue(&mut self, position: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        let queued = self.sink.enqueue(position, commit_us, record)?;
        if let Some(recorder) = &mut self.recorder {
            recorder.handed_over(queued, record);
        }
        Ok(queued)
    }

    fn seal(&mut self, end: Lsn) {
        self.sink.seal(end);
        if let Some(recorder) = &mut self.recorder {
            recorder.seal(end);
            if !self.lets_go {
                self.advance();
            }
        }
    }

    fn durable(&self) -> Lsn {
        self.sink.durable()
    }

    fn tick(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        let outcome = self.sink.tick(clock_ahead_us);
        if !self.lets_go {
            self.advance();
        }
        outcome
    }

    async fn ready(&self) {
        self.sink.ready().await;
    }

    fn deadline(&self) -> Option<Instant> {
        self.sink.deadline()
    }

    fn in_flight(&self) -> (u64, u64) {
        self.sink.in_flight()
    }

    fn oldest_commit_us(&self) -> i64 {
        self.sink.oldest_commit_us()
    }
}
