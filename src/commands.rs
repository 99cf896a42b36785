//! The short commands: each does its work once, prints, and says how it went by its exit code.

use std::{error::Error, fmt::Display, io::Write as _, net::SocketAddr};

use crate::{
    admin_command, app, backfill_command,
    check::{self, Consumer},
    cli::{Again, Check, Command, DeadLettersAction, Demo, Format, Generated, Peek, Rewind, Standing},
    config::{Config, SourceKind},
    dead_letters_command, demo, drop_command, generate_command,
    init::{self, Step},
    peek_command, prune_command, rewind_command,
    sink::exactly_once::Accepted,
    status_command,
    supervisor::Ended,
};

/// What went wrong; printed with its causes.
pub type CommandError = Box<dyn Error>;

/// Refuses what works on a replication slot where there is none.
pub fn refuse_without_slot(command: &Command, config: &Config) -> Result<(), CommandError> {
    let instead = match command {
        Command::Peek(_) => "what would be published next is in the table: the rows whose delivered_at is NULL",
        Command::Takeover(_) => "several instances poll beside each other; start the new one and stop the old one",
        Command::Drop(_) => "to decommission, stop walpost, then drop the columns and indexes of sql/poll.sql",
        Command::Prune(_) => "`walpost run` deletes by delivered_at where retention.keep is set",
        Command::Backfill(_) | Command::Rewind(_) => "to publish rows once more, set their delivered_at to NULL",
        _ => return Ok(()),
    };
    match config.postgres.source {
        SourceKind::Wal => Ok(()),
        SourceKind::Poll => Err(format!("postgres.source is \"poll\", so there is no slot; {instead}").into()),
    }
}

/// `walpost init`
pub fn init(config: &Config, only_print: bool) -> Result<u8, CommandError> {
    if only_print {
        print(&init::print(config));
        return Ok(0);
    }
    block_on(async {
        let Some(fill) = init::run(config, |step| print(&step)).await? else { return Ok(0) };
        let ended = backfill_command::publish(config, fill).await?;
        if ended == Ended::Filled {
            print(&Step::Created(init::slot_text(config)));
        }
        Ok(backfill_command::exit_code(ended))
    })?
}

/// `walpost backfill`
pub fn backfill(config: &Config, again: &Again) -> Result<u8, CommandError> {
    block_on(backfill_command::run(config, again, |line| print(&line)))?.map_err(Into::into)
}

/// `walpost check`
pub fn check(config: &Config, flags: &Check) -> Result<u8, CommandError> {
    let consumer = flags.consumer.clone().map(|group| Consumer { group, inbox_keep: flags.inbox_keep });
    let report = block_on(check::run(config, consumer.as_ref()))?;
    match flags.report.format {
        Format::Text => print(&report),
        Format::Json => print(&serde_json::to_string_pretty(&report)?),
    }
    Ok(report.exit_code())
}

/// `walpost status`
pub fn status(config: &Config, asked: &Standing) -> Result<u8, CommandError> {
    if let Some(probe) = asked.probe {
        let answer = block_on(status_command::probe(config, probe))??;
        print(&answer.text);
        return Ok(u8::from(!answer.yes));
    }
    let status = block_on(status_command::run(config))??;
    match asked.report.format {
        Format::Text => print(&status),
        Format::Json => print(&serde_json::to_string_pretty(&status)?),
    }
    Ok(0)
}

/// `walpost peek`
pub fn peek(config: &Config, wanted: &Peek) -> Result<u8, CommandError> {
    for record in block_on(peek_command::run(config, wanted))?? {
        print(&serde_json::to_string(&record)?);
    }
    Ok(0)
}

/// `walpost pause` and `walpost resume`
pub fn tell(config: &Config, action: &str) -> Result<u8, CommandError> {
    print(&block_on(admin_command::tell(config, action))??);
    Ok(0)
}

/// `walpost takeover`
pub fn takeover(config: &Config, from: SocketAddr) -> Result<u8, CommandError> {
    block_on(admin_command::hand_over(config, from))??;
    Ok(app::run(config, Accepted::default())?.exit_code())
}

/// `walpost rewind`; as [`drop`], without `--yes` it only says what it would do.
pub fn rewind(config: &Config, wanted: &Rewind) -> Result<u8, CommandError> {
    Ok(block_on(rewind_command::run(config, wanted, |line| print(&line)))??)
}

/// `walpost drop`; without `sure` it only says what it would do, and the exit code is that of a misuse.
pub fn drop(config: &Config, sure: bool) -> Result<u8, CommandError> {
    let found = block_on(drop_command::run(config, sure))??;
    print(&found);
    Ok(if sure || found.is_nothing() { 0 } else { 2 })
}

/// `walpost prune`
pub fn prune(config: &Config, dry_run: bool) -> Result<u8, CommandError> {
    let Some(retention) = config.retention else {
        eprintln!(
            "walpost: retention.keep is not set, so no row is ever too old; say how long delivered rows are kept: \
             [retention] keep = \"7d\" in the file, WALPOST_RETENTION_KEEP=7d, or --set retention.keep=7d"
        );
        return Ok(2);
    };
    block_on(prune_command::run(config, retention, dry_run, |line| print(&line)))??;
    Ok(0)
}

/// `walpost dead-letters`
pub fn dead_letters(config: &Config, action: &DeadLettersAction) -> Result<u8, CommandError> {
    match action {
        DeadLettersAction::List(report) => {
            let letters = dead_letters_command::list(config)?;
            match report.format {
                Format::Text => print(&letters),
                Format::Json => print(&serde_json::to_string_pretty(&letters)?),
            }
        }
        DeadLettersAction::Requeue(chosen) => {
            let sent = dead_letters_command::requeue(config, &chosen.ids)?;
            print(&format!("sent again: {sent}; the letters stay in the dead-letter topic"));
        }
    }
    Ok(0)
}

/// `walpost generate`
pub fn generate(what: &Generated) -> Result<u8, CommandError> {
    match what {
        Generated::Man(to) => generate_command::man(&to.folder)?,
        Generated::Completions(to) => generate_command::completions(&to.folder)?,
        Generated::Configuration => print(&crate::config::reference()),
    }
    Ok(0)
}

/// Prints, with one newline at the end. A reader that has gone away (`| head`) is no error.
fn print(text: &dyn Display) {
    let text = text.to_string();
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
}

/// `walpost demo`; `brokers` is a real Kafka to show it with.
pub fn demo(flags: &Demo, brokers: Option<&str>) -> Result<u8, CommandError> {
    Ok(match (flags.naive_shop.as_slice(), flags.order_desk.as_slice(), brokers) {
        ([conninfo, topic], _, Some(brokers)) => demo::naive_shop(conninfo, brokers, topic)?,
        (_, [desk, conninfo, told, first], Some(brokers)) => {
            demo::order_desk(desk, conninfo, brokers, told, first.parse()?)?
        }
        _ => demo::run(demo::Telling { brokers, chapter: flags.chapter, json: flags.json })?,
    })
}

fn block_on<T>(work: impl Future<Output = T>) -> std::io::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work))
}
