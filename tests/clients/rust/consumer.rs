//! A shipping service that reads the events of a topic and ships once for each, however often it is killed, the group is
//! rebalanced or the topic is read again.
//!
//! The hard part is the order of three things: the claim and the shipment are one transaction of the database, and the offset
//! is stored only when that has committed. A crash in between delivers the event again, and the claim says so.
//!
//! ```text
//! DATABASE_URL=postgres://shipping@localhost/shop BROKERS=localhost:9092 TOPIC=orders GROUP=shipping \
//!     cargo run --example consumer
//! ```

use std::{env, error::Error};

use rdkafka::{
    ClientConfig, Message,
    consumer::{Consumer, StreamConsumer},
    message::{BorrowedMessage, Headers},
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_postgres::{Client, NoTls};

/// A group that stores no offset by itself; what is stored is committed to the broker from time to time and at the end.
fn subscribe(group: &str, topic: &str) -> Result<StreamConsumer, Box<dyn Error>> {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", env::var("BROKERS")?)
        .set("group.id", group)
        .set("enable.auto.offset.store", "false")
        .set("enable.auto.commit", "true")
        .set("auto.offset.reset", "earliest")
        .set("session.timeout.ms", env::var("SESSION_TIMEOUT_MS").unwrap_or_else(|_| "45000".to_owned()))
        .create()?;
    consumer.subscribe(&[topic])?;
    Ok(consumer)
}

/// The header by which an event is known, whatever its topic, partition and offset.
fn event_id<'a>(message: &'a BorrowedMessage<'_>) -> Option<&'a str> {
    let headers = message.headers()?;
    let id = headers.iter().find(|header| header.key == "id")?;
    std::str::from_utf8(id.value?).ok()
}

/// The claim and the shipment are committed together, or neither is. False: another delivery has shipped.
async fn ship_once(client: &mut Client, group: &str, event_id: &str) -> Result<bool, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    let claim = "SELECT inbox_claim($1, $2::text::uuid)";
    let is_first: bool = transaction.query_one(claim, &[&group, &event_id]).await?.get(0);
    if is_first {
        let shipment = "INSERT INTO shipments (event_id) VALUES ($1::text::uuid)";
        transaction.execute(shipment, &[&event_id]).await?;
    }
    transaction.commit().await?;
    Ok(is_first)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (group, topic) = (env::var("GROUP")?, env::var("TOPIC")?);
    let (mut client, connection) = tokio_postgres::connect(&env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection);
    let consumer = subscribe(&group, &topic)?;
    let mut terminate = signal(SignalKind::terminate())?;
    println!("consuming {topic} as {group}");
    loop {
        // the signal first, so that a busy topic cannot keep us; `recv` is cancel-safe
        let message = tokio::select! {
            biased;
            _ = terminate.recv() => return Ok(()),
            received = consumer.recv() => match received {
                Ok(message) => message,
                Err(error) => {
                    eprintln!("{error}; librdkafka goes on by itself");
                    continue;
                }
            },
        };
        let event_id = event_id(&message).ok_or("a record without the header id: not one of walpost's")?;
        let is_first = ship_once(&mut client, &group, event_id).await?;
        // Only now. It is refused where the partition went to another instance meanwhile; that one will find our claim.
        if let Err(error) = consumer.store_offset_from_message(&message) {
            eprintln!("{event_id}: {error}");
        }
        println!("{event_id} {}", if is_first { "shipped" } else { "repeated" });
    }
}
