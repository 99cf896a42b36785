//! [`DeadLetters`]: poison on its way to the dead-letter topic.
//!
//! A dead letter keeps the ticket of the event it stands for, so nothing behind it is confirmed before the brokers have it. It
//! waits here while its topic is missing or the producer has no room; how many wait is bounded by what may be in flight.

use std::collections::VecDeque;

use openssl::sha::sha256;
use rdkafka::{
    message::{BorrowedMessage, Headers as _, Message},
    types::RDKafkaErrorCode,
};

use crate::{
    ack::Ticket,
    encode::{Dead, Headers, Record, Unfit},
    event::Position,
    observe::log::Sparse,
};

/// How often a record was sent that was refused in a batch first and then alone.
const SENT_TWICE: u32 = 2;

/// A record as the producer gave it back.
#[derive(Debug, Clone)]
pub struct Returned {
    /// The topic that refused it.
    pub topic: String,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Headers,
    timestamp_ms: i64,
}

impl Returned {
    /// Copies a record out of the producer's memory.
    pub fn copy(message: &BorrowedMessage<'_>) -> Self {
        let mut headers = Headers::default();
        for header in message.headers().into_iter().flat_map(|headers| headers.iter()) {
            headers.append(header.key.as_bytes(), header.value.unwrap_or_default());
        }
        Self {
            topic: message.topic().to_owned(),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers,
            timestamp_ms: message.timestamp().to_millis().unwrap_or(1),
        }
    }

    /// Where the event stands in the log.
    pub fn position(&self) -> Option<Position> {
        let text = std::str::from_utf8(self.headers.get(b"walpost_position")?).ok()?;
        let (commit_lsn, ordinal) = text.rsplit_once('/')?;
        Some(Position { commit_lsn: commit_lsn.parse().ok()?, ordinal: ordinal.parse().ok()? })
    }

    /// The event's id.
    pub fn event_id(&self) -> String {
        self.headers.get(b"id").map_or_else(String::new, |id| String::from_utf8_lossy(id).into_owned())
    }
}

/// A dead letter, ready to be produced.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// The event that it stands for.
    pub ticket: Ticket,
    /// The topic that the event was meant for.
    pub meant_for: String,
    /// Why it is dead: the metric's label.
    pub reason: &'static str,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Headers,
    timestamp_ms: i64,
}

impl DeadLetter {
    /// Makes one of a record that a topic refused when it was alone.
    pub fn of_returned(ticket: Ticket, returned: Returned, code: RDKafkaErrorCode) -> Self {
        let Returned { topic, key, value, mut headers, timestamp_ms } = returned;
        headers.mark_dead(&Unfit { error: &refusal(code), topic: topic.as_bytes(), attempts: SENT_TWICE });
        let mut letter = Self { ticket, meant_for: topic, reason: reason(code), key, value, headers, timestamp_ms };
        if code == RDKafkaErrorCode::MessageSizeTooLarge {
            letter.leave_value_out();
        }
        letter
    }

    /// Makes one of a record that is too large to be handed to the producer at all.
    pub fn of_giant(ticket: Ticket, record: &Record<'_>) -> Self {
        let code = RDKafkaErrorCode::MessageSizeTooLarge;
        let mut headers = record.headers.clone();
        if record.dead.is_none() {
            headers.mark_dead(&Unfit { error: &refusal(code), topic: record.topic.as_bytes(), attempts: 0 });
        }
        let dead = record.dead.unwrap_or(Dead { topic: record.topic, reason: reason(code) });
        if let Some(value) = record.value {
            headers.mark_missing_value(value.len(), &sha256(value));
        }
        Self {
            ticket,
            meant_for: dead.topic.to_owned(),
            reason: dead.reason,
            key: record.key.map(<[u8]>::to_vec),
            value: None,
            headers,
            timestamp_ms: record.timestamp_ms,
        }
    }

    /// Makes one of a record that was refused when it came before. `is_shrunk`: without its value, as the dead-letter topic wants it.
    pub fn of_convict(record: &Record<'_>, code: RDKafkaErrorCode, is_shrunk: bool) -> Self {
        let mut headers = record.headers.clone();
        if record.dead.is_none() {
            headers.mark_dead(&Unfit { error: &refusal(code), topic: record.topic.as_bytes(), attempts: SENT_TWICE });
        }
        let dead = record.dead.unwrap_or(Dead { topic: record.topic, reason: reason(code) });
        let mut letter = Self {
            ticket: Ticket::from_word(0),
            meant_for: dead.topic.to_owned(),
            reason: dead.reason,
            key: record.key.map(<[u8]>::to_vec),
            value: record.value.map(<[u8]>::to_vec),
            headers,
            timestamp_ms: record.timestamp_ms,
        };
        if is_shrunk {
            letter.leave_value_out();
        }
        letter
    }

    /// A dead letter that the dead-letter topic refuses as too large: the same without its value, if it has one still.
    pub fn shrunk(ticket: Ticket, returned: Returned, dead: Dead<'_>) -> Option<Self> {
        let Returned { key, value, headers, timestamp_ms, .. } = returned;
        value.as_ref()?;
        let (meant_for, reason) = (dead.topic.to_owned(), dead.reason);
        let mut letter = Self { ticket, meant_for, reason, key, value, headers, timestamp_ms };
        letter.leave_value_out();
        Some(letter)
    }

    fn leave_value_out(&mut self) {
        if let Some(value) = self.value.take() {
            self.headers.mark_missing_value(value.len(), &sha256(&value));
        }
    }

    /// Logs it; in a flood only some.
    pub fn tell(&self) {
        static SPARSE: Sparse = Sparse::new();
        let Some(untold) = SPARSE.turn() else { return };
        let event_id = String::from_utf8_lossy(self.event_id());
        let (topic, reason) = (&self.meant_for, self.reason);
        tracing::warn!(%event_id, topic, reason, untold, "an event goes to the dead-letter topic");
    }

    /// The event's id; empty where the row had none.
    pub fn event_id(&self) -> &[u8] {
        self.headers.get(b"id").unwrap_or_default()
    }

    /// How it is counted.
    pub fn dead(&self) -> Dead<'_> {
        Dead { topic: &self.meant_for, reason: self.reason }
    }

    /// The record for the dead-letter topic.
    pub fn record<'a>(&'a self, dead_letter_topic: &'a str) -> Record<'a> {
        Record {
            topic: dead_letter_topic,
            key: self.key.as_deref(),
            value: self.value.as_deref(),
            headers: &self.headers,
            timestamp_ms: self.timestamp_ms,
            event_id: self.event_id(),
            dead: Some(self.dead()),
        }
    }
}

/// Those that wait, in the order in which they were found.
#[derive(Debug)]
pub struct DeadLetters {
    /// The dead-letter topic.
    pub topic: String,
    /// Those that wait.
    pub waiting: VecDeque<DeadLetter>,
}

/// The metric's label for a refusal.
fn reason(code: RDKafkaErrorCode) -> &'static str {
    use RDKafkaErrorCode as Code;
    match code {
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => "too_large",
        Code::InvalidTimestamp => "invalid_timestamp",
        Code::InvalidTopic => "illegal_topic",
        Code::PolicyViolation => "policy_violation",
        _ => "invalid_record",
    }
}

fn refusal(code: RDKafkaErrorCode) -> String {
    format!("{code:?}: {code}")
}
