//! Topic templates, and names made of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walpost::route::{Template, legal};

fuzz_target!(|text: &str| {
    if let Ok(template) = Template::parse(text)
        && let Some(topic) = template.fixed()
    {
        assert!(legal(topic.as_bytes()).is_ok());
    }
});
