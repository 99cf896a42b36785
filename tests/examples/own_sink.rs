//! A service of one's own that tails the outbox.

use std::error::Error;

use tokio::sync::watch;
use walpost::{config, encode::Record, event::Position, lsn::Lsn, pipeline::Wish, sink, tailer};

/// Prints every event, and is done with it as soon as it is printed.
struct Printer(Lsn);

impl sink::Sink for Printer {
    fn recover(&mut self, confirmed: Lsn) -> Result<(), sink::SinkError> {
        self.0 = confirmed; // what came behind it will come again
        Ok(())
    }
    fn enqueue(&mut self, position: Position, _: i64, record: &Record<'_>) -> Result<sink::Queued, sink::SinkError> {
        let value = String::from_utf8_lossy(record.value.unwrap_or_default());
        println!("{position} {} {} {value}", record.topic, String::from_utf8_lossy(record.event_id));
        Ok(sink::Queued::Accepted) // `Full` would hold the event back until `ready` returns
    }
    fn seal(&mut self, end: Lsn) {
        self.0 = end; // the transaction is complete, and all of it is printed
    }
    fn durable(&self) -> Lsn {
        self.0 // never more than what may be forgotten: the slot is moved up to here
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = config::load(None, &[])?; // WALPOST_POSTGRES_URL and so on
    let (stop, wish) = watch::channel(Wish::Run);
    tokio::spawn(async move { tokio::signal::ctrl_c().await.map(|()| stop.send_replace(Wish::Drain)) });
    tailer::tail(&config, &mut Printer(Lsn::ZERO), wish).await?;
    Ok(())
}
