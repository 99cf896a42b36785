//! What the SQL link sees of the server and the slot: plain values.

use std::fmt;

use serde::Deserialize;
use tokio_postgres::Client;

use crate::lsn::Lsn;

/// The last look at the server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observation {
    /// The slot.
    pub slot: SlotState,
    /// The server's current WAL position (on a standby: the position replayed); `0/0` before the first look.
    pub current_wal: Lsn,
}

/// The slot and the server's position, on any version; on a standby its position is the one replayed.
const LOOK: &str = "
    SELECT to_jsonb(s)::text,
           (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text
    FROM (SELECT 1) one LEFT JOIN pg_replication_slots s ON s.slot_name = $1::text";

/// Looks at the slot.
pub async fn look(client: &Client, slot: &str) -> Result<Observation, tokio_postgres::Error> {
    let row = client.query_one(LOOK, &[&slot]).await?;
    let current_wal: Lsn = row.get::<_, Option<&str>>(1).and_then(|lsn| lsn.parse().ok()).unwrap_or_default();
    let slot = match row.get::<_, Option<&str>>(0).map(|row| SlotReading::from_json(row, current_wal)) {
        None => SlotState::Missing,
        Some(Ok(reading)) => SlotState::Present(reading),
        Some(Err(error)) => {
            tracing::error!(%error, "pg_replication_slots is not understood");
            SlotState::Unknown
        }
    };
    Ok(Observation { slot, current_wal })
}

/// Whether the server is there, as the SQL link sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ServerState {
    /// No link, for whatever reason.
    #[default]
    Unknown,
    /// The link is open.
    Up,
    /// The server is shutting down: it ended our link and takes no new one. It waits for its walsenders, so whoever holds
    /// a replication connection should leave.
    Stopping,
}

/// The slot, as the SQL link sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum SlotState {
    /// Nobody could look.
    #[default]
    Unknown,
    /// The server has no slot of this name.
    Missing,
    /// The server has it.
    Present(SlotReading),
}

impl SlotState {
    /// What the catalog says, when the slot is there.
    pub fn reading(&self) -> Option<&SlotReading> {
        match self {
            Self::Present(reading) => Some(reading),
            Self::Unknown | Self::Missing => None,
        }
    }

    /// Cause and remedy when the slot is gone for good: events may be missing, and a human must decide (exit code 3).
    pub fn loss(&self, slot: &str) -> Option<String> {
        match self {
            Self::Missing => Some(format!(
                "replication slot \"{slot}\" does not exist any more: it was dropped, or this server never had it \
                 (failover, restore); events written since may not have been published; compare the outbox table with \
                 the topics, then create the slot with `walpost init`"
            )),
            Self::Present(reading) => reading.loss(slot),
            Self::Unknown => None,
        }
    }

    /// Cause and remedy of what is wrong with the slot, also when it can recover.
    pub fn trouble(&self, slot: &str) -> Option<String> {
        self.loss(slot).or_else(|| self.reading()?.risk(slot))
    }
}

/// One row of `pg_replication_slots`. Columns that the server's version lacks are `None`.
///
/// See <https://www.postgresql.org/docs/current/view-pg-replication-slots.html>.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct SlotReading {
    /// `pgoutput`, for a slot of ours.
    pub plugin: Option<String>,
    /// The slot's database; none for a physical slot.
    pub database: Option<String>,
    /// Vanishes with its session.
    #[serde(default)]
    pub temporary: bool,
    /// Whether a connection streams from it.
    #[serde(default)]
    pub active: bool,
    /// The process that streams from it.
    pub active_pid: Option<i32>,
    /// Whether the WAL that it needs is safe; none while the slot is being created.
    pub wal_status: Option<WalStatus>,
    /// Bytes that can still be written before it may be lost; none without a limit.
    #[serde(rename = "safe_wal_size")]
    pub safe_wal_bytes: Option<i64>,
    /// The last confirmed LSN; `0/0` while the slot is being created.
    #[serde(rename = "confirmed_flush_lsn", default, deserialize_with = "lsn")]
    pub confirmed_lsn: Lsn,
    /// The oldest WAL that it needs.
    #[serde(default, deserialize_with = "lsn")]
    pub restart_lsn: Lsn,
    /// Bytes of WAL that it keeps on the server's disk.
    #[serde(skip)]
    pub retained_wal_bytes: u64,
    /// Decodes prepared transactions at PREPARE.
    #[serde(default)]
    pub two_phase: bool,
    /// Invalidated by a conflict with recovery (16 and later).
    #[serde(default)]
    pub conflicting: Option<bool>,
    /// Why it was invalidated (17 and later).
    #[serde(default)]
    pub invalidation_reason: Option<String>,
    /// A standby's copy of the primary's slot (17 and later).
    #[serde(default)]
    pub synced: Option<bool>,
    /// It can follow its primary to a standby (17 and later).
    #[serde(default)]
    pub failover: Option<bool>,
}

impl SlotReading {
    /// Reads the row as `to_jsonb` prints it: so no query need know the server's version.
    pub fn from_json(row: &str, current_wal: Lsn) -> Result<Self, serde_json::Error> {
        let mut reading: Self = serde_json::from_str(row)?;
        if reading.restart_lsn > Lsn::ZERO {
            reading.retained_wal_bytes = current_wal.bytes_since(reading.restart_lsn);
        }
        Ok(reading)
    }

    /// Cause and remedy when the server has invalidated the slot: it will never stream again.
    pub fn loss(&self, slot: &str) -> Option<String> {
        let lost = self.wal_status == Some(WalStatus::Lost);
        let invalidated = self.invalidation_reason.is_some() || self.conflicting == Some(true);
        let cause = match self.invalidation_reason.as_deref() {
            Some("wal_removed") => "it held back more WAL than max_slot_wal_keep_size allows, so the WAL was removed",
            Some("idle_timeout") => "nobody streamed from it for idle_replication_slot_timeout",
            Some("rows_removed") => "rows of the catalog that it needs were vacuumed away (conflict with recovery)",
            Some("wal_level_insufficient") => "wal_level was lowered on the primary",
            Some(_) => "the server says why in pg_replication_slots.invalidation_reason",
            None if self.conflicting == Some(true) => "it conflicted with recovery on this standby",
            None => "it held back more WAL than max_slot_wal_keep_size allows, so the WAL was removed",
        };
        (lost || invalidated).then(|| {
            format!(
                "replication slot \"{slot}\" is invalidated: {cause}; events that were committed and not yet published \
                 will not arrive through it; compare the outbox table with the topics, drop the slot \
                 (SELECT pg_drop_replication_slot('{slot}')), raise the limit, and create it with `walpost init`"
            )
        })
    }

    fn risk(&self, slot: &str) -> Option<String> {
        (self.wal_status == Some(WalStatus::Unreserved)).then(|| {
            format!(
                "replication slot \"{slot}\" is about to be lost: it holds back more WAL than max_slot_wal_keep_size \
                 allows, and the next checkpoint removes it; raise max_slot_wal_keep_size now, or let walpost catch up"
            )
        })
    }
}

/// `pg_replication_slots.wal_status`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WalStatus {
    /// Within `max_wal_size`.
    Reserved,
    /// More than that, kept for the slot.
    Extended,
    /// At risk: the next checkpoint may remove what it needs.
    Unreserved,
    /// Gone.
    Lost,
}

impl WalStatus {
    /// As Postgres prints it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Extended => "extended",
            Self::Unreserved => "unreserved",
            Self::Lost => "lost",
        }
    }
}

impl fmt::Display for WalStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn lsn<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Lsn, D::Error> {
    let text: Option<String> = Option::deserialize(deserializer)?;
    text.map_or(Ok(Lsn::ZERO), |text| text.parse().map_err(serde::de::Error::custom))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW_14: &str = r#"{"slot_name": "walpost", "plugin": "pgoutput", "slot_type": "logical", "datoid": 5,
        "database": "app", "temporary": false, "active": true, "active_pid": 42, "xmin": null, "catalog_xmin": "700",
        "restart_lsn": "0/1000", "confirmed_flush_lsn": "0/1800", "wal_status": "reserved", "safe_wal_size": null,
        "two_phase": false}"#;

    #[test]
    fn a_row_of_any_version_is_read() {
        let reading = SlotReading::from_json(ROW_14, Lsn(0x2000)).unwrap();
        assert_eq!(reading.retained_wal_bytes, 0x1000);
        assert_eq!(reading.confirmed_lsn, Lsn(0x1800));
        assert_eq!((reading.active_pid, reading.safe_wal_bytes, reading.synced), (Some(42), None, None));
        assert_eq!(SlotState::Present(reading).trouble("walpost"), None);
        let row =
            ROW_14.replace(r#""two_phase": false"#, r#""two_phase": false, "conflicting": false, "synced": true"#);
        assert_eq!(SlotReading::from_json(&row, Lsn(0)).unwrap().synced, Some(true));
    }

    #[test]
    fn a_slot_whose_creation_is_under_way_has_no_position_yet() {
        let row = ROW_14.replace(r#""0/1800""#, "null").replace(r#""0/1000""#, "null").replace(r#""reserved""#, "null");
        let reading = SlotReading::from_json(&row, Lsn(0x2000)).unwrap();
        assert_eq!((reading.confirmed_lsn, reading.retained_wal_bytes), (Lsn::ZERO, 0));
    }

    #[test]
    fn an_invalidated_slot_is_lost_and_the_reason_names_cause_and_remedy() {
        let row = ROW_14
            .replace("reserved", "lost")
            .replace(r#""two_phase""#, r#""invalidation_reason": "idle_timeout", "two_phase""#);
        let reading = SlotReading::from_json(&row, Lsn(0)).unwrap();
        let loss = SlotState::Present(reading).loss("walpost").unwrap();
        assert!(loss.contains("idle_replication_slot_timeout") && loss.contains("walpost init"), "{loss}");
    }

    #[test]
    fn a_slot_at_risk_is_trouble_but_no_loss() {
        let row = ROW_14.replace("reserved", "unreserved");
        let state = SlotState::Present(SlotReading::from_json(&row, Lsn(0)).unwrap());
        assert_eq!(state.loss("walpost"), None);
        assert!(state.trouble("walpost").unwrap().contains("max_slot_wal_keep_size"));
    }
}
