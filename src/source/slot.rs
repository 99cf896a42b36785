//! The slot before the stream: is it there, is it ours, can it be read; and its creation.
//!
//! A slot is created once, on purpose, and never again unasked: a new slot in place of a lost one would hide a gap. What is
//! older than the slot, and so will never be streamed, is seen exactly in the snapshot that the server exports for the slot's
//! first position.

use super::{SourceError, Wire};
use crate::{
    fault,
    lsn::Lsn,
    sql::{quote_identifier, quote_literal},
};

/// What a look at `pg_replication_slots` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotFound {
    /// Where the server would resume.
    pub confirmed: Lsn,
    /// The process that holds it, if any.
    pub active_pid: Option<String>,
    /// The cluster's system identifier, which a standby shares with its primary.
    pub system: String,
}

/// Looks at the slot through the replication connection itself. Fails with [`SourceError::SlotMissing`],
/// [`SourceError::SlotLost`] or [`SourceError::SlotForeign`].
pub async fn look(wire: &mut Wire, slot: &str) -> Result<SlotFound, SourceError> {
    let version = server_version(wire).await?;
    let invalid = match version {
        170_000.. => "invalidation_reason",
        160_000.. => "CASE WHEN conflicting THEN 'conflict with recovery' END",
        _ => "NULL",
    };
    let sql = format!(
        "SELECT slot_type, plugin, database = current_database(), temporary, two_phase, wal_status, {invalid}, \
         confirmed_flush_lsn, active_pid, database FROM pg_replication_slots WHERE slot_name = {}",
        quote_literal(slot)
    );
    let identity = wire.query("IDENTIFY_SYSTEM").await?;
    let system = identity.first().and_then(|row| row.first()).and_then(Option::as_deref).unwrap_or_default().to_owned();
    let rows = wire.query(&sql).await?;
    let Some(row) = rows.first() else { return Err(SourceError::SlotMissing(slot.to_owned())) };
    let text = |index: usize| row.get(index).and_then(Option::as_deref);
    let is = |index: usize| text(index) == Some("t");
    let foreign = |reason: String| Err(SourceError::SlotForeign { slot: slot.to_owned(), reason });
    if text(0) != Some("logical") {
        return foreign("it is a physical slot".into());
    }
    if text(1) != Some("pgoutput") {
        return foreign(format!("its output plugin is {:?}, walpost reads pgoutput", text(1).unwrap_or_default()));
    }
    if !is(2) {
        return foreign(format!("it belongs to database {:?}", text(9).unwrap_or_default()));
    }
    if is(3) {
        return foreign("it is temporary and would vanish with its session".into());
    }
    if is(4) {
        return foreign("it was created with two_phase, which walpost does not read".into());
    }
    if let Some(reason) = text(6).or((text(5) == Some("lost")).then_some("wal_removed")) {
        return Err(SourceError::SlotLost { slot: slot.to_owned(), reason: reason.to_owned() });
    }
    let Some(confirmed) = text(7).and_then(|lsn| lsn.parse().ok()) else {
        return Err(SourceError::SlotUnfinished(slot.to_owned()));
    };
    Ok(SlotFound { confirmed, active_pid: text(8).map(str::to_owned), system })
}

/// What it means that the slot stands further than it was left.
pub fn was_moved(left: Lsn, found: Lsn) -> String {
    format!(
        "the slot was moved from {left} to {found} while walpost was away, by hand or by making it anew: events in between may not \
         have been published"
    )
}

/// The same for a process that may have used it before: with `held`, a slot that is missing is lost, and `system` is the
/// cluster that it was in, which it must still be in; filled in at the first look.
pub async fn look_again(
    wire: &mut Wire,
    slot: &str,
    held: bool,
    system: &mut Option<String>,
) -> Result<SlotFound, SourceError> {
    let found = match look(wire, slot).await {
        Err(SourceError::SlotMissing(slot)) if held => {
            let reason = "it was dropped while walpost used it".to_owned();
            return Err(SourceError::SlotLost { slot, reason });
        }
        found => found?,
    };
    let before = system.get_or_insert_with(|| found.system.clone());
    if *before != found.system {
        return Err(SourceError::OtherSystem { before: before.clone(), now: found.system });
    }
    Ok(found)
}

/// The server's version as a number, for example 150018.
pub async fn server_version(wire: &mut Wire) -> Result<u32, SourceError> {
    let rows = wire.query("SHOW server_version_num").await?;
    let text = rows.first().and_then(|row| row.first()).and_then(Option::as_deref);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| SourceError::Protocol("no server_version_num".into()))
}

/// A slot that now exists, and the snapshot at its first position. The snapshot lives until the next command on the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    /// Everything committed from here on will be streamed.
    pub consistent_point: Lsn,
    /// The name by which another connection can take it over.
    pub snapshot: String,
}

/// Creates a slot. The publication must exist already.
///
/// The server waits for every transaction that runs anywhere in the cluster, so this may take as long as they do.
pub async fn create(wire: &mut Wire, slot: &str) -> Result<Created, SourceError> {
    tracing::info!(slot, "creating the replication slot: this waits for all running transactions of the cluster");
    // since 17 a slot can follow its primary to a standby that synchronizes slots
    let options =
        if server_version(wire).await? >= 170_000 { "(SNAPSHOT 'export', FAILOVER true)" } else { "EXPORT_SNAPSHOT" };
    let command = format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput {options}", quote_identifier(slot));
    let rows = wire.query(&command).await?;
    let text = |index: usize| rows.first().and_then(|row| row.get(index)).and_then(Option::as_deref);
    let (Some(consistent_point), Some(snapshot)) = (text(1).and_then(|lsn| lsn.parse().ok()), text(2)) else {
        return Err(SourceError::Protocol("an answer to CREATE_REPLICATION_SLOT without its columns".into()));
    };
    tracing::info!(slot, lsn = %consistent_point, "replication slot created");
    Ok(Created { consistent_point, snapshot: snapshot.to_owned() })
}

/// Drops a slot; one that is gone already is no error.
pub async fn drop(wire: &mut Wire, slot: &str) -> Result<(), SourceError> {
    match wire.query(&format!("DROP_REPLICATION_SLOT {}", quote_identifier(slot))).await {
        Err(SourceError::Server(error)) if error.code == UNDEFINED_OBJECT => Ok(()),
        dropped => dropped.map(|_| ()),
    }
}

const UNDEFINED_OBJECT: &str = "42704";

/// A slot beside another, in short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Where the server would resume; `None` while it is being created.
    pub confirmed: Option<Lsn>,
    /// It follows its primary to a standby.
    pub failover: bool,
}

/// Looks at a slot, over any connection; `None` when there is none. Fails with [`SourceError::SlotLost`] or
/// [`SourceError::SlotForeign`].
pub async fn seen(wire: &mut Wire, slot: &str) -> Result<Option<Seen>, SourceError> {
    // the column `failover` is there since 17
    let sql = format!(
        "SELECT confirmed_flush_lsn, wal_status, to_jsonb(s) ->> 'failover', \
         coalesce(plugin = 'pgoutput' AND database = current_database(), false) FROM pg_replication_slots s \
         WHERE slot_name = {}",
        quote_literal(slot)
    );
    let rows = wire.query(&sql).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let text = |index: usize| row.get(index).and_then(Option::as_deref);
    if text(3) != Some("t") {
        let reason = "it is no pgoutput slot of this database".to_owned();
        return Err(SourceError::SlotForeign { slot: slot.to_owned(), reason });
    }
    if text(1) == Some("lost") {
        return Err(SourceError::SlotLost { slot: slot.to_owned(), reason: "its WAL was removed".to_owned() });
    }
    Ok(Some(Seen {
        confirmed: text(0).and_then(|lsn| lsn.parse().ok()),
        failover: text(2).is_some_and(|failover| failover == "true"),
    }))
}

/// Puts `slot` in the place of `marker`, at the same position. May be repeated after it was interrupted anywhere.
pub async fn replace(wire: &mut Wire, marker: &str, slot: &str) -> Result<(), SourceError> {
    let Some(before) = seen(wire, marker).await? else { return Ok(()) };
    let mut follows = seen(wire, slot).await?.map(|now| now.failover);
    if follows.is_none() {
        let (from, to) = (quote_literal(marker), quote_literal(slot));
        wire.query(&format!("SELECT pg_copy_logical_replication_slot({from}, {to})")).await?;
        follows = seen(wire, slot).await?.map(|now| now.failover);
    }
    fault::point("in_replace");
    // a copy does not follow its primary, whatever the original does
    if before.failover && follows == Some(false) {
        wire.query(&format!("ALTER_REPLICATION_SLOT {} (FAILOVER true)", quote_identifier(slot))).await?;
    }
    drop(wire, marker).await
}
