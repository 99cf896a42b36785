//! What a person sees of the status page, in a real Chromium. `make test-page` runs it: Chromium is a large package.

#[path = "../integration/outbox.rs"]
#[expect(dead_code, reason = "each user needs a part of it")]
mod outbox;
#[path = "../integration/past.rs"]
mod past;
#[expect(dead_code, reason = "each user of the services needs a part of them")]
#[path = "../services/mod.rs"]
mod services;

use outbox::{Outbox, PATIENCE};
use past::{TOKEN, with_a_past};
use services::{browser::Browser, postgres::Version, wait_until};

#[test]
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
