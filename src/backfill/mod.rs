//! Rows that are older than the slot, and so never come through it: published before the stream begins, once each; or, on
//! purpose, any rows that are in the table, once more.
//!
//! The hard part is a crash on the way. The slot must be there before the first row is read, and once it is there under its
//! name, the next start would stream and leave the older rows out. So it begins its life under another name, with
//! [`MARKER_SUFFIX`], and gets its own name when the brokers have every row: as long as there is a slot of the other name, the
//! backfill is not complete. No other state is kept, and a backfill that was interrupted begins anew. Who works at it holds a
//! lock, so that no second process streams new rows while the first still publishes old ones. See
//! `docs/decisions/0009-backfill.md`.

mod error;
mod plan;
mod proof;
mod publish;

use tokio_postgres::Client;

pub use self::{
    error::{BackfillError, judge},
    publish::Filled,
};
use self::{
    plan::{Plan, selection},
    proof::Proof,
    publish::Run,
};
use crate::{
    clock,
    config::{Backfill, Config, OutboxConfig, TableName},
    event::Position,
    lsn::Lsn,
    pipeline::{SessionError, Signals, Stages, Telltale},
    retention::record,
    sink::{Buried, KafkaSink},
    source::{
        SourceError, Wire,
        slot::{self, Created},
        snapshot::Snapshot,
    },
    sql,
};

/// What the name of a slot ends with until its backfill is complete.
pub const MARKER_SUFFIX: &str = "_backfill";

/// How the slot was found.
pub enum Slot {
    /// It is there.
    Found,
    /// It was missing, and is there now.
    Created,
    /// It will be there once these rows are published.
    Behind(Box<Fill>),
}

/// Rows to publish, and how far that is.
pub struct Fill {
    plan: Plan,
    /// What is read, as long as the connection lives.
    reading: Option<Reading>,
    /// So many of its rows, from the first on, are acknowledged.
    done: u64,
    complete: bool,
}

/// A snapshot with the position of its first row.
struct Reading {
    snapshot: Snapshot,
    base: Position,
    proof: Proof,
}

/// Creates the slot when it is missing, and says which rows have to be published before it takes its name. The publication
/// must exist already.
pub async fn ensure_slot(client: &Client, config: &Config) -> Result<Slot, BackfillError> {
    let (slot, marker) = (&config.postgres.slot, marker_of(&config.postgres.slot));
    let found = exist(client, slot, &marker).await?;
    if found == (true, false) {
        return Ok(Slot::Found);
    }
    let mut reader = Snapshot::connect(&config.postgres.conninfo).await?;
    if !reader.lock(slot).await? {
        return Err(BackfillError::Busy(slot.clone()));
    }
    // again, since only now nobody else works at it
    let seen = (slot::seen(reader.wire(), slot).await?, slot::seen(reader.wire(), &marker).await?);
    match seen {
        (Some(_), None) => Ok(Slot::Found),
        (Some(now), Some(before)) if now.confirmed == before.confirmed => {
            let mut wire = Wire::connect(&config.postgres.conninfo).await?;
            slot::replace(&mut wire, &marker, slot).await?;
            Ok(Slot::Found)
        }
        (Some(_), Some(_)) => Err(BackfillError::TwoSlots { slot: slot.clone(), marker }),
        (None, Some(before)) => resume(client, config, (reader, before.confirmed)).await,
        (None, None) => create(client, config, reader).await,
    }
}

/// Ends what was interrupted when a slot had just got its name; creates nothing.
pub async fn settle(client: &Client, config: &Config) -> Result<(), BackfillError> {
    let slot = &config.postgres.slot;
    if exist(client, slot, &marker_of(slot)).await? == (true, true) {
        ensure_slot(client, config).await?;
    }
    Ok(())
}

/// Whether a slot or its marker is there: nobody asks for more while all is well.
async fn exist(client: &Client, slot: &str, marker: &str) -> Result<(bool, bool), BackfillError> {
    let sql = "SELECT coalesce(bool_or(slot_name = $1::text), false), coalesce(bool_or(slot_name = $2::text), false)
               FROM pg_replication_slots";
    let row = client.query_one(sql, &[&slot, &marker]).await.map_err(BackfillError::Slots)?;
    Ok((row.get(0), row.get(1)))
}

/// The name of a slot until its backfill is complete.
pub fn marker_of(slot: &str) -> String {
    format!("{slot}{MARKER_SUFFIX}")
}

async fn create(client: &Client, config: &Config, mut reader: Snapshot) -> Result<Slot, BackfillError> {
    let (slot, marker) = (&config.postgres.slot, marker_of(&config.postgres.slot));
    plan::refuse_obvious(client, &config.outboxes).await?;
    let plan = Plan::before_stream(config);
    plan.validate(client).await?;
    let name = if plan.is_empty() { slot } else { &marker };
    if name.len() > MAX_SLOT_BYTES {
        return Err(BackfillError::NameTooLong { slot: slot.clone(), marker });
    }
    if !plan.is_empty() {
        require_free_slots(client).await?;
    }
    let mut wire = Wire::connect(&config.postgres.conninfo).await?;
    let Created { consistent_point, snapshot } = slot::create(&mut wire, name).await?;
    let counted = async {
        reader.begin(Some(&snapshot)).await?;
        plan::account_for_others(&mut reader, &config.outboxes).await?;
        plan.choose(&mut reader).await?;
        Ok(Proof::look(&mut reader, &plan, Some(consistent_point)).await?)
    };
    let proof = match counted.await {
        Ok(proof) => proof,
        Err(error) => {
            slot::drop(&mut wire, name).await?;
            return Err(error);
        }
    };
    if plan.is_empty() {
        return Ok(Slot::Created);
    }
    if reader.total() == 0 {
        slot::replace(&mut wire, &marker, slot).await?;
        return Ok(Slot::Created);
    }
    Ok(Slot::Behind(Box::new(Fill::new(plan, Reading { snapshot: reader, base: before(consistent_point, 0), proof }))))
}

/// Two: better said before the rows are published than after.
async fn require_free_slots(client: &Client) -> Result<(), BackfillError> {
    let sql = "SELECT current_setting('max_replication_slots')::bigint - count(*) FROM pg_replication_slots";
    let free: i64 = client.query_one(sql, &[]).await.map_err(BackfillError::Slots)?.get(0);
    if free < 2 { Err(BackfillError::TooFewSlots(free)) } else { Ok(()) }
}

/// Longest name of a slot, in bytes.
const MAX_SLOT_BYTES: usize = 63;

/// Takes up a backfill that was interrupted.
async fn resume(
    client: &Client,
    config: &Config,
    (mut reader, confirmed): (Snapshot, Option<Lsn>),
) -> Result<Slot, BackfillError> {
    let (slot, marker) = (&config.postgres.slot, marker_of(&config.postgres.slot));
    let confirmed = confirmed.ok_or_else(|| SourceError::SlotUnfinished(marker.clone()))?;
    tracing::warn!(slot = marker, "a backfill was interrupted: it begins anew, so some events come again");
    let plan = Plan::before_stream(config);
    plan.validate(client).await?;
    reader.begin(None).await?;
    plan::account_for_others(&mut reader, &config.outboxes).await?;
    plan.choose(&mut reader).await?;
    let proof = Proof::look(&mut reader, &plan, Some(confirmed)).await?;
    if reader.total() == 0 {
        let mut wire = Wire::connect(&config.postgres.conninfo).await?;
        slot::replace(&mut wire, &marker, slot).await?;
        return Ok(Slot::Created);
    }
    Ok(Slot::Behind(Box::new(Fill::new(plan, Reading { snapshot: reader, base: before(confirmed, now()), proof }))))
}

/// Positions before all that is committed from a point on. Records of the log begin at multiples of 8, so no transaction
/// has this one.
fn before(point: Lsn, ordinal: u64) -> Position {
    Position { commit_lsn: Lsn(point.0.saturating_sub(1)), ordinal }
}

/// First ordinal of a snapshot that is not the first of its slot: no event may get a position that another had before.
fn now() -> u64 {
    clock::unix_us().unsigned_abs()
}

impl Fill {
    fn new(plan: Plan, reading: Reading) -> Self {
        Self { plan, reading: Some(reading), done: 0, complete: false }
    }

    /// Rows that are in the tables now, to be published once more beside a stream: those that fulfil the condition, of one
    /// outbox or of all.
    pub async fn again(config: &Config, wanted: Backfill, only: Option<&TableName>) -> Result<Self, BackfillError> {
        let outboxes = config.outboxes.iter().filter(|outbox| only.is_none_or(|table| outbox.table == *table));
        let outboxes: Vec<_> =
            outboxes.map(|outbox| OutboxConfig { backfill: Some(wanted.clone()), ..outbox.clone() }).collect();
        if let (Some(table), []) = (only, &outboxes[..]) {
            return Err(BackfillError::NoSuchOutbox(table.to_string()));
        }
        let plan = Plan { marker: None, ..Plan::new(config, outboxes) };
        plan.validate(&sql::connect(&config.postgres.conninfo).await?).await?;
        let reading = plan.read().await?;
        Ok(Self { plan, reading, done: 0, complete: false })
    }

    /// How many rows of each table there are to publish.
    pub fn counts(&self) -> Vec<(String, u64)> {
        self.reading.as_ref().map(|reading| reading.snapshot.counts()).unwrap_or_default()
    }

    /// Publishes until all is acknowledged, something fails, or the operator wants the end. What was acknowledged before a
    /// failure of the sink does not come again as long as the connection to the server lives.
    pub async fn publish(
        &mut self,
        (sink, stages): (&mut KafkaSink, &mut Stages),
        signals: &mut Signals,
        telltale: Telltale<'_>,
    ) -> Result<Filled, SessionError> {
        if self.complete {
            return Ok(Filled::Complete);
        }
        if self.reading.is_none() {
            self.done = 0;
            self.reading = self.plan.read().await?;
        }
        let Some(reading) = &mut self.reading else {
            // another process was faster
            self.complete = true;
            return Ok(Filled::Complete);
        };
        let mut run = Run::new(reading, self.done, self.plan.rate, telltale);
        let outcome = run.publish(sink, stages, signals).await;
        self.done = run.done(sink);
        if let Err(SessionError::Backfill(_) | SessionError::Source(_)) = outcome {
            self.reading = None;
        }
        self.complete = matches!(outcome, Ok(Filled::Complete));
        outcome
    }

    /// Notes what was delivered, then gives the slot its name. In this order: whoever dies in between does it all again.
    pub async fn finish(&mut self, buried: &Buried) -> Result<(), SourceError> {
        if let Some(reading) = &self.reading {
            reading.proof.enter(&self.plan.config, buried).await;
        }
        let Some(marker) = &self.plan.marker else { return Ok(()) };
        let mut wire = Wire::connect(&self.plan.conninfo).await?;
        // before it has its name, since others may wait for that
        if let Ok(client) = sql::connect(&self.plan.conninfo).await {
            record::forget_where_it_was_left(&client, &self.plan.config).await;
        }
        slot::replace(&mut wire, marker, &self.plan.slot).await?;
        tracing::info!(slot = self.plan.slot, "the backfill is complete: the slot has its name");
        self.reading = None; // and with it the lock
        Ok(())
    }
}

impl Plan {
    /// Takes a snapshot; `None` when another process has completed the backfill meanwhile.
    async fn read(&self) -> Result<Option<Reading>, BackfillError> {
        let mut snapshot = Snapshot::connect(&self.conninfo).await?;
        let mut point = None;
        if let Some(marker) = &self.marker {
            if !snapshot.lock(&self.slot).await? {
                return Err(BackfillError::Busy(self.slot.clone()));
            }
            let Some(seen) = slot::seen(snapshot.wire(), marker).await? else {
                let complete = slot::seen(snapshot.wire(), &self.slot).await?.is_some();
                return if complete { Ok(None) } else { Err(SourceError::SlotMissing(marker.clone()).into()) };
            };
            point = seen.confirmed;
        }
        snapshot.begin(None).await?;
        self.choose(&mut snapshot).await?;
        let proof = Proof::look(&mut snapshot, self, point).await?;
        let point = match point {
            Some(point) => point,
            None => snapshot.wal_end().await?,
        };
        Ok(Some(Reading { snapshot, base: before(point, now()), proof }))
    }

    /// Counts the rows of each outbox in the snapshot, and has them read.
    async fn choose(&self, snapshot: &mut Snapshot) -> Result<(), BackfillError> {
        for outbox in &self.outboxes {
            let (selection, table) = (selection(outbox), outbox.table.to_string());
            let count = snapshot.count(&selection).await;
            let count = count.map_err(|source| BackfillError::rows(outbox, source))?;
            if !snapshot.add(&selection, count).await? {
                return Err(BackfillError::NoSuchTable(table));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backfilled_rows_stand_before_all_that_is_streamed() {
        let streamed = Position { commit_lsn: Lsn(0x16B_3748), ordinal: 0 };
        assert!(before(Lsn(0x16B_3748), u64::MAX) < streamed);
        assert_eq!(before(Lsn(0x16B_3748), 7).to_string(), "0/16B3747/7");
        assert!(now() > 1_000_000_000_000_000, "later snapshots count on from where no first one gets");
    }
}
