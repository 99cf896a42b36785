//! [`Upkeep`]: the task of `walpost run` that keeps the record of what was delivered, and deletes by it on a schedule.
//!
//! It has a link of its own, open while there is something to do. Whatever fails is tried again later: nothing depends
//! on it but the size of the table.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_postgres::Client;

use super::{
    Witness,
    fence::{Fence, Look, Standing},
    keeping::{Keeper, Kept},
    late::Late,
    pass::{self, Batch, PassError, Plan, Walk, pause},
    record::{self, Record, RecordError},
};
use crate::{
    backoff::Backoff,
    config::{Config, RetentionConfig},
    error::chain,
    lsn::Lsn,
    observe::{Health, Metrics, Progress},
    sink::Ids,
    source::slot,
    sql::{self, SqlError},
    supervisor::Shared,
};

/// How often it is seen whether there is something to do.
const TICK: Duration = Duration::from_millis(500);
/// Time from one entry in the record to the next, while events flow.
const RECORD_INTERVAL: Duration = Duration::from_secs(5);
/// How long the slot's last position may take to reach the server at a stop.
const LAST_CONFIRM: Duration = Duration::from_secs(1);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_mins(1);

const ROWS_STAY: &str = "delivered rows of a table are not deleted";
const PARTITIONS_STAY: &str = "partitions of a table are not all kept as configured";

/// Why a turn failed.
#[derive(Debug, thiserror::Error)]
enum UpkeepError {
    #[error(transparent)]
    Link(#[from] SqlError),
    #[error("ask the server")]
    Sql(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Pass(#[from] PassError),
}

/// What it means for a table, and why.
type Fault = (&'static str, String);

/// Keeps the record, and deletes.
pub struct Upkeep {
    config: Config,
    record: Record,
    metrics: Arc<Metrics>,
    progress: Arc<Progress>,
    witness: Arc<Witness>,
    link: Option<Client>,
    fence: Fence,
    late: Late,
    health: Arc<Health>,
    /// It is known where the last process has left the slot.
    knows_where_it_was_left: bool,
    /// Dead letters that are not in the record yet.
    buried: Ids,
    /// Transactions delivered, at the last look.
    seen: u64,
    next_record: Instant,
    next_pass: Instant,
    /// When partitions are created next, should the pass still go on then.
    next_creation: Instant,
    /// The tables that are still to be walked through in this pass, and rows deleted by it.
    pass: Option<(Vec<(Plan, Walk)>, u64)>,
    backoff: Backoff,
    /// What was last complained about.
    told: String,
    /// … and about tables: what that means, and why.
    faults: Vec<Fault>,
}

impl Upkeep {
    /// For one run.
    pub fn new(config: &Config, shared: &Shared) -> Self {
        Self {
            record: Record::new(config),
            config: config.clone(),
            metrics: Arc::clone(&shared.metrics),
            progress: Arc::clone(&shared.progress),
            witness: Arc::clone(&shared.witness),
            link: None,
            fence: Fence::default(),
            late: Late::default(),
            health: Arc::clone(&shared.health),
            knows_where_it_was_left: false,
            buried: Ids::default(),
            seen: 0,
            next_record: Instant::now(),
            next_pass: Instant::now(),
            next_creation: Instant::now(),
            pass: None,
            backoff: Backoff::new(FIRST_WAIT, LONGEST_WAIT),
            told: String::new(),
            faults: Vec::new(),
        }
    }

    /// Runs from the moment that tables and slot are there until it is told to stop; then makes the last entry.
    pub async fn run(mut self, mut prepared: watch::Receiver<bool>, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            ready = prepared.wait_for(|prepared| *prepared) => if ready.is_err() { return },
        }
        loop {
            let interrupted = tokio::select! {
                // whatever is under way: the process waits
                biased;
                _ = stop.wait_for(|stop| *stop) => true,
                () = self.turn() => false,
            };
            if interrupted {
                self.link = None; // a statement may be half way
                return self.finish().await;
            }
        }
    }

    async fn turn(&mut self) {
        let wait = match self.work().await {
            Ok(wait) => wait,
            Err(error) => {
                self.complain(&error);
                (self.link, self.pass) = (None, None);
                self.backoff.next_wait()
            }
        };
        sleep(wait).await;
    }

    /// Does what is due; says how long there is nothing to do.
    async fn work(&mut self) -> Result<Duration, UpkeepError> {
        let now = Instant::now();
        let pass_is_due = self.config.retention.is_some() && self.pass.is_none() && now >= self.next_pass;
        let unrecorded =
            self.witness.begun().is_some() && (self.is_behind() || !self.fence.is_idle() || self.late.is_watching());
        let record_is_due = now >= self.next_record && unrecorded;
        if !pass_is_due && !record_is_due && self.pass.is_none() {
            if !unrecorded && self.config.retention.is_none() {
                self.link = None;
            }
            return Ok(TICK);
        }
        let client = self.open().await?;
        let outcome = self.work_over(&client, pass_is_due, record_is_due).await;
        self.link = Some(client);
        outcome
    }

    async fn work_over(
        &mut self,
        client: &Client,
        pass_is_due: bool,
        record_is_due: bool,
    ) -> Result<Duration, UpkeepError> {
        if pass_is_due || record_is_due {
            self.next_record = Instant::now() + self.record_interval();
            self.keep_record(client).await?;
            if self.config.retention.is_none() {
                self.backoff.reset();
            }
        }
        if let Some(retention) = self.config.retention.filter(|_| pass_is_due) {
            self.next_pass = Instant::now() + retention.interval;
            self.begin_pass(client, &retention).await?;
        }
        // a pass through many rows takes its time, and partitions are needed meanwhile; what hinders it is told in each pass
        let makes_some = |retention: &RetentionConfig| retention.partitions_ahead.is_some();
        if let Some(retention) =
            self.config.retention.filter(makes_some).filter(|_| Instant::now() >= self.next_creation)
        {
            self.create_partitions(client, &retention).await?;
        }
        let began = Instant::now();
        if self.pass.is_some() { self.walk(client).await.map(|()| pause(began.elapsed())) } else { Ok(TICK) }
    }

    fn record_interval(&self) -> Duration {
        self.config.retention.map_or(RECORD_INTERVAL, |retention| retention.interval.min(RECORD_INTERVAL))
    }

    fn is_behind(&self) -> bool {
        self.metrics.transactions.get() != self.seen || self.buried != Ids::default()
    }

    /// The link, with what it needs; a new one knows only what the record says.
    async fn open(&mut self) -> Result<Client, UpkeepError> {
        if let Some(client) = self.link.take().filter(|client| !client.is_closed()) {
            return Ok(client);
        }
        let client = sql::connect(&self.config.postgres.conninfo).await?;
        client.batch_execute(pass::SETTINGS).await?;
        if let Some(outbox) = self.config.outboxes.first() {
            self.record.inspect(&client, &outbox.table).await?;
        }
        self.fence = self.record.load(&client).await?;
        Ok(client)
    }

    /// An entry in the record: what the last look proves by now; then another look.
    async fn keep_record(&mut self, client: &Client) -> Result<(), UpkeepError> {
        let Some((standing, delivered)) = self.standing(client).await? else { return Ok(()) };
        self.compare(client, standing.begun).await?;
        self.keep_dead(client).await?;
        let grown = self.fence.prove(standing);
        self.record.save(client, &grown).await?;
        let Some(look) = record::look(client, &self.config).await? else { return Ok(()) };
        let next = look.next;
        self.observe(client, look, standing).await?;
        if delivered != self.seen {
            self.fence.want(next);
            self.seen = delivered;
        }
        Ok(())
    }

    /// Holds where the stream has begun against where the last process has left the slot.
    async fn compare(&mut self, client: &Client, begun: Lsn) -> Result<(), UpkeepError> {
        if self.knows_where_it_was_left {
            return Ok(());
        }
        let left = self.record.take_left(client).await?;
        self.knows_where_it_was_left = true;
        if let Some(left) = left.filter(|left| begun > *left) {
            let reason = slot::was_moved(left, begun);
            tracing::error!(slot = self.record.slot(), %left, found = %begun, "{reason}");
            self.health.remember(reason);
        }
        Ok(())
    }

    /// Where the stream and the slot stand, and how many transactions were delivered before. `None` while there is no
    /// stream or no slot.
    async fn standing(&self, client: &Client) -> Result<Option<(Standing, u64)>, UpkeepError> {
        let Some(begun) = self.witness.begun() else { return Ok(None) };
        let delivered = self.metrics.transactions.get();
        let confirmed = self.progress.confirmed_lsn();
        if self.witness.begun() != Some(begun) {
            return Ok(None); // a session began just now, and what is confirmed may be its
        }
        let slot = record::slot(client, self.record.slot()).await?;
        Ok(slot.map(|slot| (Standing { begun, confirmed, slot: slot.confirmed }, delivered)))
    }

    async fn observe(&mut self, client: &Client, mut look: Look, standing: Standing) -> Result<(), UpkeepError> {
        self.late.attend((&mut look, standing), &self.witness);
        if self.buried.incomplete {
            self.fence.forget();
        }
        let fresh = self.fence.observe(look, standing);
        self.record.save(client, &fresh).await?;
        if self.buried.incomplete && !fresh.is_empty() {
            tracing::warn!(
                "dead letters without an id, or too many of them: delivered rows of the same time stay as well"
            );
            self.buried.incomplete = false;
        }
        Ok(())
    }

    /// Notes the dead letters, before anything of their time can be called delivered: the position was read before.
    async fn keep_dead(&mut self, client: &Client) -> Result<(), UpkeepError> {
        let taken = self.witness.buried.take();
        self.buried.ids.extend(taken.ids);
        self.buried.incomplete |= taken.incomplete;
        self.record.save_dead(client, &self.buried).await?;
        self.buried.ids.clear();
        if self.buried.incomplete {
            self.fence.forget();
        }
        Ok(())
    }

    async fn begin_pass(&mut self, client: &Client, retention: &RetentionConfig) -> Result<(), UpkeepError> {
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
    async fn create_partitions(
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
    async fn walk(&mut self, client: &Client) -> Result<(), UpkeepError> {
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
        if !std::mem::take(&mut self.told).is_empty() {
            tracing::info!("retention works again");
        }
        Ok(())
    }

    /// The last entry: where the next process may go on from. A failure costs rows that stay, and nothing else.
    async fn finish(&mut self) {
        if let Err(error) = self.last_entry().await {
            tracing::debug!(error = chain(&error), "no last entry in the record of what was delivered");
        }
    }

    async fn last_entry(&mut self) -> Result<(), UpkeepError> {
        let client = self.open().await?;
        let deadline = Instant::now() + LAST_CONFIRM;
        let standing = loop {
            let Some((standing, _)) = self.standing(&client).await? else { return Ok(()) };
            let seen = record::slot(&client, self.record.slot()).await?;
            let is_left = standing.slot >= standing.confirmed && seen.is_some_and(|slot| !slot.active);
            if is_left || Instant::now() >= deadline {
                break standing;
            }
            sleep(Duration::from_millis(20)).await;
        };
        self.compare(&client, standing.begun).await?;
        self.record.leave(&client).await?;
        self.keep_dead(&client).await?;
        if self.buried.incomplete {
            return Ok(());
        }
        let closed = self.fence.close(standing.begun, standing.confirmed.min(standing.slot));
        self.record.save(&client, &closed).await?;
        Ok(())
    }

    /// Once per cause. Without `[retention]` nobody waits for anything.
    fn complain(&mut self, error: &UpkeepError) {
        let text = chain(error);
        if text == self.told {
            return;
        }
        if self.config.retention.is_some() {
            tracing::warn!(error = text, "delivered rows are not deleted; trying again until it works");
        } else {
            tracing::debug!(error = text, "no record of what is delivered");
        }
        self.told = text;
    }
}
