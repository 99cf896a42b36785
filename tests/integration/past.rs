//! A walpost that something has happened to.

use crate::{
    outbox::{Outbox, PATIENCE},
    services::walpost::Walpost,
};

/// What an application could write into an event in order to be run by an operator's browser.
const HOSTILE: &str = r#"<img src=x onerror=document.title="owned">"#;

/// Lets an operator in.
pub const TOKEN: &str = "0123456789abcdef";

/// A walpost that has published 4 events of two types and buried one.
pub fn with_a_past(outbox: &Outbox<'_>) -> Walpost {
    for (event_type, partitions) in [("often", 3), ("rare", 1), ("letters", 1)] {
        outbox.topic(event_type, partitions);
    }
    let letters = outbox.topic_name("letters");
    let walpost = outbox.relay(&[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &letters), ("WALPOST_HTTP_ADMIN_TOKEN", TOKEN)]);
    walpost.wait_until_ready(PATIENCE);
    outbox.execute(&format!(
        "INSERT INTO outbox (event_type, payload) VALUES ('often', '1'), ('often', '2'), ('rare', '3'), ('often', '4'), ('{HOSTILE}', '5')"
    ));
    outbox.wait_until_confirmed();
    walpost
}
