//! A collector of traces: takes OTLP over HTTP and keeps every span, decoded by the types of its definition.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{ResourceSpans, Span},
};
use prost::Message;

/// What it has seen.
#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    /// What it answers.
    status: AtomicU16,
    resources: Mutex<Vec<ResourceSpans>>,
    /// What it could not make sense of.
    odd: Mutex<Vec<String>>,
}

/// A collector; its thread ends with the tests.
pub struct Collector {
    port: u16,
    seen: Arc<Seen>,
}

impl Collector {
    /// On a free port.
    pub fn start() -> Self {
        Self::on(0)
    }

    /// On this port; 0: on a free one.
    pub fn on(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
        let port = listener.local_addr().expect("it is bound").port();
        let seen = Arc::new(Seen { status: 200.into(), ..Seen::default() });
        let shared = Arc::clone(&seen);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                shared.connections.fetch_add(1, SeqCst);
                if let Err(error) = take(&stream, &shared) {
                    shared.odd.lock().expect("no panic while the lock is held").push(error.to_string());
                }
            }
        });
        Self { port, seen }
    }

    /// For the setting.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// From now on it answers with this status; what comes with another than 200 is not kept.
    pub fn answer(&self, status: u16) {
        self.seen.status.store(status, SeqCst);
    }

    /// How many connections were made to it.
    pub fn connections(&self) -> usize {
        self.seen.connections.load(SeqCst)
    }

    /// Every span so far, by resource.
    pub fn resources(&self) -> Vec<ResourceSpans> {
        let odd = self.seen.odd.lock().expect("no panic while the lock is held");
        assert_eq!(*odd, [] as [String; 0], "not everything was a request of OTLP");
        self.seen.resources.lock().expect("no panic while the lock is held").clone()
    }

    /// Every span so far.
    pub fn spans(&self) -> Vec<Span> {
        let scopes = self.resources().into_iter().flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }
}

fn take(stream: &TcpStream, seen: &Seen) -> io::Result<()> {
    let odd = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_ascii_lowercase());
    }
    let is_otlp = head.first().is_some_and(|first| first == "post /v1/traces http/1.1");
    if !is_otlp || !head.iter().any(|line| line == "content-type: application/x-protobuf") {
        return Err(odd(format!("{head:?}")));
    }
    let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.ok_or_else(|| odd(format!("no length: {head:?}")))?];
    reader.read_exact(&mut body)?;
    let request = ExportTraceServiceRequest::decode(&*body).map_err(|error| odd(error.to_string()))?;
    let status = seen.status.load(SeqCst);
    if status == 200 {
        seen.resources.lock().expect("no panic while the lock is held").extend(request.resource_spans);
    }
    // an empty body is the whole of an ExportTraceServiceResponse that refuses nothing
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n")
}

/// An attribute's text, or its number as text.
pub fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        other => panic!("{key} is {other:?}"),
    }
}
