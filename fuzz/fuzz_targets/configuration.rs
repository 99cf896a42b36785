//! The configuration file and the connection string.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walpost::{config::load_from, conninfo::ConnInfo};

fuzz_target!(|text: &str| {
    let _ = load_from(Some(("walpost.toml", text)), [], &[]);
    let _ = ConnInfo::parse(text, None, None);
});
