//! [`Code`]: what an operator can look up, search for and alert on: `docs/errors.md` has the cause and the remedy of each.
//!
//! A code never changes its meaning, and none is used anew. One function for what ends a session, one for what ends a
//! command; both go by kind and SQLSTATE, never by a message's text.

use std::{error::Error, fmt};

use tokio_postgres::error::SqlState;

use crate::{
    admin_command::AdminError,
    app::StartError,
    backfill::BackfillError,
    backfill_command,
    dead_letters_command::DeadLettersError,
    drop_command::DropError,
    init::InitError,
    peek_command::PeekError,
    pipeline::{PoisonError, SessionError, TableError},
    poll::PollError,
    prune_command::PruneError,
    retention::{pass::PassError, record::RecordError},
    rewind_command::RewindError,
    sink::SinkError,
    source::{ServerError, SourceError},
    sql::SqlError,
    status_command::StatusError,
};

macro_rules! codes {
    ($($name:ident = $text:literal,)*) => {
        /// A code of an error, stable over versions.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "docs/errors.md has more to say of each")]
        pub enum Code { $($name,)* }

        impl Code {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// As it is printed.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

codes! {
    // Postgres and the way to it
    Unreachable = "WP-101",
    Tls = "WP-102",
    PasswordFile = "WP-103",
    Password = "WP-104",
    NotAllowed = "WP-105",
    NoDatabase = "WP-106",
    MayNotReplicate = "WP-107",
    NoReplication = "WP-108",
    WalLevel = "WP-109",
    LinkLost = "WP-110",
    NotUnderstood = "WP-111",
    ConnectionSettings = "WP-112",
    Denied = "WP-113",
    Server = "WP-114",
    Undecodable = "WP-115",
    // slot and publication
    SlotMissing = "WP-201",
    SlotLost = "WP-202",
    OtherCluster = "WP-203",
    SlotForeign = "WP-204",
    SlotInUse = "WP-205",
    SlotUnfinished = "WP-206",
    NoFreeSlot = "WP-207",
    Publication = "WP-208",
    SlotCannotGo = "WP-209",
    SessionOutdated = "WP-210",
    // tables and events
    TableMissing = "WP-301",
    Columns = "WP-302",
    Renamed = "WP-303",
    Routes = "WP-304",
    Poison = "WP-305",
    OlderRows = "WP-306",
    Condition = "WP-307",
    Unmarked = "WP-308",
    // Kafka
    TopicRefuses = "WP-401",
    RecordRefused = "WP-402",
    Producer = "WP-403",
    KafkaSettings = "WP-404",
    Unacknowledged = "WP-405",
    ProgressRecord = "WP-406",
    NoTransaction = "WP-407",
    NoBroker = "WP-408",
    NotCommitted = "WP-409",
    // upkeep
    Retention = "WP-501",
    DeadLetters = "WP-502",
    // the process and its operation
    Configuration = "WP-601",
    Listener = "WP-602",
    Runtime = "WP-603",
    AdminOff = "WP-604",
    AdminRefused = "WP-605",
    HandOver = "WP-606",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The code of what ended a session.
pub fn of_session(error: &SessionError) -> Code {
    match error {
        SessionError::Source(error) => of_source(error),
        SessionError::Prepare(error) => of_init(error),
        SessionError::Backfill(error) => of_backfill(error),
        SessionError::Poll(error) => of_poll(error),
        SessionError::Sink(error) => of_sink(error),
        SessionError::Table { source: TableError::Columns(_), .. } => Code::Columns,
        SessionError::Table { source: TableError::Routes(_), .. } => Code::Routes,
        SessionError::Table { source: TableError::Renamed(_), .. } => Code::Renamed,
        SessionError::Poison {
            source: PoisonError::Row(_) | PoisonError::Topic(_) | PoisonError::Headers(_), ..
        } => Code::Poison,
    }
}

/// The code of what ended a command; `None` for what is nobody's to mend, such as an output that is closed.
pub fn of_command(error: &(dyn Error + 'static)) -> Option<Code> {
    fn is<E: Error + 'static>(error: &(dyn Error + 'static), code: impl FnOnce(&E) -> Code) -> Option<Code> {
        error.downcast_ref().map(code)
    }
    is(error, of_start)
        .or_else(|| is(error, of_init))
        .or_else(|| is(error, of_sql))
        .or_else(|| {
            is(error, |error| match error {
                StatusError::Sql { source, .. } => of_sql(source),
                StatusError::Tables(error) | StatusError::Slot(error) => of_state(error.code()),
                StatusError::NoListener => Code::AdminOff,
            })
        })
        .or_else(|| is(error, of_peek))
        .or_else(|| is(error, of_drop))
        .or_else(|| is(error, of_prune))
        .or_else(|| is(error, |_: &DeadLettersError| Code::DeadLetters))
        .or_else(|| is(error, of_admin))
        .or_else(|| is(error, of_rewind))
        .or_else(|| is(error, of_fill))
}

fn of_source(error: &SourceError) -> Code {
    match error {
        SourceError::Connect { .. } | SourceError::WrongSessionAttrs => Code::Unreachable,
        SourceError::Tls { .. } | SourceError::NoTls { .. } => Code::Tls,
        SourceError::PasswordFile(_) => Code::PasswordFile,
        SourceError::Refused(_) => Code::ConnectionSettings,
        SourceError::Io(_) | SourceError::EndOfStream | SourceError::Silent | SourceError::ServerStopping => {
            Code::LinkLost
        }
        SourceError::Server(error) => of_server(error),
        SourceError::PublicationMissing(_) => Code::Publication,
        SourceError::Outdated => Code::SessionOutdated,
        SourceError::Protocol(_) | SourceError::Parse(_) => Code::NotUnderstood,
        SourceError::SlotMissing(_) => Code::SlotMissing,
        SourceError::SlotUnfinished(_) => Code::SlotUnfinished,
        SourceError::SlotLost { .. } => Code::SlotLost,
        SourceError::OtherSystem { .. } => Code::OtherCluster,
        SourceError::SlotForeign { .. } => Code::SlotForeign,
    }
}

/// By SQLSTATE: <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
fn of_server(error: &ServerError) -> Code {
    match error.code.as_str() {
        "28000" => Code::NotAllowed,
        "28P01" => Code::Password,
        "3D000" => Code::NoDatabase,
        "42501" => Code::MayNotReplicate,
        "42601" | "08P01" => Code::NoReplication,
        "42704" if error.routine.contains("ublication") => Code::Publication,
        "55000" if error.routine == "CheckLogicalDecodingRequirements" => Code::WalLevel,
        "55006" => Code::SlotInUse,
        "53400" => Code::NoFreeSlot,
        code if code.starts_with("22") => Code::Undecodable,
        code if code.starts_with("57P") || code.starts_with("08") => Code::LinkLost,
        _ => Code::Server,
    }
}

/// Of an SQL link; without a state it is the network's.
fn of_state(state: Option<&SqlState>) -> Code {
    let Some(state) = state else { return Code::Unreachable };
    match of_server(&ServerError { code: state.code().to_owned(), ..ServerError::default() }) {
        // over this link nobody replicates
        Code::MayNotReplicate => Code::Denied,
        Code::NoReplication => Code::Server,
        code => code,
    }
}

fn of_sql(error: &SqlError) -> Code {
    match error {
        SqlError::Connect { .. } | SqlError::Statement(_) => of_state(error.code()),
        SqlError::Silent { .. } => Code::Unreachable,
        SqlError::Tls(_) => Code::Tls,
        SqlError::Password { .. } => Code::PasswordFile,
    }
}

fn of_init(error: &InitError) -> Code {
    match error {
        InitError::Sql(error) => of_sql(error),
        InitError::Statement { source, .. } => of_state(source.code()),
        InitError::TableMissing { .. } => Code::TableMissing,
        InitError::PublicationAfterSlot { .. } | InitError::PublicationFaults(_) => Code::Publication,
        InitError::UnmarkedRows { .. } => Code::OlderRows,
        InitError::Slot(error) => of_backfill(error),
        InitError::Progress(error) => of_sink(error),
    }
}

fn of_backfill(error: &BackfillError) -> Code {
    match error {
        BackfillError::Source(error) | BackfillError::Rows { source: error, .. } => of_source(error),
        BackfillError::Sql(error) => of_sql(error),
        BackfillError::Slots(error) | BackfillError::Count(error) => of_state(error.code()),
        BackfillError::Condition { .. } => Code::Condition,
        BackfillError::OlderRows { .. } => Code::OlderRows,
        BackfillError::Busy(_) => Code::SlotInUse,
        BackfillError::TooFewSlots(_) => Code::NoFreeSlot,
        BackfillError::NameTooLong { .. } | BackfillError::TwoSlots { .. } => Code::SlotForeign,
        BackfillError::NoSuchTable(_) | BackfillError::NoSuchOutbox(_) => Code::TableMissing,
    }
}

fn of_poll(error: &PollError) -> Code {
    match error {
        PollError::Source(error) => of_source(error),
        PollError::Denied(_) => Code::Denied,
        PollError::Lack(_) => Code::Columns,
        PollError::Unacknowledged { .. } => Code::Unacknowledged,
        PollError::Unmarked { .. } => Code::Unmarked,
    }
}

fn of_sink(error: &SinkError) -> Code {
    match error {
        SinkError::Refused { .. } => Code::TopicRefuses,
        SinkError::Suspect { .. }
        | SinkError::Poison { .. }
        | SinkError::Cleared { .. }
        | SinkError::Convicted { .. } => Code::RecordRefused,
        SinkError::Progress(_) => Code::ProgressRecord,
        SinkError::NoTransaction { .. } => Code::NoTransaction,
        SinkError::NotThere { .. } => Code::NotCommitted,
        SinkError::Producer { .. } => Code::Producer,
        SinkError::Settings(_) => Code::KafkaSettings,
    }
}

fn of_start(error: &StartError) -> Code {
    match error {
        StartError::Route(_) => Code::Routes,
        StartError::Listen(_) => Code::Listener,
        StartError::Runtime(_) => Code::Runtime,
    }
}

fn of_fill(error: &backfill_command::CommandError) -> Code {
    match error {
        backfill_command::CommandError::Backfill(error) => of_backfill(error),
        backfill_command::CommandError::Start(error) => of_start(error),
        backfill_command::CommandError::Nothing => Code::Condition,
    }
}

fn of_peek(error: &PeekError) -> Code {
    match error {
        PeekError::Sql(error) => of_sql(error),
        PeekError::NoSlot(_) => Code::SlotMissing,
        PeekError::NoRoom { .. } => Code::NoFreeSlot,
        PeekError::Statement { source, .. } => of_state(source.code()),
        PeekError::Parse(_) => Code::NotUnderstood,
        PeekError::Routes(_) => Code::Routes,
        PeekError::Rows { source, .. } => match of_source(source) {
            Code::NoReplication | Code::Server | Code::Undecodable => Code::Condition,
            code => code,
        },
        PeekError::Table(error) => of_backfill(error),
        PeekError::Session(error) => of_session(error),
    }
}

fn of_drop(error: &DropError) -> Code {
    match error {
        DropError::Sql(error) => of_sql(error),
        DropError::Statement { source, .. } => of_state(source.code()),
        DropError::InUse { .. } => Code::SlotInUse,
        DropError::Foreign { .. } => Code::SlotForeign,
    }
}

fn of_prune(error: &PruneError) -> Code {
    match error {
        PruneError::Link(error) => of_sql(error),
        PruneError::Slot(error) => of_state(error.code()),
        PruneError::Record(RecordError::Sql(source)) | PruneError::Pass(PassError::Sql { source, .. }) => {
            of_state(source.code())
        }
        PruneError::Record(_) | PruneError::Pass(_) | PruneError::Busy { .. } => Code::Retention,
    }
}

fn of_admin(error: &AdminError) -> Code {
    match error {
        AdminError::NoListener | AdminError::NoToken | AdminError::Token(_) => Code::AdminOff,
        AdminError::Silent { .. } | AdminError::Refused { .. } => Code::AdminRefused,
        AdminError::Other { .. } | AdminError::InFlight { .. } | AdminError::Lives { .. } => Code::HandOver,
    }
}

fn of_rewind(error: &RewindError) -> Code {
    match error {
        RewindError::Sql(error) => of_sql(error),
        RewindError::Statement { source, .. } => of_state(source.code()),
        RewindError::Peek(error) => of_peek(error),
        RewindError::Lost(_) => Code::SlotLost,
        RewindError::Back { .. } | RewindError::Beyond { .. } => Code::SlotCannotGo,
        RewindError::InUse { .. } => Code::SlotInUse,
        RewindError::Rows(error) => of_fill(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_page_lists_every_code_once_and_no_other() {
        let page = include_str!("../docs/errors.md");
        let listed: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        let codes: Vec<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        let unique = |codes: &[&str]| codes.iter().map(|code| (*code).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(unique(&listed), unique(&codes));
        assert_eq!((listed.len(), codes.len()), (unique(&listed).len(), unique(&codes).len()), "one of them twice");
        for row in page.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
            assert!(cells.len() == 4 && cells.iter().all(|cell| !cell.is_empty()), "code, what, cause, remedy: {row}");
        }
    }

    #[test]
    fn causes_are_told_apart_by_sqlstate() {
        let server = |code: &str| {
            let error = ServerError { code: code.into(), ..ServerError::default() };
            of_session(&SessionError::Source(SourceError::Server(error)))
        };
        let codes = ["28P01", "28000", "55006", "57P03", "XX000"].map(server);
        assert_eq!(codes, [Code::Password, Code::NotAllowed, Code::SlotInUse, Code::LinkLost, Code::Server]);
        assert_eq!(of_state(Some(&SqlState::INSUFFICIENT_PRIVILEGE)), Code::Denied);
        assert_eq!(of_state(None), Code::Unreachable);
        let boxed: Box<dyn Error> = AdminError::NoToken.into();
        assert_eq!(of_command(boxed.as_ref()), Some(Code::AdminOff));
    }
}
