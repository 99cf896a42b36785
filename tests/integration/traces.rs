//! `[trace]`: a span for each batch, over OTLP; none where it is off, and no harm where the collector is away.

use std::{collections::BTreeSet, net::TcpListener, thread, time::Duration};

use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE, deliveries},
    services::{
        collector::{Collector, attribute},
        postgres::{Postgres, Version},
        run, wait_for, wait_until,
        walpost::{Ended, Walpost},
    },
    victim::victim,
};

const ENDPOINT: &str = "WALPOST_TRACE_OTLP_ENDPOINT";

/// Another way to read the table, and what the table lacks for it.
const POLLED: [(&str, &str); 2] = [("WALPOST_POSTGRES_SOURCE", "poll"), ("WALPOST_POLL_INTERVAL_MS", "100")];
const MARKS: &str = "ALTER TABLE outbox ADD delivered_at timestamptz, ADD attempts int NOT NULL DEFAULT 0";

/// What is said once where spans are not taken.
const AWAY: &str = "spans are not taken";

/// How long a stop may take: what it may cost to flush, and a busy machine.
const STOP: Duration = Duration::from_secs(20);

fn failed(span: &Span) -> bool {
    span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
}

fn number(span: &Span, key: &str) -> u64 {
    let text = attribute(&span.attributes, key).unwrap_or_else(|| panic!("no {key}: {span:?}"));
    text.parse().expect("a number")
}

/// Events of all spans that did not fail.
fn delivered(spans: &[Span]) -> u64 {
    spans.iter().filter(|span| !failed(span)).map(|span| number(span, "messaging.batch.message_count")).sum()
}

/// Every span, once those that did not fail stand for so many events.
fn spans(collector: &Collector, events: u64) -> Vec<Span> {
    wait_for(PATIENCE, &format!("spans of {events} events"), || {
        Some(collector.spans()).filter(|spans| delivered(spans) >= events)
    })
}

fn stop(walpost: &Walpost) {
    assert_eq!(walpost.sigterm_and_wait(STOP), Some(0), "{}", walpost.log());
}

fn warnings(log: &str) -> usize {
    log.matches(AWAY).count()
}

/// As applications write it: a trace of so many spans.
fn parent(trace: u32, span: u32) -> String {
    format!("00-{trace:032x}-{span:016x}-01")
}

/// The traces that spans lead to, as (trace, span).
fn links(spans: &[Span]) -> BTreeSet<(String, String)> {
    let links = spans.iter().flat_map(|span| &span.links);
    links.map(|link| (hex::encode(&link.trace_id), hex::encode(&link.span_id))).collect()
}

#[test]
fn where_it_is_off_nobody_is_connected_to() {
    let outbox = Outbox::shared(Version::NEWEST);
    let topic = outbox.topic("t", 1);
    let collector = Collector::start();
    let url = collector.url();
    // what a library of OpenTelemetry would obey
    let obeyed = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*url),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &url),
        ("OTEL_TRACES_EXPORTER", "otlp"),
    ];
    let walpost = outbox.relay(&obeyed);
    outbox.execute("INSERT INTO outbox (event_type) SELECT 't' FROM generate_series(1, 50)");
    outbox.wait_until_confirmed();
    assert!(walpost.metric("walpost_trace_spans_dropped_total").abs() < 1e-9);
    stop(&walpost);
    assert_eq!(outbox.kafka.record_count(&topic), 50);
    assert_eq!(collector.connections(), 0);
}

#[test]
fn spans_add_up_to_what_is_delivered_and_lead_to_the_traces_of_the_events() {
    let once = ("WALPOST_KAFKA_DELIVERY", "exactly_once");
    thread::scope(|scope| {
        scope.spawn(|| claim_spans("at least once", &[], ""));
        scope.spawn(|| claim_spans("exactly once", &[once], ""));
        scope.spawn(|| claim_spans("polled", &POLLED, MARKS));
    });
}

/// `more`: what the table lacks.
fn claim_spans(way: &str, settings: &[(&str, &str)], more: &str) {
    let outbox = Outbox::shared(Version::NEWEST);
    let [topic, other] = [outbox.topic("t", 3), outbox.topic("other", 1)];
    outbox.execute(more);
    let polls = !more.is_empty();
    let collector = Collector::start();
    let url = collector.url();
    let traced = [(ENDPOINT, &*url), ("WALPOST_TRACE_SERVICE_NAME", "shop-outbox")];
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[settings, &traced].concat());
    walpost.wait_for_log(PATIENCE, if polls { "polling tables=" } else { "streaming slot=" });
    let plain = |number: u32| {
        outbox.execute(&format!(
            "INSERT INTO outbox (event_type, key, payload, headers)
             SELECT 't', 'k' || n, '{{\"n\": {number}}}', jsonb_build_object('traceparent', '{}') FROM generate_series(1, 3) n",
            parent(number, 7)
        ));
    };
    plain(1);
    let alone = spans(&collector, 3);
    assert!(links(&alone).contains(&(format!("{:032x}", 1), format!("{:016x}", 7))), "{way}: {alone:#?}");
    (2..=20).for_each(plain);
    // in one transaction more traces than a span leads to
    outbox.execute(&format!(
        "INSERT INTO outbox (event_type, headers)
         SELECT 'other', jsonb_build_object('traceparent', '00-' || lpad(to_hex(1000 + n), 32, '0') || '-{:016x}-00')
         FROM generate_series(1, 40) n",
        9
    ));
    outbox.execute("INSERT INTO outbox (event_type, headers) VALUES ('t', '{\"traceparent\": \"none\"}')");
    let found = spans(&collector, 101);
    stop(&walpost);
    assert_eq!(delivered(&collector.spans()), 101, "{way}: {found:#?}");
    assert_eq!(outbox.kafka.read_all(&[&topic, &other]).len(), 101);
    for span in &found {
        let text = |key: &str| attribute(&span.attributes, key);
        assert_eq!(span.kind(), SpanKind::Client);
        assert!(!failed(span), "{way}: {span:?}");
        assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
        assert_eq!(text("messaging.system").as_deref(), Some("kafka"));
        assert_eq!(text("messaging.operation.type").as_deref(), Some("send"));
        match text("messaging.destination.name") {
            Some(one) => {
                assert!([&topic, &other].contains(&&one), "{one}");
                assert_eq!(span.name, format!("send {one}"));
            }
            None => assert_eq!(span.name, "send"),
        }
        assert!(number(span, "walpost.bytes") > 0);
        assert_eq!(text("walpost.slot").as_deref(), (!polls).then_some(outbox.database.name()));
        assert_eq!(text("walpost.lsn").is_some(), !polls, "{way}: {span:?}");
        assert!(span.start_time_unix_nano > 1_700_000_000_000_000_000, "{span:?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(span.links.len() <= 32);
    }
    // of the 40 traces of one transaction, 32 have room; rows that are polled are acknowledged as it comes
    let left_out: u32 = found.iter().map(|span| span.dropped_links_count).sum();
    assert!(polls || left_out >= 8, "{way}: {left_out}");
    assert!(links(&found).len() + left_out as usize >= 60, "{way}: {found:#?}");
    let resource = collector.resources().remove(0).resource.expect("spans have a resource");
    assert_eq!(attribute(&resource.attributes, "service.name").as_deref(), Some("shop-outbox"));
    assert_eq!(attribute(&resource.attributes, "service.version").as_deref(), Some(env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_batch_whose_session_fails_says_why_and_the_next_that_it_is_sent_again() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let collector = Collector::start();
    let walpost = outbox.relay(&[(ENDPOINT, &collector.url())]);
    outbox.execute("INSERT INTO outbox VALUES ('warm', 't', 'k', NULL)");
    outbox.wait_until_confirmed();
    kafka.freeze();
    outbox.execute("INSERT INTO outbox SELECT n, 't', 'k', 'x' FROM generate_series(1, 10) n");
    wait_until(PATIENCE, "the events are in flight", || walpost.metric("walpost_in_flight_events") >= 10.0);
    outbox.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = current_database()",
    );
    let broken = wait_for(PATIENCE, "a span of what failed", || collector.spans().into_iter().find(failed));
    kafka.thaw();
    outbox.wait_until_confirmed();
    let all = spans(&collector, 11);
    stop(&walpost);
    assert_eq!(delivered(&collector.spans()), 11, "{all:#?}");
    assert_eq!(deliveries(&kafka.read_all(&[&topic])).len(), 11);
    assert_eq!(number(&broken, "messaging.batch.message_count"), 10);
    let code = attribute(&broken.attributes, "error.type").expect("it says why");
    assert!(code.starts_with("WP-1"), "{broken:?}");
    assert!(attribute(&broken.attributes, "walpost.lsn").is_none(), "nothing was confirmed");
    let events = all.iter().filter(|span| !failed(span)).flat_map(|span| &span.events);
    let again: Vec<_> = events.filter(|event| event.name == "walpost.sent_again").collect();
    assert_eq!(again.len(), 1, "{all:#?}");
    assert_eq!(attribute(&again[0].attributes, "error.type"), Some(code));
}

#[test]
fn a_polled_event_that_is_refused_is_told_with_its_batch() {
    let outbox = Outbox::shared(Version::NEWEST);
    outbox.topic("t", 1);
    outbox.kafka.create_topic(&outbox.topic_name("small"), 1, &[("max.message.bytes", "1000")]);
    outbox.execute(MARKS);
    let collector = Collector::start();
    let url = collector.url();
    let walpost = Walpost::relay(&outbox.database, outbox.kafka, &[&POLLED[..], &[(ENDPOINT, &url)]].concat());
    // of a kind that no compression makes small
    outbox.execute(
        "INSERT INTO outbox (event_type, payload)
         SELECT 'small', jsonb_agg(gen_random_uuid()) FROM generate_series(1, 200)
         UNION ALL VALUES ('t', '1'::jsonb), ('t', '2'), ('small', '3')",
    );
    let told = |span: &Span| attribute(&span.attributes, "walpost.failed_count").is_some();
    let span = wait_for(PATIENCE, "a span with what failed", || collector.spans().into_iter().find(told));
    assert_eq!(number(&span, "walpost.failed_count"), 1);
    assert_eq!(attribute(&span.attributes, "error.type").as_deref(), Some("MessageSizeTooLarge"));
    assert!(failed(&span) && attribute(&span.attributes, "walpost.lsn").is_none(), "{span:?}");
    outbox.wait_until_true(PATIENCE, "3 = (SELECT count(delivered_at) FROM outbox)");
    stop(&walpost);
}

#[test]
fn a_collector_that_hangs_holds_nothing_up_and_is_told_of_once() {
    // it lets everyone in and never says a word
    let mute = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", mute.local_addr().expect("it is bound"));
    let outbox = Outbox::shared(Version::NEWEST);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[(ENDPOINT, &url)]);
    let insert = |rows: u32| {
        outbox.execute(&format!("INSERT INTO outbox (event_type) SELECT 't' FROM generate_series(1, {rows})"));
        outbox.wait_until_confirmed();
    };
    insert(1);
    let (asked, _) = mute.accept().expect("it asks for spans to be taken");
    // from here on the first request is under way, for seconds
    (0..50).for_each(|_| insert(20));
    walpost.wait_for_log(PATIENCE, AWAY);
    drop(asked);
    let again = mute.accept().expect("it tries again");
    insert(1);
    stop(&walpost);
    drop(again);
    assert_eq!(warnings(&walpost.log()), 1, "{}", walpost.log());
    assert_eq!(outbox.kafka.record_count(&topic), 1002);
}

#[test]
fn spans_wait_for_a_collector_that_is_away_and_those_it_refuses_are_counted() {
    let port = run::free_port();
    let outbox = Outbox::shared(Version::NEWEST);
    outbox.topic("t", 1);
    let walpost = outbox.relay(&[(ENDPOINT, &format!("http://127.0.0.1:{port}/"))]);
    let insert = || {
        outbox.execute("INSERT INTO outbox (event_type) VALUES ('t')");
        outbox.wait_until_confirmed();
    };
    insert();
    walpost.wait_for_log(PATIENCE, AWAY);
    insert();
    let collector = Collector::on(port);
    spans(&collector, 2);
    walpost.wait_for_log(PATIENCE, "the collector takes spans again");
    let dropped = || walpost.metric("walpost_trace_spans_dropped_total");
    assert!(dropped().abs() < 1e-9, "none was lost");
    collector.answer(400);
    insert();
    wait_until(PATIENCE, "what is refused is counted", || (dropped() - 1.0).abs() < 1e-9);
    assert_eq!(warnings(&walpost.log()), 2, "one for each outage: {}", walpost.log());
    // a stop sends what is left
    collector.answer(200);
    insert();
    stop(&walpost);
    assert_eq!(delivered(&collector.spans()), 3);
}

#[test]
fn an_endpoint_that_cannot_be_used_is_a_fault() {
    let outbox = Outbox::shared(Version::NEWEST);
    for (endpoint, what) in [
        (
            "https://localhost:4318",
            "is https, and spans are sent over plain http only; let a collector beside walpost speak TLS",
        ),
        ("localhost:4318", "does not begin with http://; for example http://localhost:4318"),
        ("http://localhost", "names no port; collectors take OTLP over HTTP at 4318"),
    ] {
        let Ended { code, output } = outbox.command(&["run"], &[(ENDPOINT, endpoint)]);
        assert_eq!(code, Some(2), "{output}");
        let fault = format!("trace.otlp_endpoint (environment variable {ENDPOINT}): {what}");
        assert!(output.contains(&fault), "{output}");
    }
}
