//! What the configuration promises, checked through [`load_from`].

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::table_name::column_name;

const URL: (&str, &str) = ("WALPOST_POSTGRES_URL", "postgres://relay@db.example:5433/shop");

fn load_with(file: &str, environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Config, Faults> {
    let environment = environment.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let flags: Vec<_> = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    load_from(Some(("walpost.toml", file)), environment, &flags)
}

fn file(text: &str) -> Result<Config, Faults> {
    load_with(text, &[URL], &[])
}

/// The faults as the operator sees them.
fn faults(result: Result<Config, Faults>) -> String {
    result.expect_err("must be faulty").to_string()
}

fn only_fault(result: Result<Config, Faults>) -> String {
    let faults = result.expect_err("must be faulty").0;
    assert_eq!(faults.len(), 1, "{faults:?}");
    faults[0].to_string()
}

#[test]
fn the_connection_string_is_all_that_is_required() {
    let config = file("").unwrap();
    assert_eq!(config.postgres.conninfo.redacted(), "relay@db.example:5433/shop");
    assert_eq!((config.postgres.slot.as_str(), config.postgres.publication.as_str()), ("walpost", "walpost"));
    assert!(config.postgres.auto_create);
    assert_eq!(config.outboxes.len(), 1);
    assert_eq!(config.outboxes[0].table.to_string(), r#""public"."outbox""#);
    assert_eq!(config.outboxes[0].backfill, None);
    assert_eq!(config.outboxes[0].columns.timestamp, OptionalColumn { name: "created_at".into(), explicit: false });
    assert_eq!(config.route.topic, "outbox.{event_type}");
    assert_eq!(config.route.on_illegal_topic, OnIllegalTopic::Park);
    assert_eq!(config.kafka.brokers, "localhost:9092");
    assert_eq!((config.kafka.partitions, config.kafka.replication_factor), (-1, -1));
    assert_eq!((config.limits.in_flight_events, config.limits.in_flight_bytes), (20_000, 67_108_864));
    assert_eq!(config.retention, None);
    assert_eq!(config.shutdown.drain_timeout, Duration::from_secs(10));
    assert_eq!(config.http.listen, Some("127.0.0.1:9465".parse().unwrap()));
    assert_eq!((config.log.format, config.log.level.as_str()), (LogFormat::Text, "info"));
}

#[test]
fn without_a_connection_string_the_fault_says_how_to_give_one() {
    let fault = only_fault(load_with("", &[], &[]));
    assert!(fault.contains("postgres.url") && fault.contains("WALPOST_POSTGRES_URL"), "{fault}");
}

#[test]
fn what_needs_no_database_needs_no_connection_string() {
    let flag = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let config = load_without_database(None, &[flag("outbox.table", "a.b")]).unwrap();
    assert_eq!(config.outboxes[0].table.to_string(), r#""a"."b""#);
    let fault = only_fault(load_without_database(None, &[flag("outbox.table", "a.b.c")]));
    assert!(fault.starts_with("outbox.table"), "{fault}");
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let text = "[postgres]\nslot = 'file'\npublication = 'file'\n[kafka]\nbrokers = 'file:1'";
    let environment = [URL, ("WALPOST_POSTGRES_SLOT", "variable"), ("WALPOST_POSTGRES_PUBLICATION", "variable")];
    let config = load_with(text, &environment, &[("postgres.slot", "flag")]).unwrap();
    assert_eq!(config.postgres.slot, "flag");
    assert_eq!(config.postgres.publication, "variable");
    assert_eq!(config.kafka.brokers, "file:1");
}

#[test]
fn the_environment_alone_can_say_everything() {
    let config = load_with(
        "",
        &[
            URL,
            ("WALPOST_POSTGRES_AUTO_CREATE", "false"),
            ("WALPOST_OUTBOX_TABLE", "shop.events"),
            ("WALPOST_OUTBOX_BACKFILL", "created_at > now() - interval '1 day'"),
            ("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "type"),
            ("WALPOST_OUTBOX_COLUMNS_KEY", "aggregateid"),
            ("WALPOST_OUTBOX_HEADER_COLUMNS", r#"{tenant = "tenant_id", "trace-id" = "trace"}"#),
            ("WALPOST_ROUTE_RULES", r#"[{event_type = "order.*", topic = "orders"}]"#),
            ("WALPOST_KAFKA_PROPERTIES_COMPRESSION_TYPE", "lz4"),
            ("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "500"),
            ("WALPOST_RETENTION_KEEP", "7d"),
            ("WALPOST_HTTP_LISTEN", ""),
        ],
        &[],
    )
    .unwrap();
    let outbox = &config.outboxes[0];
    assert!(!config.postgres.auto_create);
    assert_eq!(outbox.table, TableName { schema: "shop".into(), table: "events".into() });
    assert_eq!(outbox.backfill, Some(Backfill::Where("created_at > now() - interval '1 day'".into())));
    assert_eq!(outbox.columns.event_type, "type");
    assert_eq!(outbox.columns.key, OptionalColumn { name: "aggregateid".into(), explicit: true });
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(outbox.header_columns, [pair("tenant", "tenant_id"), pair("trace-id", "trace")]);
    assert_eq!(config.route.rules, [RouteRule { event_type: "order.*".into(), topic: "orders".into() }]);
    assert_eq!(config.kafka.properties, [("compression.type".to_owned(), Secret::new("lz4"))]);
    assert_eq!(config.limits.in_flight_events, 500);
    assert_eq!(config.retention.unwrap().keep, Duration::from_hours(7 * 24));
    assert_eq!(config.http.listen, None);
}

#[test]
fn properties_come_from_all_layers_and_the_last_one_wins() {
    let text = "[kafka.properties]\n'linger.ms' = 1\n'client.id' = 'file'\nsocket.keepalive.enable = true";
    let environment = [URL, ("WALPOST_KAFKA_PROPERTIES_LINGER_MS", "2")];
    let config = load_with(text, &environment, &[("kafka.properties.linger.ms", "3")]).unwrap();
    let properties: Vec<_> =
        config.kafka.properties.iter().map(|(name, value)| (name.as_str(), value.expose())).collect();
    assert_eq!(properties, [("linger.ms", "3"), ("client.id", "file"), ("socket.keepalive.enable", "true")]);
}

#[test]
fn header_columns_keep_the_order_of_the_file() {
    let config = file("[outbox.header_columns]\nz = 'c1'\na = 'c2'\nm = 'c3'").unwrap();
    let headers: Vec<_> = config.outboxes[0].header_columns.iter().map(|(header, _)| header.as_str()).collect();
    assert_eq!(headers, ["z", "a", "m"]);
}

#[test]
fn several_tables_are_an_array() {
    let text = "[[outbox]]\ntable = 'a'\n[[outbox]]\ntable = '\"B\"'\n[outbox.columns]\nid = 'event_id'";
    let config = file(text).unwrap();
    let tables: Vec<_> = config.outboxes.iter().map(|outbox| outbox.table.to_string()).collect();
    assert_eq!(tables, [r#""public"."a""#, r#""public"."B""#]);
    assert_eq!(config.outboxes[1].columns.id, "event_id");
}

#[test]
fn an_override_of_one_among_several_tables_is_refused() {
    let environment = [URL, ("WALPOST_OUTBOX_TABLE", "c")];
    let text = "[[outbox]]\ntable = 'a'\n[[outbox]]\ntable = 'b'";
    let fault = only_fault(load_with(text, &environment, &[]));
    assert!(fault.contains("WALPOST_OUTBOX_TABLE") && fault.contains("one [outbox]"), "{fault}");
}

#[test]
fn a_table_among_several_must_be_named_and_not_twice() {
    let text = faults(file("[[outbox]]\ntable = 'a'\n[[outbox]]\n[[outbox]]\ntable = 'public.A'"));
    assert!(text.contains("outbox.table (walpost.toml:3): is missing"), "{text}");
    assert!(text.contains("outbox.table (walpost.toml:4): \"public\".\"a\" appears twice"), "{text}");
}

#[test]
fn all_faults_are_reported_at_once_with_their_places() {
    let text = "[postgres]\nslot = 'Walpost'\n\n[kafka]\npartitions = 0\n[log]\nlevel = 'inof'\nformat = 'xml'\n\
                [limits]\nin_flight_events = 0\nin_flight_bytes = 'many'\n[http]\nlisten = 'localhost:1'\n\
                [route]\non_illegal_topic = 'ignore'\n[[route.rules]]\ntopic = 't'\n[shutdown]\ndrain_timeout_ms = -1\n\
                [retention]\nbatch = 5";
    let environment = [("WALPOST_POSTGRES_AUTO_CREATE", "yes")];
    let text = faults(load_with(text, &environment, &[("kafka.dead_letter_topic", "a b")]));
    for expected in [
        "postgres.url (walpost.toml:1): is missing",
        "postgres.slot (walpost.toml:2)",
        "postgres.auto_create (environment variable WALPOST_POSTGRES_AUTO_CREATE): must be true or false",
        "kafka.partitions (walpost.toml:5): must not be 0",
        "kafka.dead_letter_topic (command line, kafka.dead_letter_topic)",
        "log.level (walpost.toml:7): `inof` is no level",
        "log.format (walpost.toml:8): must be one of text, json",
        "limits.in_flight_events (walpost.toml:10): must be a whole number from 1 to 1000000",
        "limits.in_flight_bytes (walpost.toml:11)",
        "http.listen (walpost.toml:13)",
        "route.on_illegal_topic (walpost.toml:15): must be one of park, halt, sanitize",
        "route.rules.event_type (walpost.toml:16): is missing",
        "shutdown.drain_timeout_ms (walpost.toml:19)",
        "retention.batch (walpost.toml:21): has no effect without retention.keep",
    ] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
    assert_eq!(text.lines().count(), 15, "{text}");
}

#[test]
fn dead_letters_rows_are_kept_for_ever_or_at_least_as_long_as_others() {
    let retention = |text: &str| file(&format!("[retention]\n{text}"));
    assert_eq!(retention("keep = '7d'").unwrap().retention.unwrap().keep_dead_lettered, None);
    let thirty = retention("keep = '7d'\nkeep_dead_lettered = '30d'").unwrap().retention.unwrap();
    assert_eq!(thirty.keep_dead_lettered, Some(Duration::from_hours(30 * 24)));
    let text = faults(retention("keep = '7d'\nkeep_dead_lettered = '1d'"));
    assert!(text.contains("retention.keep_dead_lettered (walpost.toml:3): is shorter than retention.keep"), "{text}");
    let text = faults(retention("keep_dead_lettered = '1d'"));
    assert!(text.contains("keep_dead_lettered (walpost.toml:2): has no effect without retention.keep"), "{text}");
    let week = retention("keep = '7d'\ndrop_partitions = true\npartitions_ahead = 7").unwrap().retention.unwrap();
    assert_eq!((week.drop_partitions, week.partitions_ahead), (true, Some(7)));
    let never = retention("keep = '7d'\npartitions_ahead = 0").unwrap().retention.unwrap();
    assert_eq!((never.drop_partitions, never.partitions_ahead), (false, None));
    let text = faults(retention("drop_partitions = true\npartitions_ahead = 367"));
    for fault in [
        "drop_partitions (walpost.toml:2): has no effect without retention.keep",
        "partitions_ahead (walpost.toml:3): must be a whole number from 0 to 366",
    ] {
        assert!(text.contains(fault), "{text}");
    }
    for key in ["drop_partitions = true", "partitions_ahead = 1"] {
        let text = faults(file(&format!("[postgres]\nsource = 'poll'\n[retention]\nkeep = '7d'\n{key}")));
        assert!(text.contains("(walpost.toml:5): has no effect where the table is polled"), "{text}");
    }
}

#[test]
fn unknown_keys_name_the_nearest_known_one() {
    let text = faults(file("[postgres]\nslott = 'x'\n[kafkaa]\nx = 1\n[outbox]\nslot = 'x'\n[outbox.column]\nid='a'"));
    for expected in [
        "postgres.slott (walpost.toml:2): is an unknown key; did you mean postgres.slot?",
        "kafkaa (walpost.toml:3): is an unknown key; did you mean kafka?",
        "outbox.slot (walpost.toml:6): is an unknown key; did you mean postgres.slot?",
        "outbox.column (walpost.toml:7): is an unknown key; did you mean outbox.columns?",
    ] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
}

#[test]
fn unknown_variables_and_flags_name_the_nearest_known_one() {
    let environment = [URL, ("WALPOST_KAFKA_BROKER", "x"), ("WALPOST_ZZZ", "x")];
    let text = faults(load_with("", &environment, &[("kafka.broker", "x"), ("postgres.wholly_different", "x")]));
    assert!(
        text.contains("WALPOST_KAFKA_BROKER): is an unknown variable; did you mean WALPOST_KAFKA_BROKERS?"),
        "{text}"
    );
    assert!(text.contains("WALPOST_ZZZ): is an unknown variable"), "{text}");
    assert!(text.contains("kafka.broker (command line, kafka.broker): is an unknown key; did you mean"), "{text}");
    assert!(text.contains("known in [postgres] are auto_create, password_file"), "{text}");
}

#[test]
fn what_kubernetes_sets_for_a_service_named_walpost_is_not_ours() {
    let environment = [
        URL,
        ("WALPOST_SERVICE_HOST", "10.0.0.1"),
        ("WALPOST_SERVICE_PORT", "9465"),
        ("WALPOST_SERVICE_PORT_METRICS", "9465"),
        ("WALPOST_PORT", "tcp://10.0.0.1:9465"),
        ("WALPOST_PORT_9465_TCP", "tcp://10.0.0.1:9465"),
        ("WALPOST_PORT_9465_TCP_ADDR", "10.0.0.1"),
        ("WALPOST_METRICS_PORT_9465_TCP_PROTO", "tcp"),
    ];
    load_with("", &environment, &[]).unwrap();
}

#[test]
fn broken_toml_is_reported_by_line_without_its_text() {
    let fault = faults(file("[postgres]\nurl = postgres://u:hunter2@h/d\n"));
    assert!(fault.contains("walpost.toml:2"), "{fault}");
    assert!(!fault.contains("hunter2"), "{fault}");
}

#[test]
fn a_missing_file_is_a_fault_only_when_it_was_named() {
    let fault = only_fault(load(Some(Path::new("/nonexistent/walpost.toml")), &[]));
    assert!(fault.contains("/nonexistent/walpost.toml") && fault.contains("--config"), "{fault}");
    assert!(read_file(None).is_ok());
}

/// Case 42.
#[test]
fn secrets_never_appear() {
    let secret = "hunter2";
    let url = format!("postgres://u:{secret}@h/d?sslmod=x");
    let text = format!("[kafka.properties]\n'sasl.password' = '{secret}'\n'nonesuch' = '{secret}'");
    let faults = faults(load_with(&text, &[("WALPOST_POSTGRES_URL", &url)], &[("kafka.properties.acks", secret)]));
    assert!(!faults.contains(secret), "{faults}");

    let url = url.replace("?sslmod=x", "");
    let text = format!("[kafka.properties]\n'sasl.password' = '{secret}'");
    let environment = [("WALPOST_POSTGRES_URL", url.as_str()), ("PGPASSWORD", secret)];
    let config = load_with(&text, &environment, &[]).unwrap();
    assert!(!format!("{config:?}").contains(secret));
    assert_eq!(config.postgres.conninfo.password().unwrap().unwrap().expose(), secret);
}

/// Case 56; and case 16, as to a time limit for messages.
#[test]
fn properties_that_hold_up_a_guarantee_are_refused_with_the_reason() {
    for name in [
        "acks",
        "request.required.acks",
        "enable.idempotence",
        "enable.gapless.guarantee",
        "transactional.id",
        "transaction.timeout.ms",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "message.send.max.retries",
        "retries",
        "partitioner",
        "partitioner_cb",
        "delivery.report.only.error",
        "queuing.strategy",
        "bootstrap.servers",
        "metadata.broker.list",
        "plugin.library.paths",
        "test.mock.num.brokers",
        "enabled_events",
        "log_cb",
        "dr_msg_cb",
    ] {
        let fault = only_fault(load_with("", &[URL], &[(&format!("kafka.properties.{name}"), "1")]));
        assert!(fault.contains(&format!("{name} is not yours to set: ")), "{fault}");
    }
}

#[test]
fn a_property_with_two_names_is_set_under_one() {
    let config = file("[kafka.properties]\n'compression.codec' = 'zstd'\n'queue.buffering.max.ms' = 7").unwrap();
    let set = |name: &str| config.kafka.properties.iter().find(|(set, _)| set == name).map(|(_, value)| value.expose());
    assert_eq!(
        (set("compression.type"), set("linger.ms"), config.kafka.properties.len()),
        (Some("zstd"), Some("7"), 2)
    );
    let text = "[kafka.properties]\n'compression.codec' = 'zstd'\n'compression.type' = 'lz4'";
    assert!(only_fault(file(text)).contains("under two names"));
}

/// Case 41.
#[test]
fn properties_are_checked_by_librdkafka_itself() {
    let text = "[kafka.properties]\ncompression.type = 'foo'\nlinger.millis = 5\n'linger.ms' = -3";
    let text = faults(file(text));
    assert!(text.contains("compression.type is refused by librdkafka"), "{text}");
    assert!(text.contains("linger.millis is no property of librdkafka"), "{text}");
    assert!(text.contains("linger.ms is refused by librdkafka"), "{text}");
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        file(&format!("[kafka.properties]\ncompression.type = '{codec}'")).unwrap();
    }
}

#[test]
fn properties_that_only_fail_together_fail_here_already() {
    let properties = |text: &str| file(&format!("[kafka.properties]\n{text}"));
    let fault = only_fault(properties("security.protocol = 'ssl'\nssl.ca.location = '/nonexistent/ca.pem'"));
    assert!(fault.contains("kafka.properties") && fault.contains("ssl.ca.location"), "{fault}");
    let scram = "security.protocol = 'sasl_ssl'\nsasl.mechanism = 'SCRAM-SHA-512'\nsasl.username = 'u'";
    properties(&format!("{scram}\nsasl.password = 'hunter2'")).unwrap();
    let fault =
        only_fault(properties(&format!("{}\nsasl.password = 'hunter2'", scram.replace("SCRAM-SHA-512", "NONE"))));
    assert!(!fault.contains("hunter2"), "{fault}");
}

#[test]
fn topic_templates_are_checked_with_the_rest() {
    let text =
        "route = {topic = 'a b', rules = [{event_type = '*', topic = 'x.{id'}]}\nkafka.dead_letter_topic = '__d'";
    let text = faults(file(text));
    for expected in ["route.topic (walpost.toml:1)", "route.rules.topic (walpost.toml:1)", "no legal topic name"] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
}

#[test]
fn wrong_types_are_faults() {
    let text = "postgres = 3\nroute = {topic = 1}\nkafka.properties = {a = [1]}\noutbox = {columns = 'x'}\nhttp = []";
    let text = faults(file(text));
    for expected in [
        "postgres (walpost.toml:1): must be a table",
        "route.topic (walpost.toml:2): must be text",
        "a must be text, a number or a boolean",
        "outbox.columns (walpost.toml:4): must be a table",
        "http (walpost.toml:5): must be a table",
    ] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
}

#[test]
fn an_unreadable_password_file_is_found_at_once() {
    let fault = only_fault(file("[postgres]\npassword_file = '/nonexistent/secret'"));
    assert!(fault.contains("postgres.password_file (walpost.toml:2): cannot be read"), "{fault}");
}

#[test]
fn polling_is_chosen_by_a_word_and_its_columns_are_mapped_like_others() {
    assert_eq!(file("").unwrap().postgres.source, SourceKind::Wal);
    let environment = [URL, ("WALPOST_POSTGRES_SOURCE", "poll"), ("WALPOST_OUTBOX_COLUMNS_ATTEMPTS", "urinishlar")];
    let config = load_with("[outbox.columns]\norder = '\"Id\"'\n[poll]\nbatch = 7", &environment, &[]).unwrap();
    assert_eq!(config.postgres.source, SourceKind::Poll);
    let columns = PollColumns { attempts: "urinishlar".into(), order: Some("Id".into()), ..PollColumns::default() };
    assert_eq!(config.outboxes[0].poll, columns);
    assert_eq!((config.poll.batch, config.poll.notify_channel), (7, None));
    let fault = only_fault(file("[postgres]\nsource = 'table'"));
    assert!(fault.contains("must be one of wal, poll"), "{fault}");
    let all = faults(file(&format!("[poll]\nbatch = 0\nack_timeout_ms = 10\nnotify_channel = '{}'", "x".repeat(64))));
    for key in ["poll.batch", "poll.ack_timeout_ms", "poll.notify_channel"] {
        assert!(all.contains(key), "{key} is not in {all}");
    }
}

#[test]
fn spans_are_off_unless_a_collector_is_named() {
    let off = file("").unwrap().trace;
    assert_eq!((off.otlp_endpoint, off.service_name.as_str(), off.one_in), (None, "walpost", 1));
    let text = "[trace]\notlp_endpoint = 'http://localhost:4318'\nservice_name = 'shop'\none_in = 10";
    let on = file(text).unwrap().trace;
    assert_eq!(on.otlp_endpoint.unwrap().to_string(), "http://localhost:4318/v1/traces");
    assert_eq!((on.service_name.as_str(), on.one_in), ("shop", 10));
    let text = faults(file("[trace]\notlp_endpoint = 'https://localhost:4318'\none_in = 0"));
    for part in [
        "trace.otlp_endpoint (walpost.toml:2): is https, and spans are sent over plain http only; let a collector",
        "trace.one_in (walpost.toml:3): must be a whole number from 1 to 1000000",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let fault = only_fault(load_with("", &[URL, ("WALPOST_TRACE_OTLP_ENDPOINT", "")], &[]));
    assert!(fault.contains("is empty"), "{fault}");
}

#[test]
fn the_example_states_the_defaults_and_every_key() {
    let example = include_str!("../../deploy/walpost.example.toml");
    let environment = || std::iter::empty::<(OsString, OsString)>();
    let (stated, known) = read(Some(("walpost.example.toml", example)), environment(), &[]);
    let url = ("postgres.url".to_owned(), "postgres://walpost@localhost:5432/app".to_owned());
    let unstated = load_from(None, environment(), &[url]).unwrap();
    assert_eq!(format!("{:#?}", stated.unwrap()), format!("{unstated:#?}"));

    let mut section = String::new();
    let mut shown = std::collections::BTreeSet::new();
    for line in example.lines().map(|line| line.trim_start_matches("# ").trim()) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_start_matches('[').split(']').next().unwrap().to_owned();
            shown.insert(section.clone());
        } else if let Some((key, _)) = line.split_once(" = ") {
            shown.insert(format!("{section}.{key}"));
        }
    }
    for key in known.iter().chain(&["route.rules.event_type".into(), "route.rules.topic".into()]) {
        assert!(shown.contains(key), "{key} is not in the example");
    }
}

#[test]
fn the_page_of_all_settings_is_that_of_the_code() {
    let (_, known) = read(None, std::iter::empty::<(OsString, OsString)>(), &[]);
    let page = reference();
    // a table of keys is a heading, a key is a line
    for key in known {
        let shown = page.contains(&format!("**`{key}`**")) || page.contains(&format!("[{key}]"));
        assert!(shown, "{key} is not in the reference");
    }
    let written = include_str!("../../docs/configuration.md");
    let fresh = written.trim_end() == page.trim_end();
    assert!(fresh, "docs/configuration.md is old: walpost generate configuration > docs/configuration.md");
}

/// Case 38.
#[test]
fn table_names_are_read_as_sql_reads_them() {
    let parse = |text| TableName::parse(text).map(|name| (name.schema, name.table));
    let name = |schema: &str, table: &str| Ok((schema.to_owned(), table.to_owned()));
    assert_eq!(parse("Outbox"), name("public", "outbox"));
    assert_eq!(parse("Shop.Outbox$1"), name("shop", "outbox$1"));
    assert_eq!(parse(r#""My.Schema"."Out""box""#), name("My.Schema", "Out\"box"));
    assert_eq!(parse(r#" shop . "Outbox" "#), name("shop", "Outbox"));
    assert_eq!(parse("ÄÖ"), name("public", "ÄÖ"));
    for wrong in ["", ".", "a.", ".a", "a.b.c", "a b", "1a", r#""a"#, r#""""#, "a-b", r#""a"b"#, &"x".repeat(64)] {
        assert!(TableName::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn column_names_are_taken_as_written_unless_quoted() {
    assert_eq!(column_name("Event Type"), Ok("Event Type".into()));
    assert_eq!(column_name(r#""Event ""Type""""#), Ok("Event \"Type\"".into()));
    for wrong in ["", r#""a" b"#, r#""a"#, &"x".repeat(64)] {
        assert!(column_name(wrong).is_err(), "{wrong}");
    }
}

proptest! {
    #[test]
    fn a_table_name_survives_being_written_and_read(schema in "[^\\x00]{1,15}", table in "[^\\x00]{1,15}") {
        let name = TableName { schema, table };
        prop_assert_eq!(TableName::parse(&name.to_string()), Ok(name));
    }

    #[test]
    fn no_table_name_panics(text in "\\PC{0,40}", odd in "[\"a.$ \\x00]{0,12}") {
        let _ = TableName::parse(&text);
        let _ = TableName::parse(&odd);
        let _ = column_name(&odd);
    }

    #[test]
    fn no_file_panics(text in "[\\[\\]{}a-z.= '\"\n0-9]{0,60}", key in "[a-z.]{0,12}") {
        let _ = load_with(&text, &[(&variable_name(&key), &text)], &[(&key, &text)]);
    }
}

fn variable_name(key: &str) -> String {
    format!("WALPOST_{}", key.to_uppercase().replace('.', "_"))
}
