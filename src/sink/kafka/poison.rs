//! What becomes of a record that is refused: the session ends, or the record goes to the dead-letter topic.

use rdkafka::types::RDKafkaErrorCode;
use tokio::time::Instant;

use super::{Failed, KafkaSink};
use crate::{
    ack::Ticket,
    encode::Record,
    sink::{
        Queued, SinkError,
        dead_letter::{DeadLetter, Returned},
        kafka_error::{self, Verdict},
        reports::Failure,
    },
};

impl KafkaSink {
    /// The first failure that says something by itself decides, unless the record can go to the dead-letter topic.
    pub(super) fn failed(&mut self, ticket: Ticket, failure: Failure) {
        let verdict = kafka_error::judge(failure.code);
        if verdict == Verdict::Consequence || self.failure.is_some() {
            return;
        }
        let Failure { code, topic, returned } = failure;
        let name = kafka_error::name(code);
        self.metrics.delivery_errors.with_label_values(&[&topic, &name]).inc();
        let ends_with = match (verdict, returned) {
            (Verdict::Wait, _) if self.failures.is_some() => {
                self.let_go(ticket, topic, (name, true));
                None
            }
            (Verdict::Wait, _) => Some(SinkError::Refused { topic, code: name }),
            (Verdict::Suspect, Some(returned)) => {
                let event_id = returned.event_id();
                let letter = self.letter(ticket, code, returned);
                if letter.is_none() && self.failures.is_some() {
                    self.let_go(ticket, topic, (name, false));
                    return;
                }
                letter.map_or(Some(SinkError::Poison { event_id, topic, code: name }), |letter| {
                    self.bury(letter);
                    None
                })
            }
            (Verdict::Suspect, None) => Some(SinkError::Suspect { topic, code: name, until: self.furthest }),
            _ => Some(SinkError::Producer { code: name }),
        };
        self.failure = ends_with.map(|error| (error, Instant::now()));
    }

    /// Leaves a record to whoever sends; it holds nothing up.
    fn let_go(&mut self, ticket: Ticket, topic: String, (code, is_refusal): (String, bool)) {
        let Some(load) = self.tracker.complete(ticket) else { return };
        if let Some(isolation) = &mut self.isolation {
            isolation.through(ticket);
            isolation.convict();
        }
        if let Some(failures) = &mut self.failures {
            failures.push(Failed { commit_lsn: load.commit_lsn, topic, code, is_refusal });
        }
    }

    /// The dead letter for a record that was refused alone; `None` when there is no place for it.
    fn letter(&mut self, ticket: Ticket, code: RDKafkaErrorCode, returned: Returned) -> Option<DeadLetter> {
        let letters = self.dead_letters.as_ref()?;
        if returned.topic != letters.topic {
            return Some(DeadLetter::of_returned(ticket, returned, code));
        }
        let account = self.tracker.load(ticket)?.account;
        let dead = self.topics.dead_of(account)?;
        (code == RDKafkaErrorCode::MessageSizeTooLarge).then(|| DeadLetter::shrunk(ticket, returned, dead)).flatten()
    }

    /// Sends a dead letter as soon as that is possible.
    fn bury(&mut self, letter: DeadLetter) {
        if let Some(isolation) = &mut self.isolation {
            isolation.convict();
        }
        letter.tell();
        self.buried.note(letter.event_id());
        if let Some(letters) = &mut self.dead_letters {
            letters.waiting.push_back(letter);
        }
    }

    pub(super) fn send_dead_letters(&mut self) -> Result<(), SinkError> {
        let Some(letters) = &mut self.dead_letters else { return Ok(()) };
        while let Some(letter) = letters.waiting.front() {
            let Some(number) = self.topics.number(&letters.topic)? else { return Ok(()) };
            let account = self.topics.dead_number(number, letter.dead());
            let record = letter.record(&letters.topic);
            if self.tracker.redirect(letter.ticket, account) {
                match self.topics.produce(account, &record, letter.ticket) {
                    Ok(()) => self.unreported += 1,
                    Err(RDKafkaErrorCode::QueueFull) => return Ok(()),
                    Err(code) if kafka_error::judge(code) == Verdict::Consequence => {
                        self.fatal_since.get_or_insert_with(Instant::now);
                        return Ok(());
                    }
                    Err(code) => {
                        let event_id = String::from_utf8_lossy(record.event_id).into_owned();
                        let (topic, code) = (letters.topic.clone(), kafka_error::name(code));
                        return Err(SinkError::Poison { event_id, topic, code });
                    }
                }
            }
            letters.waiting.pop_front();
        }
        Ok(())
    }

    /// A record that the producer did not take, for good.
    pub(super) fn not_taken(
        &mut self,
        ticket: Ticket,
        record: &Record<'_>,
        code: RDKafkaErrorCode,
    ) -> Result<Queued, SinkError> {
        if kafka_error::judge(code) == Verdict::Consequence {
            // the producer died of something that the reports on their way will name
            self.tracker.untrack(ticket);
            self.fatal_since.get_or_insert_with(Instant::now);
            return Ok(Queued::Full);
        }
        let (topic, name) = (record.topic.to_owned(), kafka_error::name(code));
        self.metrics.delivery_errors.with_label_values(&[&topic, &name]).inc();
        let too_large = code == RDKafkaErrorCode::MessageSizeTooLarge;
        if too_large && self.dead_letters.is_some() && record.dead.is_none_or(|_| record.value.is_some()) {
            self.bury(DeadLetter::of_giant(ticket, record));
            return Ok(Queued::Accepted);
        }
        self.tracker.untrack(ticket);
        Err(match kafka_error::judge(code) {
            Verdict::Wait => SinkError::Refused { topic, code: name },
            Verdict::Suspect => {
                let event_id = String::from_utf8_lossy(record.event_id).into_owned();
                SinkError::Poison { event_id, topic, code: name }
            }
            Verdict::Consequence | Verdict::Rebuild => SinkError::Producer { code: name },
        })
    }
}
