//! `walpost prune`: one retention pass now.
//!
//! What was delivered stands in the record that `walpost run` keeps. A `run` that streams is given a moment to bring it
//! up to date; without one, only what is recorded goes.

use std::{fmt::Display, time::Duration};

use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use crate::{
    config::{Config, RetentionConfig},
    retention::{
        keeping::{Keeper, Kept},
        pass::{self, Batch, Census, PassError, Plan, Walk, pause},
        record::{self, Record, RecordError},
    },
    sql::{self, SqlError},
};

/// How long a `run` may take to enter what it has delivered.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long another cleaner may be at the same table.
const TURN: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Why nothing more was deleted.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    /// No SQL link.
    #[error(transparent)]
    Link(#[from] SqlError),
    /// A look failed.
    #[error("look at the replication slot")]
    Slot(#[from] tokio_postgres::Error),
    /// No record of what was delivered.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A table.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// Another cleaner works on.
    #[error("another walpost has been deleting from {table} all the time; try again later")]
    Busy {
        /// The table.
        table: String,
    },
}

/// Deletes, or only counts; `say` gets lines for people.
pub async fn run(
    config: &Config,
    retention: RetentionConfig,
    dry_run: bool,
    mut say: impl FnMut(String),
) -> Result<(), PruneError> {
    let client = sql::connect(&config.postgres.conninfo).await?;
    client.batch_execute(pass::SETTINGS).await?;
    // counting reads every row that is old enough
    client.batch_execute("SET statement_timeout = '10min'").await?;
    let record = Record::new(config);
    if let Some(outbox) = config.outboxes.first() {
        record.inspect(&client, &outbox.table).await?;
    }
    let mut unfit = None;
    for outbox in &config.outboxes {
        let plan = Plan::make(&client, outbox, &retention, &record).await?;
        let census = settled(&client, config, &plan, &mut say).await?;
        let table = &plan.table;
        let mut keeper = Keeper::start(&client, (outbox, &plan), (&retention, &record)).await?;
        if !dry_run {
            keeper.create(&client, &plan).await?;
        }
        keeper.drop(&client, &plan, dry_run).await?;
        let kept = keeper.kept;
        tell_of_partitions(table, &kept, dry_run, &mut say);
        if dry_run {
            let rest = plan.census(&client, &kept.spared).await?.deletable.saturating_sub(kept.rows());
            say(format!("{table}: {rest} rows would be deleted"));
        } else {
            let deleted = walk(&client, &plan, (&retention, &kept.spared)).await?;
            say(format!("{table}: deleted {deleted} rows"));
        }
        explain(table, census, &mut say);
        unfit = unfit.or(kept.unfit);
    }
    // a fault of the table or the role, which must not be overlooked; what could be done is done
    unfit.map_or(Ok(()), |error| Err(error.into()))
}

/// Counts; while someone streams and has not yet entered what is old enough, waits for that.
async fn settled(
    client: &Client,
    config: &Config,
    plan: &Plan,
    say: &mut impl FnMut(String),
) -> Result<Census, PruneError> {
    let deadline = Instant::now() + PATIENCE;
    let name = &config.postgres.slot;
    loop {
        let census = plan.census(client, &[]).await?;
        if census.pending == 0 {
            return Ok(census);
        }
        let slot = record::slot(client, name).await?;
        let streamed = slot.is_some_and(|slot| slot.active);
        if streamed && Instant::now() < deadline {
            sleep(LOOK_INTERVAL).await;
            continue;
        }
        let end: String = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await?.get(0);
        let confirmed: &dyn Display = slot.as_ref().map_or(&"nothing" as &dyn Display, |slot| &slot.confirmed);
        let who = if streamed { "a walpost streams from it" } else { "nobody streams from it: start `walpost run`" };
        say(format!(
            "{}: {} old rows are not known to be delivered yet: slot {name} has confirmed {confirmed}, the WAL ends at {end}; \
             {who}",
            plan.table, census.pending
        ));
        return Ok(census);
    }
}

fn tell_of_partitions(table: &str, kept: &Kept, dry_run: bool, say: &mut impl FnMut(String)) {
    let what = if dry_run { "would drop" } else { "dropped" };
    kept.created.iter().for_each(|name| say(format!("{table}: created partition {name}")));
    for (name, rows) in &kept.dropped {
        say(format!("{table}: {what} partition {name} with {rows} delivered rows"));
    }
    kept.staying.iter().for_each(|name| say(format!("{table}: partition {name} stays: not all of its rows may go")));
    kept.busy.iter().for_each(|name| say(format!("{table}: partition {name} is in use; try again later")));
    kept.uncreated.iter().chain(&kept.refused).for_each(|error| say(error.to_string()));
}

async fn walk(
    client: &Client,
    plan: &Plan,
    (retention, spared): (&RetentionConfig, &[u32]),
) -> Result<u64, PruneError> {
    let mut walk = Walk::new(plan, retention.batch, spared.to_vec());
    let (mut deleted, mut refused) = (0, None);
    loop {
        let began = Instant::now();
        match walk.step(client, plan).await? {
            Batch::Deleted(rows) => (deleted, refused) = (deleted + rows, None),
            Batch::Last(rows) => return Ok(deleted + rows),
            Batch::NotOurTurn if refused.get_or_insert(began).elapsed() > TURN => {
                return Err(PruneError::Busy { table: plan.table.clone() });
            }
            Batch::NotOurTurn => {}
        }
        sleep(pause(began.elapsed())).await;
    }
}

fn explain(table: &str, census: Census, say: &mut impl FnMut(String)) {
    if census.dead_lettered > 0 {
        say(format!(
            "{table}: kept {} rows of dead-lettered events (retention.keep_dead_lettered)",
            census.dead_lettered
        ));
    }
    if census.unproven > 0 {
        say(format!(
            "{table}: kept {} rows of which nobody knows whether they were delivered: they are older than the slot, or were \
             written around a crash of walpost; compare them with the topics, then delete them by hand",
            census.unproven
        ));
    }
}
