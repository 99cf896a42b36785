//! The `walpost` binary: arguments, logging, exit code.

use std::process::ExitCode;

use clap::Parser;
use walpost::{
    app,
    cli::{Cli, Command},
    commands, config,
    config::Config,
    error::chain,
    observe::log,
};

/// Usage or configuration.
const MISUSE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    ExitCode::from(match run(&cli) {
        Ok(code) => code,
        Err(Failure { code, text }) => {
            eprintln!("walpost: {text}");
            code
        }
    })
}

/// Why nothing was done, and the exit code that says so.
struct Failure {
    code: u8,
    text: String,
}

fn run(cli: &Cli) -> Result<u8, Failure> {
    let config = config::load(cli.settings.config.as_deref(), &cli.overrides())
        .map_err(|faults| Failure { code: MISUSE, text: faults.to_string() })?;
    log::init(config.log.format, &config.log.level);
    dispatch(cli, &config)
}

fn dispatch(cli: &Cli, config: &Config) -> Result<u8, Failure> {
    let failed = |error: &dyn std::error::Error| Failure { code: 1, text: chain(error) };
    match &cli.command {
        Command::Run => app::run(config).map(app::Ended::exit_code).map_err(|error| failed(&error)),
        Command::Init(init) => commands::init(config, init.print).map_err(|error| failed(&error)),
        Command::Check(report) => Ok(commands::check(config, report.format)),
        Command::Status(report) => commands::status(config, report.format).map_err(|error| failed(&error)),
        Command::Demo => unimplemented!(),
    }
}
