//! What a service manager such as systemd is told over `NOTIFY_SOCKET`: that walpost is ready, how it stands, that it
//! lives, that it stops.
//!
//! The socket and the watchdog's time come from the environment that the manager makes; they are its protocol
//! (`man sd_notify`) and no settings of ours. The hard part is the watchdog: a sign of life from a task of its own would
//! show that this task lives, so it is sent only while the pipeline itself turns.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use super::{Stage, View};
use crate::{pipeline::Wish, supervisor::Ended};

/// How often it is looked whether there is something to tell.
const LOOK: Duration = Duration::from_millis(500);
/// The pipeline's thread beats every second; less silence than this says nothing.
const LEAST_SILENCE: Duration = Duration::from_secs(3);
/// What a stop takes beside the drain.
const FAREWELL: Duration = Duration::from_secs(10);

/// Whether somebody wants to be told.
pub fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| !socket.is_empty())
}

/// Tells what changes, for ever. Dropping it at any time is fine.
pub async fn keep_told(view: View, mut wish: watch::Receiver<Wish>, drain_timeout: Duration) {
    let watchdog = sd_notify::watchdog_enabled();
    // a pipeline that shows no life for half of the watchdog's time gets no further sign, and the manager acts
    let silence = watchdog.map(|time| (time / 2).max(LEAST_SILENCE));
    let mut looks = interval(watchdog.map_or(LOOK, |time| LOOK.min(time / 4)).max(Duration::from_millis(1)));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut ready, mut told) = (false, String::new());
    loop {
        tokio::select! {
            // a wish first: what follows it belongs to a stop
            biased;
            Ok(()) = wish.changed() => tell(&[
                NotifyState::Stopping,
                NotifyState::ExtendTimeoutUsec(micros(drain_timeout + FAREWELL)),
                NotifyState::Status("stopping: waiting for what is in flight"),
            ]),
            _ = looks.tick() => {}
        }
        let stopping = *wish.borrow() > Wish::Run;
        if !ready && view.progress.stage() != Stage::Connecting {
            ready = true;
            tell(&[NotifyState::Ready]);
        }
        let standing = standing(&view);
        if !stopping && standing != told {
            tell(&[NotifyState::Status(&standing)]);
            told = standing;
        }
        // a drain waits without turning, for as long as it may
        let hangs = |limit| if stopping { view.progress.silent_for(limit) } else { view.hangs(limit) };
        if silence.is_some_and(|limit| !hangs(limit)) {
            tell(&[NotifyState::Watchdog]);
        }
    }
}

/// Tells how it ended; the exit code says it to machines.
pub fn tell_the_end(ended: Ended, last_error: Option<String>) {
    let why = last_error.map(|error| one_line(&error)).unwrap_or_default();
    let text = match ended {
        Ended::Stopped | Ended::Filled => "stopped as asked".to_owned(),
        Ended::Halted | Ended::Misconfigured | Ended::SlotLost => format!("halted: {why}"),
    };
    tell(&[NotifyState::Stopping, NotifyState::Status(&text)]);
}

/// The one line of `systemctl status`.
fn standing(view: &View) -> String {
    if view.stands_by() {
        return format!("standing by: another walpost holds the slot {}", view.slot);
    }
    match view.troubles().first() {
        Some(trouble) => one_line(&format!("not ready: {}: {}", trouble.part, trouble.reason)),
        None if view.polls => "polling".to_owned(),
        None => format!("streaming from slot {}", view.slot),
    }
}

/// A line break would begin another message.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager was not told");
    }
}
