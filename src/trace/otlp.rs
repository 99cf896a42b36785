//! Batches as OTLP spans, by the semantic conventions for
//! [messaging](https://opentelemetry.io/docs/specs/semconv/messaging/kafka/).

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
    trace::v1::{
        ResourceSpans, ScopeSpans, Span, SpanFlags, Status,
        span::{self, SpanKind},
        status::StatusCode,
    },
};

use super::{
    batch::{Batch, Destination, Failure},
    link::Link,
};

/// Of whom the spans speak.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub service: String,
    /// `None` where tables are polled: then there are no positions either.
    pub slot: Option<String>,
}

/// What is posted.
pub(super) fn request(identity: &Identity, batches: &[Batch]) -> ExportTraceServiceRequest {
    let version = env!("CARGO_PKG_VERSION");
    let resource = Resource {
        attributes: vec![text("service.name", identity.service.clone()), text("service.version", version)],
        ..Resource::default()
    };
    let scope = InstrumentationScope { name: "walpost".into(), version: version.into(), ..Default::default() };
    let spans = batches.iter().map(|batch| span(identity, batch)).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let spans = ResourceSpans { resource: Some(resource), scope_spans, ..ResourceSpans::default() };
    ExportTraceServiceRequest { resource_spans: vec![spans] }
}

fn span(identity: &Identity, batch: &Batch) -> Span {
    let operation = "send";
    let name = match &batch.destination {
        Destination::One(topic) => format!("{operation} {topic}"),
        Destination::Several => operation.to_owned(),
    };
    let attributes = attributes(identity, operation, batch);
    let status =
        batch.failure.as_ref().map(|failure| Status { message: failure.text.clone(), code: StatusCode::Error.into() });
    Span {
        trace_id: random::<16>().to_vec(),
        span_id: random::<8>().to_vec(),
        flags: SAMPLED,
        name,
        // the events bring the context that consumers go on with; so this is no producer's span
        kind: SpanKind::Client.into(),
        start_time_unix_nano: nanos(batch.began_us),
        end_time_unix_nano: nanos(batch.ended_us),
        attributes,
        events: events(batch),
        links: batch.links.iter().map(link).collect(),
        dropped_links_count: batch.links_left_out,
        status,
        ..Span::default()
    }
}

/// The flag of the trace context that says that the span is recorded.
const SAMPLED: u32 = 1;

fn attributes(identity: &Identity, operation: &str, batch: &Batch) -> Vec<KeyValue> {
    let mut attributes = vec![
        text("messaging.system", "kafka"),
        text("messaging.operation.name", operation),
        text("messaging.operation.type", "send"),
        number("messaging.batch.message_count", batch.events),
        number("walpost.bytes", batch.bytes),
    ];
    if let Destination::One(topic) = &batch.destination {
        attributes.push(text("messaging.destination.name", &**topic));
    }
    if let Some(slot) = &identity.slot {
        attributes.push(text("walpost.slot", slot.clone()));
        if batch.failure.is_none() {
            attributes.push(text("walpost.lsn", batch.end.to_string()));
        }
    }
    if batch.failed > 0 {
        attributes.push(number("walpost.failed_count", batch.failed));
    }
    if let Some(failure) = &batch.failure {
        attributes.push(text("error.type", failure.code.clone()));
    }
    attributes
}

fn events(batch: &Batch) -> Vec<span::Event> {
    let mut events = Vec::new();
    if let Some(Failure { at_us, code, text: message }) = &batch.retried {
        let attributes = vec![text("error.type", code.clone()), text("exception.message", message.clone())];
        events.push(event(*at_us, "walpost.sent_again", attributes));
    }
    if batch.held_us > 0 {
        let millis = u64::try_from(batch.held_us / 1_000).unwrap_or(0);
        events.push(event(batch.began_us + batch.held_us, "walpost.held", vec![number("walpost.held_ms", millis)]));
    }
    events
}

fn event(at_us: i64, name: &str, attributes: Vec<KeyValue>) -> span::Event {
    span::Event { time_unix_nano: nanos(at_us), name: name.to_owned(), attributes, ..span::Event::default() }
}

fn link(link: &Link) -> span::Link {
    // what is known of the span behind it: it came from another process
    let remote = SpanFlags::ContextHasIsRemoteMask as u32 | SpanFlags::ContextIsRemoteMask as u32;
    span::Link {
        trace_id: link.trace_id.to_vec(),
        span_id: link.span_id.to_vec(),
        flags: u32::from(link.flags) | remote,
        ..span::Link::default()
    }
}

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    pair(key, Value::StringValue(value.into()))
}

fn number(key: &str, value: u64) -> KeyValue {
    pair(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn pair(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn nanos(unix_us: i64) -> u64 {
    unix_us.max(0).unsigned_abs().saturating_mul(1_000)
}

/// Not all zero, which would be no id.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    while bytes == [0; N] {
        fastrand::fill(&mut bytes);
    }
    bytes
}
