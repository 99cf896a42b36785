//! Fault points: places at which a test ends the process, and deliberate bugs, so that tests can show that they would see
//! them.
//!
//! Only in builds with debug assertions. In a release build [`point`] is nothing, [`bug`] is false, and no variable is read.

/// A deliberate bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// What was received is confirmed, delivered or not.
    ConfirmOnReceipt,
    /// A keepalive's position, and one more, is confirmed while events before it are in flight.
    KeepalivePlusOne,
    /// A record that is delivered takes the watermark over those before it.
    UnorderedWatermark,
    /// Every tenth Kafka transaction is aborted where it should be committed, and taken for committed.
    CommitForNothing,
    /// With the first event in flight the loop stops turning, while its thread goes on.
    StandingLoop,
}

/// Ends the process with SIGKILL, if `CRASH_KILL=<name>:<n>` names this point and this is the n-th time; `CRASH_STOP` stops it
/// with SIGSTOP.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    use std::sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    };

    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    struct Plan {
        name: String,
        left: AtomicU64,
        signal: Signal,
    }
    static PLANS: LazyLock<Vec<Plan>> = LazyLock::new(|| {
        let plan = |(variable, signal): (&str, Signal)| {
            let plan = std::env::var(variable).ok()?;
            let (name, times) = plan.split_once(':')?;
            Some(Plan { name: name.to_owned(), left: AtomicU64::new(times.parse().ok()?), signal })
        };
        [("CRASH_KILL", Signal::SIGKILL), ("CRASH_STOP", Signal::SIGSTOP)].into_iter().filter_map(plan).collect()
    });
    for plan in PLANS.iter().filter(|plan| plan.name == name) {
        if plan.left.fetch_sub(1, Relaxed) == 1 {
            let _ = kill(Pid::this(), plan.signal);
        }
    }
}

/// Whether `CRASH_BUG` asks for this bug.
#[cfg(debug_assertions)]
pub fn bug(bug: Bug) -> bool {
    use std::sync::LazyLock;
    static PLAN: LazyLock<Option<Bug>> = LazyLock::new(|| match std::env::var("CRASH_BUG").ok()?.as_str() {
        "commit_for_nothing" => Some(Bug::CommitForNothing),
        "confirm_on_receipt" => Some(Bug::ConfirmOnReceipt),
        "keepalive_plus_one" => Some(Bug::KeepalivePlusOne),
        "standing_loop" => Some(Bug::StandingLoop),
        "unordered_watermark" => Some(Bug::UnorderedWatermark),
        _ => None,
    });
    *PLAN == Some(bug)
}

/// How far the wall clock is to be off, µs: what stands in the file that `CRASH_CLOCK` names.
#[cfg(debug_assertions)]
pub fn clock_offset_us() -> i64 {
    use std::sync::LazyLock;
    static FILE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("CRASH_CLOCK").ok());
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn point(_name: &str) {}

/// False.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn bug(_bug: Bug) -> bool {
    false
}

/// Zero.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn clock_offset_us() -> i64 {
    0
}
