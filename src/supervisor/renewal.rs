//! [`Birth`]: what was so when a producer was made. A session ends early once that has changed in a way that the producer does
//! not survive.

use super::{clock_step::Offset, password};
use crate::{
    config::{KafkaConfig, Secret},
    observe::Health,
    pipeline::SessionError,
    retention::Witness,
    source::SourceError,
};

/// The circumstances under which the present producer was made.
#[derive(Debug, Default)]
pub(super) struct Birth {
    /// What it proves itself with, where that stands in a file.
    password: Option<Secret>,
    clock: Offset,
}

/// A session that ends once what it publishes is out of date.
pub(super) async fn until_outdated(
    witness: &Witness,
    session: impl Future<Output = Result<(), SessionError>>,
) -> Result<(), SessionError> {
    tokio::select! {
        biased;
        outcome = session => outcome,
        () = witness.renewal() => Err(SourceError::Outdated.into()),
    }
}

impl Birth {
    /// Of a producer that is made now.
    pub fn now(kafka: &KafkaConfig) -> Self {
        Self { password: kafka.password_in_file(), clock: Offset::now() }
    }

    /// A session that ends early when the producer has to be renewed. What was acknowledged and is not confirmed is remembered, as
    /// after every session.
    pub async fn guard(
        &self,
        (kafka, health): (&KafkaConfig, &Health),
        session: impl Future<Output = Result<(), SessionError>>,
    ) -> Result<(), SessionError> {
        tokio::select! {
            // the session first: how it ended says more
            biased;
            outcome = session => outcome,
            changed = password::changes(self.password.as_ref(), kafka, health) => Err(changed),
            set_back = self.clock.set_back() => Err(set_back),
        }
    }
}
