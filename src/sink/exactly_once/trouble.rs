//! What becomes of a record that is refused: its transaction fails, and the next session knows better.

use rdkafka::{error::KafkaError, producer::Producer, types::RDKafkaErrorCode};
use tokio::time::Instant;

use super::{ExactlyOnceSink, State, writer::OF_PROGRESS};
use crate::{
    ack::Ticket,
    encode::Record,
    event::Position,
    lsn::Lsn,
    sink::{
        Queued, SinkError,
        dead_letter::DeadLetter,
        kafka_error::{self, Verdict},
        reports::Failure,
    },
};

/// The ticket of every event: which one failed is known by its headers.
const OF_EVENT: u64 = 0;

impl ExactlyOnceSink {
    pub(super) fn take_reports(&mut self) {
        let mut taken = std::mem::take(&mut self.taken);
        self.reports.take(&mut taken);
        for report in taken.drain(..) {
            if let Some(failed) = report.failure {
                self.failed(*failed, report.ticket.to_word() == OF_PROGRESS);
            }
        }
        self.taken = taken;
    }

    /// The first failure that says something by itself decides how the session ends.
    fn failed(&mut self, Failure { code, topic, returned }: Failure, is_progress: bool) {
        let verdict = kafka_error::judge(code);
        if verdict == Verdict::Consequence || self.failure.is_some() {
            return;
        }
        let name = kafka_error::name(code);
        self.metrics.delivery_errors.with_label_values(&[&topic, &name]).inc();
        self.failure = Some(match (verdict, returned) {
            (Verdict::Wait, _) => {
                self.learned.refused = Some(topic.clone());
                SinkError::Refused { topic, code: name }
            }
            (Verdict::Suspect, _) if is_progress => SinkError::Refused { topic, code: name },
            (Verdict::Suspect, Some(returned)) => {
                let event_id = returned.event_id();
                let was_dead = self.dead_letter_topic.as_deref().is_none_or(|letters| letters == topic);
                let noted = returned
                    .position()
                    .is_some_and(|position| self.learned.convicts.add(position, event_id.as_bytes(), code, was_dead));
                if noted && self.dead_letter_topic.is_some() {
                    SinkError::Convicted { event_id, topic, code: name }
                } else {
                    SinkError::Poison { event_id, topic, code: name }
                }
            }
            (Verdict::Suspect, None) => SinkError::Suspect { topic, code: name, until: self.furthest },
            _ => SinkError::Producer { code: name },
        });
    }

    pub(super) fn check_fatal(&mut self) -> Result<(), SinkError> {
        let told = self.reports.fatal_error(&self.producer);
        let found = || self.producer.client().fatal_error().map_or(RDKafkaErrorCode::Fatal, |(code, _)| code);
        match told.or_else(|| self.fatal.then(found)) {
            Some(code) => Err(SinkError::Producer { code: kafka_error::name(code) }),
            None => Ok(()),
        }
    }

    /// Puts a record into the transaction, which is begun where none is open.
    pub(super) fn send(
        &mut self,
        position: Position,
        commit_us: i64,
        record: &Record<'_>,
    ) -> Result<Queued, SinkError> {
        let Some(mut account) = self.topics.number(record.topic)? else { return Ok(Queued::Full) };
        if let Some(dead) = record.dead {
            account = self.topics.dead_number(account, dead);
            self.buried.note(record.event_id);
        }
        if self.state == State::Idle {
            self.open()?;
        }
        match self.topics.produce(account, record, Ticket::from_word(OF_EVENT)) {
            Ok(()) => {}
            Err(RDKafkaErrorCode::QueueFull) => return Ok(Queued::Full),
            Err(code) => return self.not_taken((position, commit_us), record, code),
        }
        self.batch.add(Instant::now, account, record.weight() as u64, commit_us);
        self.target.write(position, record.event_id);
        self.in_transaction = true;
        self.furthest = self.furthest.max(Lsn(position.commit_lsn.0 + 1));
        Ok(Queued::Accepted)
    }

    /// Puts the dead letter in the place of its event.
    pub(super) fn bury(
        &mut self,
        position: Position,
        commit_us: i64,
        (letter, topic): (&DeadLetter, &str),
    ) -> Result<Queued, SinkError> {
        let queued = self.send(position, commit_us, &letter.record(topic))?;
        if queued == Queued::Accepted {
            letter.tell();
        }
        Ok(queued)
    }

    /// A record that the producer did not take, for good.
    fn not_taken(
        &mut self,
        (position, commit_us): (Position, i64),
        record: &Record<'_>,
        code: RDKafkaErrorCode,
    ) -> Result<Queued, SinkError> {
        let (topic, name) = (record.topic.to_owned(), kafka_error::name(code));
        if matches!(kafka_error::judge(code), Verdict::Consequence | Verdict::Rebuild) {
            // the transaction has failed of something that the reports on their way will name
            self.fatal |= code == RDKafkaErrorCode::Fatal;
            return if self.fatal { Ok(Queued::Full) } else { Err(SinkError::Producer { code: name }) };
        }
        self.metrics.delivery_errors.with_label_values(&[&topic, &name]).inc();
        let too_large = code == RDKafkaErrorCode::MessageSizeTooLarge;
        if let (true, Some(letters)) = (too_large && record.value.is_some(), self.dead_letter_topic.clone()) {
            let letter = DeadLetter::of_giant(Ticket::from_word(OF_EVENT), record);
            return self.bury(position, commit_us, (&letter, &letters));
        }
        let event_id = String::from_utf8_lossy(record.event_id).into_owned();
        Err(match kafka_error::judge(code) {
            Verdict::Wait => SinkError::Refused { topic, code: name },
            _ => SinkError::Poison { event_id, topic, code: name },
        })
    }
}

/// librdkafka's name of an error.
pub fn name(error: &KafkaError) -> String {
    error.rdkafka_error_code().map_or_else(|| error.to_string(), kafka_error::name)
}
