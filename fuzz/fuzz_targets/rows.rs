//! A description of a table, and rows that may or may not fit it: to events, topics and headers.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use walpost::{
    config::{Config, load_from},
    decode::Decoder,
    encode::Headers,
    event::Position,
    lsn::Lsn,
    route::{Router, legal},
    source::pgoutput::{Message, parse},
};

static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let text = "postgres.url = 'postgres://u@h/d'\nroute.topic = 'o.{event_type}.{key}'";
    load_from(Some(("walpost.toml", text)), [], &[]).expect("a legal configuration")
});

fuzz_target!(|bytes: &[u8]| {
    // two bytes of length before each message
    let mut messages = Vec::new();
    let mut rest = bytes;
    while let Some((length, tail)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_be_bytes(*length)).min(tail.len());
        let (message, tail) = tail.split_at(length);
        messages.push(message);
        rest = tail;
    }
    let router = Router::new(&CONFIG.route).expect("a legal route");
    let mut bound = None;
    let mut headers = Headers::default();
    for message in messages {
        match parse(message) {
            Ok(Message::Relation(relation)) => {
                let decoder = Decoder::new(&relation, &CONFIG.outboxes[0]).ok();
                bound = decoder.and_then(|decoder| router.bind(&decoder, "t").ok().map(|routes| (decoder, routes)));
            }
            Ok(Message::Insert { row, .. }) => {
                let Some((decoder, routes)) = &mut bound else { continue };
                let position = Position { commit_lsn: Lsn(1), ordinal: 0 };
                if let Ok((event, cells)) = decoder.decode(row, position, 1) {
                    assert!(event.timestamp_ms >= 1);
                    if let Ok(topic) = routes.topic(event.event_type, &cells) {
                        assert!(legal(topic.as_bytes()).is_ok());
                    }
                    let _ = headers.fill(&event, &cells, &[]);
                } else {
                    let _ = decoder.rest(row);
                }
            }
            _ => {}
        }
    }
});
