//! The status page: what it is made of, and, in a real Chromium (`make test-page`), what a person sees.

use serde_json::Value;

use crate::{
    outbox::{Outbox, PATIENCE},
    services::{browser::Browser, postgres::Version, wait_until, walpost::Walpost},
};

/// What an application could write into an event in order to be run by an operator's browser.
const HOSTILE: &str = r#"<img src=x onerror=document.title="owned">"#;

/// Lets an operator in.
const TOKEN: &str = "0123456789abcdef";

fn history(walpost: &Walpost) -> Value {
    serde_json::from_str(&walpost.get("/status/history").body).expect("/status/history is JSON")
}

fn sum(list: &Value) -> u64 {
    list.as_array().expect("a list").iter().filter_map(|entry| entry["events"].as_u64()).sum()
}

/// A walpost that has published 4 events of two types and buried one.
fn with_a_past(outbox: &Outbox<'_>) -> Walpost {
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

#[test]
#[ignore = "needs Chromium: make test-page"]
fn a_person_sees_at_a_glance_what_is_wrong_and_nothing_of_the_data_is_markup() {
    let outbox = Outbox::shared(Version::NEWEST);
    let walpost = with_a_past(&outbox);
    let mut page = Browser::open(&format!("http://127.0.0.1:{}/", walpost.http_port()), (1280, 900));
    page.wait_until("document.getElementById('headline').textContent === 'Streaming'");
    page.wait_until("document.querySelectorAll('#topics tbody tr').length === 2");
    keep(&mut page, "light", "well");
    assert!(page.text("#letters tbody").contains("no legal topic"));
    page.wait_until("document.querySelectorAll('#seconds-plot polyline').length > 0");

    // by keyboard: the plot is reached by Tab, and the arrow keys read a moment
    page.evaluate("document.getElementById('seconds-plot').focus()");
    page.press("ArrowLeft", 37);
    let read = page.text("#seconds-text");
    assert!(read.contains(':') && !read.contains("at most"), "{read}");
    let told = page.read_out();
    for (role, name) in
        [("heading", "Streaming"), ("heading", "Last errors"), ("status", "Streaming"), ("columnheader", "Events")]
    {
        assert!(told.contains(&(role.to_owned(), name.to_owned())), "{role} {name}: {told:?}");
    }
    assert!(told.iter().any(|(role, name)| role == "image" && name.starts_with("Lag in seconds")), "{told:?}");

    // broken: a topic that is missing, with a name of an application's making
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('no-such-topic')");
    page.wait_until("document.getElementById('headline').textContent === 'Streaming, but not ready'");
    page.wait_until("document.getElementById('errors').textContent.includes('no-such-topic')");
    assert!(page.text("#troubles").contains("no-such-topic"));
    keep(&mut page, "dark", "broken");
    assert_eq!(page.evaluate("document.querySelectorAll('img, iframe, object').length"), 0);
    assert_eq!(page.evaluate("document.title.includes('owned')"), false);
    assert_eq!(page.complaints(), [] as [String; 0]);

    // a policy that is only written and not obeyed would be none
    page.evaluate("document.body.appendChild(document.createElement('script')).textContent = 'document.title = 1'");
    page.wait_until("document.title !== '1'");
    wait_until(PATIENCE, "the policy forbids a foreign script", || {
        page.evaluate("0");
        page.complaints().iter().any(|complaint| complaint.contains("Content Security Policy"))
    });

    let desk = format!("127.0.0.1:{}", walpost.http_port());
    let env = [("WALPOST_HTTP_LISTEN", &*desk), ("WALPOST_HTTP_ADMIN_TOKEN", TOKEN)];
    assert_eq!(outbox.command(&["pause"], &env).code, Some(0));
    page.wait_until("document.getElementById('headline').textContent === 'Paused: nothing is sent'");
    keep(&mut page, "dark", "paused");

    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    page.wait_until("document.getElementById('headline').textContent === 'walpost does not answer'");
    keep(&mut page, "light", "gone");
}

/// Shows the page so, and keeps a picture where `WALPOST_SCREENSHOTS` says.
fn keep(page: &mut Browser, scheme: &str, name: &str) {
    page.prefer(scheme);
    let ground = page.evaluate("getComputedStyle(document.body).backgroundColor");
    let expected = if scheme == "dark" { "rgb(18, 21, 27)" } else { "rgb(246, 247, 249)" };
    assert_eq!(ground, expected);
    let overflow = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
    assert_eq!(page.evaluate(overflow), true, "the page is wider than its window");
    let picture = page.screenshot();
    if let Ok(folder) = std::env::var("WALPOST_SCREENSHOTS") {
        std::fs::write(format!("{folder}/{name}-{scheme}.png"), picture).expect("a folder for pictures");
    }
}
