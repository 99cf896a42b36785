//! The lesson: what a dual write loses and an outbox keeps, chapter by chapter. Each is a measurement, with real processes
//! and real SQL, that comes to numbers which are known beforehand.

use std::{
    collections::{HashMap, HashSet},
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use tokio::{sync::oneshot, task::JoinHandle};
use tokio_postgres::{Client, error::SqlState};

use super::{
    DemoError, LIMIT, POLL_INTERVAL,
    audience::Reader,
    broker::Broker,
    chapter::{Chapter, Expected, Row},
    cluster::Cluster,
    count,
    desk::{Desk, ORDERS},
    judge::{Arrival, Latency},
    relay::Recipe,
    report::{Screen, millis, say},
    stream, tail,
};

/// Topics of the lesson, which are also event types.
pub const TOPICS: [&str; 7] = [
    "lesson.dual-write",
    "lesson.outbox",
    "lesson.rollback",
    "lesson.killed",
    "lesson.inbox",
    "lesson.tailed",
    "lesson.polled",
];
/// The chapters' numbers, from 1, and what they are about.
pub const CHAPTERS: std::ops::RangeInclusive<u8> = 1..=7;
const TITLES: [&str; 7] = [
    "A dual write: COMMIT, then send. The process dies in between at each tenth order",
    "An outbox: order and event in one transaction, and the same deaths",
    "ROLLBACK leaves neither row nor event",
    "The tailer is killed amid a transaction and sends it again",
    "One event is delivered three times and acted on once: the inbox",
    "The application's role may write events and nothing else",
    "Reading the log and polling the table, side by side",
];
/// So few events may be in flight while the tailer is to be killed in the middle of a transaction.
const FEW: &str = "1";
/// How many of the events are in Kafka when it is killed.
const SEEN: usize = 20;
/// How many events each way is measured with, and the rest between two.
const MEASURED: usize = 100;
const REST: Duration = Duration::from_millis(20);
/// How often a kill may come too late.
const TRIES: u8 = 5;

const TABLES: &str = "
CREATE TABLE desk_orders (desk text, number integer, PRIMARY KEY (desk, number));
CREATE TABLE desk_actions (event_id uuid);
GRANT SELECT, INSERT ON desk_orders TO shop;
CREATE ROLE shipping LOGIN;
GRANT walpost_consumer TO shipping;
GRANT INSERT ON desk_actions TO shipping;
";

/// A consumer at work in a thread of its own.
type Reading = JoinHandle<Result<Vec<Arrival>, DemoError>>;

/// What it has read.
async fn read(reading: Reading) -> Result<Vec<Arrival>, DemoError> {
    reading.await.map_err(|_| DemoError::Gone("consumer"))?
}

/// Who takes part.
pub struct Lesson<'a> {
    /// Where it is printed.
    pub screen: Screen,
    /// The server.
    pub cluster: &'a Cluster,
    /// A superuser's link to it.
    pub superuser: &'a Client,
    /// Kafka.
    pub broker: &'a Broker,
    /// How a walpost is started.
    pub relay: &'a Recipe,
}

impl Lesson<'_> {
    /// Tells all chapters, or the one that was chosen.
    pub async fn tell(&self, chosen: Option<u8>) -> Result<Vec<Chapter>, DemoError> {
        self.superuser.batch_execute(TABLES).await.map_err(DemoError::sql("create the lesson's tables"))?;
        let mut told = Vec::new();
        for number in CHAPTERS.filter(|number| chosen.is_none_or(|chosen| chosen == *number)) {
            let title = TITLES[usize::from(number) - 1];
            self.screen.heading(&format!("{number}. {title}"));
            let rows = match number {
                1 => self.dual_write().await?,
                2 => self.outbox().await?,
                3 => self.rollback().await?,
                4 => self.killed().await?,
                5 => self.inbox().await?,
                6 => self.role().await?,
                _ => self.side_by_side().await?,
            };
            for row in &rows {
                self.screen.measured(row);
            }
            told.push(Chapter { number, title, rows });
        }
        Ok(told)
    }

    async fn dual_write(&self) -> Result<Vec<Row>, DemoError> {
        let topic = self.broker.topic(TOPICS[0]);
        let deaths = self.take_orders(Desk::DualWrite, &topic).await?;
        let events: HashSet<String> = self.arrivals(&topic).await?.into_iter().map(|arrival| arrival.key).collect();
        say("Ten orders that nobody will ever hear of, and no error anywhere.");
        Ok(vec![
            Row::new("orders in the database", self.orders(Desk::DualWrite).await?, Expected::Exactly(100)),
            Row::new("deaths after COMMIT", deaths, Expected::Exactly(10)),
            Row::new("events in Kafka", events.len(), Expected::Exactly(90)),
        ])
    }

    async fn outbox(&self) -> Result<Vec<Row>, DemoError> {
        let relay = stream(self.relay, self.superuser).await?;
        let deaths = self.take_orders(Desk::Outbox, TOPICS[1]).await?;
        self.until_confirmed().await?;
        relay.stop().await?;
        let arrived = self.arrivals(&self.broker.topic(TOPICS[1])).await?;
        let events: HashSet<&String> = arrived.iter().map(|arrival| &arrival.key).collect();
        Ok(vec![
            Row::new("orders in the database", self.orders(Desk::Outbox).await?, Expected::Exactly(100)),
            Row::new("deaths after COMMIT", deaths, Expected::Exactly(10)),
            Row::new("events in Kafka", events.len(), Expected::Exactly(100)),
        ])
    }

    async fn rollback(&self) -> Result<Vec<Row>, DemoError> {
        let relay = stream(self.relay, self.superuser).await?;
        let shop = self.cluster.connect("shop").await?;
        let order = |number: u8, end: &str| {
            format!(
                "BEGIN; INSERT INTO desk_orders VALUES ('rollback', {number});
                 SELECT outbox_emit('{}', '{number}', '{{}}'); {end}",
                TOPICS[2]
            )
        };
        for statements in [order(1, "ROLLBACK"), order(2, "COMMIT")] {
            shop.batch_execute(&statements).await.map_err(DemoError::sql("write an order"))?;
        }
        self.until_confirmed().await?;
        relay.stop().await?;
        let arrived = self.arrivals(&self.broker.topic(TOPICS[2])).await?;
        let of = |key: &str| arrived.iter().filter(|arrival| arrival.key == key).count();
        let rows = async |number: u8| {
            count(self.superuser, &format!("desk_orders WHERE desk = 'rollback' AND number = {number}")).await
        };
        Ok(vec![
            Row::new("rolled back: orders in the database", rows(1).await?, Expected::Exactly(0)),
            Row::new("rolled back: events in Kafka", of("1"), Expected::Exactly(0)),
            Row::new("committed: orders in the database", rows(2).await?, Expected::Exactly(1)),
            Row::new("committed: events in Kafka", of("2"), Expected::Exactly(1)),
        ])
    }

    async fn killed(&self) -> Result<Vec<Row>, DemoError> {
        let topic = self.broker.topic(TOPICS[3]);
        for attempt in 1..=TRIES {
            let key = format!("attempt-{attempt}");
            let slow = stream(&self.relay.with("WALPOST_LIMITS_IN_FLIGHT_EVENTS", FEW), self.superuser).await?;
            let of_attempt = key.clone();
            let seen = self.read_along(&[&topic], SEEN, move |arrival| arrival.key == of_attempt).await?;
            let insert = "SELECT count(outbox_emit($1, $2, '{}'::text)) FROM generate_series(1, $3::integer)";
            let written = self.superuser.query_one(insert, &[&TOPICS[3], &key, &ORDERS]).await;
            written.map_err(DemoError::sql("write events"))?;
            read(seen).await?;
            slow.kill9().await?;
            let relay = stream(self.relay, self.superuser).await?;
            self.until_confirmed().await?;
            relay.stop().await?;
            let arrived = self.arrivals(&topic).await?;
            let arrived: Vec<&Arrival> = arrived.iter().filter(|arrival| arrival.key == key).collect();
            let ids: HashSet<&String> = arrived.iter().map(|arrival| &arrival.id).collect();
            if arrived.len() > ids.len() || attempt == TRIES {
                return Ok(vec![
                    Row::new("records in Kafka", arrived.len(), Expected::AtLeast(101)),
                    Row::new("different events, by the header `id`", ids.len(), Expected::Exactly(100)),
                ]);
            }
        }
        Err(DemoError::Gone("last attempt"))
    }

    async fn inbox(&self) -> Result<Vec<Row>, DemoError> {
        let relay = stream(self.relay, self.superuser).await?;
        let shop = self.cluster.connect("shop").await?;
        let emit = "SELECT outbox_emit($1, 'parcel', '{}'::text)::text";
        let row = shop.query_one(emit, &[&TOPICS[4]]).await.map_err(DemoError::sql("write an event"))?;
        let id: String = row.get(0);
        self.until_confirmed().await?;
        relay.stop().await?;
        let arrived = self.arrivals(&self.broker.topic(TOPICS[4])).await?;
        let delivered = arrived.iter().filter(|arrival| arrival.id == id).count();
        // once, and then twice at the same moment
        let mut first = self.act(&id).await?;
        let (second, third) = tokio::join!(self.act(&id), self.act(&id));
        first += second? + third?;
        let actions = count(self.superuser, &format!("desk_actions WHERE event_id = '{id}'")).await?;
        Ok(vec![
            Row::new("records in Kafka", delivered, Expected::Exactly(1)),
            Row::new("deliveries to the consumer, of which first", first, Expected::Exactly(1)),
            Row::new("actions in the database", actions, Expected::Exactly(1)),
        ])
    }

    /// What a consumer does with a delivery: claim and action in one transaction. 1 when it was the first.
    async fn act(&self, id: &str) -> Result<usize, DemoError> {
        let failed = || DemoError::sql("act on an event");
        let mut consumer = self.cluster.connect("shipping").await?;
        let transaction = consumer.transaction().await.map_err(failed())?;
        let claim = transaction.query_one("SELECT inbox_claim('shipping', $1::text::uuid)", &[&id]).await;
        let first: bool = claim.map_err(failed())?.get(0);
        if first {
            let action = transaction.execute("INSERT INTO desk_actions VALUES ($1::text::uuid)", &[&id]).await;
            action.map_err(failed())?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(usize::from(first))
    }

    async fn role(&self) -> Result<Vec<Row>, DemoError> {
        let shop = self.cluster.connect("shop").await?;
        let mut refused = 0;
        let attempts = ["SELECT * FROM outbox", "UPDATE outbox SET key = 'x'", "DELETE FROM outbox", "TRUNCATE outbox"];
        for statement in attempts {
            match shop.batch_execute(statement).await {
                Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                    say(&format!("{statement}: {}", error.as_db_error().map_or("refused", |error| error.message())));
                    refused += 1;
                }
                Err(error) => return Err(DemoError::sql("try what is not allowed")(error)),
                Ok(()) => say(&format!("{statement}: allowed!")),
            }
        }
        let emit = format!("BEGIN; SELECT outbox_emit('{}', 'k', '{{}}'); ROLLBACK", TOPICS[4]);
        let allowed = shop.batch_execute(&emit).await.is_ok();
        Ok(vec![
            Row::new("attempts to read, change or delete, refused", refused, Expected::Exactly(attempts.len())),
            Row::new("events written by outbox_emit", usize::from(allowed), Expected::Exactly(1)),
        ])
    }

    async fn side_by_side(&self) -> Result<Vec<Row>, DemoError> {
        let (tailed, polled) = (self.broker.topic(TOPICS[5]), self.broker.topic(TOPICS[6]));
        let owner = self.relay.with("WALPOST_POSTGRES_URL", &self.cluster.conninfo("postgres"));
        let polling = owner.with("WALPOST_POSTGRES_SOURCE", "poll").with("WALPOST_OUTBOX_TABLE", "public.polled");
        polling.run(&["init"]).await?;
        let of_log = stream(self.relay, self.superuser).await?;
        let of_table = polling.start(&["run"])?;
        // the first contact with a topic is not what is to be measured
        let warm = self.read_along(&[&tailed, &polled], 2, |_| true).await?;
        self.write_both(0).await?;
        read(warm).await?;

        let reading = self.read_along(&[&tailed, &polled], 2 * MEASURED, |_| true).await?;
        let mut committing = HashMap::new();
        for number in 1..=MEASURED {
            committing.insert(number.to_string(), self.write_both(number).await?);
            tokio::time::sleep(REST).await;
        }
        let arrived = read(reading).await?;
        of_log.stop().await?;
        of_table.stop().await?;
        let mut rows = Vec::new();
        for (topic, way) in [(&tailed, "by the log"), (&polled, "by polling")] {
            let of_topic = arrived.iter().filter(|arrival| arrival.topic == *topic);
            let waits =
                of_topic.filter_map(|arrival| Some((&arrival.key, arrival.at - *committing.get(&arrival.key)?)));
            let waits: HashMap<&String, Duration> = waits.collect();
            let Latency { events, median, p99, .. } = Latency::of(waits.into_values().collect());
            say(&format!("{way}: median {}, p99 {}, from COMMIT to consumer", millis(median), millis(p99)));
            let median = usize::try_from(median.as_millis()).unwrap_or(usize::MAX);
            rows.push(Row::new(&format!("events {way}"), events, Expected::Exactly(MEASURED)));
            rows.push(Row::new(&format!("median {way}, ms"), median, Expected::Any));
        }
        Ok(rows)
    }

    /// Writes an event into either table; when the first COMMIT was sent.
    async fn write_both(&self, number: usize) -> Result<tokio::time::Instant, DemoError> {
        let (key, began) = (number.to_string(), tokio::time::Instant::now());
        for (table, event_type) in [("outbox", TOPICS[5]), ("polled", TOPICS[6])] {
            let insert = format!("INSERT INTO {table} (event_type, key, payload) VALUES ($1, $2, '{{}}')");
            let inserted = self.superuser.execute(&insert, &[&event_type, &key]).await;
            inserted.map_err(DemoError::sql("write an event"))?;
        }
        Ok(began)
    }

    /// Reads topics from where they end now; done when it has so many of the records that are wanted, or gave up.
    async fn read_along(
        &self,
        topics: &[&str],
        count: usize,
        wanted: impl Fn(&Arrival) -> bool + Send + 'static,
    ) -> Result<Reading, DemoError> {
        let topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let mut reader = Reader::new(self.broker, &topics)?;
        let (tell, reading) = oneshot::channel();
        let read = tokio::task::spawn_blocking(move || {
            reader.read_to_end(|_| ())?;
            // who asked may have given up
            let _ = tell.send(());
            let (began, mut arrived) = (Instant::now(), Vec::new());
            while arrived.len() < count && began.elapsed() < LIMIT {
                arrived.extend(reader.next().filter(&wanted));
            }
            Ok(arrived)
        });
        reading.await.map_err(|_| DemoError::Gone("consumer"))?;
        Ok(read)
    }

    /// Lets the desk take all orders, started again after each death; the number of deaths.
    async fn take_orders(&self, desk: Desk, told: &str) -> Result<usize, DemoError> {
        let (conninfo, began, mut deaths) = (self.cluster.conninfo("shop"), Instant::now(), 0);
        loop {
            let first = (self.orders(desk).await? + 1).to_string();
            let arguments =
                ["demo", "--brokers", &self.broker.brokers, "--order-desk", desk.name(), &conninfo, told, &first];
            let ended =
                self.relay.command(&arguments)?.status().await.map_err(DemoError::io("start the order desk"))?;
            match ended.signal() {
                Some(9) => deaths += 1,
                None if ended.success() => return Ok(deaths),
                _ => return Err(DemoError::Ended { program: "the order desk", log: tail(&self.relay.log()) }),
            }
            if began.elapsed() > LIMIT {
                return Err(DemoError::InVain { what: "all orders were taken", log: tail(&self.relay.log()) });
            }
        }
    }

    async fn orders(&self, desk: Desk) -> Result<usize, DemoError> {
        count(self.superuser, &format!("desk_orders WHERE desk = '{}'", desk.name())).await
    }

    /// All records of a topic.
    async fn arrivals(&self, topic: &str) -> Result<Vec<Arrival>, DemoError> {
        let mut reader = Reader::new(self.broker, &[topic.to_owned()])?;
        let reading = tokio::task::spawn_blocking(move || {
            let mut arrivals = Vec::new();
            reader.read_to_end(|arrival| arrivals.push(arrival)).map(|()| arrivals)
        });
        read(reading).await
    }

    /// Waits until all that is committed by now is delivered.
    async fn until_confirmed(&self) -> Result<(), DemoError> {
        let failed = || DemoError::sql("look at the slot");
        let end = self.superuser.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.map_err(failed())?;
        let passed =
            "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 'walpost'";
        let (end, began): (String, _) = (end.get(0), Instant::now());
        while !self.superuser.query_one(passed, &[&end]).await.map_err(failed())?.get::<_, bool>(0) {
            if began.elapsed() > LIMIT {
                let log = tail(&self.relay.log());
                return Err(DemoError::InVain { what: "all events were delivered", log });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}
