//! From an error to what is done about it. One function; it goes by kind, SQLSTATE and routine, never by a message's text,
//! which servers translate.

use std::{error::Error, fmt::Write};

use tokio_postgres::error::SqlState;

use crate::{
    backfill,
    init::InitError,
    pipeline::{PoisonError, SessionError, TableError},
    poll,
    sink::SinkError,
    source::{ServerError, SourceError},
};

/// What is done about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Try again, soon and then less often.
    Retry,
    /// Try again, but not often: somebody has to mend something meanwhile. Says what.
    RetrySlowly(&'static str),
    /// Stop: exit code 1. Says what to do.
    Halt(&'static str),
    /// Stop: exit code 2. Says what to do.
    Misconfigured(&'static str),
    /// Stop: exit code 3, events may be missing and a human must decide. Says what to do.
    SlotLost(&'static str),
}

const SLOT_LOST: &str = "events written since its confirmed position may be missing from Kafka; decide about them (the rows are \
     still in the outbox table), then drop the slot with pg_drop_replication_slot and create a new one with `walpost init`";

/// Judges an error that ended a session.
pub fn judge(error: &SessionError) -> Verdict {
    match error {
        SessionError::Source(error) => judge_source(error),
        SessionError::Prepare(error) => judge_prepare(error),
        SessionError::Backfill(error) => backfill::judge(error),
        SessionError::Poll(error) => poll::judge(error),
        SessionError::Sink(error) => judge_sink(error),
        SessionError::Table { source: TableError::Columns(_), .. } => Verdict::Halt(
            "map the columns of the table in [outbox.columns] and [outbox.header_columns], or alter the table",
        ),
        SessionError::Table { source: TableError::Renamed(_), .. } => Verdict::Halt(
            "before the next start, name the table's new name in outbox.table (beside a table that took its place: as one more \
             [[outbox]]), or rename it back; the slot keeps its position, so nothing is lost",
        ),
        SessionError::Table { source: TableError::Routes(_), .. } => {
            Verdict::Halt("name only columns of the table in route.topic and route.rules")
        }
        SessionError::Poison { source: PoisonError::Topic(_), .. } => Verdict::Halt(
            "route its event type to a legal topic with [[route.rules]], or set route.on_illegal_topic = \"sanitize\"",
        ),
        SessionError::Poison { .. } => {
            Verdict::Halt("mend the mapping in the configuration; the slot keeps its position, so nothing is lost")
        }
    }
}

fn judge_prepare(error: &InitError) -> Verdict {
    match error {
        InitError::Sql(error) => judge_code(error.code()),
        InitError::Statement { source, .. } if source.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            Verdict::Halt(
                "run `walpost init` once as the table's owner, or grant what is denied: `walpost init --print` lists it",
            )
        }
        InitError::Statement { source, .. } => judge_code(source.code()),
        InitError::Slot(error) => backfill::judge(error),
        InitError::Progress(error) => judge_sink(error),
        InitError::UnmarkedRows { .. }
        | InitError::TableMissing { .. }
        | InitError::PublicationAfterSlot { .. }
        | InitError::PublicationFaults(_) => {
            Verdict::Halt("mend it as the error says, then start again; `walpost check` shows everything at once")
        }
    }
}

/// Judges an error of an SQL link; without a code it is one of the network.
pub(crate) fn judge_code(code: Option<&SqlState>) -> Verdict {
    code.map_or(Verdict::Retry, |code| {
        judge_server(&ServerError { code: code.code().to_owned(), ..ServerError::default() })
    })
}

pub(crate) fn judge_source(error: &SourceError) -> Verdict {
    match error {
        SourceError::Server(error) => judge_server(error),
        SourceError::PublicationMissing(_) => Verdict::Halt(
            "create the publication with `walpost init`; if it was dropped while rows were written, the server skips those \
             rows: find them in the outbox table",
        ),
        SourceError::SlotMissing(_) => {
            Verdict::Halt("create it with `walpost init`, or set postgres.auto_create = true")
        }
        SourceError::SlotLost { .. } => Verdict::SlotLost(SLOT_LOST),
        SourceError::OtherSystem { .. } => Verdict::SlotLost(
            "point postgres.url at the cluster that holds the slot; if this one takes its place (restored, upgraded), decide \
             about the events that were written in between, then restart walpost",
        ),
        SourceError::SlotUnfinished(_) => Verdict::RetrySlowly(
            "its creation waits for the transactions that run in the cluster: see pg_stat_activity",
        ),
        SourceError::SlotForeign { .. } => {
            Verdict::Halt("name another slot in postgres.slot, or drop this one with pg_drop_replication_slot")
        }
        SourceError::Refused(_) => Verdict::Halt("mend postgres.url and its password settings"),
        SourceError::NoTls { .. } => {
            Verdict::RetrySlowly("turn ssl on in the server, or lower sslmode in postgres.url")
        }
        SourceError::Tls { .. } => {
            Verdict::RetrySlowly("check sslmode, sslrootcert and the certificate's host name in postgres.url")
        }
        SourceError::PasswordFile(_) => Verdict::RetrySlowly("make postgres.password_file readable"),
        SourceError::Parse(_) => {
            Verdict::Halt("this is a bug in walpost or no Postgres server; the slot keeps its position")
        }
        SourceError::Connect { .. }
        | SourceError::WrongSessionAttrs
        | SourceError::Io(_)
        | SourceError::EndOfStream
        | SourceError::Silent
        | SourceError::Outdated
        | SourceError::ServerStopping
        | SourceError::Protocol(_) => Verdict::Retry,
    }
}

fn judge_server(error: &ServerError) -> Verdict {
    match error.code.as_str() {
        "28000" => Verdict::RetrySlowly(
            "allow the connection in pg_hba.conf: for logical replication the line must name the database, not `replication`",
        ),
        "28P01" => Verdict::RetrySlowly("mend the password in postgres.url, postgres.password_file or PGPASSWORD"),
        "3D000" => Verdict::RetrySlowly("name an existing database in postgres.url"),
        "42501" => {
            Verdict::Halt("grant the right to replicate: ALTER ROLE … REPLICATION (on RDS: GRANT rds_replication TO …)")
        }
        "42601" | "08P01" => Verdict::Halt(
            "the server does not understand replication commands: connect to Postgres itself, not through a pooler",
        ),
        "42704" if error.routine.contains("ublication") => Verdict::Halt(
            "the publication did not exist when the pending rows were written; create it with `walpost init`, then advance the \
             slot with pg_replication_slot_advance and publish the rows in between from the table",
        ),
        "55000" if error.routine == "CheckLogicalDecodingRequirements" => {
            Verdict::Halt("set wal_level = logical in postgresql.conf and restart the server")
        }
        "53400" => Verdict::RetrySlowly("raise max_replication_slots, or drop slots that nobody reads"),
        code if code.starts_with("22") => {
            Verdict::Halt("the server cannot decode a row: see its log; the slot keeps its position")
        }
        "42704" | "55000" | "0A000" | "XX000" => Verdict::RetrySlowly("see the server's log"),
        _ => Verdict::Retry,
    }
}

fn judge_sink(error: &SinkError) -> Verdict {
    match error {
        SinkError::Refused { .. } => {
            Verdict::RetrySlowly("create the topic or grant the right to write to it; walpost resumes by itself")
        }
        SinkError::NoTransaction { .. } => Verdict::RetrySlowly(
            "grant Write on the topics, and Write and Describe on the transactional id (kafka.progress_topic), or lower kafka.transaction_timeout_ms to what \
             the brokers allow (transaction.max.timeout.ms); walpost resumes by itself",
        ),
        SinkError::Progress(_) => {
            Verdict::SlotLost("decide as the error says; nothing was published or confirmed since")
        }
        SinkError::Suspect { .. }
        | SinkError::Cleared { .. }
        | SinkError::Convicted { .. }
        | SinkError::NotThere { .. }
        | SinkError::Producer { .. } => Verdict::Retry,
        SinkError::Poison { .. } => Verdict::Halt(
            "let the topic take it (for a record that is too large: raise max.message.bytes), or route its event type elsewhere; \
             the slot keeps its position, so nothing is lost",
        ),
        SinkError::Settings(_) => Verdict::Misconfigured("mend [kafka] in the configuration"),
    }
}

/// The error and its causes in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        // transparent layers would say the same twice
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            let _ = write!(text, ": {inner_text}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(code: &str, routine: &str) -> Verdict {
        let error = ServerError { code: code.into(), routine: routine.into(), ..ServerError::default() };
        judge(&SessionError::Source(SourceError::Server(error)))
    }

    #[test]
    fn faults_that_pass_are_retried_and_others_wait_for_a_human() {
        for code in ["57P01", "57P03", "55006", "53300", "08006", "40001"] {
            assert_eq!(server(code, ""), Verdict::Retry, "{code}");
        }
        assert!(matches!(server("28P01", ""), Verdict::RetrySlowly(_)));
        assert!(matches!(server("42501", ""), Verdict::Halt(_)));
        assert!(matches!(server("42704", "get_publication_oid"), Verdict::Halt(_)));
        assert!(matches!(server("55000", "CheckLogicalDecodingRequirements"), Verdict::Halt(_)));
        let lost = SourceError::SlotLost { slot: "s".into(), reason: "wal_removed".into() };
        assert!(matches!(judge(&lost.into()), Verdict::SlotLost(_)));
    }

    #[test]
    fn a_chain_says_each_cause_once() {
        let inner = ServerError { code: "28P01".into(), message: "no".into(), ..ServerError::default() };
        let error = SessionError::Source(SourceError::Server(inner));
        assert_eq!(chain(&error), "the server refused: no (SQLSTATE 28P01)");
    }
}
