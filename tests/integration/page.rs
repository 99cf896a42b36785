//! The status page: what it is made of. What a person sees of it in a real Chromium: `make test-page`.

use serde_json::Value;

use crate::{
    outbox::{Outbox, PATIENCE},
    past::with_a_past,
    services::{postgres::Version, wait_until, walpost::Walpost},
};

fn history(walpost: &Walpost) -> Value {
    serde_json::from_str(&walpost.get("/status/history").body).expect("/status/history is JSON")
}

fn sum(list: &Value) -> u64 {
    list.as_array().expect("a list").iter().filter_map(|entry| entry["events"].as_u64()).sum()
}

#[test]
fn the_history_has_samples_topics_dead_letters_and_errors() {
    let outbox = Outbox::shared(Version::NEWEST);
    let walpost = with_a_past(&outbox);
    wait_until(PATIENCE, "a sample behind the events", || {
        history(&walpost)["samples"]["events"]
            .as_array()
            .and_then(|events| events.last())
            .is_some_and(|last| *last == 4)
    });
    let seen = history(&walpost);
    assert_eq!(seen["topics"][0]["topic"], outbox.topic_name("often"));
    assert_eq!((sum(&seen["topics"]), seen["topics"][0]["events"].as_u64()), (4, Some(3)));
    assert_eq!((sum(&seen["dead_letters"]), &seen["dead_letters"][0]["reason"]), (1, &"illegal_topic".into()));
    let samples = &seen["samples"];
    let lengths =
        ["at_ms", "lag_bytes", "lag_seconds", "events", "ready"].map(|name| samples[name].as_array().map(Vec::len));
    assert!(lengths.iter().all(|length| length.is_some() && *length == lengths[0]), "{samples}");
    assert_eq!(seen["status"]["ready"], true);
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('no-such-topic')");
    wait_until(PATIENCE, "the missing topic is an error", || {
        let errors = history(&walpost)["errors"].clone();
        errors[0]["part"] == "topic" && errors[0]["reason"].as_str().is_some_and(|text| text.contains("no-such-topic"))
    });
}
