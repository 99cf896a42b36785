//! [`Upkeep`]: the task of `walpost run` that keeps the record of what was delivered, and deletes by it on a schedule.
//!
//! It has a link of its own, open while there is something to do. Whatever fails is tried again later: nothing depends
//! on it but the size of the table.

mod passes;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_postgres::Client;

use self::passes::Fault;
use super::{
    Witness,
    fence::{Fence, Look, Standing},
    late::Late,
    pass::{self, PassError, Plan, Walk, pause},
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
/// Time from one look for late partitions to the next, while none flow.
const WATCH_INTERVAL: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_mins(1);

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
    /// When late partitions are looked for, though nothing is delivered.
    next_watch: Instant,
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
            next_watch: Instant::now(),
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
        let unrecorded = self.witness.begun().is_some() && (self.is_behind() || !self.fence.is_idle());
        let watch_is_due = self.witness.begun().is_some() && self.late.is_watching() && now >= self.next_watch;
        let record_is_due = now >= self.next_record && unrecorded || watch_is_due;
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
            self.next_watch = Instant::now() + WATCH_INTERVAL;
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
