//! The short commands: each does its work once, prints, and says how it went by its exit code.

use std::{fmt::Display, io::Write as _};

use serde::Serialize;

use crate::{
    check,
    cli::Format,
    config::Config,
    init::{self, InitError},
    status_command::{self, StatusError},
};

/// `walpost init`
pub fn init(config: &Config, print: bool) -> Result<u8, InitError> {
    if print {
        println!("{}", init::print(config));
        return Ok(0);
    }
    block_on(init::run(config, |step| println!("{step}"))).map(|()| 0)
}

/// `walpost check`: 0 when `run` would work, else 1.
pub fn check(config: &Config, format: Format) -> u8 {
    let report = block_on(check::run(config));
    show(&report, format);
    report.exit_code()
}

/// `walpost status`
pub fn status(config: &Config, format: Format) -> Result<u8, StatusError> {
    show(&block_on(status_command::run(config))?, format);
    Ok(0)
}

fn show(report: &(impl Display + Serialize), format: Format) {
    let text = match format {
        Format::Text => report.to_string(),
        Format::Json => serde_json::to_string(report).expect("a report holds nothing that JSON cannot") + "\n",
    };
    // a reader that has seen enough (`| head`) is no failure
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime needs only file descriptors").block_on(work)
}
