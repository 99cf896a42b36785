//! The order desk of the lesson: takes one order after the other and dies, by SIGKILL, between the COMMIT of each tenth and
//! whatever comes after it. A process of its own.

use std::time::Duration;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_postgres::Client;

use super::{DemoError, broker::client_config, cluster::connect};

/// How many orders there are.
pub const ORDERS: i32 = 100;
/// How long Kafka may take to acknowledge.
const LIMIT: Duration = Duration::from_secs(10);

/// How the desk tells of its orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Desk {
    /// Commits, then sends.
    DualWrite,
    /// Writes the event in the order's own transaction.
    Outbox,
}

impl Desk {
    /// The name on its command line; also names its orders in the database.
    pub fn name(self) -> &'static str {
        match self {
            Self::DualWrite => "dual-write",
            Self::Outbox => "outbox",
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::DualWrite, Self::Outbox].into_iter().find(|desk| desk.name() == name)
    }
}

/// Works from order `first` on. `told` is the topic of a dual write, or the type of an outbox event.
pub async fn work(desk: Desk, conninfo: &str, brokers: &str, told: &str, first: i32) -> Result<(), DemoError> {
    let mut client = connect(conninfo).await.map_err(DemoError::sql("connect to the private Postgres"))?;
    let producer: FutureProducer = client_config(brokers)
        .set("enable.idempotence", "true")
        .create()
        .map_err(DemoError::kafka("start a producer"))?;
    for number in first..=ORDERS {
        match desk {
            Desk::DualWrite => {
                insert(&client, desk, number).await.map_err(DemoError::sql("commit an order"))?;
                die_at_each_tenth(number);
                let (key, payload) = (number.to_string(), payload(number));
                let record = FutureRecord::to(told).key(&key).payload(&payload);
                producer.send(record, LIMIT).await.map_err(|(error, _)| DemoError::kafka("send an event")(error))?;
            }
            Desk::Outbox => {
                order_with_event(&mut client, number, told).await.map_err(DemoError::sql("commit an order"))?;
                die_at_each_tenth(number);
            }
        }
    }
    Ok(())
}

async fn order_with_event(client: &mut Client, number: i32, event_type: &str) -> Result<(), tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    transaction
        .execute("INSERT INTO desk_orders (desk, number) VALUES ($1, $2)", &[&Desk::Outbox.name(), &number])
        .await?;
    let (key, payload) = (number.to_string(), payload(number));
    transaction.execute("SELECT outbox_emit($1, $2, $3::text)", &[&event_type, &key, &payload]).await?;
    transaction.commit().await
}

async fn insert(client: &Client, desk: Desk, number: i32) -> Result<u64, tokio_postgres::Error> {
    client.execute("INSERT INTO desk_orders (desk, number) VALUES ($1, $2)", &[&desk.name(), &number]).await
}

fn payload(number: i32) -> String {
    format!(r#"{{"order": {number}}}"#)
}

fn die_at_each_tenth(number: i32) {
    if number % 10 == 3 {
        let _ = kill(Pid::this(), Signal::SIGKILL);
    }
}
