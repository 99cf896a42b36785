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
    /// With the first event in flight the loop stops turning, while its thread goes on.
    StandingLoop,
}

/// Ends the process with SIGKILL, if `CRASH_KILL=<name>:<n>` names this point and this is the n-th time.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    use std::sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    };
    static PLAN: LazyLock<Option<(String, AtomicU64)>> = LazyLock::new(|| {
        let plan = std::env::var("CRASH_KILL").ok()?;
        let (name, times) = plan.split_once(':')?;
        Some((name.to_owned(), AtomicU64::new(times.parse().ok()?)))
    });
    if let Some((planned, left)) = &*PLAN
        && planned == name
        && left.fetch_sub(1, Relaxed) == 1
    {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Whether `CRASH_BUG` asks for this bug.
#[cfg(debug_assertions)]
pub fn bug(bug: Bug) -> bool {
    use std::sync::LazyLock;
    static PLAN: LazyLock<Option<Bug>> = LazyLock::new(|| match std::env::var("CRASH_BUG").ok()?.as_str() {
        "confirm_on_receipt" => Some(Bug::ConfirmOnReceipt),
        "keepalive_plus_one" => Some(Bug::KeepalivePlusOne),
        "standing_loop" => Some(Bug::StandingLoop),
        "unordered_watermark" => Some(Bug::UnorderedWatermark),
        _ => None,
    });
    *PLAN == Some(bug)
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
