//! A service of one's own that tails the outbox.

use walpost::{
    config,
    encode::Record,
    event::Position,
    lsn::Lsn,
    pipeline::Wish,
    sink::{Queued, Sink, SinkError},
    tailer,
};

/// Prints every event, and is done with it as soon as it is printed.
struct Printer {
    durable: Lsn,
}

impl Sink for Printer {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), SinkError> {
        self.durable = confirmed; // what came behind it will come again
        Ok(())
    }
    fn enqueue(&mut self, position: Position, _: i64, record: &Record<'_>) -> Result<Queued, SinkError> {
        let value = String::from_utf8_lossy(record.value.unwrap_or_default());
        println!("{position} {} {} {value}", record.topic, String::from_utf8_lossy(record.event_id));
        Ok(Queued::Accepted) // `Full` would hold the event back until `ready` returns
    }
    fn seal(&mut self, end: Lsn) {
        self.durable = end; // the transaction is complete, and all of it is printed
    }
    fn durable(&self) -> Lsn {
        self.durable // never more than what may be forgotten: the slot is moved up to here
    }
    fn tick(&mut self, _: i64) -> Result<(), SinkError> {
        Ok(()) // here a sink that delivers in the background learns what has arrived
    }
    async fn ready(&self) {}
    fn in_flight(&self) -> (u64, u64) {
        (0, 0)
    }
    fn oldest_commit_us(&self) -> i64 {
        0
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = config::load(None, &[])?; // WALPOST_POSTGRES_URL and so on
    let (stop, wish) = tokio::sync::watch::channel(Wish::Run);
    tokio::spawn(async move { tokio::signal::ctrl_c().await.map(|()| stop.send_replace(Wish::Drain)) });
    tailer::tail(&config, &mut Printer { durable: Lsn::ZERO }, wish).await?;
    Ok(())
}
