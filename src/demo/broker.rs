//! [`Broker`]: the Kafka of the demo: librdkafka's mock in this process, or a real one that was named.

use std::time::Duration;

use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    mocking::MockCluster,
    producer::DefaultProducerContext,
};

use super::DemoError;

/// Partitions of each topic.
pub const PARTITIONS: i32 = 4;
/// How long one answer to an admin request may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Where records go, with the topics of this demo in it.
pub struct Broker {
    kind: Kind,
    /// The bootstrap servers.
    pub brokers: String,
    prefix: String,
    topics: Vec<String>,
}

enum Kind {
    /// Lives as long as this value.
    Mock {
        _cluster: MockCluster<'static, DefaultProducerContext>,
    },
    Real(AdminClient<DefaultClientContext>),
}

impl Broker {
    /// Starts the mock, or connects to `brokers`, and creates a topic for each of `names`.
    pub async fn start(brokers: Option<&str>, names: &[&str]) -> Result<Self, DemoError> {
        let Some(brokers) = brokers else { return Self::mock(names) };
        let failed = || DemoError::kafka(format!("create topics at {brokers}"));
        let admin: AdminClient<_> = client_config(brokers).create().map_err(failed())?;
        let prefix = format!("walpost-demo-{:06x}", fastrand::u32(..1 << 24));
        let topics: Vec<String> = names.iter().map(|name| format!("{prefix}.{name}")).collect();
        let wanted: Vec<NewTopic<'_>> =
            topics.iter().map(|topic| NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(-1))).collect();
        // made first, so that a failure half-way leaves nothing behind
        let broker = Self { kind: Kind::Real(admin), brokers: brokers.to_owned(), prefix, topics: topics.clone() };
        let Kind::Real(admin) = &broker.kind else { unreachable!("set above") };
        let results = admin.create_topics(&wanted, &options()).await.map_err(failed())?;
        match results.into_iter().find_map(Result::err) {
            None => Ok(broker),
            Some((topic, code)) => {
                broker.close().await;
                Err(DemoError::Topic { topic, code })
            }
        }
    }

    fn mock(names: &[&str]) -> Result<Self, DemoError> {
        let failed = || DemoError::kafka("start the in-process broker");
        let cluster = MockCluster::new(1).map_err(failed())?;
        let prefix = "shop".to_owned();
        let topics: Vec<String> = names.iter().map(|name| format!("{prefix}.{name}")).collect();
        for topic in &topics {
            cluster.create_topic(topic, PARTITIONS, 1).map_err(failed())?;
        }
        Ok(Self { brokers: cluster.bootstrap_servers(), kind: Kind::Mock { _cluster: cluster }, prefix, topics })
    }

    /// What stands before the dot in each topic's name.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The topic of this name.
    pub fn topic(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// What it is, for people.
    pub fn describe(&self) -> String {
        match self.kind {
            Kind::Mock { .. } => "librdkafka's mock broker in this process".to_owned(),
            Kind::Real(_) => format!("{}, topics {}.*", self.brokers, self.prefix),
        }
    }

    /// A consumer's longest wait for records (ms). The mock always waits that long when it has none; a real broker answers
    /// as soon as it has one.
    pub fn fetch_wait_ms(&self) -> u32 {
        match self.kind {
            Kind::Mock { .. } => 2,
            Kind::Real(_) => 100,
        }
    }

    /// Deletes the topics of a real one.
    pub async fn close(self) {
        if let Kind::Real(admin) = &self.kind {
            let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
            let deleted = admin.delete_topics(&topics, &options()).await;
            let refused = deleted.map_or(true, |results| results.iter().any(Result::is_err));
            if refused {
                eprintln!("walpost: could not delete all topics {}.*: delete them yourself", self.prefix);
            }
        }
    }
}

/// What every client of the demo needs.
pub fn client_config(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("log_level", "0").set("enable.metrics.push", "false");
    config.set("reconnect.backoff.ms", "20");
    config
}

fn options() -> AdminOptions {
    AdminOptions::new().operation_timeout(Some(ANSWER_LIMIT)).request_timeout(Some(ANSWER_LIMIT))
}
