//! The slot before the stream: is it there, is it ours, can it be read; and its creation.
//!
//! A slot is created once, on purpose, and never again unasked: a new slot in place of a lost one would hide a gap. At its
//! creation the rows that are older than the slot, and so will never be streamed, are counted exactly: in the snapshot that
//! the server exports for the slot's first position.

use super::{SourceError, Wire};
use crate::{
    config::{Backfill, OutboxConfig},
    conninfo::ConnInfo,
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

/// The server's version as a number, for example 150018.
pub async fn server_version(wire: &mut Wire) -> Result<u32, SourceError> {
    let rows = wire.query("SHOW server_version_num").await?;
    let text = rows.first().and_then(|row| row.first()).and_then(Option::as_deref);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| SourceError::Protocol("no server_version_num".into()))
}

/// A slot that now exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    /// Everything committed from here on will be streamed.
    pub consistent_point: Lsn,
    /// Rows that are older than the slot: per outbox, in the order of the configuration.
    pub older_rows: Vec<u64>,
}

/// Why no slot was created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The replication link failed or was refused.
    #[error("create replication slot")]
    Source(#[from] SourceError),
    /// The SQL link failed while counting.
    #[error("count the rows that are older than the slot")]
    Sql(#[from] tokio_postgres::Error),
    /// There are older rows and nobody said what shall become of them. The slot was dropped again.
    #[error(
        "{table} holds {count} rows that are older than the replication slot and so would never be published; \
         say what shall become of them: outbox.backfill = \"none\" leaves them unpublished"
    )]
    OlderRows {
        /// The outbox.
        table: String,
        /// How many rows.
        count: u64,
    },
    /// There are older rows, and publishing them is asked for, which this version cannot do. The slot was dropped again.
    #[error(
        "{table} holds {count} rows that are older than the replication slot, and this version cannot publish them yet; \
         outbox.backfill = \"none\" leaves them unpublished"
    )]
    NoBackfill {
        /// The outbox.
        table: String,
        /// How many rows.
        count: u64,
    },
}

/// Fails early where rows are there already and nobody said what shall become of them: a slot that is created first and
/// dropped after a long count could be left behind by a crash in between.
async fn refuse_obvious(sql: &tokio_postgres::Client, outboxes: &[OutboxConfig]) -> Result<(), CreateError> {
    for outbox in outboxes.iter().filter(|outbox| outbox.backfill != Some(Backfill::None)) {
        let row = sql.query_one(&format!("SELECT EXISTS (SELECT FROM {})", outbox.table), &[]).await?;
        if row.get(0) {
            let row = sql.query_one(&format!("SELECT count(*) FROM {}", outbox.table), &[]).await?;
            let count = u64::try_from(row.get::<_, i64>(0)).unwrap_or_default();
            refuse_unsaid(&[count], std::slice::from_ref(outbox))?;
        }
    }
    Ok(())
}

/// Creates the slot, and counts what is older. The publication must exist already.
///
/// The server waits for every transaction that runs anywhere in the cluster, so this may take as long as they do.
pub async fn create(
    conninfo: &ConnInfo,
    sql: &mut tokio_postgres::Client,
    slot: &str,
    outboxes: &[OutboxConfig],
) -> Result<Created, CreateError> {
    refuse_obvious(sql, outboxes).await?;
    let mut wire = Wire::connect(conninfo).await?;
    tracing::info!(slot, "creating the replication slot: this waits for all running transactions of the cluster");
    // since 17 a slot can follow its primary to a standby that synchronizes slots
    let options = if server_version(&mut wire).await? >= 170_000 {
        "(SNAPSHOT 'export', FAILOVER true)"
    } else {
        "EXPORT_SNAPSHOT"
    };
    let command = format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput {options}", quote_identifier(slot));
    let rows = wire.query(&command).await?;
    let text = |index: usize| rows.first().and_then(|row| row.get(index)).and_then(Option::as_deref);
    let (Some(consistent_point), Some(snapshot)) = (text(1).and_then(|lsn| lsn.parse().ok()), text(2)) else {
        return Err(SourceError::Protocol("an answer to CREATE_REPLICATION_SLOT without its columns".into()).into());
    };
    // the snapshot lives until the next command on `wire`
    let counted = count_older(sql, snapshot, outboxes).await;
    match counted.and_then(|rows| refuse_unsaid(&rows, outboxes).map(|()| rows)) {
        Ok(older_rows) => {
            tracing::info!(slot, lsn = %consistent_point, "replication slot created");
            Ok(Created { consistent_point, older_rows })
        }
        Err(error) => {
            wire.query(&format!("DROP_REPLICATION_SLOT {}", quote_identifier(slot))).await?;
            Err(error)
        }
    }
}

async fn count_older(
    sql: &mut tokio_postgres::Client,
    snapshot: &str,
    outboxes: &[OutboxConfig],
) -> Result<Vec<u64>, CreateError> {
    let transaction = sql
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::RepeatableRead)
        .read_only(true)
        .start()
        .await?;
    transaction.batch_execute(&format!("SET TRANSACTION SNAPSHOT {}", quote_literal(snapshot))).await?;
    let mut counts = Vec::new();
    for outbox in outboxes {
        let row = transaction.query_one(&format!("SELECT count(*) FROM {}", outbox.table), &[]).await?;
        counts.push(u64::try_from(row.get::<_, i64>(0)).unwrap_or_default());
    }
    transaction.rollback().await?;
    Ok(counts)
}

fn refuse_unsaid(counts: &[u64], outboxes: &[OutboxConfig]) -> Result<(), CreateError> {
    for (outbox, count) in outboxes.iter().zip(counts) {
        match &outbox.backfill {
            None if *count > 0 => {
                let table = format!("{}.{}", outbox.table.schema, outbox.table.table);
                return Err(CreateError::OlderRows { table, count: *count });
            }
            Some(Backfill::None) if *count > 0 => {
                tracing::warn!(
                    table = outbox.table.table,
                    count,
                    "rows older than the slot stay unpublished, as configured"
                );
            }
            Some(Backfill::All | Backfill::Where(_)) if *count > 0 => {
                let table = outbox.table.to_string();
                return Err(CreateError::NoBackfill { table, count: *count });
            }
            _ => {}
        }
    }
    Ok(())
}
