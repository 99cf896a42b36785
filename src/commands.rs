//! The short commands: each does its work once, prints, and says how it went by its exit code.

use crate::{
    config::Config,
    init::{self, InitError},
};

/// `walpost init`
pub fn init(config: &Config, print: bool) -> Result<u8, InitError> {
    if print {
        println!("{}", init::print(config));
        return Ok(0);
    }
    block_on(init::run(config, |step| println!("{step}"))).map(|()| 0)
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime needs only file descriptors").block_on(work)
}
