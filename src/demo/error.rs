//! Why the demo could not be shown to its end.

use rdkafka::{error::KafkaError, types::RDKafkaErrorCode};

/// What went wrong. Broken promises are no error: they stand in the table.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// There is no server to run, or only an old one.
    #[error(
        "no Postgres server of version 14 or later in PATH, /usr/lib/postgresql or /usr/pgsql-*{}; on Debian and Ubuntu \
         install it with: sudo apt-get install postgresql",
        .found.as_ref().map(|version| format!(" (only {version})")).unwrap_or_default()
    )]
    NoPostgres {
        /// The version that is there.
        found: Option<String>,
    },
    /// We are root, and nobody else could be found.
    #[error(
        "a Postgres server refuses to run as root, and there is neither a user postgres nor nobody: run this as another user"
    )]
    NoAccount,
    /// The operating system refused something.
    #[error("{attempt}")]
    Io {
        /// What was tried.
        attempt: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Postgres refused something.
    #[error("{attempt}")]
    Sql {
        /// What was tried.
        attempt: String,
        /// Why it failed.
        source: tokio_postgres::Error,
    },
    /// Kafka refused something.
    #[error("{attempt}")]
    Kafka {
        /// What was tried.
        attempt: String,
        /// Why it failed.
        source: KafkaError,
    },
    /// Kafka did not create a topic.
    #[error("create topic {topic}")]
    Topic {
        /// The topic.
        topic: String,
        /// Why it failed.
        #[source]
        code: RDKafkaErrorCode,
    },
    /// A program that was to go on, or to end well, did not.
    #[error("{program} ended before its time; its last words:\n{log}")]
    Ended {
        /// The program.
        program: &'static str,
        /// The end of its log.
        log: String,
    },
    /// Something did not happen in time.
    #[error("waited in vain until {what}; the last words of walpost:\n{log}")]
    InVain {
        /// What was waited for.
        what: &'static str,
        /// The end of walpost's log.
        log: String,
    },
    /// A part of the demo is gone that should not be.
    #[error("the {0} of the demo is gone")]
    Gone(&'static str),
    /// ^C, or a signal that means the same.
    #[error("interrupted; everything that the demo had started is gone")]
    Interrupted,
}

impl DemoError {
    /// For `map_err`: the attempt that failed.
    pub(super) fn io(attempt: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let attempt = attempt.into();
        |source| Self::Io { attempt, source }
    }

    /// For `map_err`: the attempt that failed.
    pub(super) fn sql(attempt: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> Self {
        let attempt = attempt.into();
        |source| Self::Sql { attempt, source }
    }

    /// For `map_err`: the attempt that failed.
    pub(super) fn kafka(attempt: impl Into<String>) -> impl FnOnce(KafkaError) -> Self {
        let attempt = attempt.into();
        |source| Self::Kafka { attempt, source }
    }
}
