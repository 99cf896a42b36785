//! temporary
use walpost::{app, config::*, conninfo::ConnInfo};
fn main() -> std::process::ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    let var = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let opt =
        |name: &str, default: &str| OptionalColumn { name: var(name, default), explicit: std::env::var(name).is_ok() };
    let config = Config {
        postgres: PostgresConfig {
            conninfo: ConnInfo::parse(&var("WALPOST_POSTGRES_URL", ""), None, None).unwrap(),
            slot: var("WALPOST_POSTGRES_SLOT", "walpost"),
            publication: var("WALPOST_POSTGRES_PUBLICATION", "walpost"),
            auto_create: true,
        },
        outboxes: vec![OutboxConfig {
            table: TableName { schema: "public".into(), table: "outbox".into() },
            backfill: None,
            columns: ColumnsConfig {
                id: var("WALPOST_OUTBOX_COLUMNS_ID", "id"),
                event_type: var("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "event_type"),
                payload: var("WALPOST_OUTBOX_COLUMNS_PAYLOAD", "payload"),
                key: opt("WALPOST_OUTBOX_COLUMNS_KEY", "key"),
                headers: opt("WALPOST_OUTBOX_COLUMNS_HEADERS", "headers"),
                timestamp: opt("WALPOST_OUTBOX_COLUMNS_TIMESTAMP", "created_at"),
            },
            header_columns: vec![],
        }],
        route: RouteConfig {
            topic: var("WALPOST_ROUTE_TOPIC", "outbox.{event_type}"),
            on_illegal_topic: OnIllegalTopic::Park,
            rules: vec![],
        },
        kafka: KafkaConfig {
            brokers: var("WALPOST_KAFKA_BROKERS", "localhost:9092"),
            create_topics: false,
            partitions: -1,
            replication_factor: -1,
            dead_letter_topic: None,
            properties: vec![],
        },
        limits: LimitsConfig {
            in_flight_events: var("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "20000").parse().unwrap(),
            in_flight_bytes: 64 << 20,
        },
        shutdown: ShutdownConfig { drain_timeout: std::time::Duration::from_secs(10) },
        http: HttpConfig { listen: None },
        log: LogConfig { format: LogFormat::Text, level: "info".into() },
    };
    app::run(config).unwrap().exit_code().into()
}
