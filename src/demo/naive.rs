//! The naive shop: commits an order, then sends its event. A process of its own, so that it can be killed in between.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use super::{
    DemoError,
    audience::Reader,
    broker::{Broker, client_config},
    cluster::{Cluster, connect},
    count,
    relay::Recipe,
    shop::{WRITERS, uuid},
};

/// How often it is killed.
pub const KILLS: usize = 3;
/// Orders that it commits before it is killed, at least.
const ORDERS: usize = 120;
/// How long it may take to commit them.
const LIMIT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

const TABLE: &str = "CREATE TABLE naive_orders (id uuid PRIMARY KEY); GRANT INSERT ON naive_orders TO shop;";

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Orders that are in the database.
    pub orders: usize,
    /// Those of them whose event is not in Kafka.
    pub lost: usize,
}

/// Runs and kills the naive shop, and counts what it lost.
pub async fn observe(
    (cluster, superuser): (&Cluster, &Client),
    broker: &Broker,
    topic: &str,
    recipe: &Recipe,
) -> Result<Outcome, DemoError> {
    let failed = || DemoError::sql("look at the naive shop's orders");
    superuser.batch_execute(TABLE).await.map_err(failed())?;
    let conninfo = format!("{} application_name=naive-shop", cluster.conninfo("shop"));
    for _ in 0..KILLS {
        let committed = count(superuser, "naive_orders").await?;
        let enough = committed + ORDERS + fastrand::usize(0..ORDERS / 4);
        let arguments = ["demo", "--brokers", &broker.brokers, "--naive-shop", &conninfo, topic];
        let mut shop = recipe.start(&arguments)?;
        let began = Instant::now();
        while count(superuser, "naive_orders").await? < enough {
            shop.must_run()?;
            if began.elapsed() > LIMIT {
                return Err(DemoError::InVain { what: "the naive shop had its orders", log: String::new() });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        shop.kill9().await?;
    }
    // a COMMIT that was under way when its client died may still succeed
    while count(superuser, "pg_stat_activity WHERE application_name = 'naive-shop'").await? > 0 {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let rows = superuser.query("SELECT id::text FROM naive_orders", &[]).await.map_err(failed())?;
    let mut reader = Reader::new(broker, &[topic.to_owned()])?;
    let sent = tokio::task::spawn_blocking(move || {
        let mut sent = HashSet::new();
        reader.read_to_end(|arrival| sent.extend([arrival.key])).map(|()| sent)
    });
    let sent = sent.await.map_err(|_| DemoError::Gone("consumer"))??;
    let lost = rows.iter().filter(|row| !sent.contains(row.get::<_, &str>(0))).count();
    Ok(Outcome { orders: rows.len(), lost })
}

/// The shop itself: writes until it is killed.
pub async fn shop(conninfo: &str, brokers: &str, topic: &str) -> Result<(), DemoError> {
    let producer: FutureProducer = client_config(brokers)
        .set("enable.idempotence", "true")
        .create()
        .map_err(DemoError::kafka("start a producer"))?;
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let client = connect(conninfo).await.map_err(DemoError::sql("connect to the private Postgres"))?;
        writers.spawn(write(client, producer.clone(), topic.to_owned()));
    }
    writers.join_next().await.unwrap_or(Ok(Ok(()))).map_err(|_| DemoError::Gone("writer"))?
}

/// As careful as this can be done: the next order waits until Kafka has acknowledged the last one's event.
async fn write(client: Client, producer: FutureProducer, topic: String) -> Result<(), DemoError> {
    loop {
        let id = uuid(fastrand::u128(..));
        let insert = client.execute("INSERT INTO naive_orders VALUES ($1::text::uuid)", &[&id]).await;
        insert.map_err(DemoError::sql("commit an order"))?;
        // whoever is killed here has an order that nobody hears of
        let record = FutureRecord::to(&topic).key(&id).payload("{}");
        producer.send(record, LIMIT).await.map_err(|(error, _)| DemoError::kafka("send an event")(error))?;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
