//! The shop: writers that commit an order and its events in one transaction, and sometimes think better of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{sync::mpsc::UnboundedSender, task::JoinSet, time::Instant};
use tokio_postgres::{Client, Statement};

use super::{DemoError, book::Note, cluster::Cluster, judge::Written};

/// How many write at the same time, each on a connection of its own.
pub const WRITERS: usize = 8;
/// How many customers they write for; the customer is the events' key.
pub const CUSTOMERS: u8 = 24;
/// The types of event.
pub const EVENT_TYPES: [&str; 3] = ["order.placed", "stock.reserved", "order.cancelled"];
/// One in so many transactions is rolled back.
pub const ROLLED_BACK: u8 = 10;
/// The longest rest between two orders of a writer.
const REST: Duration = Duration::from_millis(30);

/// The shop's own tables and role, beside what `walpost init` and sql/roles.sql made.
const TABLES: &str = "
CREATE TABLE customers (name text PRIMARY KEY, events bigint NOT NULL DEFAULT 0);
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents integer NOT NULL);
INSERT INTO customers SELECT 'customer-' || to_char(n, 'FM00') FROM generate_series(1, 24) n;
CREATE ROLE shop LOGIN;
GRANT walpost_app TO shop;
GRANT SELECT, UPDATE ON customers TO shop;
GRANT SELECT, INSERT ON orders TO shop;
";

/// Locks the customer until the transaction ends: so the numbers of a customer's events are in commit order.
const TAKE_NUMBERS: &str = "UPDATE customers SET events = events + $2 WHERE name = $1 RETURNING events";
const INSERT_ORDER: &str = "INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING id";
const INSERT_EVENT: &str =
    "INSERT INTO outbox (id, event_type, key, payload) VALUES ($1::text::uuid, $2, $3, $4::text::json)";

/// The writers at work; dropping this stops them where they are.
pub struct Shop {
    writers: JoinSet<Result<(), tokio_postgres::Error>>,
    closing: Arc<AtomicBool>,
}

impl Shop {
    /// Creates tables and role.
    pub async fn furnish(superuser: &Client) -> Result<(), DemoError> {
        superuser.batch_execute(TABLES).await.map_err(DemoError::sql("create the shop's tables"))
    }

    /// Opens: the writers begin. An event of a type is for topic `<prefix>.<type>`.
    pub async fn open(cluster: &Cluster, notes: &UnboundedSender<Note>, prefix: &str) -> Result<Self, DemoError> {
        let closing = Arc::new(AtomicBool::new(false));
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let client = cluster.connect("shop").await?;
            let failed = || DemoError::sql("prepare the shop's statements");
            let writer = Writer {
                take_numbers: client.prepare(TAKE_NUMBERS).await.map_err(failed())?,
                insert_order: client.prepare(INSERT_ORDER).await.map_err(failed())?,
                insert_event: client.prepare(INSERT_EVENT).await.map_err(failed())?,
                client,
                notes: notes.clone(),
                prefix: prefix.to_owned(),
            };
            writers.spawn(writer.work(Arc::clone(&closing)));
        }
        Ok(Self { writers, closing })
    }

    /// Closes: each writer ends its transaction. Fails when one had failed before.
    pub async fn close(mut self) -> Result<(), DemoError> {
        self.closing.store(true, Relaxed);
        while let Some(ended) = self.writers.join_next().await {
            ended.map_err(|_| DemoError::Gone("writer"))?.map_err(DemoError::sql("write an order"))?;
        }
        Ok(())
    }
}

struct Writer {
    client: Client,
    take_numbers: Statement,
    insert_order: Statement,
    insert_event: Statement,
    notes: UnboundedSender<Note>,
    prefix: String,
}

impl Writer {
    async fn work(mut self, closing: Arc<AtomicBool>) -> Result<(), tokio_postgres::Error> {
        while !closing.load(Relaxed) {
            let note = self.order().await?;
            // the book is kept longer than the shop is open
            let _ = self.notes.send(note);
            tokio::time::sleep(REST.mul_f64(fastrand::f64())).await;
        }
        Ok(())
    }

    /// One transaction: an order and its events.
    async fn order(&mut self) -> Result<Note, tokio_postgres::Error> {
        let customer = format!("customer-{:02}", fastrand::u8(1..=CUSTOMERS));
        let types = match fastrand::u8(..10) {
            0 => &EVENT_TYPES[2..],
            1..4 => &EVENT_TYPES[..2],
            _ => &EVENT_TYPES[..1],
        };
        let cents = fastrand::i32(500..50_000);
        let transaction = self.client.transaction().await?;
        let count = i64::try_from(types.len()).unwrap_or(0);
        let last: i64 = transaction.query_one(&self.take_numbers, &[&customer, &count]).await?.get(0);
        let order: i64 = transaction.query_one(&self.insert_order, &[&customer, &cents]).await?.get(0);
        let mut events = Vec::new();
        for (number, event_type) in (last - count + 1..).zip(types) {
            let id = uuid(fastrand::u128(..));
            let payload =
                format!("{{\"order\":{order},\"customer\":\"{customer}\",\"cents\":{cents},\"number\":{number}}}");
            transaction.execute(&self.insert_event, &[&id, event_type, &customer, &payload]).await?;
            let (topic, key, committing) = (format!("{}.{event_type}", self.prefix), customer.clone(), Instant::now());
            events.push(Written { id, topic, key, number, payload, committing });
        }
        if fastrand::u8(..ROLLED_BACK) == 0 {
            transaction.rollback().await?;
            return Ok(Note::RolledBack(events.len()));
        }
        let committing = Instant::now();
        for event in &mut events {
            event.committing = committing;
        }
        transaction.commit().await?;
        Ok(Note::Committed(events))
    }
}

/// Random bits as a version 4 UUID.
pub fn uuid(random: u128) -> String {
    let bits = random & !(0xF << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::uuid;

    #[test]
    fn an_id_is_a_version_4_uuid() {
        assert_eq!(uuid(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(uuid(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
