//! What a record holds, byte for byte.

use std::collections::{BTreeSet, HashMap};

use tokio_postgres::NoTls;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends, lsn},
    services::{
        complete,
        kafka::Kafka,
        postgres::{Postgres, Version},
        topics::Received,
    },
};

#[test]
fn a_record_of_the_default_table_is_exact() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let topic = outbox.topic("order.placed", 1);
        let _walpost = outbox.relay(&[]);
        let before = outbox.wal_end();
        outbox.execute(
            r#"INSERT INTO outbox VALUES
               ('6f1c0f6e-0000-4000-8000-00000000000a', 'order.placed', 'k é', '{"b" :1,"a":  "ü"}',
                '{"trace": "x", "n": 1}', '2024-05-06 07:08:09.123456+02'),
               ('6f1c0f6e-0000-4000-8000-00000000000b', 'order.placed', NULL, NULL, NULL, '1970-01-01 00:00:01+00')"#,
        );
        let after = outbox.wal_end();
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= 2);
        let position = records[0].header("walpost_position").expect("a position");
        let (commit_lsn, ordinal) = position.rsplit_once('/').expect("an LSN and an ordinal");
        assert!((before..after).contains(&lsn(commit_lsn)), "{position}");
        assert_eq!(ordinal, "0");

        assert_eq!(records[0].key.as_deref(), Some("k é".as_bytes()));
        assert_eq!(text(records[0].value.as_deref()), r#"{"b" :1,"a":  "ü"}"#);
        assert_eq!(records[0].timestamp, Some(1_714_972_089_123));
        let own = |id, position| [("id", id), ("event_type", "order.placed"), ("walpost_position", position)];
        let members = [("n", "1"), ("trace", "x")]; // jsonb sorts them so
        let first = own("6f1c0f6e-0000-4000-8000-00000000000a", position);
        assert_eq!(headers(&records[0]), [&first[..], &members].concat());

        assert_eq!((&records[1].key, &records[1].value, records[1].timestamp), (&None, &None, Some(1000)));
        let second = format!("{commit_lsn}/1");
        assert_eq!(headers(&records[1]), own("6f1c0f6e-0000-4000-8000-00000000000b", &second));
    });
}

/// Case 29: the payloads are those that Postgres prints.
#[test]
fn a_debezium_style_table_needs_the_environment_only() {
    const ROWS: usize = 10_000;
    at_both_ends(|version| {
        let outbox = Outbox::with(
            Postgres::shared(version),
            Kafka::shared(),
            "CREATE TABLE outboxevent (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
                aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)",
        );
        let topics = [outbox.topic("Order", 3), outbox.topic("Payment", 2)];
        let topics = topics.each_ref().map(String::as_str);
        let _walpost = outbox.relay(&[
            ("WALPOST_OUTBOX_TABLE", "public.outboxevent"),
            ("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "type"),
            ("WALPOST_OUTBOX_COLUMNS_KEY", "aggregateid"),
            ("WALPOST_ROUTE_TOPIC", &outbox.topic_name("{aggregatetype}")),
        ]);
        outbox.execute(
            r#"DO $$ BEGIN
                 FOR n IN 1..10000 LOOP
                   INSERT INTO outboxevent VALUES (('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid,
                     (ARRAY['Order', 'Payment'])[1 + n % 2], 'k-' || n % 97, 'Placed',
                     jsonb_build_object('number', n, 'text', 'größe "' || n || '"'));
                   IF n % 3 = 0 THEN COMMIT; END IF;
                 END LOOP;
               END $$"#,
        );
        outbox.wait_until_confirmed();

        let records = outbox.kafka.read_all(&topics);
        assert_eq!(records.len(), ROWS);
        let mut last: HashMap<(&str, &[u8]), (i32, usize)> = HashMap::new();
        let mut seen = BTreeSet::new();
        for record in &records {
            let number: usize = record.header("id").expect("an id")[24..].parse().expect("a number");
            seen.insert(number);
            assert_eq!(record.topic, outbox.topic_name(["Order", "Payment"][number % 2]));
            assert_eq!(text(record.key.as_deref()), format!("k-{}", number % 97));
            let value = format!(r#"{{"text": "größe \"{number}\"", "number": {number}}}"#);
            assert_eq!(text(record.value.as_deref()), value);
            assert_eq!(record.header("event_type"), Some("Placed"));
            let key = (record.topic.as_str(), record.key.as_deref().expect("a key"));
            if let Some((partition, before)) = last.insert(key, (record.partition, number)) {
                assert!(before < number, "{number} of {key:?} came after {before}");
                assert_eq!(partition, record.partition, "{key:?} changed its partition");
            }
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), (1..=ROWS).collect::<Vec<_>>());
    });
}

/// Case 28.
#[test]
fn null_and_empty_stay_apart_in_text() {
    let records = published(Version::NEWEST, &table("text"), &[], "(DEFAULT, 't', NULL, NULL), (DEFAULT, 't', '', '')");
    assert_eq!((&records[0].key, &records[0].value), (&None, &None));
    assert_eq!((&records[1].key, &records[1].value), (&Some(Vec::new()), &Some(Vec::new())));
}

/// Case 28.
#[test]
fn null_and_jsons_null_stay_apart_in_jsonb() {
    let rows = r#"(DEFAULT, 't', 'k', NULL), (DEFAULT, 't', 'k', 'null'), (DEFAULT, 't', 'k', '""')"#;
    let records = published(Version::OLDEST, &table("jsonb"), &[], rows);
    let values: Vec<_> = records.iter().map(|record| record.value.as_deref()).collect();
    assert_eq!(values, [None, Some(&b"null"[..]), Some(&b"\"\""[..])]);
}

/// Case 31.
#[test]
fn bytea_is_published_raw() {
    let table = "CREATE TABLE outbox (id int, event_type text, key bytea, payload bytea)";
    let rows = r"(1, 't', '\x00ff', '\x5c000af09f'), (2, 't', '\x', '\x'), (3, 't', NULL, NULL)";
    let records = published(Version::NEWEST, table, &[], rows);
    let pairs: Vec<_> = records.iter().map(|record| (record.key.as_deref(), record.value.as_deref())).collect();
    let first: (&[u8], &[u8]) = (b"\0\xff", b"\\\0\x0a\xf0\x9f");
    assert_eq!(pairs, [(Some(first.0), Some(first.1)), (Some(b""), Some(b"")), (None, None)]);
}

/// Case 32.
#[test]
fn a_uuid_key_has_36_bytes() {
    let table = "CREATE TABLE outbox (id int, event_type text, key uuid, payload text)";
    let records = published(Version::NEWEST, table, &[], "(1, 't', 'A0EEBC999C0B4EF8BB6D6BB9BD380A11', '')");
    assert_eq!(text(records[0].key.as_deref()), "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
}

/// Case 33.
#[test]
fn header_columns_hold_what_postgres_prints() {
    let tables = "CREATE TYPE mood AS ENUM ('so so', 'glad'); CREATE TYPE pair AS (a int, b text);
        CREATE DOMAIN size AS int CHECK (VALUE > 0);
        CREATE TABLE outbox (id int, event_type text, payload text, enum mood, list text[], pair pair, float float8,
            number numeric, none int, grid int[][], size size, nothing numeric, key pair)";
    let columns = "{number = 'number', mood = 'enum', list = 'list', pair = 'pair', none = 'none', nan = 'float',
        grid = 'grid', size = 'size', nan2 = 'nothing'}";
    let row = r#"(1, 't', '', 'so so', '{a,"b c",NULL}', '(1,"x ""y""")', 'NaN',
        1234567890123456789012345678901234567890.10, NULL, '{{1,2},{3,4}}', 42, 'NaN', '(7,"a,b ""c""")')"#;
    at_both_ends(|version| {
        let records = published(version, tables, &[("WALPOST_OUTBOX_HEADER_COLUMNS", columns)], row);
        let expected = [
            ("number", "1234567890123456789012345678901234567890.10"),
            ("mood", "so so"),
            ("list", r#"{a,"b c",NULL}"#),
            ("pair", r#"(1,"x ""y""")"#),
            ("nan", "NaN"),
            ("grid", "{{1,2},{3,4}}"),
            ("size", "42"),
            ("nan2", "NaN"),
        ];
        let present: BTreeSet<_> = headers(&records[0])[3..].iter().copied().collect();
        assert_eq!(present, expected.into_iter().collect());
        assert_eq!(text(records[0].key.as_deref()), r#"(7,"a,b ""c""")"#);
    });
}

/// Cases 29 and 30.
#[test]
fn json_is_never_interpreted() {
    let payloads = [r#"{"nul": "\u0000"}"#, r#"{"half": "\ud83d"}"#, r#"{ "😀":"\ud83d\ude00" , "a":1.0e1, "a":2 }"#];
    let rows: Vec<_> = payloads.iter().map(|payload| format!("(DEFAULT, 't', '🔑', '{payload}')")).collect();
    let records = published(Version::NEWEST, &table("json"), &[], &rows.join(", "));
    assert_eq!(records.iter().map(|record| text(record.value.as_deref())).collect::<Vec<_>>(), payloads);
    assert_eq!(text(records[0].key.as_deref()), "🔑");
}

#[test]
fn defaults_of_role_and_database_do_not_leak() {
    let tables =
        "CREATE TABLE outbox (id int, event_type text, payload bytea, created_at timestamp, moment timestamptz,
            span interval, float float8, bytes bytea);
        DO $$ BEGIN
          EXECUTE format('ALTER DATABASE %I SET datestyle = German', current_database());
          EXECUTE format('ALTER DATABASE %I SET bytea_output = escape', current_database());
          EXECUTE format('ALTER DATABASE %I SET statement_timeout = 1', current_database());
          EXECUTE format('ALTER ROLE postgres IN DATABASE %I SET timezone = ''Asia/Tokyo''', current_database());
          EXECUTE format('ALTER ROLE postgres IN DATABASE %I SET intervalstyle = iso_8601', current_database());
          EXECUTE format('ALTER ROLE postgres IN DATABASE %I SET extra_float_digits = 0', current_database());
        END $$";
    let columns = "{moment = 'moment', span = 'span', float = 'float', bytes = 'bytes'}";
    let row = r"(1, 't', '\x00ff', '2024-01-02 03:04:05.678', '2024-01-02 03:04:05.678+00', '1 day 2 hours',
        0.1::float8 + 0.2::float8, '\x00ff')";
    at_both_ends(|version| {
        let records = published(version, tables, &[("WALPOST_OUTBOX_HEADER_COLUMNS", columns)], row);
        assert_eq!(records[0].value.as_deref(), Some(&b"\0\xff"[..]));
        assert_eq!(records[0].timestamp, Some(1_704_164_645_678));
        let expected = [
            ("moment", "2024-01-02 03:04:05.678+00"),
            ("span", "1 day 02:00:00"),
            ("float", "0.30000000000000004"),
            ("bytes", r"\x00ff"),
        ];
        assert_eq!(headers(&records[0])[3..], expected);
    });
}

#[test]
fn a_database_without_encoding_keeps_its_bytes() {
    at_both_ends(|version| {
        // it lends its name, and takes care of the topic
        let outbox = Outbox::shared(version);
        let topic = outbox.topic("t", 1);
        let name = format!("{}_ascii", outbox.database.name());
        outbox.execute(&format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII'"));
        let url = outbox.database.url().replace(outbox.database.name(), &name);
        execute_at(&url, &table("text"));
        let walpost = outbox.relay(&[("WALPOST_POSTGRES_URL", &url)]);
        execute_at(&url, r"INSERT INTO outbox VALUES (1, 't', E'caf\xe9', E'\xe9\xff')");
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
        assert_eq!(records[0].key.as_deref(), Some(&b"caf\xe9"[..]));
        assert_eq!(records[0].value.as_deref(), Some(&b"\xe9\xff"[..]));
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        outbox
            .wait_until_true(PATIENCE, &format!("pg_drop_replication_slot('{}') IS NOT NULL", outbox.database.name()));
        outbox.execute(&format!("DROP DATABASE {name} WITH (FORCE)"));
    });
}

/// Case 34.
#[test]
fn times_of_any_type_become_unix_milliseconds() {
    const MOMENT: &str = "2024-02-29 23:59:58.9876";
    let times = [
        ("timestamp(0)", MOMENT, Some(1_709_251_199_000)), // the server rounds it
        ("timestamp(3)", MOMENT, Some(1_709_251_198_988)),
        ("timestamp(6)", MOMENT, Some(1_709_251_198_987)),
        ("timestamptz", "2024-02-29 23:59:58.9876-01:30", Some(1_709_256_598_987)),
        ("date", "2024-02-29", Some(1_709_164_800_000)),
        ("bigint", "1709251198987", Some(1_709_251_198_987)),
        ("timestamptz", "infinity", None),
        ("timestamp", "1907-01-01 00:00:00", Some(1)), // Kafka knows no time before 1970
    ];
    let (mut tables, mut mapping, mut inserts) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (kind, value, _)) in times.iter().enumerate() {
        tables.push(format!("CREATE TABLE o{index} (id int, event_type text, payload text, at {kind})"));
        mapping.push(format!("{{table = 'o{index}', columns = {{timestamp = 'at'}}}}"));
        inserts.push(format!("INSERT INTO o{index} VALUES ({index}, 't', '', '{value}')"));
    }
    tables.push("CREATE TABLE none (id int, event_type text, payload text, created_at timestamptz)".to_owned());
    mapping.push("{table = 'none'}".to_owned());
    inserts.push(format!("INSERT INTO none VALUES ({}, 't', '', NULL)", times.len()));

    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), &tables.join("; "));
    let topic = outbox.topic("t", 1);
    let _walpost = outbox.relay(&[("WALPOST_OUTBOX", &format!("[{}]", mapping.join(", ")))]);
    let now =
        || outbox.text("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)").parse::<i64>().expect("a number");
    let before = now();
    outbox.execute(&inserts.join("; "));
    let after = now();
    let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() > times.len());
    let expected = times.iter().map(|(_, _, expected)| *expected).chain([None]);
    for (record, expected) in records.iter().zip(expected) {
        let actual = record.timestamp.expect("every record has a timestamp");
        match expected {
            Some(expected) => assert_eq!(actual, expected, "{record:?}"),
            None => assert!((before..=after).contains(&actual), "{record:?} has not the time of its commit"),
        }
    }
}

#[test]
fn reserved_headers_win_and_none_comes_twice() {
    let tables = "CREATE TABLE outbox (id int, event_type text, payload text, tenant text, headers jsonb)";
    let columns = "{tenant = 'tenant', id = 'tenant', walpost_position = 'tenant'}";
    let row =
        r#"(7, 't', '', 'acme', '{"id": "x", "event_type": "x", "walpost_position": "x", "tenant": "x", "own": "y"}')"#;
    let records = published(Version::NEWEST, tables, &[("WALPOST_OUTBOX_HEADER_COLUMNS", columns)], row);
    let position = records[0].header("walpost_position").expect("a position");
    lsn(position.rsplit_once('/').expect("an ordinal").0);
    let expected = [("id", "7"), ("event_type", "t"), ("walpost_position", position), ("tenant", "acme"), ("own", "y")];
    assert_eq!(headers(&records[0]), expected);
}

/// <https://www.w3.org/TR/trace-context/>: a consumer goes on in the trace of whoever wrote the event.
#[test]
fn a_trace_context_passes_unchanged_from_columns_or_headers() {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const STATE: &str = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";
    at_both_ends(|version| {
        let table = "CREATE TABLE outbox (id int, event_type text, payload text, headers json, trace text, state text)";
        let columns = [("WALPOST_OUTBOX_HEADER_COLUMNS", "{traceparent = \"trace\", tracestate = \"state\"}")];
        let rows = format!(
            "(1, 't', '', NULL, '{PARENT}', '{STATE}'),
             (2, 't', '', '{{\"traceparent\": \"{PARENT}\", \"tracestate\": \"{STATE}\"}}', NULL, NULL),
             (3, 't', '', '{{\"traceparent\": \"other\"}}', '{PARENT}', NULL)"
        );
        let records = published(version, table, &columns, &rows);
        let trace = |record: &Received| {
            let both = headers(record).into_iter().filter(|(name, _)| name.starts_with("trace"));
            both.map(|(name, value)| (name.to_owned(), value.to_owned())).collect::<Vec<_>>()
        };
        let context =
            [("traceparent", PARENT), ("tracestate", STATE)].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!((trace(&records[0]), trace(&records[1])), (context.to_vec(), context.to_vec()));
        assert_eq!(trace(&records[2]), context[..1], "the column wins, and no header comes twice");
    });
}

#[test]
fn members_of_headers_keep_order_and_type() {
    let tables = "CREATE TABLE outbox (id int, event_type text, payload text, headers json)";
    let row = r#"(1, 't', '', '{"z": "plain \"é\" \u00fc", "a": 1.50, "no": null, "o": {"k": [1, 2]}, "t": true, "e": ""}'),
        (2, 't', '', '{}'), (3, 't', '', NULL)"#;
    let records = published(Version::NEWEST, tables, &[], row);
    let expected = [("z", "plain \"é\" ü"), ("a", "1.50"), ("o", r#"{"k": [1, 2]}"#), ("t", "true"), ("e", "")];
    assert_eq!(headers(&records[0])[3..], expected);
    assert_eq!((records[1].headers.len(), records[2].headers.len()), (3, 3));
}

#[test]
fn a_payload_of_some_megabytes_passes() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), &table("text"));
        let topic = outbox.topic_name("t");
        outbox.kafka.create_topic(&topic, 1, &[("max.message.bytes", "20000000")]);
        let _walpost = outbox.relay(&[]);
        outbox.execute("INSERT INTO outbox VALUES (1, 't', 'k', repeat('0123456789', 500000))");
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| !records.is_empty());
        assert!(records[0].value.as_deref() == Some("0123456789".repeat(500_000).as_bytes()));
    });
}

/// Case 38, as to quotes, dots and capitals.
#[test]
fn names_that_need_quotes_are_found() {
    // another table has the same name, and is published as well
    let tables = r#"CREATE SCHEMA "My.Schema"; CREATE TABLE "My.Schema"."Out""box"
        ("The Id" int, "TYPE" text, "pay-load" text, "Key" text);
        CREATE SCHEMA "my"; CREATE TABLE "my"."Out""box" (LIKE "My.Schema"."Out""box");
        CREATE PUBLICATION "Pub ""1"", 'x'" FOR ALL TABLES WITH (publish = 'insert')"#;
    let outbox = Outbox::with(Postgres::shared(Version::OLDEST), Kafka::shared(), tables);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[
        ("WALPOST_OUTBOX_TABLE", r#""My.Schema"."Out""box""#),
        ("WALPOST_OUTBOX_COLUMNS_ID", "The Id"),
        ("WALPOST_OUTBOX_COLUMNS_EVENT_TYPE", "TYPE"),
        ("WALPOST_OUTBOX_COLUMNS_PAYLOAD", "pay-load"),
        ("WALPOST_OUTBOX_COLUMNS_KEY", "Key"),
        ("WALPOST_POSTGRES_PUBLICATION", r#"Pub "1", 'x'"#),
    ]);
    outbox.execute(r#"INSERT INTO "my"."Out""box" VALUES (0, 't', 'other', 'other')"#);
    outbox.execute(r#"INSERT INTO "My.Schema"."Out""box" VALUES (1, 't', 'p', 'k')"#);
    outbox.wait_until_confirmed();
    let records = outbox.kafka.read_all(&[&topic]);
    assert_eq!(records.len(), 1, "{}", walpost.log());
    assert_eq!((text(records[0].key.as_deref()), text(records[0].value.as_deref())), ("k", "p"));
}

/// Publishes some rows of the table `outbox` and returns the records of the event type `t`, in their order.
fn published(version: Version, tables: &str, env: &[(&str, &str)], rows: &str) -> Vec<Received> {
    let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), tables);
    let topic = outbox.topic("t", 1);
    let _walpost = outbox.relay(env);
    outbox.execute(&format!("INSERT INTO outbox VALUES {rows}"));
    let count: usize = outbox.text("SELECT count(*) FROM outbox").parse().expect("a number");
    outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= count)
}

/// An outbox table with a payload of this type.
fn table(payload: &str) -> String {
    format!("CREATE TABLE outbox (id bigserial PRIMARY KEY, event_type text, key text, payload {payload})")
}

fn headers(record: &Received) -> Vec<(&str, &str)> {
    record.headers.iter().map(|(name, value)| (name.as_str(), text(value.as_deref()))).collect()
}

fn text(bytes: Option<&[u8]>) -> &str {
    std::str::from_utf8(bytes.expect("not null")).expect("UTF-8")
}

fn execute_at(url: &str, sql: &str) {
    let (url, statements) = (url.to_owned(), sql.to_owned());
    let done = complete(async move {
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
        tokio::spawn(connection);
        client.batch_execute(&statements).await
    });
    done.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}
