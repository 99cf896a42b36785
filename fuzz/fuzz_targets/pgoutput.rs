//! One message of pgoutput.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walpost::source::pgoutput::{Message, parse};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Message::Insert { row, .. }) = parse(bytes) {
        assert_eq!(row.cells().count(), row.len());
    }
});
