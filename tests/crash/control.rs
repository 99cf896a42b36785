//! The kit must see what it looks for: three deliberate bugs, each to be caught.

use std::time::{Duration, Instant};

use crate::{judge::Tally, services::proxy::Weather, world::World};

/// How long a bug may go unseen.
const LIMIT: Duration = Duration::from_secs(40);

/// A world with a slow way to the broker, so that there is always something in flight.
fn slow_world(bug: Option<&'static str>) -> World {
    let world = World::with_bug(4, false, bug);
    for node in world.shared.kafka.nodes() {
        node.proxy().set(Weather::Delayed(Duration::from_millis(200)));
    }
    world
}

fn claim_seen(bug: &'static str) {
    let world = slow_world(Some(bug));
    let since = Instant::now();
    while world.watch.found().early.is_empty() {
        assert!(since.elapsed() < LIMIT, "nobody saw {bug}; walpost's log:\n{}", world.log_tail());
        std::thread::sleep(Duration::from_millis(100));
    }
    world.writers.stop();
}

#[test]
fn the_kit_sees_nothing_where_nothing_is_wrong() {
    let world = slow_world(None);
    let since = Instant::now();
    while world.watch.found().looks < 20 {
        assert!(since.elapsed() < LIMIT, "{} looks", world.watch.found().looks);
        std::thread::sleep(Duration::from_millis(100));
    }
    let tally = Tally::of(&world);
    assert!(tally.is_clean(), "{tally}");
}

#[test]
fn the_kit_sees_what_is_confirmed_on_receipt() {
    claim_seen("confirm_on_receipt");
}

#[test]
fn the_kit_sees_a_keepalive_that_is_confirmed_with_one_more() {
    claim_seen("keepalive_plus_one");
}

#[test]
fn the_kit_sees_a_watermark_that_passes_what_is_in_flight() {
    claim_seen("unordered_watermark");
}
