//! What the broker says of a batch, and what may be concluded from it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    ledger::{EVENT_TYPE, TABLE},
    outbox::{Outbox, PATIENCE},
    services::{
        postgres::{Postgres, Version},
        proxy::Way,
        wait_until,
    },
    victim::victim,
};

/// Numbers of the protocol (<https://kafka.apache.org/protocol>).
const PRODUCE: [u8; 2] = [0, 0];
const CORRUPT_MESSAGE: [u8; 2] = [0, 2];
const NOT_LEADER_OR_FOLLOWER: [u8; 2] = [0, 6];

/// How long the first answer is held for a second request to come.
const SECOND_REQUEST_WITHIN: Duration = Duration::from_millis(500);

/// A broker that knows nothing of a producer takes any first sequence number: if the first batch of a partition is refused
/// for a moment and the second is already on its way, the second's success says nothing of the first.
/// Case 15: nor does it overtake it.
#[test]
fn a_success_never_vouches_for_the_batch_before_it() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic(EVENT_TYPE, 1);
    let seen = Arc::<AtomicU32>::default();
    kafka.nodes()[0].proxy().tamper(refuse_the_first_batch(topic.clone(), Arc::clone(&seen)));
    let _walpost = outbox.relay(&[("WALPOST_KAFKA_BROKERS", &kafka.proxied_brokers())]);
    let insert = |id: u32| outbox.execute(&format!("INSERT INTO outbox VALUES ('{id}', '{EVENT_TYPE}', 'k', NULL)"));
    insert(1);
    wait_until(PATIENCE, "the first batch is on its way", || seen.load(Relaxed) == 1);
    insert(2);
    wait_until(PATIENCE, "the first batch was refused", || seen.load(Relaxed) == 2);
    outbox.wait_until_confirmed();
    let arrived: Vec<_> =
        kafka.read_all(&[&topic]).iter().map(|record| record.header("id").map(str::to_owned)).collect();
    assert_eq!(arrived, ["1", "2"].map(|id| Some(id.to_owned())));
}

/// Spoils the first batch so that the broker refuses it, and makes of its answer one that every client tries again.
fn refuse_the_first_batch(topic: String, seen: Arc<AtomicU32>) -> impl FnMut(Way, &mut Vec<u8>) -> bool {
    let (mut first, mut second) = (None, false);
    move |way, frame| {
        let found = frame.windows(topic.len()).position(|window| window == topic.as_bytes());
        let (Some(start), true) = (found, seen.load(Relaxed) < 2) else { return true };
        match (way, &first) {
            (Way::Request, None) if frame.starts_with(&PRODUCE) => {
                let near_the_end = frame.len() - 16;
                frame[near_the_end] ^= 0x55;
                first = Some((frame[4..8].to_vec(), Instant::now()));
                seen.store(1, Relaxed);
            }
            (Way::Request, Some(_)) if frame.starts_with(&PRODUCE) => second = true,
            (Way::Answer, Some((correlation, since))) if frame.starts_with(correlation) => {
                if !second && since.elapsed() < SECOND_REQUEST_WITHIN {
                    return false;
                }
                // behind the name: the number of partitions (one byte in flexible versions), the partition, the error
                let error = start + topic.len() + 1 + 4;
                assert_eq!(frame[error..error + 2], CORRUPT_MESSAGE);
                frame[error..error + 2].copy_from_slice(&NOT_LEADER_OR_FOLLOWER);
                seen.store(2, Relaxed);
            }
            _ => {}
        }
        true
    }
}
