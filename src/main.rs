//! The `walpost` binary: arguments, logging, exit code.

use std::process::ExitCode;

use clap::Parser;
use walpost::{
    app,
    cli::{Cli, Command},
    codes::{self, Code},
    commands::{self, CommandError},
    config,
    error::chain,
    observe::log,
    sink::exactly_once::Accepted,
};

/// Usage or configuration.
const MISUSE: u8 = 2;
/// An error that needs a human.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Demo(demo) = &cli.command {
        // it brings along all that it needs, so no configuration is read
        return exit(commands::demo(demo, cli.settings.brokers.as_deref()));
    }
    if let Command::Generate(generate) = &cli.command {
        return exit(commands::generate(&generate.what));
    }
    let (flags, file) = (cli.overrides(), cli.settings.config.as_deref());
    let loaded = match &cli.command {
        Command::Init(init) if init.print => config::load_without_database(file, &flags),
        _ => config::load(file, &flags),
    };
    match loaded {
        Err(faults) => {
            eprintln!("walpost: {faults} [{}]", Code::Configuration);
            ExitCode::from(MISUSE)
        }
        Ok(config) => {
            log::init(config.log.format, &config.log.level);
            exit(dispatch(&cli.command, &config))
        }
    }
}

fn exit(outcome: Result<u8, CommandError>) -> ExitCode {
    ExitCode::from(outcome.unwrap_or_else(|error| {
        let code = codes::of_command(error.as_ref()).map(|code| format!(" [{code}]")).unwrap_or_default();
        eprintln!("walpost: {}{code}", chain(error.as_ref()));
        FAILED
    }))
}

fn dispatch(command: &Command, config: &config::Config) -> Result<u8, CommandError> {
    commands::refuse_without_slot(command, config)?;
    match command {
        Command::Run(run) => {
            let accepted = Accepted { duplicates: run.accept_duplicates, gap: run.accept_gap };
            Ok(app::run(config, accepted)?.exit_code())
        }
        Command::Init(init) => commands::init(config, init.print),
        Command::Backfill(again) => commands::backfill(config, again),
        Command::Check(flags) => commands::check(config, flags),
        Command::Status(standing) => commands::status(config, standing),
        Command::Peek(peek) => commands::peek(config, peek),
        Command::Pause => commands::tell(config, "pause"),
        Command::Resume => commands::tell(config, "resume"),
        Command::Takeover(takeover) => commands::takeover(config, takeover.from),
        Command::Rewind(rewind) => commands::rewind(config, rewind),
        Command::Drop(drop) => commands::drop(config, drop.yes),
        Command::Prune(prune) => commands::prune(config, prune.dry_run),
        Command::DeadLetters(letters) => commands::dead_letters(config, &letters.action),
        Command::Demo(_) | Command::Generate(_) => unreachable!("they are done before the configuration is read"),
    }
}
