//! The command line: commands, flags and their help. No behaviour.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{config::TableName, lsn::Lsn};

/// Streams a Postgres transactional outbox to Kafka from the write-ahead log.
///
/// Settings come from a TOML file, over it the environment (`WALPOST_<SECTION>_<KEY>`, `PGPASSWORD`), over that the flags.
#[derive(Debug, Parser)]
#[command(name = "walpost", version, arg_required_else_help = true, after_help = EXAMPLE)]
pub struct Cli {
    /// Settings that hold for every command.
    #[command(flatten)]
    pub settings: Settings,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLE: &str = "\
Example:
  export WALPOST_POSTGRES_URL=postgres://walpost@localhost:5432/app
  walpost init && walpost check && walpost run

Exit codes:
  0  stopped as asked
  1  halted by an error that needs a human
  2  usage or configuration
  3  the slot is lost or invalidated: events may be missing";

/// Flags over the configuration. Passwords have none: other users of the machine can read a command line.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Settings")]
pub struct Settings {
    /// Configuration file [default: ./walpost.toml where it exists]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kafka's bootstrap servers (kafka.brokers)
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    pub brokers: Option<String>,
    /// The replication slot (postgres.slot)
    #[arg(long, global = true, value_name = "NAME")]
    pub slot: Option<String>,
    /// The publication (postgres.publication)
    #[arg(long, global = true, value_name = "NAME")]
    pub publication: Option<String>,
    /// The outbox table (outbox.table)
    #[arg(long, global = true, value_name = "SCHEMA.TABLE")]
    pub table: Option<String>,
    /// Where metrics and health are served, "" for nowhere (http.listen)
    #[arg(long, global = true, value_name = "IP:PORT")]
    pub listen: Option<String>,
    /// error, warn, info, debug, trace or a filter (log.level)
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// text or json (log.format)
    #[arg(long, global = true, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Any key, as often as needed, for example kafka.properties.linger.ms=5
    #[arg(long = "set", global = true, value_name = "SECTION.KEY=VALUE", value_parser = assignment)]
    pub set: Vec<(String, String)>,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The service: tail the slot (or poll the table), publish, confirm
    #[command(after_help = "Example:\n  walpost run --config /etc/walpost.toml --log-format json\n\n\
                      Where no replication slot can be had, walpost reads the table itself:\n  walpost run --set postgres.source=poll")]
    Run(Run),
    /// Create what is missing: outbox table, functions for applications, publication, slot; or, where the table is polled
    /// (postgres.source), the marks for what was delivered
    #[command(
        after_help = "Example:\n  walpost init --print | less\n  walpost init --backfill none\n  walpost init --backfill \"created_at > now() - interval '1 day'\" --rate 1000"
    )]
    Init(Init),
    /// Publish rows that are in the table once more, behind all that was published meanwhile; the slot plays no part
    #[command(
        after_help = "Example:\n  walpost backfill \"created_at >= '2026-05-01'\" --dry-run\n  walpost backfill all --rate 500\n\n\
                      The events have the same ids as before, so consumers that drop what they have seen drop these.\n\
                      Events of one key come again after newer ones."
    )]
    Backfill(Again),
    /// Find out whether `run` would work, and what to mend; exit code 0 when it would
    #[command(
        after_help = "Example:\n  walpost check --format json\n  walpost check --consumer billing --inbox-keep 30d"
    )]
    Check(Check),
    /// Show slot, positions, lag and the last error; where the table is polled, lag and the last error
    #[command(
        after_help = "Example:\n  walpost status --format json\n  walpost status --probe live   # for health checks: exit code 0 or 1"
    )]
    Status(Standing),
    /// Print the records that would be published next, as JSON lines, without moving the slot; works beside a running walpost
    #[command(
        after_help = "Example:\n  walpost peek --limit 1\n  walpost peek | jq .headers\n  walpost peek --explain --from-table \"event_type = 'order.paid'\""
    )]
    Peek(Peek),
    /// Send nothing until `resume`: asks the walpost that runs on this machine (`http.admin_token_file`); the slot retains WAL
    #[command(after_help = "Example:\n  walpost pause && walpost status\n\n\
                      What has begun is finished and confirmed. A restart of walpost ends the pause.")]
    Pause,
    /// Go on after `pause`
    #[command(after_help = "Example:\n  walpost resume")]
    Resume,
    /// A planned hand-over without duplicates: another walpost confirms what it has begun and ends, then this one runs
    #[command(after_help = "Example:\n  walpost takeover --from 10.0.0.5:9465 --config /etc/walpost.toml\n\n\
                      Both need the same http.admin_token_file. Where Kafka does not acknowledge, nothing is changed.")]
    Takeover(Takeover),
    /// Publish rows once more that are still in the table, or move the slot forward past events; a slot cannot go back
    #[command(
        after_help = "Example:\n  walpost rewind --events-since '2026-05-01 12:00+00'        # says how many\n  \
                      walpost rewind --events-since '2026-05-01 12:00+00' --yes\n  walpost rewind --to 0/16B3748          # says how many events would be skipped"
    )]
    Rewind(Rewind),
    /// Decommission: drop the replication slot, then the publication; tables and rows stay
    #[command(after_help = "Example:\n  walpost drop         # says what it would do\n  walpost drop --yes")]
    Drop(Drop),
    /// Delete delivered rows that are older than retention.keep, once and now
    #[command(after_help = "Example:\n  walpost prune --dry-run\n  walpost prune --set retention.keep=7d")]
    Prune(Prune),
    /// Events that could not be published: see why, and send them again
    #[command(
        after_help = "Example:\n  walpost dead-letters list\n  walpost dead-letters requeue 7f3c… --config /etc/walpost.toml"
    )]
    DeadLetters(DeadLetters),
    /// The whole story on this machine in under a minute: nothing to configure, nothing left behind
    #[command(
        after_help = "Example:\n  walpost demo\n  walpost demo --chapter 1\n  walpost demo --json\n  walpost demo --brokers localhost:9092"
    )]
    Demo(Demo),
    /// Write man pages, completions or the configuration reference: for those who make packages
    #[command(
        hide = true,
        after_help = "Example:\n  walpost generate man /usr/share/man/man1\n  walpost generate completions .\n  walpost generate configuration > docs/configuration.md"
    )]
    Generate(Generate),
}

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct Generate {
    /// What is written.
    #[command(subcommand)]
    pub what: Generated,
}

/// What can be written out of walpost itself.
#[derive(Debug, Subcommand)]
pub enum Generated {
    /// A man page for each command
    Man(Folder),
    /// Completions for bash, zsh and fish
    Completions(Folder),
    /// The page of all settings, to standard output
    Configuration,
}

/// Where files are written.
#[derive(Debug, Args)]
pub struct Folder {
    /// A folder; made where it is missing
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Flags of `status`.
#[derive(Debug, Args)]
pub struct Standing {
    /// How it is shown.
    #[command(flatten)]
    pub report: Report,
    /// Ask the walpost that runs here one thing: exit code 0 for yes, 1 for no or no answer
    #[arg(long, value_enum, conflicts_with = "format")]
    pub probe: Option<Probe>,
}

/// What a health check asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Probe {
    /// Does it live (`/livez`)?
    Live,
    /// Does it stream, and is nothing wrong (`/readyz`)?
    Ready,
    /// Is it ready, or does it wait for the slot that another one holds (`/readyz?standby=ok`)?
    Standby,
}

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Under exactly-once delivery (`kafka.delivery`), once: publish from the slot's position on although the progress topic does not say
    /// what was published from it, so that events may come twice
    #[arg(long)]
    pub accept_duplicates: bool,
    /// Under exactly-once delivery (`kafka.delivery`), once: publish from the slot's position on although, by the progress topic, events
    /// before it may be missing
    #[arg(long)]
    pub accept_gap: bool,
}

/// Flags of `dead-letters`.
#[derive(Debug, Args)]
pub struct DeadLetters {
    /// What to do with them.
    #[command(subcommand)]
    pub action: DeadLettersAction,
}

/// What to do with dead letters.
#[derive(Debug, Subcommand)]
pub enum DeadLettersAction {
    /// Show each with its reason; the topic stays as it is
    List(Report),
    /// Send some again to the topics they were meant for, behind all that was published meanwhile
    Requeue(Requeue),
}

/// Flags of `dead-letters requeue`.
#[derive(Debug, Args)]
pub struct Requeue {
    /// Ids of the events
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub ids: Vec<String>,
    /// All of them
    #[arg(long)]
    pub all: bool,
}

/// Flags of `peek`.
#[derive(Debug, Args)]
pub struct Peek {
    /// How many records at most
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub limit: usize,
    /// Rows that are in the table instead of those behind the slot: all, or those that fulfil an SQL condition
    #[arg(long, value_name = "CONDITION", num_args = 0..=1, default_missing_value = "all")]
    pub from_table: Option<String>,
    /// Say which rule chose the topic, and what each part of the record weighs
    #[arg(long)]
    pub explain: bool,
}

/// Flags of `takeover`.
#[derive(Debug, Args)]
pub struct Takeover {
    /// The listener of the walpost that is to end (its http.listen)
    #[arg(long, value_name = "IP:PORT")]
    pub from: SocketAddr,
}

/// Flags of `rewind`.
#[derive(Debug, Args)]
pub struct Rewind {
    /// Move the slot forward to here; events before are never published
    #[arg(long, value_name = "LSN", conflicts_with = "events_since", required_unless_present = "events_since")]
    pub to: Option<Lsn>,
    /// Publish rows once more whose timestamp column is not older: anything that Postgres takes for a time
    #[arg(long, value_name = "TIME")]
    pub events_since: Option<String>,
    /// Do it
    #[arg(long)]
    pub yes: bool,
}

/// Flags of `drop`.
#[derive(Debug, Args)]
pub struct Drop {
    /// Do it
    #[arg(long)]
    pub yes: bool,
}

/// Flags of `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Only this chapter: 1 to 7 are the lesson, 8 is the long run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=i64::from(crate::demo::LONG_RUN)))]
    pub chapter: Option<u8>,
    /// Print nothing but the numbers, as JSON
    #[arg(long)]
    pub json: bool,
    /// A process of the demo's own: the desk that dies at each tenth order
    #[arg(long, hide = true, num_args = 4, value_names = ["DESK", "CONNINFO", "TOLD", "FIRST"])]
    pub order_desk: Vec<String>,
    /// A process of the demo's own: the shop that it kills
    #[arg(long, hide = true, num_args = 2, value_names = ["CONNINFO", "TOPIC"])]
    pub naive_shop: Vec<String>,
}

/// Flags of `prune`.
#[derive(Debug, Args)]
pub struct Prune {
    /// Say how many rows would go, and delete nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Flags of `init`.
#[derive(Debug, Args)]
pub struct Init {
    /// Print the SQL and do nothing
    #[arg(long)]
    pub print: bool,
    /// Rows older than the slot: all, none or an SQL condition (outbox.backfill). They are published now, so this needs
    /// Kafka; to begin again after an interruption, run it or `walpost run` again
    #[arg(long, value_name = "all|none|CONDITION")]
    pub backfill: Option<String>,
    /// Rows a second that are published at most, 0 for no limit (key `limits.backfill_rate`)
    #[arg(long, value_name = "ROWS")]
    pub rate: Option<String>,
}

/// Flags of `backfill`.
#[derive(Debug, Args)]
pub struct Again {
    /// Which rows: all, or what would stand behind WHERE in SQL
    #[arg(value_name = "all|CONDITION")]
    pub condition: String,
    /// Only count them
    #[arg(long)]
    pub dry_run: bool,
    /// Only of this outbox, where there are several
    #[arg(long, value_name = "SCHEMA.TABLE", value_parser = TableName::parse)]
    pub only: Option<TableName>,
    /// Rows a second that are published at most, 0 for no limit (key `limits.backfill_rate`)
    #[arg(long, value_name = "ROWS")]
    pub rate: Option<String>,
}

/// Flags of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// How it is printed.
    #[command(flatten)]
    pub report: Report,
    /// Also whether the inbox remembers what this consumer group has dealt with for as long as its topics keep records
    #[arg(long, value_name = "GROUP")]
    pub consumer: Option<String>,
    /// How long that group's marks are kept (`inbox_prune`); without, the oldest mark is what is known
    #[arg(long, value_name = "DURATION", requires = "consumer", value_parser = humantime::parse_duration)]
    pub inbox_keep: Option<Duration>,
}

/// Flags of what prints a report.
#[derive(Debug, Args)]
pub struct Report {
    /// How it is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// For programs
    Json,
}

impl Cli {
    /// The flags as pairs of a configuration key and its value; `--set` first, so that the named flags win.
    pub fn overrides(&self) -> Vec<(String, String)> {
        let settings = &self.settings;
        let (backfill, rate) = match &self.command {
            Command::Init(init) => (init.backfill.as_ref(), init.rate.as_ref()),
            Command::Backfill(again) => (None, again.rate.as_ref()),
            _ => (None, None),
        };
        let named = [
            ("kafka.brokers", settings.brokers.as_ref()),
            ("postgres.slot", settings.slot.as_ref()),
            ("postgres.publication", settings.publication.as_ref()),
            ("outbox.table", settings.table.as_ref()),
            ("outbox.backfill", backfill),
            ("limits.backfill_rate", rate),
            ("http.listen", settings.listen.as_ref()),
            ("log.level", settings.log_level.as_ref()),
            ("log.format", settings.log_format.as_ref()),
        ];
        let named = named.into_iter().filter_map(|(key, value)| value.map(|value| (key.to_owned(), value.clone())));
        settings.set.iter().cloned().chain(named).collect()
    }
}

fn assignment(text: &str) -> Result<(String, String), &'static str> {
    let (key, value) = text.split_once('=').ok_or("write SECTION.KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn overrides(arguments: &[&str]) -> Vec<(String, String)> {
        Cli::try_parse_from(arguments).unwrap().overrides()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_become_configuration_keys() {
        let arguments = "walpost --slot a run --brokers k:1 --set kafka.properties.linger.ms=5 --set postgres.slot=b";
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            overrides(&arguments.split(' ').collect::<Vec<_>>()),
            [
                pair("kafka.properties.linger.ms", "5"),
                pair("postgres.slot", "b"),
                pair("kafka.brokers", "k:1"),
                pair("postgres.slot", "a"),
            ]
        );
        let given = overrides(&["walpost", "init", "--backfill", "a = 'b'", "--listen", ""]);
        assert_eq!(given, [pair("outbox.backfill", "a = 'b'"), pair("http.listen", "")]);
    }

    #[test]
    fn a_set_without_a_value_is_refused() {
        assert!(Cli::try_parse_from(["walpost", "run", "--set", "postgres.slot"]).is_err());
    }

    #[test]
    fn the_help_of_each_command_shows_an_example() {
        for name in [
            "",
            "run",
            "init",
            "backfill",
            "check",
            "status",
            "peek",
            "prune",
            "drop",
            "dead-letters",
            "demo",
            "generate",
        ] {
            let arguments = ["walpost", name, "--help"].into_iter().filter(|argument| !argument.is_empty());
            let help = Cli::try_parse_from(arguments).unwrap_err().to_string();
            assert!(help.contains("Example:\n"), "{name}: {help}");
        }
    }
}
