//! A shop that writes events with its orders, and a shipping service that acts once on each: plain SQL by tokio-postgres.
//!
//! ```text
//! DATABASE_URL=postgres://shop@localhost/shop cargo run --example client write
//! DATABASE_URL=postgres://shipping@localhost/shop cargo run --example client consume 0199c0de-… …
//! ```

use std::error::Error;

use tokio_postgres::{Client, NoTls};

/// Order and event are committed together, or neither is.
async fn place_order(client: &mut Client, order: i64, payload: &str) -> Result<String, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO orders (id) VALUES ($1)", &[&order]).await?;
    let event = "SELECT outbox_emit('order.placed', $1, $2)::text";
    let row = transaction.query_one(event, &[&order.to_string(), &payload]).await?;
    transaction.commit().await?;
    Ok(row.get(0))
}

/// The payload as `jsonb`, and headers of its own. With tokio-postgres' feature `with-serde_json-1` the parameters may be
/// a `serde_json::Value`; without it they are text.
async fn place_traced_order(client: &mut Client, order: i64, traceparent: &str) -> Result<String, Box<dyn Error>> {
    let payload = serde_json::json!({ "order": order, "items": ["tea", "cup"] }).to_string();
    let headers = serde_json::json!({ "traceparent": traceparent }).to_string();
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO orders (id) VALUES ($1)", &[&order]).await?;
    let event = "SELECT outbox_emit('order.placed', $1, $2::text::jsonb, $3::text::jsonb)::text";
    let row = transaction.query_one(event, &[&order.to_string(), &payload, &headers]).await?;
    transaction.commit().await?;
    Ok(row.get(0))
}

/// Without a payload: a record without a value, which a compacted topic takes for a deletion.
async fn forget_order(client: &mut Client, order: i64) -> Result<String, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    transaction.execute("DELETE FROM orders WHERE id = $1", &[&order]).await?;
    let event = "SELECT outbox_emit('order.forgotten', $1, NULL)::text";
    let row = transaction.query_one(event, &[&order.to_string()]).await?;
    transaction.commit().await?;
    Ok(row.get(0))
}

/// What is not committed has not happened: the order is gone, and its event never arrives.
async fn refuse_order(client: &mut Client, order: i64) -> Result<(), tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO orders (id) VALUES ($1)", &[&order]).await?;
    transaction.execute("SELECT outbox_emit('order.placed', $1, '{}')", &[&order.to_string()]).await?;
    transaction.rollback().await
}

/// The mark and the shipment are committed together, or neither is. False: the order was shipped before.
async fn ship_once(client: &mut Client, event_id: &str) -> Result<bool, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    let claim = "SELECT inbox_claim('shipping', $1::text::uuid)";
    let is_first: bool = transaction.query_one(claim, &[&event_id]).await?.get(0);
    if is_first {
        let shipment = "INSERT INTO shipments (event_id) VALUES ($1::text::uuid)";
        transaction.execute(shipment, &[&event_id]).await?;
    }
    transaction.commit().await?;
    Ok(is_first)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut client, connection) = tokio_postgres::connect(&std::env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection);
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("write") => {
            println!("{}", place_order(&mut client, 1, r#"{"order": 1,  "drink": "☕"}"#).await?);
            let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
            println!("{}", place_traced_order(&mut client, 2, traceparent).await?);
            refuse_order(&mut client, 3).await?;
            println!("{}", forget_order(&mut client, 1).await?);
        }
        Some("consume") => {
            for event_id in arguments {
                let is_first = ship_once(&mut client, &event_id).await?;
                println!("{event_id} {}", if is_first { "shipped" } else { "repeated" });
            }
        }
        _ => return Err("usage: client write | client consume EVENT_ID...".into()),
    }
    Ok(())
}
