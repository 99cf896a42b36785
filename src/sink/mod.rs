//! Where records go, and how their delivery is known.
//!
//! A [`Sink`] takes records in commit order and says with [`Sink::durable`] up to where the log is delivered: the only
//! source of what may be confirmed. It knows nothing of Postgres. The shape leaves room for a sink whose position is
//! written in the same Kafka transaction as the records.

mod buried;
mod dead_letter;
mod delivered;
pub mod exactly_once;
mod isolation;
pub mod kafka;
pub mod kafka_error;
mod known_topics;
mod produce;
mod producer;
mod reports;
mod settings;
mod statistics;
mod topics;

use std::future::Future;

use tokio::time::Instant;

use crate::{encode::Record, event::Position, lsn::Lsn};
pub use buried::{Buried, Ids};
pub use delivered::Delivered;
pub use exactly_once::{ExactlyOnceSink, Refusal};
pub use kafka::{Failed, KafkaSink, Mode, Sending};
pub use settings::{admin_config, client_config, reader_config};

/// What became of a record that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queued {
    /// It is on its way.
    Accepted,
    /// Not taken: there is no room, or its topic is not there yet. Try the same record again when [`Sink::ready`] says so.
    Full,
}

/// Takes records and knows when they are delivered.
pub trait Sink {
    /// Begins a session at the position that the slot has confirmed. Called once the slot is held.
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError>;
    /// Hands a record over. `commit_us`: when its transaction was committed, by the server's clock.
    fn enqueue(&mut self, position: Position, commit_us: i64, record: &Record<'_>) -> Result<Queued, SinkError>;
    /// A transaction ends here, or the server has decoded up to here outside of one: the only points that can become
    /// durable.
    fn seal(&mut self, end: Lsn);
    /// Everything before this position is delivered.
    fn durable(&self) -> Lsn;
    /// Takes in what is known by now of deliveries. `clock_ahead_us`: the server's clock minus [`steady_us`](crate::clock::steady_us).
    /// Without it: nothing is ever learned later, for a sink that has delivered when [`Self::enqueue`] returns.
    fn tick(&mut self, clock_ahead_us: i64) -> Result<(), SinkError> {
        let _ = clock_ahead_us;
        Ok(())
    }
    /// Returns when a [`Self::tick`] may change something for a sink that was full. Cancel-safe. Without it: never, for a sink
    /// that is never full.
    fn ready(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }
    /// When a [`Self::tick`] is due though nothing happens; `None`: whenever it comes.
    fn deadline(&self) -> Option<Instant> {
        None
    }
    /// Records and bytes that are not delivered yet. Without it: none.
    fn in_flight(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Commit time (µs, server's clock) of the oldest transaction that is not delivered; 0 when all are, and without it.
    fn oldest_commit_us(&self) -> i64 {
        0
    }
}

/// Why a sink cannot go on. The stream resumes from the slot with a new producer, or walpost halts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// A topic does not take records until an operator mends something.
    #[error("topic {topic:?} takes no records: {code}")]
    Refused {
        /// The topic.
        topic: String,
        /// librdkafka's name of the error.
        code: String,
    },
    /// A batch was refused for what is in it. Which record is at fault is found by sending each alone.
    #[error("a batch for topic {topic:?} was refused: {code}; looking for the record at fault")]
    Suspect {
        /// The topic.
        topic: String,
        /// librdkafka's name of the error.
        code: String,
        /// Each record up to here is to be sent alone.
        until: Lsn,
    },
    /// The record at fault is found.
    #[error("event {event_id} is refused by topic {topic:?}: {code}")]
    Poison {
        /// The event.
        event_id: String,
        /// The topic.
        topic: String,
        /// librdkafka's name of the error.
        code: String,
    },
    /// The suspects are all through; go back to normal batches.
    #[error("every suspect record is through, {convicted} of them were refused")]
    Cleared {
        /// How many were refused.
        convicted: u64,
    },
    /// The record at fault is found, and will be a dead letter when the stream brings it again.
    #[error(
        "event {event_id} is refused by topic {topic:?}: {code}; beginning anew, with its dead letter in its place"
    )]
    Convicted {
        /// The event.
        event_id: String,
        /// The topic.
        topic: String,
        /// librdkafka's name of the error.
        code: String,
    },
    /// What the progress topic says does not fit the slot.
    #[error(transparent)]
    Progress(#[from] Refusal),
    /// The brokers allow no transactions.
    #[error("no transaction under the transactional.id {id:?}: {code}")]
    NoTransaction {
        /// The transactional id, which is the progress topic's name.
        id: String,
        /// librdkafka's name of the error.
        code: String,
    },
    /// A transaction that the brokers called committed is not.
    #[error(
        "a transaction was acknowledged as committed, and topic {topic:?} does not have it; nothing of it was confirmed, and it is \
         sent again from what is stored"
    )]
    NotThere {
        /// The progress topic.
        topic: String,
    },
    /// The producer is dead.
    #[error("the producer failed: {code}")]
    Producer {
        /// librdkafka's name of the error.
        code: String,
    },
    /// No producer could be made of the settings.
    #[error("make a producer: {0}")]
    Settings(String),
}
