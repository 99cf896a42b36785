//! `walpost check`: each thing that can be wrong is broken for real, and found with what mends it.

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer},
};
use serde_json::Value;

use crate::{
    outbox::Outbox,
    services::{kafka::Kafka, postgres::Version},
};

/// The findings of `walpost check`, as it tells them to machines.
pub fn findings(outbox: &Outbox<'_>, flags: &[&str], env: &[(&str, &str)]) -> Vec<Value> {
    let args: Vec<&str> = ["check", "--format", "json"].iter().chain(flags).copied().collect();
    let checked = outbox.command(&args, env);
    let report: Value =
        serde_json::from_str(&checked.output).unwrap_or_else(|error| panic!("{error}: {}", checked.output));
    report["findings"].as_array().expect("a list").clone()
}

/// The severity of a finding with what it says; empty where there is no such finding.
fn found(findings: &[Value], code: &str) -> String {
    let finding = findings.iter().find(|finding| finding["code"] == code);
    finding.map_or_else(String::new, |finding| {
        let text = |name: &str| finding[name].as_str().unwrap_or_default().to_owned();
        format!("{}: {} | {} | {}", text("severity"), text("what"), text("why"), text("fix"))
    })
}

/// Claims what a finding says.
fn claim_found(findings: &[Value], code: &str, said: &[&str]) {
    let finding = found(findings, code);
    for text in said {
        assert!(finding.contains(text), "{code} does not say {text:?}: {finding:?}, in {findings:#?}");
    }
}

fn commit(kafka: &Kafka, group: &str, topic: &str) {
    let mut config = kafka.client_config();
    config.set("group.id", group).set("enable.auto.commit", "false");
    let consumer: BaseConsumer = config.create().expect("a client needs no broker to be created");
    let mut offsets = TopicPartitionList::new();
    offsets.add_partition_offset(topic, 0, Offset::Offset(0)).expect("a legal offset");
    consumer.commit(&offsets, CommitMode::Sync).expect("the broker takes it");
}

/// Case 54.
#[test]
fn an_inbox_that_forgets_sooner_than_the_topic_is_found() {
    let outbox = Outbox::shared(Version::NEWEST);
    outbox.execute(include_str!("../../sql/inbox.sql"));
    let day = (24 * 60 * 60 * 1000).to_string();
    let (short, long) = (outbox.topic_name("short"), outbox.topic_name("long"));
    let (ours, foreign) = (format!("{short}-group"), format!("not-{short}"));
    outbox.kafka.create_topic(&short, 1, &[("retention.ms", &day), ("segment.ms", &day)]);
    outbox.kafka.create_topic(&long, 1, &[("retention.ms", "-1")]);
    outbox.kafka.create_topic(&foreign, 1, &[("retention.ms", "-1")]);
    let check = |flags: &[&str]| findings(&outbox, &[&["--consumer", ours.as_str()], flags].concat(), &[]);

    claim_found(&check(&[]), "consumer_offsets", &["warn", "has committed no offset"]);
    commit(outbox.kafka, &ours, &short);
    commit(outbox.kafka, &ours, &foreign);
    claim_found(&check(&[]), "inbox_unmarked", &["warn", "has no mark of consumer"]);
    // what the flag says decides, whatever topics there are beside those of the group and of the routes
    let fix = format!("inbox_prune('{ours}', '172801 seconds')");
    for keep in ["1h", "47h"] {
        claim_found(&check(&["--inbox-keep", keep]), "inbox_retention", &["warn", &short, "for 2days", &fix]);
    }
    claim_found(&check(&["--inbox-keep", "2d"]), "inbox_retention", &["ok", "its topics (1)"]);
    // without it, the oldest mark
    outbox.execute(&format!("SELECT inbox_claim('{ours}', gen_random_uuid())"));
    claim_found(&check(&[]), "inbox_retention_unproven", &["warn", "the oldest mark", "--inbox-keep"]);
    outbox.execute("UPDATE inbox SET claimed_at = now() - interval '49 hours'");
    claim_found(&check(&[]), "inbox_retention", &["ok"]);
    // a topic that keeps all is never outlived
    commit(outbox.kafka, &ours, &long);
    claim_found(&check(&["--inbox-keep", "9y"]), "inbox_retention", &["warn", &long, "for ever"]);
    outbox.kafka.alter_topic(&long, &[("cleanup.policy", "compact"), ("retention.ms", &day)]);
    claim_found(&check(&["--inbox-keep", "9y"]), "inbox_retention", &["warn", &long, "is compacted"]);
    outbox.execute("DROP TABLE inbox CASCADE");
    claim_found(&check(&[]), "inbox_unreadable", &["warn", "does not exist"]);
}
