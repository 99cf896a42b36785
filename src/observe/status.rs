//! [`Status`]: how walpost stands, for people and for machines.

use std::{fmt, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{Health, History, Metrics, NOT_SEEN_YET, Observation, Part, Progress, Stage, WalStatus, metrics};
use crate::{clock, lsn::Lsn};

/// The loop comes round after four seconds of silence at the latest; this leaves room for a busy machine.
const LONGEST_TURN: Duration = Duration::from_secs(10);

/// Everything that there is to see of a running walpost; cheap to clone.
#[derive(Debug, Clone)]
pub struct View {
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// Where the pipeline stands.
    pub progress: Arc<Progress>,
    /// Why it is not ready.
    pub health: Arc<Health>,
    /// What the monitor saw last.
    pub observation: watch::Receiver<Observation>,
    /// Name of the slot.
    pub slot: String,
    /// Name of the publication.
    pub publication: String,
    /// The tables are polled: there is neither slot nor publication.
    pub polls: bool,
    /// The last half hour.
    pub history: Arc<History>,
    /// Bounds on what is in flight: events, bytes.
    pub in_flight_limits: (usize, usize),
}

impl View {
    /// Why walpost is not ready, as (part, reason); empty when it is.
    pub fn troubles(&self) -> Vec<Trouble> {
        let mut troubles: Vec<Trouble> = self
            .health
            .troubles()
            .into_iter()
            .map(|(part, reason)| Trouble { part: part.to_string(), reason })
            .collect();
        let unexplained = !self.progress.streaming() && !troubles.iter().any(|trouble| trouble.part == "stream");
        if unexplained {
            let what = if self.polls { "the tables are not polled" } else { "the replication stream is not open" };
            let reason = format!("{what} yet");
            troubles.insert(0, Trouble { part: "stream".to_owned(), reason });
        }
        troubles
    }

    /// Bytes of WAL that are not confirmed.
    pub fn lag_bytes(&self) -> Option<u64> {
        metrics::lag_bytes(&self.progress, &self.observation.borrow())
    }

    /// Whether nothing keeps it from taking over but that another walpost holds the slot.
    pub fn stands_by(&self) -> bool {
        let only_waits = |trouble: &Trouble| trouble.part == "stream" || trouble.reason == NOT_SEEN_YET;
        self.progress.stage() == Stage::Standby && self.troubles().iter().all(only_waits)
    }

    /// Whether the pipeline has shown no life for so long.
    pub fn hangs(&self, limit: Duration) -> bool {
        // where the tables are polled, the loop may rest for as long as it was told to
        self.progress.silent_for(limit) || !self.polls && self.progress.stuck_for(limit.max(LONGEST_TURN))
    }

    /// The metrics, in Prometheus' text format.
    pub fn metrics(&self) -> String {
        let seen = self.observation.borrow().clone();
        let troubles = self.troubles();
        for part in Part::ALL.map(|part| part.to_string()) {
            let complained = troubles.iter().any(|trouble| trouble.part == part);
            self.metrics.trouble.with_label_values(&[&part]).set(i64::from(complained));
        }
        self.metrics.render(&self.progress, &seen, clock::steady_us())
    }

    /// How it stands now.
    pub fn status(&self) -> Status {
        let seen = self.observation.borrow().clone();
        let troubles = self.troubles();
        let (events, bytes) = self.progress.in_flight();
        Status {
            ready: troubles.is_empty(),
            streaming: self.progress.streaming(),
            paused: self.progress.paused(),
            received_lsn: known(self.progress.received_lsn()),
            confirmed_lsn: known(metrics::confirmed_lsn(&self.progress, &seen)),
            lag_bytes: metrics::lag_bytes(&self.progress, &seen),
            lag_seconds: Some(self.progress.lag_seconds(clock::steady_us())),
            in_flight_events: Some(events),
            in_flight_bytes: Some(bytes),
            troubles,
            last_error: self.health.last_error(),
            source: source(self.polls).to_owned(),
            ..Status::of_slot(&self.slot, &self.publication, &seen)
        }
    }
}

/// How walpost stands. The JSON of `/status` and `walpost status`; LSNs as Postgres prints them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The version that answers.
    pub version: String,
    /// Where events are read: `wal` or `poll`. What concerns slot and WAL is null while tables are polled.
    #[serde(default)]
    pub source: String,
    /// Name of the slot.
    pub slot: String,
    /// Name of the publication.
    pub publication: String,
    /// Nothing is wrong, and it streams. False when no walpost answered.
    pub ready: bool,
    /// A replication stream is open.
    pub streaming: bool,
    /// An operator has paused it.
    #[serde(default)]
    pub paused: bool,
    /// Furthest position received; null when no walpost answered.
    pub received_lsn: Option<String>,
    /// Position confirmed to the server.
    pub confirmed_lsn: Option<String>,
    /// The server's own position.
    pub current_wal_lsn: Option<String>,
    /// Bytes of WAL between the server's position and the confirmed one; null when unknown.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest unconfirmed event; null when no walpost answered.
    pub lag_seconds: Option<f64>,
    /// `reserved`, `extended`, `unreserved` or `lost`; null when there is no slot, or nobody could look.
    pub slot_wal_status: Option<String>,
    /// Bytes of WAL that the slot keeps on the server's disk.
    pub retained_wal_bytes: Option<u64>,
    /// Bytes that can still be written before the slot may be lost; null without a limit.
    pub safe_wal_bytes: Option<i64>,
    /// Events handed to the producer and not yet acknowledged; null when no walpost answered.
    pub in_flight_events: Option<u64>,
    /// Their bytes.
    pub in_flight_bytes: Option<u64>,
    /// What is wrong now.
    pub troubles: Vec<Trouble>,
    /// The last thing that went wrong, also when it is over.
    pub last_error: Option<String>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// `stream`, `slot`, `publication`, `kafka` or `topic`.
    pub part: String,
    /// Cause and remedy.
    pub reason: String,
}

impl Status {
    /// What the slot alone tells, without a walpost that answers.
    pub fn of_slot(slot: &str, publication: &str, seen: &Observation) -> Self {
        let reading = seen.slot.reading();
        let confirmed = reading.map_or(Lsn::ZERO, |slot| slot.confirmed_lsn);
        let wrong = seen.slot.trouble(slot).map(|reason| Trouble { part: "slot".to_owned(), reason });
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            source: source(false).to_owned(),
            slot: slot.to_owned(),
            publication: publication.to_owned(),
            ready: false,
            streaming: reading.is_some_and(|slot| slot.active),
            paused: false,
            received_lsn: None,
            confirmed_lsn: known(confirmed),
            current_wal_lsn: known(seen.current_wal),
            lag_bytes: (confirmed > Lsn::ZERO).then(|| seen.current_wal.bytes_since(confirmed)),
            lag_seconds: None,
            slot_wal_status: reading.and_then(|slot| slot.wal_status).map(|status: WalStatus| status.to_string()),
            retained_wal_bytes: reading.map(|slot| slot.retained_wal_bytes),
            safe_wal_bytes: reading.and_then(|slot| slot.safe_wal_bytes),
            in_flight_events: None,
            in_flight_bytes: None,
            troubles: wrong.into_iter().collect(),
            last_error: None,
        }
    }
}

impl Status {
    /// What the tables alone tell: since when, in seconds, an event waits, without a walpost that answers.
    pub fn of_tables(slot: &str, publication: &str, waiting_seconds: Option<f64>) -> Self {
        let nothing = Self::of_slot(slot, publication, &Observation::default());
        Self { source: source(true).to_owned(), lag_seconds: waiting_seconds, ..nothing }
    }
}

fn source(polls: bool) -> &'static str {
    if polls { "poll" } else { "wal" }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |flag| if flag { "yes" } else { "no" };
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
        let mut row = |name: &str, value: String| writeln!(f, "{name:<14}{value}");
        row("walpost", self.version.clone())?;
        let polls = self.source == source(true);
        if polls {
            row("source", self.source.clone())?;
        } else {
            row("slot", self.slot.clone())?;
            row("publication", self.publication.clone())?;
        }
        if self.in_flight_events.is_some() {
            row("ready", yes(self.ready).to_owned())?;
        }
        if polls {
            row("polling", yes(self.streaming).to_owned())?;
            row("lag", self.lag_seconds.map_or_else(|| "unknown".to_owned(), |seconds| format!("{seconds:.1} s")))?;
            return self.fmt_rest(f);
        }
        row("streaming", yes(self.streaming).to_owned())?;
        row("received", text(&self.received_lsn))?;
        row("confirmed", text(&self.confirmed_lsn))?;
        row("current WAL", text(&self.current_wal_lsn))?;
        let seconds = self.lag_seconds.map(|seconds| format!(", {seconds:.1} s")).unwrap_or_default();
        let lag = self.lag_bytes.map_or_else(|| "unknown".to_owned(), bytes);
        row("lag", format!("{lag}{seconds}"))?;
        row("WAL status", text(&self.slot_wal_status))?;
        row("retained WAL", self.retained_wal_bytes.map_or_else(|| "unknown".to_owned(), bytes))?;
        if let Some(safe) = self.safe_wal_bytes {
            row("until lost", bytes(u64::try_from(safe).unwrap_or(0)))?;
        }
        self.fmt_rest(f)
    }
}

impl Status {
    fn fmt_rest(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(f, "{name:<14}{value}");
        if let (Some(events), Some(size)) = (self.in_flight_events, self.in_flight_bytes) {
            row("in flight", format!("{events} events, {}", bytes(size)))?;
        }
        for trouble in &self.troubles {
            row("trouble", format!("{}: {}", trouble.part, trouble.reason))?;
        }
        match &self.last_error {
            Some(error) => row("last error", error.clone()),
            None => Ok(()),
        }
    }
}

fn known(lsn: Lsn) -> Option<String> {
    (lsn > Lsn::ZERO).then(|| lsn.to_string())
}

/// A size for people: `1.5 MiB`.
fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if size < 1024 {
        return format!("{size} B");
    }
    let power = (size.ilog2() / 10).min(5);
    let tenths = u128::from(size) * 10 / (1_u128 << (10 * power));
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[power as usize - 1])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn view() -> (View, watch::Sender<Observation>) {
        let (sender, observation) = watch::channel(Observation::default());
        let view = View {
            metrics: Arc::default(),
            progress: Arc::default(),
            health: Arc::default(),
            observation,
            slot: "walpost".to_owned(),
            publication: "walpost".to_owned(),
            polls: false,
            history: Arc::default(),
            in_flight_limits: (20_000, 1 << 26),
        };
        (view, sender)
    }

    #[test]
    fn not_ready_until_it_streams_and_nothing_is_wrong() {
        let (view, _sender) = view();
        assert!(view.status().troubles[0].reason.contains("not open yet"));
        view.progress.set_streaming(true);
        assert!(view.status().ready);
        view.health.trouble(Part::Kafka, "no broker answers");
        let status = view.status();
        assert!(!status.ready);
        assert_eq!(status.troubles, [Trouble { part: "kafka".into(), reason: "no broker answers".into() }]);
        view.health.well(Part::Kafka);
        assert!(view.status().ready);
        assert_eq!(view.status().last_error.as_deref(), Some("no broker answers"), "it stays known when it is over");
    }

    #[test]
    fn a_standby_stands_by_only_while_nothing_else_is_wrong() {
        let (view, _sender) = view();
        assert!(!view.stands_by());
        view.progress.set_stage(Stage::Standby);
        view.health.trouble(Part::Stream, "the slot is active for PID 7");
        assert!(view.stands_by());
        view.health.trouble(Part::Kafka, "no broker answers");
        assert!(!view.stands_by(), "it could not take over");
    }

    #[test]
    fn json_comes_back_as_it_went() {
        let (view, _sender) = view();
        view.progress.set(Lsn(0x20), Lsn(0x10), (3, 300), 1);
        let status = view.status();
        assert_eq!((status.received_lsn.as_deref(), status.lag_bytes), (Some("0/20"), Some(0x10)));
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&json).unwrap(), status);
        assert!(status.to_string().contains("in flight     3 events, 300 B\n"), "{status}");
    }

    #[test]
    fn sizes_are_readable() {
        let read = [0, 1023, 1024, 1_572_864, u64::MAX].map(bytes);
        assert_eq!(read, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "16383.9 PiB"]);
    }
}
