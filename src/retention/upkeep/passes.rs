//! Passes through the tables: partitions are kept, and delivered rows deleted.

use std::mem::take;

use tokio::time::Instant;
use tokio_postgres::Client;

use super::{
    super::{
        keeping::{Keeper, Kept},
        pass::{self, Batch, PassError, Plan, Walk},
    },
    Upkeep, UpkeepError,
};
use crate::config::RetentionConfig;

const ROWS_STAY: &str = "delivered rows of a table are not deleted";
const PARTITIONS_STAY: &str = "partitions of a table are not all kept as configured";

/// What it means for a table, and why.
pub(super) type Fault = (&'static str, String);

impl Upkeep {
    pub(super) async fn begin_pass(&mut self, client: &Client, retention: &RetentionConfig) -> Result<(), UpkeepError> {
        let (mut tables, mut faults) = self.create_partitions(client, retention).await?;
        let (mut walks, mut dropped) = (Vec::new(), 0);
        while let Some((plan, mut keeper)) = tables.pop() {
            keeper.drop(client, &plan, false).await?;
            self.tell_of_partitions(&mut keeper.kept);
            let kept = keeper.kept;
            dropped += kept.rows();
            let refused = kept.unfit.into_iter().chain(kept.uncreated).chain(kept.refused);
            faults.extend(refused.map(|error| (PARTITIONS_STAY, error.to_string())));
            let walk = Walk::new(&plan, retention.batch, kept.spared);
            walks.push((plan, walk));
        }
        for (what, error) in faults.iter().filter(|fault| !self.faults.contains(fault)) {
            tracing::warn!(error, "{what}; looking again in each pass");
        }
        self.faults = faults;
        self.pass = Some((walks, dropped));
        Ok(())
    }

    /// Creates the partitions to come, of all tables, before the rows of one are looked at. Returns the tables that can be pruned,
    /// and why others cannot.
    pub(super) async fn create_partitions(
        &mut self,
        client: &Client,
        retention: &RetentionConfig,
    ) -> Result<(Vec<(Plan, Keeper)>, Vec<Fault>), UpkeepError> {
        self.next_creation = Instant::now() + retention.interval;
        let (mut tables, mut faults) = (Vec::new(), Vec::new());
        for outbox in &self.config.outboxes {
            match Plan::make(client, outbox, retention, &self.record).await {
                Ok(plan) => {
                    let mut keeper = Keeper::start(client, (outbox, &plan), (retention, &self.record)).await?;
                    keeper.create(client, &plan).await?;
                    self.tell_of_partitions(&mut keeper.kept);
                    tables.push((plan, keeper));
                }
                Err(error @ PassError::Unfit { .. }) => faults.push((ROWS_STAY, error.to_string())),
                Err(error) => return Err(error.into()),
            }
        }
        Ok((tables, faults))
    }

    /// Of those that are created once.
    fn tell_of_partitions(&self, kept: &mut Kept) {
        for partition in kept.created.drain(..) {
            tracing::info!(partition, "created a partition of the outbox");
        }
        for (partition, rows) in &kept.dropped {
            tracing::info!(partition, rows, "dropped a partition: all its rows were delivered");
        }
        self.metrics.pruned_rows.inc_by(kept.rows());
    }

    /// One batch.
    pub(super) async fn walk(&mut self, client: &Client) -> Result<(), UpkeepError> {
        let Some((mut walks, mut deleted)) = self.pass.take() else { return Ok(()) };
        let Some((plan, walk)) = walks.last_mut() else { return self.end_pass(client, deleted).await };
        let (rows, over) = match walk.step(client, plan).await? {
            Batch::Deleted(rows) => (rows, false),
            Batch::Last(rows) => (rows, true),
            Batch::NotOurTurn => (0, true),
        };
        self.metrics.pruned_rows.inc_by(rows);
        deleted += rows;
        if over {
            walks.pop();
        }
        self.pass = Some((walks, deleted));
        Ok(())
    }

    async fn end_pass(&mut self, client: &Client, deleted: u64) -> Result<(), UpkeepError> {
        let mut rows = 0;
        for outbox in &self.config.outboxes {
            rows += pass::rows(client, outbox).await?;
        }
        self.metrics.outbox_rows.with_label_values::<&str>(&[]).set(i64::try_from(rows).unwrap_or(i64::MAX));
        if let Some(retention) = &self.config.retention {
            pass::forget_dead(client, &self.record, retention).await?;
        }
        tracing::debug!(deleted, rows, "retention pass");
        self.backoff.reset();
        if !take(&mut self.told).is_empty() {
            tracing::info!("retention works again");
        }
        Ok(())
    }
}
