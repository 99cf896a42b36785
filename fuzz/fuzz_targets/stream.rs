//! Bytes as a hostile server may send them: frames, and what they hold.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walpost::source::{copied, frame, relation::Relations};

fuzz_target!(|bytes: &[u8]| {
    let (mut rest, mut relations) = (bytes, Relations::default());
    while let Ok(Some(found)) = frame(rest) {
        assert!(found.size > 4 && found.body.len() + 5 == found.size);
        if found.tag == b'd' {
            let _ = copied(found.body, &mut relations);
        }
        rest = &rest[found.size..];
    }
});
