//! A topic that walpost may not write to.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use crate::{
    ledger::TABLE,
    outbox::{Outbox, PATIENCE},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        wait_until,
    },
    victim::victim,
};

/// Case 37.
#[test]
fn events_for_a_topic_that_denies_writing_are_held_until_it_allows_it() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let walpost = outbox.relay(&[]);
    let insert = |id: u32| outbox.execute(&format!("INSERT INTO outbox VALUES ({id}, 't', 'k', '')"));
    insert(1);
    outbox.wait_until_confirmed();

    let acls = [acl(&topic, WRITE, DENY), acl(&topic, DESCRIBE, ALLOW), acl(&topic, READ, ALLOW)];
    ask(&kafka, CREATE_ACLS, &acls);
    insert(2);
    wait_until(PATIENCE, "walpost names the topic", || {
        let answer = walpost.get("/readyz");
        answer.status == 503 && answer.body.contains(&topic)
    });
    insert(3);
    let errors = format!("walpost_delivery_errors_total{{code=\"TopicAuthorizationFailed\",topic=\"{topic}\"}}");
    assert!(walpost.metric(&errors) >= 1.0);
    assert_eq!(kafka.record_count(&topic), 1);

    // an ACL is its own filter
    ask(&kafka, DELETE_ACLS, &acls);
    walpost.wait_until_ready(PATIENCE);
    outbox.wait_until_confirmed();
    let records = kafka.read_all(&[&topic]);
    assert_eq!(records.iter().map(|record| record.header("id")).collect::<Vec<_>>(), ["1", "2", "3"].map(Some));
}

/// A topic that may not be seen is no missing one, and is counted by what it is.
#[test]
fn a_topic_that_may_not_be_seen_is_counted_as_denied() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    let acls = [acl(&topic, DESCRIBE, DENY), acl(&topic, WRITE, ALLOW), acl(&topic, READ, ALLOW)];
    ask(&kafka, CREATE_ACLS, &acls);
    let walpost = outbox.relay(&[]);
    outbox.execute("INSERT INTO outbox VALUES (1, 't', 'k', '')");
    let counted = |code: &str| {
        let name = format!("walpost_delivery_errors_total{{code=\"{code}\",topic=\"{topic}\"}}");
        walpost.metrics().get(&name).copied()
    };
    wait_until(PATIENCE, "the topic is held", || counted("TopicAuthorizationFailed").is_some());
    assert_eq!(counted("UnknownTopicOrPartition"), None);
    ask(&kafka, DELETE_ACLS, &acls);
    walpost.wait_until_ready(PATIENCE);
    outbox.wait_until_confirmed();
    assert_eq!(kafka.record_count(&topic), 1);
}

// Kafka's protocol, as far as neither librdkafka's bindings nor the broker's jars have it:
// https://kafka.apache.org/protocol#The_Messages_CreateAcls
pub const CREATE_ACLS: i16 = 30;
pub const DELETE_ACLS: i16 = 31;
pub const READ: u8 = 3;
pub const WRITE: u8 = 4;
pub const DESCRIBE: u8 = 8;
pub const DENY: u8 = 2;
pub const ALLOW: u8 = 3;

/// What everybody may do to a topic, or may not.
pub fn acl(topic: &str, operation: u8, permission: u8) -> Vec<u8> {
    const TOPIC: u8 = 2;
    acl_on(TOPIC, topic, operation, permission)
}

/// Kinds of resources.
pub const GROUP: u8 = 3;
pub const TRANSACTIONAL_ID: u8 = 5;

/// The same of any kind of resource.
pub fn acl_on(kind: u8, name: &str, operation: u8, permission: u8) -> Vec<u8> {
    const LITERAL: u8 = 3;
    [&[kind][..], &string(name), &[LITERAL], &string("User:*"), &string("*"), &[operation, permission]].concat()
}

fn string(text: &str) -> Vec<u8> {
    let length = i16::try_from(text.len()).expect("a short text");
    [&length.to_be_bytes()[..], text.as_bytes()].concat()
}

/// Sends one request about ACLs and waits for the answer.
pub fn ask(kafka: &Kafka, request: i16, acls: &[Vec<u8>]) {
    const VERSION: i16 = 1;
    let count = u32::try_from(acls.len()).expect("a few");
    let header = [&request.to_be_bytes()[..], &VERSION.to_be_bytes(), &7_i32.to_be_bytes(), &string("test")].concat();
    let message = [&header[..], &count.to_be_bytes(), &acls.concat()].concat();
    let size = u32::try_from(message.len()).expect("a short message");
    let mut stream = TcpStream::connect(kafka.brokers()).expect("the broker listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket of ours");
    stream.write_all(&[&size.to_be_bytes()[..], &message].concat()).expect("the broker reads");
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).expect("the broker answers");
    let mut answer = vec![0; u32::from_be_bytes(answer) as usize];
    stream.read_exact(&mut answer).expect("the broker answers");
    // behind correlation id, throttle time and count stands the first result's error code
    assert_eq!(answer[12..14], [0, 0], "{answer:?}");
}
