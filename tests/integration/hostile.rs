//! Servers that are none: they may say anything, and cost nothing but an error.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use crate::{
    outbox::{PATIENCE, stays},
    services::{kafka::Kafka, wait_until, walpost::Walpost},
};

/// What walpost may take when all it hears is noise, MB.
const MEMORY_MB: f64 = 60.0;

/// Something that answers every connection with this, for as long as it is taken; returns its port.
fn hostile(answer: impl Fn(&mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let answer = std::sync::Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = std::sync::Arc::clone(&answer);
            thread::spawn(move || {
                let mut stream = stream;
                // the request is of no interest
                let _ = stream.read(&mut [0; 4096]);
                let _ = answer(&mut stream);
            });
        }
    });
    port
}

fn noise(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut chunk = [0; 4096];
    fastrand::fill(&mut chunk);
    stream.write_all(&chunk)
}

/// A frame of this kind which says that two gigabytes follow, and noise.
fn absurd_length(kind: u8) -> impl Fn(&mut TcpStream) -> std::io::Result<()> {
    move |stream| {
        stream.write_all(&[&[kind][..], &i32::MAX.to_be_bytes()].concat())?;
        (0..2000).try_for_each(|_| noise(stream))
    }
}

/// Legal frames that never lead anywhere.
fn endless(frame: &'static [u8]) -> impl Fn(&mut TcpStream) -> std::io::Result<()> {
    move |stream| loop {
        stream.write_all(&frame.repeat(100))?;
        thread::sleep(Duration::from_millis(1));
    }
}

fn claim_survives(walpost: &Walpost, what: &str) {
    wait_until(PATIENCE, &format!("{what}: not ready"), || walpost.get("/readyz").status == 503);
    stays(Duration::from_secs(4), &format!("{what}: it lives"), || walpost.get("/livez").status == 200);
    assert!(walpost.peak_mb() < MEMORY_MB, "{what}: {} MB", walpost.peak_mb());
    let log = walpost.log();
    assert!(!log.contains("panicked"), "{what}:\n{log}");
    assert!(log.lines().count() < 60, "{what} fills the log:\n{log}");
}

#[test]
fn what_is_no_postgres_costs_neither_life_nor_memory() {
    let servers = [
        ("noise", hostile(|stream| (0..100).try_for_each(|_| noise(stream)))),
        ("an absurd authentication request", hostile(absurd_length(b'R'))),
        ("an absurd error", hostile(absurd_length(b'E'))),
        ("an absurd notice", hostile(absurd_length(b'N'))),
        ("endless notices", hostile(endless(b"N\0\0\0\x0cMhello\0\0"))),
        ("endless parameters", hostile(endless(b"S\0\0\0\x08a\0b\0"))),
        ("negative length", hostile(|stream| stream.write_all(b"R\xff\xff\xff\xff\0\0\0\0"))),
        ("silence", hostile(|stream| stream.read_exact(&mut [0; 10_000]))),
    ];
    thread::scope(|scope| {
        for (what, port) in &servers {
            scope.spawn(move || {
                let url = format!("postgres://relay@127.0.0.1:{port}/app?sslmode=disable");
                let brokers = Kafka::shared().brokers();
                let env = [("WALPOST_POSTGRES_URL", url.as_str()), ("WALPOST_KAFKA_BROKERS", &brokers)];
                claim_survives(&Walpost::start(&env), what);
            });
        }
    });
}
