//! In steady state parser and tracker allocate nothing, and a transaction's events cost one text for its position.

#[path = "bench/steady.rs"]
mod steady;

use allocation_counter::measure;
use steady::{Flight, Stages, Transaction};
use walpost::{
    encode::{Headers, Record},
    event::Position,
    lsn::Lsn,
    sink::{Queued, Sink, SinkError},
    trace::Traced,
};

#[test]
fn the_parser_allocates_nothing() {
    let transaction = Transaction::new();
    assert_eq!(measure(|| transaction.parse()).count_total, 0);
}

#[test]
fn the_tracker_allocates_nothing_once_it_has_grown() {
    let mut flight = Flight::new();
    flight.round();
    assert_eq!(measure(|| flight.round()).count_total, 0);
}

#[test]
fn decode_route_and_encode_allocate_for_a_transaction_and_never_for_an_event() {
    let transaction = Transaction::new();
    let (rows, mut stages) = (transaction.rows(), Stages::new());
    stages.encode(&rows);
    let allocated = measure(|| stages.encode(&rows)).count_total;
    assert!(allocated <= 2, "{allocated} allocations for {} events", rows.len());
}

/// Takes everything, and has it at once.
#[derive(Debug, Default)]
struct Abyss {
    events: u64,
    sealed: Lsn,
}

impl Sink for Abyss {
    fn recover(&mut self, _: Lsn) -> Result<(), SinkError> {
        Ok(())
    }

    fn enqueue(&mut self, _: Position, _: i64, _: &Record<'_>) -> Result<Queued, SinkError> {
        self.events += 1;
        Ok(Queued::Accepted)
    }

    fn seal(&mut self, end: Lsn) {
        self.sealed = end;
    }

    fn durable(&self) -> Lsn {
        self.sealed
    }

    fn tick(&mut self, _: i64) -> Result<(), SinkError> {
        Ok(())
    }

    async fn ready(&self) {}

    fn in_flight(&self) -> (u64, u64) {
        (0, 0)
    }

    fn oldest_commit_us(&self) -> i64 {
        0
    }
}

#[test]
fn spans_that_nobody_wants_allocate_nothing() {
    let headers = Headers::default();
    let record = Record {
        topic: "t",
        key: None,
        value: Some(b"v"),
        headers: &headers,
        timestamp_ms: 1,
        event_id: b"1",
        dead: None,
    };
    let mut abyss = Abyss::default();
    let mut traced = Traced::new(&mut abyss, None);
    let allocated = measure(|| {
        for end in 1..=1_000 {
            let _ = traced.enqueue(Position::default(), 1, &record);
            traced.seal(Lsn(end));
            let _ = traced.tick(0);
        }
    });
    assert_eq!(allocated.count_total, 0);
    assert_eq!((abyss.events, abyss.sealed), (1_000, Lsn(1_000)));
}
