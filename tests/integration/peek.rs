//! What would come next, and the end of a walpost.

use serde_json::Value;

use crate::{
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{postgres::Version, topics::Received, walpost::Ended},
};

fn peek(outbox: &Outbox<'_>, limit: usize, more: &[(&str, &str)]) -> Vec<Value> {
    let Ended { code, output } = outbox.command(&["peek", "--limit", &limit.to_string()], more);
    assert_eq!(code, Some(0), "{output}");
    output.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

/// A record that arrived, as `peek` shows it.
fn as_shown(record: &Received) -> Value {
    let text = |bytes: &Option<Vec<u8>>| match bytes {
        None => Value::Null,
        Some(bytes) => String::from_utf8(bytes.clone()).expect("text").into(),
    };
    let headers = record.headers.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    serde_json::json!({
        "topic": record.topic,
        "position": record.header("walpost_position"),
        "key": text(&record.key),
        "value": text(&record.value),
        "headers": Value::Object(headers),
        "timestamp": record.timestamp,
        "value_bytes": record.value.as_ref().map_or(0, Vec::len),
    })
}

#[test]
fn what_is_shown_is_what_is_published_and_the_slot_stays_where_it_is() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let topics = [outbox.topic("a", 1), outbox.topic("b", 1)];
        outbox.relay(&[]).kill9();
        outbox.execute(
            r#"INSERT INTO outbox (event_type, key, payload, headers) VALUES
               ('a', 'k', '{"n": 1}', '{"trace": "x", "n": 5}'), ('b', '', NULL, NULL), ('a', NULL, '"ü"', NULL)"#,
        );
        outbox.execute(
            "INSERT INTO outbox (event_type, key, payload) SELECT 'a', 'k', 'null' FROM generate_series(1, 700)",
        );
        let before = outbox.confirmed();
        let (all, some) = (peek(&outbox, 5000, &[]), peek(&outbox, 2, &[]));
        assert_eq!((all.len(), &some[..]), (703, &all[..2]));
        assert_eq!(outbox.confirmed(), before);
        let slots = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'walpost\\_peek%' AND database = '{}'",
            outbox.database.name()
        );
        assert_eq!(outbox.text(&slots), "0", "the copy of the slot is left behind");

        let _walpost = outbox.relay(&[]);
        outbox.wait_until_confirmed();
        for topic in &topics {
            let arrived: Vec<_> = outbox.kafka.read_all(&[topic]).iter().map(as_shown).collect();
            let of_topic: Vec<_> = all.iter().filter(|shown| shown["topic"] == topic.as_str()).cloned().collect();
            assert_eq!(of_topic, arrived, "{version:?}");
        }
        assert_eq!(peek(&outbox, 10, &[]), [] as [Value; 0], "all is published, and a walpost streams");
    });
}

#[test]
fn what_cannot_be_published_is_shown_with_the_reason() {
    let outbox = Outbox::shared(Version::NEWEST);
    outbox.relay(&[]).kill9();
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('no topic!'), ('fine')");
    let halting = [("WALPOST_ROUTE_ON_ILLEGAL_TOPIC", "halt")];
    let shown = peek(&outbox, 10, &halting);
    assert!(shown[0]["error"].as_str().is_some_and(|error| error.contains("no topic!")), "{shown:?}");
    assert_eq!(shown[1]["topic"], outbox.topic_name("fine"));
    let buried = peek(&outbox, 1, &[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", "letters")]);
    assert_eq!(buried[0]["topic"], "letters");
    assert!(buried[0]["error"].as_str().is_some_and(|error| error.contains("no topic!")), "{buried:?}");
}

#[test]
fn the_rule_that_chose_the_topic_is_explained_and_rows_of_the_table_are_shown_without_a_slot() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        outbox.execute(
            r#"INSERT INTO outbox (event_type, key, payload, headers) VALUES
               ('order.paid', 'k', '1', '{"trace": "x"}'), ('user.new', 'kk', '22', NULL), ('order.sent', NULL, NULL, NULL)"#,
        );
        let file = crate::services::run::folder("peek").join("walpost.toml");
        let rules = "[route]\n[[route.rules]]\nevent_type = \"user.*\"\ntopic = \"users\"\n\
                     [[route.rules]]\nevent_type = \"order.p*\"\ntopic = \"paid-{key}\"\n";
        std::fs::write(&file, rules).expect("our own folder");
        let config = file.display().to_string();
        let peek = |more: &[&str]| {
            let args = [&["peek", "--explain", "--config", &config], more].concat();
            let Ended { code, output } = outbox.command(&args, &[]);
            assert_eq!(code, Some(0), "{output}");
            output.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect::<Vec<Value>>()
        };
        let shown = peek(&["--from-table"]);
        let by_type = |event_type: &str| {
            shown.iter().find(|shown| shown["headers"]["event_type"] == event_type).expect("it is shown")
        };
        let template = format!("{}.{{event_type}}", outbox.database.name());
        for (event_type, topic, rule, glob, template) in [
            ("user.new", "users".to_owned(), Value::from(1), Value::from("user.*"), "users"),
            ("order.paid", "paid-k".to_owned(), Value::from(2), Value::from("order.p*"), "paid-{key}"),
            ("order.sent", outbox.topic_name("order.sent"), Value::Null, Value::Null, &template),
        ] {
            let shown = by_type(event_type);
            let explain = &shown["explain"];
            assert_eq!(
                (&shown["topic"], &explain["rule"], &explain["matches"]),
                (&topic.into(), &rule, &glob),
                "{shown}"
            );
            assert_eq!(explain["template"], template);
            let size = |name: &str| explain[name].as_u64().expect("a number");
            let value = shown["value_bytes"].as_u64().expect("a number");
            assert_eq!(size("record_bytes"), size("key_bytes") + size("headers_bytes") + value, "{shown}");
        }
        assert_eq!(by_type("order.paid")["explain"]["key_bytes"], 1);
        assert_eq!(peek(&["--from-table", "event_type LIKE 'user%'"]).len(), 1);
        assert_eq!(peek(&["--from-table", "--limit", "2"]).len(), 2);
        let refused = outbox.command(&["peek", "--from-table", "no such thing"], &[]);
        assert!(refused.code == Some(1) && refused.output.contains("WHERE"), "{}", refused.output);
    });
}

#[test]
fn without_a_slot_there_is_advice() {
    let outbox = Outbox::shared(Version::NEWEST);
    let Ended { code, output } = outbox.command(&["peek"], &[]);
    assert_eq!(code, Some(1));
    assert!(output.contains("does not exist") && output.contains("walpost init"), "{output}");
}

/// Case 58: the end of a walpost for good.
#[test]
fn dropping_takes_slot_and_publication_and_only_when_sure() {
    at_both_ends(|version| {
        let outbox = Outbox::shared(version);
        let name = outbox.database.name();
        let left = || {
            let slots = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '{name}%'");
            let publications = format!("SELECT count(*) FROM pg_publication WHERE pubname = '{name}'");
            (outbox.text(&slots), outbox.text(&publications))
        };
        let walpost = outbox.relay(&[]);
        let in_use = outbox.command(&["drop", "--yes"], &[]);
        assert!(in_use.code == Some(1) && in_use.output.contains("in use"), "{}", in_use.output);
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        outbox.execute("INSERT INTO outbox (event_type) VALUES ('t')");
        outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{name}_backfill', 'pgoutput')"));
        let asked = outbox.command(&["drop"], &[]);
        assert!(asked.code == Some(2) && asked.output.contains("drop --yes"), "{}", asked.output);
        assert!(asked.output.contains("not published any more"), "{}", asked.output);
        assert_eq!(left(), ("2".to_owned(), "1".to_owned()));
        let done = outbox.command(&["drop", "--yes"], &[]);
        assert_eq!(done.code, Some(0), "{}", done.output);
        assert_eq!(left(), ("0".to_owned(), "0".to_owned()));
        assert_eq!(outbox.text("SELECT count(*) FROM outbox"), "1", "the rows stay");
        let again = outbox.command(&["drop", "--yes"], &[]);
        assert!(again.code == Some(0) && again.output.contains("nothing to drop"), "{}", again.output);
    });
}

#[test]
fn what_is_not_walposts_alone_stays() {
    let outbox = Outbox::shared(Version::NEWEST);
    let name = outbox.database.name();
    outbox.execute(&format!("CREATE TABLE other (); CREATE PUBLICATION {name} FOR TABLE outbox, other"));
    outbox.execute(&format!("SELECT pg_create_physical_replication_slot('{name}')"));
    let foreign = outbox.command(&["drop", "--yes"], &[]);
    assert!(foreign.code == Some(1) && foreign.output.contains("not walpost's"), "{}", foreign.output);
    outbox.execute(&format!("SELECT pg_drop_replication_slot('{name}')"));
    let shared = outbox.command(&["drop", "--yes"], &[]);
    assert!(shared.code == Some(0) && shared.output.contains("public.other"), "{}", shared.output);
    assert_eq!(outbox.text(&format!("SELECT count(*) FROM pg_publication WHERE pubname = '{name}'")), "1");
}
