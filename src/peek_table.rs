//! `walpost peek --from-table`: the records that rows of the outbox tables would make now.
//!
//! They are read in one snapshot, as a backfill reads them, and stand at no position of the log.

use super::{PeekError, Peeked, ShopWindow};
use crate::{
    backfill::BackfillError,
    clock,
    config::{Backfill, Config, OutboxConfig},
    event::Position,
    lsn::Lsn,
    pipeline::{Open, Stages},
    source::snapshot::{Selection, Snapshot},
};

/// At most as many as the window takes.
pub(super) async fn run(
    config: &Config,
    condition: &str,
    mut stages: Stages,
    mut window: ShopWindow,
) -> Result<Vec<Peeked>, PeekError> {
    for outbox in &config.outboxes {
        let failed = |source| PeekError::Rows { table: outbox.table.to_string(), source };
        let mut snapshot = Snapshot::connect(&config.postgres.conninfo).await.map_err(failed)?;
        snapshot.begin(None).await.map_err(failed)?;
        // how many there are does not matter to whoever reads from the first one
        if !snapshot.add(&selection(outbox, condition), 1).await.map_err(failed)? {
            return Err(BackfillError::NoSuchTable(outbox.table.to_string()).into());
        }
        for relation in snapshot.relations() {
            stages.describe(relation, Lsn(u64::MAX))?;
        }
        snapshot.seek(0).await.map_err(failed)?;
        while !window.is_full() && !snapshot.is_exhausted() {
            let Some((relation, row)) = snapshot.peek().map_err(failed)? else {
                if !snapshot.is_exhausted() {
                    snapshot.drive().await.map_err(failed)?;
                }
                continue;
            };
            let open = Open { commit_us: clock::unix_us(), position: Position::default(), row: None };
            let outcome = stages.publish(relation.oid, row, open, &mut window);
            window.show(outcome, Position::default())?;
            snapshot.consume();
        }
    }
    Ok(window.shown)
}

fn selection(outbox: &OutboxConfig, condition: &str) -> Selection {
    Selection {
        table: outbox.table.clone(),
        id: outbox.columns.id.clone(),
        timestamp: outbox.columns.timestamp.name.clone(),
        condition: match Backfill::parse(condition) {
            Backfill::Where(condition) => Some(condition),
            Backfill::All | Backfill::None => None,
        },
    }
}
