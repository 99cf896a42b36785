//! The consumer in `tests/clients`: killed, rebalanced and sent back to the beginning, it acts on each event exactly once.

use std::{collections::BTreeSet, path::PathBuf, process::Command, time::Duration};

use nix::sys::signal::Signal;
use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer},
};

use crate::{
    clients::{Business, example},
    outbox::PATIENCE,
    services::{process::Process, run, wait_until},
};

const PARTITIONS: i32 = 6;
const ROUNDS: u32 = 20;
const EVENTS_PER_ROUND: u64 = 100;

/// How soon the group notices a death; the broker takes nothing shorter.
const SHORT: Duration = Duration::from_secs(1);

/// A round may have to wait until the group has noticed a death, on a machine that is busy.
const ROUND_PATIENCE: Duration = Duration::from_mins(1);

/// Orders of a business, and the shipping service that consumes them.
struct Shipping {
    business: Business,
    topic: String,
    group: String,
    binary: PathBuf,
    placed: u64,
}

impl Shipping {
    fn open() -> Self {
        let business = Business::open();
        let topic = business.outbox.topic("orders", PARTITIONS);
        let group = format!("{}-shipping", business.outbox.database.name());
        Self { business, topic, group, binary: example("consumer"), placed: 0 }
    }

    /// Until then, every shipment fails.
    fn allow_shipments(&self) {
        self.business.of_shipping("GRANT INSERT ON shipments TO shipping");
    }

    fn place_orders(&mut self, count: u64) {
        let (first, last) = (self.placed + 1, self.placed + count);
        let event = "outbox_emit('order.placed', number::text, jsonb_build_object('order', number))";
        self.business.outbox.execute(&format!("SELECT {event} FROM generate_series({first}, {last}) AS number"));
        self.placed = last;
    }

    /// The death of an instance is noticed after `session_timeout`.
    fn instance(&self, session_timeout: Duration) -> Process {
        let mut command = Command::new(&self.binary);
        command
            .env("DATABASE_URL", self.business.url("postgres", "shipping"))
            .env("BROKERS", self.business.outbox.kafka.brokers())
            .env("TOPIC", &self.topic)
            .env("GROUP", &self.group)
            .env("SESSION_TIMEOUT_MS", session_timeout.as_millis().to_string());
        Process::start("consumer", &run::folder("consumer"), &mut command)
    }

    fn shipped(&self) -> u64 {
        self.business.outbox.text("SELECT count(*) FROM shipments").parse().expect("a number")
    }

    fn wait_until_shipped(&self, count: u64) {
        wait_until(ROUND_PATIENCE, &format!("{count} shipments"), || self.shipped() >= count);
    }

    /// Nothing is missing, nothing was shipped twice, and nothing that was not ordered.
    fn assert_each_was_shipped_once(&self) {
        let ledger = self.business.outbox.text(
            "SELECT format('%s missing, %s twice, %s strange',
               (SELECT count(*) FROM (SELECT id FROM outbox EXCEPT SELECT event_id FROM shipments) AS missing),
               (SELECT count(*) FROM (SELECT FROM shipments GROUP BY event_id HAVING count(*) > 1) AS twice),
               (SELECT count(*) FROM (SELECT event_id FROM shipments EXCEPT SELECT id FROM outbox) AS strange))",
        );
        assert_eq!(ledger, "0 missing, 0 twice, 0 strange");
        assert_eq!(self.shipped(), self.placed);
    }

    fn client(&self) -> BaseConsumer {
        let mut config = self.business.outbox.kafka.client_config();
        config.set("group.id", &self.group).set("enable.auto.commit", "false");
        config.create().expect("a client needs no broker to be created")
    }

    /// Sends the group back to the beginning, as soon as its last member that died is forgotten.
    fn rewind(&self) {
        let mut beginning = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            beginning.add_partition_offset(&self.topic, partition, Offset::Offset(0)).expect("a legal offset");
        }
        let client = self.client();
        wait_until(PATIENCE, "the group is empty", || client.commit(&beginning, CommitMode::Sync).is_ok());
    }

    /// The sum of the offsets that the group has committed.
    fn committed(&self) -> u64 {
        let mut partitions = TopicPartitionList::new();
        partitions.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = self.client().committed_offsets(partitions, PATIENCE).expect("the broker answers");
        let offsets = committed.elements().iter().filter_map(|element| element.offset().to_raw()).collect::<Vec<_>>();
        offsets.into_iter().filter_map(|offset| u64::try_from(offset).ok()).sum()
    }
}

/// Asks it to stop once it has begun.
fn stop(instance: &Process) {
    instance.wait_for_log(PATIENCE, "consuming");
    instance.signal(Signal::SIGTERM);
    let status = instance.wait(PATIENCE);
    assert!(status.success(), "{status}:\n{}", instance.log());
}

/// The events that came to it again.
fn repetitions(instance: &Process) -> BTreeSet<String> {
    instance.log().lines().filter_map(|line| Some(line.strip_suffix(" repeated")?.to_owned())).collect()
}

#[test]
fn a_consumer_that_is_killed_and_rebalanced_and_reads_all_again_acts_once_on_each_event() {
    let mut shipping = Shipping::open();
    shipping.allow_shipments();
    let _walpost = shipping.business.outbox.relay(&[("WALPOST_ROUTE_TOPIC", &shipping.topic)]);
    let mut instances = [shipping.instance(SHORT), shipping.instance(SHORT)];
    let mut repeated = BTreeSet::new();
    for round in 1..=ROUNDS {
        shipping.place_orders(EVENTS_PER_ROUND);
        // at least one is left, so the end comes at any point of their work
        let goal = shipping.shipped() + fastrand::u64(1..EVENTS_PER_ROUND);
        shipping.wait_until_shipped(goal.min(shipping.placed));
        let victim = &mut instances[fastrand::usize(..2)];
        // most die; some leave the group as they should, which is another way for it to be rebalanced
        if round % 6 == 0 {
            stop(victim);
        } else {
            victim.kill();
        }
        repeated.append(&mut repetitions(victim));
        *victim = shipping.instance(SHORT);
    }
    shipping.wait_until_shipped(shipping.placed);
    shipping.business.outbox.wait_until_confirmed();
    instances.iter().for_each(stop);
    shipping.assert_each_was_shipped_once();
    repeated.extend(instances.iter().flat_map(repetitions));
    assert!(!repeated.is_empty(), "with so many deaths, some events must have come again");

    shipping.rewind();
    let again = shipping.instance(PATIENCE);
    wait_until(ROUND_PATIENCE, "all is read again", || repetitions(&again).len() as u64 == shipping.placed);
    // a clean stop commits what is stored
    stop(&again);
    assert_eq!(shipping.committed(), shipping.business.outbox.kafka.record_count(&shipping.topic).cast_unsigned());
    shipping.assert_each_was_shipped_once();
}

/// Case 53.
#[test]
fn a_consumer_whose_action_fails_leaves_the_event_to_the_next() {
    let mut shipping = Shipping::open();
    let _walpost = shipping.business.outbox.relay(&[("WALPOST_ROUTE_TOPIC", &shipping.topic)]);
    shipping.place_orders(EVENTS_PER_ROUND);
    let first = shipping.instance(PATIENCE);
    assert!(!first.wait(PATIENCE).success(), "it may not write shipments");
    assert!(first.log().contains("permission denied for table shipments"), "{}", first.log());
    assert_eq!((shipping.committed(), shipping.shipped()), (0, 0));

    shipping.allow_shipments();
    let second = shipping.instance(PATIENCE);
    shipping.wait_until_shipped(shipping.placed);
    stop(&second);
    assert_eq!(shipping.committed(), shipping.placed);
    assert!(repetitions(&second).is_empty());
    shipping.assert_each_was_shipped_once();
}
