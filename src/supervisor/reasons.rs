//! Words for errors: the labels of metrics, and the part that is unwell.

use crate::{
    backfill::BackfillError, init::InitError, observe::Part, pipeline::SessionError, poll::PollError, sink::SinkError,
    source::SourceError,
};

/// Another process holds the slot.
pub(super) fn slot_is_taken(error: &SessionError) -> bool {
    match error {
        SessionError::Source(SourceError::Server(error)) => error.code == "55006",
        SessionError::Backfill(BackfillError::Busy(_)) => true,
        SessionError::Prepare(error) => matches!(**error, InitError::Slot(BackfillError::Busy(_))),
        _ => false,
    }
}

/// What is unwell then.
pub(super) fn part(error: &SessionError) -> Part {
    match error {
        SessionError::Sink(SinkError::Refused { .. }) => Part::Topic,
        SessionError::Sink(_) | SessionError::Poll(PollError::Unacknowledged { .. }) => Part::Kafka,
        _ => Part::Stream,
    }
}

/// The label of `producer_restarts_total`.
pub(super) fn sink_reason(error: &SinkError) -> &'static str {
    match error {
        SinkError::Refused { .. } => "topic_refused",
        SinkError::Suspect { .. } => "batch_refused",
        SinkError::Poison { .. } => "poison",
        SinkError::Cleared { .. } => "isolation_over",
        SinkError::Convicted { .. } => "record_refused",
        SinkError::Progress(_) => "progress",
        SinkError::NoTransaction { .. } => "no_transaction",
        SinkError::NotThere { .. } => "not_committed",
        SinkError::Producer { .. } => "producer_failed",
        SinkError::Settings(_) => "settings",
    }
}

/// The label of `halted`.
pub(super) fn reason(error: &SessionError) -> &'static str {
    match error {
        SessionError::Source(SourceError::SlotLost { .. } | SourceError::OtherSystem { .. }) => "slot_lost",
        SessionError::Source(_) | SessionError::Prepare(_) | SessionError::Backfill(_) | SessionError::Poll(_) => {
            "postgres"
        }
        SessionError::Sink(SinkError::Progress(_)) => "progress",
        SessionError::Sink(SinkError::Poison { .. }) | SessionError::Poison { .. } => "poison",
        SessionError::Sink(_) => "kafka",
        SessionError::Table { .. } => "table",
    }
}
