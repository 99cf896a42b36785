//! A pass: deletes rows that are old enough and known to be delivered, a small batch at a time.
//!
//! One statement is one batch and one transaction: it takes the lock that keeps two cleaners apart, picks rows by age
//! and by the record of what was delivered, and deletes exactly these. Where the role may lock rows, rows that someone
//! else holds are skipped; where it may only delete, a held row costs a short wait, then the batch shrinks and goes
//! around it.

use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::{Client, Statement, error::SqlState, types::ToSql};

use super::{
    age::TimeKind,
    record::{Record, RecordError},
    statements::{LEAF, Statements},
};
use crate::{
    config::{OutboxConfig, RetentionConfig},
    sql::{quote_identifier, quote_literal},
};

/// Settings of a link that deletes. The statements are short, and compiling one (`jit`) would take longer than it runs.
/// A deletion that a crash of the server undoes is done again, so nobody waits for its flush.
/// No schema that others may create in is searched: a function there that fits the arguments better would be called, with
/// the rights of whoever may delete.
pub const SETTINGS: &str =
    "SET lock_timeout = '200ms'; SET statement_timeout = '30s'; SET synchronous_commit = off; SET jit = off;
    SET plan_cache_mode = force_custom_plan; SET search_path = pg_catalog;
    SET default_transaction_isolation = 'read committed'; SET default_transaction_read_only = off";

/// Why a table cannot be pruned.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Something about the table.
    #[error("{what}; {fix}")]
    Unfit {
        /// Names it for machines.
        code: &'static str,
        /// What is the case.
        what: String,
        /// What mends it.
        fix: String,
    },
    /// A statement failed.
    #[error("delete delivered rows of {table}")]
    Sql {
        /// The table.
        table: String,
        /// Why.
        source: tokio_postgres::Error,
    },
    /// No record of what was delivered.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// An outbox, and the statements that prune it.
#[derive(Debug)]
pub struct Plan {
    /// Its name as SQL.
    pub table: String,
    /// The column has an index, the table has a primary key or another unique one.
    pub indexed: bool,
    /// See [`Plan::indexed`].
    pub keyed: bool,
    /// The role may lock rows, so rows that someone holds are skipped.
    may_lock: bool,
    relation: u32,
    slot: String,
    kind: TimeKind,
    delete: String,
    count: String,
    /// Whether a partition holds a row that must stay; its name is to be filled in.
    stays: String,
}

/// What there is to prune.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// Old enough and delivered.
    pub deletable: u64,
    /// Old enough and dead-lettered.
    pub dead_lettered: u64,
    /// Old enough; their delivery is not recorded yet.
    pub pending: u64,
    /// Old enough; nothing will tell whether they were delivered.
    pub unproven: u64,
}

const INSPECT: &str = "
    SELECT c.oid, c.relkind::text, has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'DELETE'),
           has_any_column_privilege(c.oid, 'UPDATE'),
           (SELECT coalesce(b.typname, t.typname)::text FROM pg_attribute a
            JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype
            WHERE a.attrelid = c.oid AND a.attname = $3 AND a.attnum > 0 AND NOT a.attisdropped),
           EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                   WHERE i.indrelid = c.oid AND a.attname = $3 AND i.indpred IS NULL AND i.indisvalid),
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2";

impl Plan {
    /// Looks whether an outbox can be pruned, and how.
    pub async fn make(
        client: &Client,
        outbox: &OutboxConfig,
        retention: &RetentionConfig,
        record: &Record,
    ) -> Result<Self, PassError> {
        let table = outbox.table.to_string();
        let failed = |source| PassError::Sql { table: outbox.table.to_string(), source };
        let unfit = |code, what: String, fix: String| Err(PassError::Unfit { code, what, fix });
        let column = &outbox.columns.timestamp.name;
        let row = client.query_opt(INSPECT, &[&outbox.table.schema, &outbox.table.table, column]).await;
        let Some(row) = row.map_err(failed)? else {
            return unfit("table_missing", format!("table {table} does not exist"), "create it".to_owned());
        };
        if !row.get::<_, bool>(2) || !row.get::<_, bool>(3) {
            return unfit(
                "retention_denied",
                format!("the role may not read and delete rows of {table}, so retention cannot work"),
                format!("GRANT SELECT, DELETE ON {table} TO walpost's role, or leave [retention] out"),
            );
        }
        let quoted = quote_identifier(column);
        let Some(kind) = row.get::<_, Option<&str>>(5).and_then(TimeKind::of) else {
            return unfit(
                "retention_timestamp",
                format!("table {table} has no column {quoted} that holds a time, so retention cannot know the age of its rows"),
                "map outbox.columns.timestamp to a column of type timestamptz, timestamp, date or bigint (Unix ms), or add \
                 one: created_at timestamptz NOT NULL DEFAULT now(), with an index"
                    .to_owned(),
            );
        };
        let statements = Statements {
            table: &table,
            time: format!("c.{quoted}"),
            id: quote_identifier(&outbox.columns.id),
            kind,
            partitioned: row.get::<_, &str>(1) == "p",
            may_lock: row.get(4),
            retention,
            record,
        };
        Ok(Self {
            indexed: row.get(6),
            keyed: row.get(7),
            may_lock: row.get(4),
            relation: row.get(0),
            slot: record.slot().to_owned(),
            kind,
            delete: statements.delete(&quoted),
            count: statements.count(),
            stays: statements.stays(),
            table,
        })
    }

    /// Counts what a pass would meet, beside partitions that are left alone. Reads every row that is old enough.
    pub async fn census(&self, client: &Client, spared: &[u32]) -> Result<Census, PassError> {
        let row = client.query_one(&self.count, &[&self.slot, &spared]).await.map_err(|source| self.failed(source))?;
        let number = |index: usize| u64::try_from(row.get::<_, i64>(index)).unwrap_or_default();
        Ok(Census { deletable: number(0), dead_lettered: number(1), pending: number(2), unproven: number(3) })
    }

    pub(super) fn kind(&self) -> TimeKind {
        self.kind
    }

    /// One lock for each table, in a corner of the space that others will hardly use.
    pub(super) fn lock(&self) -> i64 {
        0x7761_6c70_0000_0000_i64 | i64::from(self.relation)
    }

    /// Asks whether a partition, by its name as SQL, holds a row that must stay; `$1` is the slot.
    pub(super) fn stays(&self, leaf: &str) -> String {
        self.stays.replace(LEAF, leaf)
    }

    pub(super) fn failed(&self, source: tokio_postgres::Error) -> PassError {
        PassError::Sql { table: self.table.clone(), source }
    }
}

/// Where a pass through one table stands.
#[derive(Debug)]
pub struct Walk {
    from: String,
    batch: u32,
    most: u32,
    skip: i64,
    held_up: u32,
    /// Partitions that will be dropped whole: nothing is deleted from them.
    spared: Vec<u32>,
    statement: Option<Statement>,
}

/// A batch is as large as can be deleted in about this time: whoever commits meanwhile waits that long at most.
const BATCH_TIME: Duration = Duration::from_millis(4);
/// The size of the first.
const FIRST_BATCH: u32 = 100;

/// So often in a row a batch may meet rows that someone holds, before the rest is left for another pass.
const PATIENCE: u32 = 25;

/// What a batch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// It deleted so many, and there may be more.
    Deleted(u64),
    /// It deleted so many, and there is no more for now.
    Last(u64),
    /// Another cleaner is at this table.
    NotOurTurn,
}

impl Walk {
    /// From the oldest row on, `batch` rows at a time, except from partitions that will be dropped whole.
    pub fn new(plan: &Plan, batch: u32, spared: Vec<u32>) -> Self {
        Self {
            from: plan.kind.beginning().to_owned(),
            batch: batch.min(FIRST_BATCH),
            most: batch,
            skip: 0,
            held_up: 0,
            spared,
            statement: None,
        }
    }

    /// Deletes one batch.
    pub async fn step(&mut self, client: &Client, plan: &Plan) -> Result<Batch, PassError> {
        let lock = plan.lock();
        let limit = i64::from(self.batch);
        let statement = match self.statement.take() {
            Some(statement) => statement,
            None => client.prepare(&plan.delete).await.map_err(|source| plan.failed(source))?,
        };
        let began = Instant::now();
        let parameters: [&(dyn ToSql + Sync); 6] = [&plan.slot, &lock, &self.from, &limit, &self.skip, &self.spared];
        let row = client.query_one(&statement, &parameters).await;
        let took = began.elapsed();
        self.statement = Some(statement);
        let row = match row {
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) && !plan.may_lock => {
                self.go_around();
                return Ok(if self.held_up < PATIENCE { Batch::Deleted(0) } else { Batch::Last(0) });
            }
            row => row.map_err(|source| plan.failed(source))?,
        };
        if !row.get::<_, bool>(0) {
            return Ok(Batch::NotOurTurn);
        }
        let (deleted, picked): (i64, i64) = (row.get(1), row.get(3));
        if let Some(at) = row.get::<_, Option<String>>(2).filter(|at| *at != self.from) {
            // what was gone around lies before this, or is met again
            (self.from, self.skip) = (at, 0);
        }
        let deleted = u64::try_from(deleted).unwrap_or_default();
        let full = picked >= limit;
        self.held_up = 0;
        self.adapt(took);
        Ok(if full { Batch::Deleted(deleted) } else { Batch::Last(deleted) })
    }

    fn adapt(&mut self, took: Duration) {
        let wanted = if took > BATCH_TIME { self.batch / 2 } else { self.batch + self.batch / 4 + 1 };
        self.batch = wanted.clamp(self.most.min(10), self.most);
    }

    /// Someone holds a row of the batch.
    fn go_around(&mut self) {
        self.held_up += 1;
        if self.batch > 1 {
            self.batch = (self.batch / 8).max(1);
        } else {
            self.skip += 1;
        }
    }
}

/// How long to leave the server alone after a batch: nearly all of the time belongs to others.
pub fn pause(batch_took: Duration) -> Duration {
    (batch_took * 5).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

/// How many rows an outbox holds: counted where there are few, else as the server's statistics have it.
pub async fn rows(client: &Client, outbox: &OutboxConfig) -> Result<u64, tokio_postgres::Error> {
    const COUNTED: i64 = 10_000;
    let table = &outbox.table;
    let sql = format!("SELECT count(*) FROM (SELECT FROM {table} LIMIT {COUNTED}) counted");
    let counted: i64 = client.query_one(&sql, &[]).await?.get(0);
    if counted < COUNTED {
        return Ok(counted.unsigned_abs());
    }
    let sql = format!(
        "SELECT sum(greatest(c.reltuples::bigint, pg_stat_get_live_tuples(c.oid)))::bigint FROM pg_class c
         WHERE c.oid = {name}::regclass OR c.oid IN (SELECT relid FROM pg_partition_tree({name}::regclass) WHERE isleaf)",
        name = quote_literal(&table.to_string())
    );
    let estimated: Option<i64> = client.query_one(&sql, &[]).await?.get(0);
    Ok(estimated.unwrap_or_default().max(counted).unsigned_abs())
}

/// Forgets dead letters whose rows are long gone.
pub async fn forget_dead(
    client: &Client,
    record: &Record,
    retention: &RetentionConfig,
) -> Result<(), tokio_postgres::Error> {
    let Some(keep) = retention.keep_dead_lettered else { return Ok(()) };
    let keep = TimeKind::Timestamptz.cutoff(keep.max(retention.keep) * 2);
    let sql = format!("DELETE FROM {} WHERE slot = $1 AND recorded_at < {keep}", record.dead_lettered());
    client.execute(&sql, &[&record.slot()]).await.map(drop)
}
