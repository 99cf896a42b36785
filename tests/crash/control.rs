//! The kit must see what it looks for: three deliberate bugs, each to be caught.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::{judge::Tally, services::proxy::Weather, world::World};

/// How long a bug may go unseen.
const LIMIT: Duration = Duration::from_secs(40);

/// A world with a slow way to the broker, so that there is always something in flight.
fn slow_world(bug: Option<&'static str>) -> World {
    let world = World::with_bug(4, bug);
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

/// The module is compiled alone, as a release build does it: neither variable may be in what comes out.
#[test]
fn a_release_build_has_no_fault_points() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let module = sources.join("fault.rs");
    let named = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains("\"CRASH_"));
    let naming: Vec<_> = rust_files(&sources).into_iter().filter(|path| named(path)).collect();
    assert_eq!(naming, std::slice::from_ref(&module));
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fault.o");
    let mut rustc = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()));
    rustc.args(["--edition=2024", "--crate-type=lib", "--emit=obj", "-Copt-level=3", "-Cdebug-assertions=off"]);
    // without them, an unused function would not be compiled at all
    rustc.args(["-Clink-dead-code=yes", "-o"]).arg(&object).arg(&module);
    assert!(rustc.status().expect("the compiler that built this").success());
    let compiled = String::from_utf8_lossy(&fs::read(&object).expect("it was compiled")).into_owned();
    assert!(compiled.contains("point"), "nothing was compiled");
    assert!(!compiled.contains("CRASH_"));
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("our own folder").map(|entry| entry.expect("our own folder").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let sources = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    sources.chain(folders.iter().flat_map(|folder| rust_files(folder))).collect()
}
