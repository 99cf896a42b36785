//! In steady state parser and tracker allocate nothing, and a transaction's events cost one text for its position.

#[path = "bench/steady.rs"]
mod steady;

use allocation_counter::measure;
use steady::{Flight, Stages, Transaction};

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
