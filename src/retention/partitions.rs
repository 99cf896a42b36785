//! Partitions of an outbox that is partitioned by range of its timestamp: delivered ones are dropped whole, those of the
//! days to come are created in time.
//!
//! A partition is dropped in one transaction that first keeps writers out of it (SHARE), then looks at every row, and only
//! then detaches and drops it. Its age picks it and proves nothing: each row must be as a pass would delete it. Not
//! `DETACH … CONCURRENTLY`: while that is pending, the server publishes nothing of what a transaction with an older snapshot
//! still writes into the partition (see `docs/decisions/0012-partitions.md`).

use std::time::Duration;

use tokio_postgres::{Client, Row, error::SqlState};

use super::{
    pass::{PassError, Plan, TimeKind},
    record::Record,
};
use crate::{
    config::{OutboxConfig, RetentionConfig},
    sql::{quote_identifier, quote_literal},
};

/// A partition is dropped this long after its end at the earliest: transactions that began before midnight may still write
/// into yesterday's.
const GRACE: Duration = Duration::from_hours(24);
/// What a partition's name has beside the table's, `_20260501`, leaves so many of the 63 bytes.
const NAME_BYTES: usize = 54;

/// The partitions of an outbox, and what is to become of them.
#[derive(Debug)]
pub struct Partitions {
    root: String,
    schema: String,
    table: String,
    owner: String,
    relation: u32,
    kind: TimeKind,
    record: Record,
    drop: bool,
    /// So many days from tomorrow on are to have a partition; `None`: none is created.
    ahead: Option<u32>,
}

/// A partition whose end has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Its name as SQL.
    pub name: String,
    relation: u32,
}

/// What became of a partition that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It was dropped, or would be, with so many rows.
    Dropped(u64),
    /// It holds rows that must stay.
    Stays,
    /// Somebody uses it, or another cleaner is at the table.
    Busy,
}

const INSPECT: &str = "
    SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(n.oid, 'CREATE'), pg_get_userbyid(c.relowner)::text,
           c.oid, c.relkind = 'p' AND EXISTS (
               SELECT FROM pg_partitioned_table p JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
               WHERE p.partrelid = c.oid AND p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = $3)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2";

impl Partitions {
    /// Looks whether the partitions can be kept, where that is wanted.
    pub async fn make(
        client: &Client,
        (outbox, plan): (&OutboxConfig, &Plan),
        retention: &RetentionConfig,
        record: &Record,
    ) -> Result<Option<Self>, PassError> {
        let table = &outbox.table;
        if !plan.is_partitioned() || (!retention.drop_partitions && retention.partitions_ahead.is_none()) {
            return Ok(None);
        }
        let column = &outbox.columns.timestamp.name;
        let row = client.query_one(INSPECT, &[&table.schema, &table.table, column]).await;
        let row = row.map_err(|source| plan.failed(source))?;
        if !row.get::<_, bool>(3) {
            return Err(PassError::Unfit {
                code: "retention_partitions",
                what: format!(
                    "table {table} is not partitioned by range of its timestamp column {} alone, so the age of a partition \
                     cannot be known",
                    quote_identifier(column)
                ),
                fix: "leave out retention.drop_partitions and retention.partitions_ahead, or partition it so"
                    .to_owned(),
            });
        }
        let owner: String = row.get(1);
        if !row.get::<_, bool>(0) {
            return Err(PassError::Unfit {
                code: "retention_partitions",
                what: format!("the role may neither drop nor create partitions of {table}"),
                fix: format!(
                    "GRANT {} TO walpost's role, and GRANT CREATE on the schema: only the owner may; or leave out \
                     retention.drop_partitions and retention.partitions_ahead",
                    quote_identifier(&owner)
                ),
            });
        }
        Ok(Some(Self {
            root: table.to_string(),
            schema: table.schema.clone(),
            table: table.table.clone(),
            owner,
            relation: row.get(2),
            kind: plan.kind(),
            record: record.clone(),
            drop: retention.drop_partitions,
            ahead: retention.partitions_ahead,
        }))
    }

    /// The partitions that ended long enough ago, the oldest first.
    pub async fn ended(&self, client: &Client, plan: &Plan, keep: Duration) -> Result<Vec<Ended>, PassError> {
        if !self.drop {
            return Ok(Vec::new());
        }
        let sql = format!(
            "SELECT format('%I.%I', n.nspname, c.relname), c.oid FROM ({bounds}) b
             JOIN pg_class c ON c.oid = b.leaf AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE b.upper < now() - make_interval(secs => {keep}) ORDER BY b.upper",
            bounds = self.bounds(),
            keep = keep.max(GRACE).as_secs_f64(),
        );
        let rows = client.query(&sql, &[]).await.map_err(|source| plan.failed(source))?;
        Ok(rows.iter().map(|row| Ended { name: row.get(0), relation: row.get(1) }).collect())
    }

    /// Drops a partition if every row in it has been delivered and may go; `only_look`: says whether it would.
    pub async fn drop(
        &self,
        client: &Client,
        (plan, ended): (&Plan, &Ended),
        only_look: bool,
    ) -> Result<Fate, PassError> {
        if only_look {
            return self.look(client, plan, ended).await;
        }
        match self.drop_or_fail(client, plan, ended).await {
            Ok(fate @ Fate::Dropped(_)) => {
                client.batch_execute("COMMIT").await.map_err(|source| plan.failed(source))?;
                Ok(fate)
            }
            Ok(fate) => self.leave(client, plan, fate).await,
            Err(PassError::Sql { source, .. }) if source.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                self.leave(client, plan, Fate::Busy).await
            }
            Err(error) => {
                client.batch_execute("ROLLBACK").await.map_err(|source| plan.failed(source))?;
                Err(error)
            }
        }
    }

    async fn leave(&self, client: &Client, plan: &Plan, fate: Fate) -> Result<Fate, PassError> {
        client.batch_execute("ROLLBACK").await.map_err(|source| plan.failed(source))?;
        Ok(fate)
    }

    async fn drop_or_fail(&self, client: &Client, plan: &Plan, ended: &Ended) -> Result<Fate, PassError> {
        let failed = |source| plan.failed(source);
        // a row that someone has written and not committed holds a lock that this waits for
        client.batch_execute("BEGIN; SET LOCAL statement_timeout = '10min'").await.map_err(failed)?;
        if !self.takes_turn(client, plan).await? {
            return Ok(Fate::Busy);
        }
        client.batch_execute(&format!("LOCK TABLE ONLY {} IN SHARE MODE", ended.name)).await.map_err(failed)?;
        let fate = self.look(client, plan, ended).await?;
        if let Fate::Dropped(_) = fate {
            let forget = format!("DELETE FROM {} WHERE slot = $1 AND relation = $2", self.record.delivered());
            client.execute(&forget, &[&self.record.slot(), &ended.relation]).await.map_err(failed)?;
            let detach =
                format!("ALTER TABLE {} DETACH PARTITION {name}; DROP TABLE {name}", self.root, name = ended.name);
            client.batch_execute(&detach).await.map_err(failed)?;
        }
        Ok(fate)
    }

    async fn look(&self, client: &Client, plan: &Plan, ended: &Ended) -> Result<Fate, PassError> {
        let failed = |source| plan.failed(source);
        let stays = client.query_one(&plan.stays(&ended.name), &[&self.record.slot()]).await.map_err(failed)?;
        if stays.get(0) {
            return Ok(Fate::Stays);
        }
        let count =
            client.query_one(&format!("SELECT count(*) FROM ONLY {}", ended.name), &[]).await.map_err(failed)?;
        Ok(Fate::Dropped(count.get::<_, i64>(0).unsigned_abs()))
    }

    /// Within a transaction: false while another cleaner is at this table.
    async fn takes_turn(&self, client: &Client, plan: &Plan) -> Result<bool, PassError> {
        let row = client.query_one("SELECT pg_try_advisory_xact_lock($1)", &[&plan.lock()]).await;
        Ok(row.map_err(|source| plan.failed(source))?.get(0))
    }

    /// Creates the partitions of the days to come, today's with them, where nothing covers them; returns their names.
    pub async fn create(&self, client: &Client, plan: &Plan) -> Result<Vec<String>, PassError> {
        let Some(ahead) = self.ahead else { return Ok(Vec::new()) };
        let failed = |source| plan.failed(source);
        let missing = client.query(&self.missing(ahead), &[]).await.map_err(failed)?;
        let mut created = Vec::new();
        for day in &missing {
            client.batch_execute("BEGIN").await.map_err(failed)?;
            let attached = match self.takes_turn(client, plan).await {
                Ok(true) => self.attach(client, plan, day).await.map(Some),
                Ok(false) => Ok(None),
                Err(error) => Err(error),
            };
            let end = if matches!(attached, Ok(Some(_))) { "COMMIT" } else { "ROLLBACK" };
            client.batch_execute(end).await.map_err(failed)?;
            created.extend(attached?);
        }
        Ok(created)
    }

    /// Made first and attached then: `CREATE TABLE … PARTITION OF` would keep all writers out.
    async fn attach(&self, client: &Client, plan: &Plan, day: &Row) -> Result<String, PassError> {
        let (date, from, to): (&str, &str, &str) = (day.get(0), day.get(1), day.get(2));
        let stem = &self.table[..self.table.floor_char_boundary(NAME_BYTES)];
        let name = format!("{}.{}", quote_identifier(&self.schema), quote_identifier(&format!("{stem}_{date}")));
        // LIKE without IDENTITY: the root's counts for what comes through it
        let sql = format!(
            "CREATE TABLE {name} (LIKE {root} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED \
                 INCLUDING STORAGE INCLUDING INDEXES);
             ALTER TABLE {name} OWNER TO {owner};
             ALTER TABLE {root} ATTACH PARTITION {name} FOR VALUES FROM ({from}) TO ({to})",
            root = self.root,
            owner = quote_identifier(&self.owner),
            from = quote_literal(from),
            to = quote_literal(to),
        );
        client.batch_execute(&sql).await.map_err(|source| plan.failed(source))?;
        Ok(name)
    }

    /// The days from today to so many ahead that no partition touches, with their bounds as the column has them.
    fn missing(&self, ahead: u32) -> String {
        let bound = |day: &str| match self.kind {
            TimeKind::Timestamptz => format!("({day} AT TIME ZONE 'UTC')::text"),
            TimeKind::Timestamp => format!("({day})::text"),
            TimeKind::Date => format!("({day})::date::text"),
            TimeKind::UnixMillis => format!("(extract(epoch FROM {day}) * 1000)::bigint::text"),
        };
        format!(
            "SELECT to_char(day, 'YYYYMMDD'), {from}, {to}
             FROM generate_series(date_trunc('day', now() AT TIME ZONE 'UTC'),
                                  date_trunc('day', now() AT TIME ZONE 'UTC') + make_interval(days => {ahead}), '1 day') day
             WHERE NOT EXISTS (
                 SELECT FROM ({bounds}) b
                 WHERE NOT b.is_default AND coalesce(b.lower, '-infinity') < (day + interval '1 day') AT TIME ZONE 'UTC'
                   AND coalesce(b.upper, 'infinity') > day AT TIME ZONE 'UTC')
             ORDER BY day",
            from = bound("day"),
            to = bound("(day + interval '1 day')"),
            bounds = self.bounds(),
        )
    }

    /// The direct partitions with the instants between which their rows lie; NULL for no end.
    fn bounds(&self) -> String {
        let instant = |text: &str| match self.kind {
            TimeKind::Timestamptz => format!("({text})::timestamptz"),
            TimeKind::Timestamp => format!("({text})::timestamp AT TIME ZONE 'UTC'"),
            TimeKind::Date => format!("({text})::date::timestamp AT TIME ZONE 'UTC'"),
            TimeKind::UnixMillis => format!("to_timestamp(({text})::bigint / 1000.0)"),
        };
        format!(
            "SELECT leaf, bound = 'DEFAULT' AS is_default, {lower} AS lower, {upper} AS upper FROM (
                 SELECT leaf, bound, (regexp_match(bound, $re$FROM \\('?(-?[0-9][^')]*)$re$))[1] AS lower_text,
                        (regexp_match(bound, $re$TO \\('?(-?[0-9][^')]*)$re$))[1] AS upper_text
                 FROM (SELECT i.inhrelid AS leaf, pg_get_expr(p.relpartbound, p.oid) AS bound
                       FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
                       WHERE i.inhparent = {relation}) of_catalog OFFSET 0) texts",
            lower = instant("lower_text"),
            upper = instant("upper_text"),
            relation = self.relation,
        )
    }
}
