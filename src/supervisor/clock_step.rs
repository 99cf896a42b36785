//! [`Offset`]: sees that the wall clock was set back under a producer.
//!
//! librdkafka's threads wait by the wall clock (a condition variable's default): one that is waiting when the clock is set back
//! an hour waits an hour longer, and with it what it should have sent or asked. A new producer's threads have not waited yet.

use std::time::Duration;

use crate::{clock, pipeline::SessionError, sink::SinkError};

/// How often the clocks are compared.
const LOOK: Duration = Duration::from_millis(500);
/// A smaller step costs no more than itself.
const STEP_US: i64 = 1_000_000;

/// How far the wall clock was ahead of the one that nobody sets, µs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Offset(i64);

impl Offset {
    /// Now.
    pub fn now() -> Self {
        Self(clock::unix_us() - clock::steady_us())
    }

    /// Ends once the wall clock was set back since then.
    pub async fn set_back(mut self) -> SessionError {
        loop {
            let now = Self::now();
            if now.0 < self.0 - STEP_US {
                return SinkError::Producer { code: "the clock was set back".into() }.into();
            }
            // a step forward counts as well: the next one may take it back
            self.0 = self.0.max(now.0);
            tokio::time::sleep(LOOK).await;
        }
    }
}
