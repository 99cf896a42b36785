//! The hot path in steady state, stage by stage, without servers: what the bench times, and a test holds to be free of
//! allocations.

use std::hint::black_box;

use walpost::{
    ack::{AckTracker, Bounds, Load, Ticket},
    config::{ColumnsConfig, OnIllegalTopic, OptionalColumn, OutboxConfig, RouteConfig, TableName},
    decode::Decoder,
    encode::{Headers, Record},
    event::Position,
    lsn::Lsn,
    route::{Router, Routes},
    source::pgoutput::{self, Cell, Column, Message, Relation},
};

/// Events of a transaction.
pub const PER_TRANSACTION: u64 = 100;
/// Records between the tracker's two ends, and so of a [`Flight::round`].
pub const IN_FLIGHT: u64 = 5_000;
/// Delivery reports come partition by partition.
const PARTITIONS: usize = 9;
const COMMIT_US: i64 = 1_700_000_000_000_000;
const OID: u32 = 16_384;

/// Begin, rows and Commit of one transaction, as pgoutput sends them.
pub struct Transaction {
    messages: Vec<Vec<u8>>,
}

impl Transaction {
    /// Rows of a Debezium-like table with a payload of 300 bytes.
    pub fn new() -> Self {
        let mut messages = vec![[&b"B"[..], &0x16B_3748_u64.to_be_bytes(), &[0; 8], &[0; 4]].concat()];
        messages.extend((0..PER_TRANSACTION).map(insert));
        messages
            .push([&b"C"[..], &[0], &0x16B_3748_u64.to_be_bytes(), &0x16B_3778_u64.to_be_bytes(), &[0; 8]].concat());
        Self { messages }
    }

    /// Parses all messages and looks at every cell.
    pub fn parse(&self) {
        for bytes in &self.messages {
            let message = pgoutput::parse(black_box(bytes)).expect("a legal message");
            if let Message::Insert { row, .. } = message {
                let bytes: usize =
                    row.cells().map(|cell| if let Cell::Text(text) = cell { text.len() } else { 0 }).sum();
                black_box(bytes);
            }
        }
    }
}

fn insert(number: u64) -> Vec<u8> {
    let cells = [
        format!("7d444840-9dc0-11d1-b245-{number:012}"),
        format!("t{}", number % 3),
        format!("k{number}"),
        "Created".to_owned(),
        format!("{{\"seq\": {number}, \"pad\": \"{}\"}}", "x".repeat(275)),
        "2026-01-02 03:04:05.678901+00".to_owned(),
    ];
    let mut bytes = [&b"I"[..], &OID.to_be_bytes(), b"N"].concat();
    bytes.extend(u16::try_from(cells.len()).expect("a few").to_be_bytes());
    for cell in cells {
        bytes.push(b't');
        bytes.extend(u32::try_from(cell.len()).expect("short").to_be_bytes());
        bytes.extend(cell.as_bytes());
    }
    bytes
}

/// Decode, route and encode.
pub struct Stages {
    decoder: Decoder,
    routes: Routes,
    headers: Headers,
    commit_lsn: Lsn,
}

impl Stages {
    /// Bound to the table of [`Transaction`].
    pub fn new() -> Self {
        let columns = [
            ("id", 2950),
            ("aggregatetype", 25),
            ("aggregateid", 25),
            ("type", 25),
            ("payload", 3802),
            ("created_at", 1184),
        ];
        let columns = columns.map(|(name, type_oid)| Column { name: name.to_owned(), type_oid });
        let (schema, table) = ("public".to_owned(), "outbox".to_owned());
        let relation = Relation { oid: OID, schema: schema.clone(), table: table.clone(), columns: columns.to_vec() };
        let column = |name: &str, explicit| OptionalColumn { name: name.to_owned(), explicit };
        let outbox = OutboxConfig {
            table: TableName { schema, table },
            backfill: None,
            columns: ColumnsConfig {
                id: "id".to_owned(),
                event_type: "type".to_owned(),
                payload: "payload".to_owned(),
                key: column("aggregateid", true),
                headers: column("headers", false),
                timestamp: column("created_at", false),
            },
            header_columns: Vec::new(),
            poll: walpost::config::PollColumns::default(),
        };
        let topic = "shop.{aggregatetype}".to_owned();
        let route = RouteConfig { topic, on_illegal_topic: OnIllegalTopic::Halt, rules: Vec::new() };
        let decoder = Decoder::new(&relation, &outbox).expect("the columns are there");
        let routes = Router::new(&route).and_then(|router| router.bind(&decoder, "outbox")).expect("a legal route");
        Self { decoder, routes, headers: Headers::default(), commit_lsn: Lsn(0x16B_3748) }
    }

    /// Takes the rows of a transaction, already parsed by [`Transaction::rows`], to records.
    pub fn encode(&mut self, rows: &[pgoutput::Row<'_>]) {
        self.commit_lsn.0 += 100;
        for (row, ordinal) in rows.iter().zip(0..) {
            let position = Position { commit_lsn: self.commit_lsn, ordinal };
            let (event, cells) = self.decoder.decode(*row, position, COMMIT_US).expect("a legal row");
            let topic = self.routes.topic(event.event_type, &cells).expect("a legal topic");
            self.headers.fill(&event, &cells, &[]).expect("no headers of its own");
            let record = Record {
                topic,
                key: event.key,
                value: event.payload,
                headers: &self.headers,
                timestamp_ms: event.timestamp_ms,
                event_id: event.id,
                dead: None,
            };
            black_box(record.weight());
            black_box(&record);
        }
    }
}

impl Transaction {
    /// Its rows, parsed.
    pub fn rows(&self) -> Vec<pgoutput::Row<'_>> {
        let parsed = self.messages.iter().map(|bytes| pgoutput::parse(bytes).expect("a legal message"));
        let rows =
            parsed.filter_map(|message| if let Message::Insert { row, .. } = message { Some(row) } else { None });
        rows.collect()
    }
}

/// The tracker with a full load in flight.
pub struct Flight {
    tracker: AckTracker,
    tickets: Vec<Ticket>,
    end: Lsn,
}

impl Flight {
    /// Nothing in flight.
    pub fn new() -> Self {
        let mut tracker = AckTracker::new(Bounds { events: 20_000, bytes: 64 << 20 });
        tracker.open(Lsn(1));
        Self { tracker, tickets: Vec::new(), end: Lsn(1) }
    }

    /// Tracks and seals until the load is in flight, then completes it partition by partition.
    pub fn round(&mut self) {
        self.tickets.clear();
        for number in 1..=IN_FLIGHT {
            let load = Load { weight: 900, commit_us: COMMIT_US, ..Load::default() };
            self.tickets.push(self.tracker.track(load).expect("within the bounds"));
            if number % PER_TRANSACTION == 0 {
                self.end.0 += 1;
                self.tracker.seal(self.end);
            }
        }
        for partition in 0..PARTITIONS {
            for ticket in self.tickets.iter().skip(partition).step_by(PARTITIONS) {
                black_box(self.tracker.complete(*ticket));
            }
        }
        assert_eq!(self.tracker.watermark(), self.end);
    }
}
