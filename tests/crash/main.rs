//! The crash kit: writers that keep a ledger, faults from a seed, a watch on what is confirmed, and a judge over what Kafka
//! holds in the end.
//!
//! Cases 1, 2, 4, 5, 13, 15, 46 and 55: kills and lost links anywhere, amid COPY and large transactions, with brokers that
//! stand still and writes that are none of walpost's.
//!
//! `CRASH_MINUTES` sets how long it goes on, `CRASH_SEED` which faults come in which order, `CRASH_BROKERS=3` puts three
//! brokers behind it, `CRASH_DELIVERY=exactly_once` asks for that. See docs/reliability.md.

#[expect(dead_code, reason = "each user of the services needs a part of them")]
#[path = "../services/mod.rs"]
mod services;

mod control;
mod faults;
mod judge;
mod watch;
mod world;
mod writers;

use std::time::{Duration, Instant};

use faults::Faults;
use judge::Tally;
use world::World;

/// The slice that every test run takes.
const SLICE: Duration = Duration::from_mins(2);
const SLICE_SEED: u64 = 0x5EED;
const WRITERS: usize = 8;

/// The length of the run, and the seed of its faults.
fn plan() -> (Duration, u64) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<f64>().expect(name));
    let length = number("CRASH_MINUTES").map_or(SLICE, |minutes| Duration::from_secs_f64(minutes * 60.0));
    let fresh = if length > SLICE { fastrand::u64(..) } else { SLICE_SEED };
    let seed = std::env::var("CRASH_SEED").ok().map_or(fresh, |text| text.parse().expect("CRASH_SEED is a number"));
    (length, seed)
}

/// Under exactly-once delivery, where nothing may come twice. `CRASH_DELIVERY=exactly_once` gives it the whole run instead.
const SLICE_ONCE: Duration = Duration::from_mins(1);

#[test]
fn whatever_crashes_nothing_is_lost_confirmed_early_or_overtaken() {
    let (length, seed) = plan();
    let once = std::env::var("CRASH_DELIVERY").is_ok_and(|delivery| delivery == "exactly_once");
    run(length, Faults::new(seed), once);
}

#[test]
fn under_exactly_once_delivery_nothing_comes_twice_either() {
    run(SLICE_ONCE, Faults::new(SLICE_SEED).sparing_single_broker(), true);
}

fn run(length: Duration, mut faults: Faults, once: bool) {
    let seed = faults.seed();
    println!("seed {seed}, {length:?}");
    let world = World::start(WRITERS, length >= Duration::from_mins(10), once);
    let end = Instant::now() + length;
    while Instant::now() < end {
        faults.round(&world);
    }
    let tally = Tally::of(&world);
    println!("{faults}\n{tally}");
    // the control: kills that repeat nothing would prove nothing of the other kind of delivery
    assert!(once || tally.duplicates() > 0, "nothing came twice: were there any kills?");
    assert!(tally.gone() > 0, "retention has deleted nothing, so it was not tried");
    assert!(tally.is_clean(), "seed {seed}: see the table above; CRASH_SEED={seed} replays the faults");
}
