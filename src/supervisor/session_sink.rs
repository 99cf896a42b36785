//! [`SessionSink`]: the sink of a session, by the kind of delivery.

use crate::sink::{ExactlyOnceSink, KafkaSink};

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
