//! [`SessionSink`]: the sink of a session, by the kind of delivery; and the [`Memory`] that goes from one to the next.

use crate::sink::{Delivered, ExactlyOnceSink, KafkaSink};

/// The sink of a session.
pub(super) enum SessionSink {
    AtLeastOnce(Box<KafkaSink>),
    ExactlyOnce(Box<ExactlyOnceSink>),
    /// It is used elsewhere.
    Taken,
}

impl SessionSink {
    /// True while nothing was ever handed over: then another session may begin with its producer.
    pub fn is_fresh(&self) -> bool {
        match self {
            Self::AtLeastOnce(sink) => sink.is_fresh(),
            Self::ExactlyOnce(sink) => sink.is_fresh(),
            Self::Taken => false,
        }
    }

    /// Takes an at-least-once sink out.
    pub fn take_at_least_once(&mut self) -> Option<KafkaSink> {
        match std::mem::replace(self, Self::Taken) {
            Self::AtLeastOnce(sink) => Some(*sink),
            Self::ExactlyOnce(_) | Self::Taken => None,
        }
    }
}

/// What one session of at-least-once delivery has learned that the next must know.
#[derive(Default)]
pub(super) struct Memory {
    /// What the brokers have beyond the slot.
    pub delivered: Delivered,
    /// The topic that takes no records.
    pub refused: Option<String>,
}

impl Memory {
    /// Tells a sink, before its session.
    pub fn lend(&mut self, sink: &mut KafkaSink) {
        sink.remember(self.refused.as_deref(), std::mem::take(&mut self.delivered));
    }

    /// Asks a sink, after its session.
    pub fn take_back(&mut self, sink: &mut KafkaSink) {
        self.refused = sink.refused().map(str::to_owned);
        self.delivered = sink.leave_delivered();
    }
}
