//! [`Proof`]: what a complete backfill tells retention. Every row of an outbox that was to be published whole, and that its
//! snapshot shows, has been delivered.
//!
//! All transactions below the oldest that ran at the snapshot had ended, so whatever of theirs is in the table was read.
//! What the snapshot does not show comes by the stream: so an entry that goes on from there begins as well, and nothing
//! falls between. The tables are looked at in the snapshot itself: one that was rewritten since has another shape.

use super::plan::Plan;
use crate::{
    config::{Backfill, Config},
    error::chain,
    fault,
    lsn::Lsn,
    retention::{
        fence::{Interval, Leaf},
        record::{self, Record, RecordError},
    },
    sink::{Buried, Ids},
    source::{SourceError, snapshot::Snapshot},
    sql::{self, SqlError},
};

/// The first xid of an ordinary transaction.
const FIRST_XID: u64 = 3;

/// Why there is no entry. Nothing is lost: the rows stay.
#[derive(Debug, thiserror::Error)]
enum ProofError {
    #[error(transparent)]
    Link(#[from] SqlError),
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Taken with the snapshot, entered when the brokers have every row.
pub(super) struct Proof {
    oldest_running: u64,
    leaves: Vec<Leaf>,
    /// Where the stream goes on from; `None` where the rows are published beside one.
    point: Option<Lsn>,
}

impl Proof {
    /// Looks at the tables that are published whole, in the snapshot, after they have been locked by a first query.
    pub(super) async fn look(snapshot: &mut Snapshot, plan: &Plan, point: Option<Lsn>) -> Result<Self, SourceError> {
        let whole = plan.outboxes.iter().filter(|outbox| outbox.backfill == Some(Backfill::All));
        let tables: Vec<_> = whole.map(|outbox| &outbox.table).collect();
        let wire = snapshot.wire();
        let seen = wire.query(record::XIDS).await?;
        let text = |index: usize| seen.first().and_then(|row| row.get(index)?.as_deref());
        let oldest_running = text(0).and_then(|xid| xid.parse().ok()).unwrap_or(0);
        let mut leaves = Vec::new();
        if !tables.is_empty() && text(2) == Some("f") {
            let sql = record::leaves_sql(&plan.config.postgres.publication, &tables, text(3) == Some("t"));
            for row in wire.query(&sql).await? {
                if let [Some(relation), Some(shape), ..] = row.as_slice()
                    && let Ok(relation) = relation.parse()
                {
                    leaves.push(Leaf { relation, shape: shape.clone() });
                }
            }
        }
        Ok(Self { oldest_running, leaves, point })
    }

    /// Enters it in the record: the dead letters first, which have a retention of their own.
    pub(super) async fn enter(&self, config: &Config, buried: &Buried) {
        fault::point("before_proof");
        let ids = buried.take();
        if let Err(error) = self.try_enter(config, &ids).await {
            tracing::debug!(error = chain(&error), "no record of what was backfilled: its rows stay");
            // whoever keeps the record of the stream tries again
            ids.ids.iter().for_each(|id| buried.note(id.as_bytes()));
        }
        fault::point("after_proof");
    }

    async fn try_enter(&self, config: &Config, buried: &Ids) -> Result<(), ProofError> {
        if self.leaves.is_empty() && buried.ids.is_empty() {
            return Ok(());
        }
        let client = sql::connect(&config.postgres.conninfo).await?;
        record::ready(&client, config).await?;
        let record = Record::new(config);
        record.save_dead(&client, buried).await?;
        if buried.incomplete {
            tracing::warn!("dead letters without an id, or too many of them: backfilled rows stay in the table");
            return Ok(());
        }
        Ok(record.save(&client, &self.intervals()).await?)
    }

    fn intervals(&self) -> Vec<Interval> {
        let until = self.oldest_running;
        let entry = |leaf: &Leaf, since, confirmed| Interval { leaf: leaf.clone(), since, until, confirmed };
        let read = self.leaves.iter().map(|leaf| entry(leaf, FIRST_XID, Lsn::ZERO));
        let goes_on = |point: Lsn| self.leaves.iter().map(move |leaf| entry(leaf, until, point));
        read.chain(self.point.into_iter().flat_map(goes_on)).collect()
    }
}
