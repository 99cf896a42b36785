//! [`Plan`]: which rows, by the configuration; and what is said about the rest.

use tokio_postgres::Client;

use super::{BackfillError, marker_of};
use crate::{
    config::{Backfill, Config, OutboxConfig},
    conninfo::ConnInfo,
    source::snapshot::{Selection, Snapshot},
};

/// Which rows are published, and for which slot.
pub(super) struct Plan {
    pub(super) conninfo: ConnInfo,
    /// Of all outboxes: where the record of what was delivered is.
    pub(super) config: Config,
    pub(super) slot: String,
    /// The name of the slot until all are published; `None` when they are published once more beside a stream.
    pub(super) marker: Option<String>,
    /// The outboxes with rows to publish.
    pub(super) outboxes: Vec<OutboxConfig>,
    /// Rows a second at most; 0 for no limit.
    pub(super) rate: u32,
}

impl Plan {
    pub(super) fn new(config: &Config, outboxes: Vec<OutboxConfig>) -> Self {
        let slot = config.postgres.slot.clone();
        let (marker, rate) = (Some(marker_of(&slot)), config.limits.backfill_rate);
        Self { conninfo: config.postgres.conninfo.clone(), config: config.clone(), slot, marker, outboxes, rate }
    }

    /// What the configuration wants published before the stream begins.
    pub(super) fn before_stream(config: &Config) -> Self {
        let wanted = |outbox: &&OutboxConfig| matches!(outbox.backfill, Some(Backfill::All | Backfill::Where(_)));
        Self::new(config, config.outboxes.iter().filter(wanted).cloned().collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.outboxes.is_empty()
    }

    /// Has the server parse the conditions, before anything is created for them. Prepared, so that each is one statement.
    pub(super) async fn validate(&self, client: &Client) -> Result<(), BackfillError> {
        for outbox in self.outboxes.iter().filter(|outbox| matches!(outbox.backfill, Some(Backfill::Where(_)))) {
            let refused = |source| BackfillError::Condition { table: outbox.table.to_string(), source };
            let prepared = client.prepare(&format!("SELECT {}", selection(outbox).from())).await;
            if !prepared.map_err(|error| refused(Box::new(error)))?.params().is_empty() {
                return Err(refused("it has parameters ($1), and there are no values for them".into()));
            }
        }
        Ok(())
    }
}

/// The rows that the configuration wants of an outbox.
pub(super) fn selection(outbox: &OutboxConfig) -> Selection {
    let condition = match &outbox.backfill {
        Some(Backfill::Where(condition)) => Some(condition.clone()),
        _ => None,
    };
    let columns = &outbox.columns;
    Selection {
        table: outbox.table.clone(),
        id: columns.id.clone(),
        timestamp: columns.timestamp.name.clone(),
        condition,
    }
}

/// Fails early where rows are there already and nobody said what shall become of them: a slot that is created first and
/// dropped after a long count could be left behind by a crash in between.
pub(super) async fn refuse_obvious(client: &Client, outboxes: &[OutboxConfig]) -> Result<(), BackfillError> {
    for outbox in outboxes.iter().filter(|outbox| outbox.backfill.is_none()) {
        let ask = async |sql: String| client.query_one(&sql, &[]).await.map_err(BackfillError::Count);
        if ask(format!("SELECT EXISTS (SELECT FROM {})", outbox.table)).await?.get(0) {
            let row = ask(format!("SELECT count(*) FROM {}", outbox.table)).await?;
            refuse_unsaid(outbox, u64::try_from(row.get::<_, i64>(0)).unwrap_or_default())?;
        }
    }
    Ok(())
}

/// Counts the rows that are not to be published: as wanted, or for want of a word about them, which is an error.
pub(super) async fn account_for_others(
    snapshot: &mut Snapshot,
    outboxes: &[OutboxConfig],
) -> Result<(), BackfillError> {
    for outbox in outboxes.iter().filter(|outbox| matches!(outbox.backfill, None | Some(Backfill::None))) {
        let count = snapshot.count(&selection(outbox)).await;
        let count = count.map_err(|source| BackfillError::rows(outbox, source))?;
        refuse_unsaid(outbox, count)?;
        if count > 0 {
            let table = &outbox.table.table;
            tracing::warn!(table, count, "rows older than the slot stay unpublished, as configured");
        }
    }
    Ok(())
}

fn refuse_unsaid(outbox: &OutboxConfig, count: u64) -> Result<(), BackfillError> {
    if outbox.backfill.is_some() || count == 0 {
        return Ok(());
    }
    let table = format!("{}.{}", outbox.table.schema, outbox.table.table);
    Err(BackfillError::OlderRows { table, count })
}
