//! Partitions of an outbox that is partitioned by range of its timestamp or its id: delivered ones are dropped whole, those
//! to come are created in time.
//!
//! How one is dropped stands in `dropping`. What the server refuses about one partition is told, and keeps nothing else from being done.

use std::time::Duration;

use tokio_postgres::{Client, Row, error::SqlState};

use super::{
    bounds::{Bounds, Key, Width},
    pass::{PassError, Plan},
    record::Record,
};
use crate::{
    config::{OutboxConfig, RetentionConfig},
    error::chain,
    sql::{quote_identifier, quote_literal},
};

/// A partition is dropped this long after its end at the earliest: transactions that began before midnight may still write
/// into yesterday's.
const GRACE: Duration = Duration::from_hours(24);
/// What a partition's name has beside the table's, 20 bytes at most, leaves so many of the 63.
const NAME_BYTES: usize = 43;
/// Others wait for what is done in this time.
pub(super) const MOMENT: &str = "2s";
/// Names all of this for machines.
const CODE: &str = "retention_partitions";

/// The partitions of an outbox, and what is to become of them.
#[derive(Debug)]
pub struct Partitions {
    pub(super) bounds: Bounds,
    schema: String,
    table: String,
    pub(super) owner: String,
    pub(super) record: Record,
    drop: bool,
    /// So many behind the present one are to be there; `None`: none is created.
    ahead: Option<u32>,
}

/// A partition that can be dropped whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whole {
    /// Its name as SQL.
    pub name: String,
    /// Its oid.
    pub relation: u32,
    /// Nothing is expected in it any more.
    pub has_ended: bool,
}

/// The partitions that were created, and why others were not.
#[derive(Debug, Default)]
pub struct Created {
    /// Their names as SQL.
    pub names: Vec<String>,
    /// With advice.
    pub refused: Vec<PassError>,
}

const INSPECT: &str = "
    SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(n.oid, 'CREATE'), pg_get_userbyid(c.relowner)::text,
           c.oid,
           c.relkind = 'p',
           (SELECT CASE WHEN a.attname = $3 THEN 'time' WHEN a.attname = $4 AND t.typname IN ('int2', 'int4', 'int8') THEN 'id' END
            FROM pg_partitioned_table p JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
            JOIN pg_type t ON t.oid = a.atttypid
            WHERE p.partrelid = c.oid AND p.partstrat = 'r' AND p.partnatts = 1)
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
        if !retention.drop_partitions && retention.partitions_ahead.is_none() {
            return Ok(None);
        }
        let (time, id) = (&outbox.columns.timestamp.name, &outbox.columns.id);
        let row = client.query_one(INSPECT, &[&table.schema, &table.table, time, id]).await;
        let row = row.map_err(|source| plan.failed(source))?;
        if !row.get::<_, bool>(3) {
            return Ok(None); // beside a partitioned one in one configuration
        }
        let key = match row.get::<_, Option<&str>>(4) {
            Some("time") => Key::Time(plan.kind()),
            Some(_) => Key::Id,
            None => return Err(not_by_range(outbox)),
        };
        let owner: String = row.get(1);
        if !row.get::<_, bool>(0) {
            return Err(no_right(&table.to_string(), &table.schema, &owner));
        }
        Ok(Some(Self {
            bounds: Bounds {
                relation: row.get(2),
                root: table.to_string(),
                key,
                id_name: id.clone(),
                id: quote_identifier(id),
                time: quote_identifier(time),
                time_kind: plan.kind(),
            },
            schema: table.schema.clone(),
            table: table.table.clone(),
            owner,
            record: record.clone(),
            drop: retention.drop_partitions,
            ahead: retention.partitions_ahead,
        }))
    }

    /// The partitions that are dropped whole, the oldest first, once that is wanted: none where it is not.
    pub async fn whole(&self, client: &Client, plan: &Plan, keep: Duration) -> Result<Vec<Whole>, PassError> {
        if !self.drop {
            return Ok(Vec::new());
        }
        let rows = client.query(&self.bounds.whole(keep.max(GRACE)), &[]).await;
        let whole = |row: &Row| Whole { name: row.get(0), relation: row.get(1), has_ended: row.get(2) };
        Ok(rows.map_err(|source| plan.failed(source))?.iter().map(whole).collect())
    }

    /// Within a transaction: false while another cleaner is at this table.
    pub(super) async fn takes_turn(&self, client: &Client, plan: &Plan) -> Result<bool, PassError> {
        let row = client.query_one("SELECT pg_try_advisory_xact_lock($1)", &[&plan.lock()]).await;
        Ok(row.map_err(|source| plan.failed(source))?.get(0))
    }

    /// Creates the partition of now and those to come, where nothing covers them.
    pub async fn create(&self, client: &Client, plan: &Plan) -> Result<Created, PassError> {
        let mut created = Created::default();
        let missing = match self.missing(client, plan).await {
            Err(unfit @ PassError::Unfit { .. }) => {
                created.refused.push(unfit);
                return Ok(created);
            }
            missing => missing?,
        };
        created.refused.extend(self.gap(&missing));
        for cell in missing.iter().filter(|cell| is_free(cell)) {
            match self.create_one(client, plan, cell).await.or_else(|error| judge_create(error, cell)) {
                Ok(name) => created.names.extend(name),
                Err((over, unfit @ PassError::Unfit { .. })) => {
                    created.refused.push(unfit);
                    if over {
                        break;
                    }
                }
                Err((_, error)) => return Err(error),
            }
        }
        Ok(created)
    }

    /// Nothing fits in between: what is written there finds no place, and nobody would know before.
    pub fn gap(&self, missing: &[Row]) -> Option<PassError> {
        let cell = missing.iter().find(|cell| !is_free(cell))?;
        let (from, to): (&str, &str) = (cell.get(1), cell.get(2));
        let what = format!("partitions of table {} cover the range from {from} to {to} only in part", self.bounds.root);
        Some(refused(what, "create one for the rest of it by hand, before inserts into it fail".to_owned()))
    }

    /// The partitions that are to be created, and ranges in which that is not possible. Fails where the widths of those that are there differ.
    pub async fn missing(&self, client: &Client, plan: &Plan) -> Result<Vec<Row>, PassError> {
        let Some(ahead) = self.ahead else { return Ok(Vec::new()) };
        let failed = |source| plan.failed(source);
        let row = client.query_one(&self.bounds.width(), &[]).await.map_err(failed)?;
        let (anchor, step): (Option<String>, Option<String>) = (row.get(0), row.get(1));
        let (Some(anchor), Some(step)) = (anchor, step) else {
            let known: i64 = row.get(3);
            let what =
                if known == 0 { "has no partition with two bounds" } else { "has partitions of different widths" };
            return Err(refused(
                format!(
                    "table {} {what}, so how wide the next ones are to be is not known and none is created",
                    self.bounds.root
                ),
                "create the next three by hand, all of one width; or leave out retention.partitions_ahead".to_owned(),
            ));
        };
        let width = Width { anchor, step, months: row.get(2) };
        client.query(&self.bounds.missing(&width, ahead), &[]).await.map_err(failed)
    }

    async fn create_one(&self, client: &Client, plan: &Plan, cell: &Row) -> Result<Option<String>, PassError> {
        client.batch_execute("BEGIN").await.map_err(|source| plan.failed(source))?;
        let created = match self.takes_turn(client, plan).await {
            Ok(true) => self.attach(client, plan, cell).await.map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        if !matches!(created, Ok(Some(_))) {
            client.batch_execute("ROLLBACK").await.map_err(|source| plan.failed(source))?;
        }
        created
    }

    /// Made first and attached then: `CREATE TABLE … PARTITION OF` would keep all writers out. The server commits at once: a
    /// DEFAULT partition is locked, and looked through, meanwhile.
    async fn attach(&self, client: &Client, plan: &Plan, cell: &Row) -> Result<String, PassError> {
        let (end, from, to): (&str, &str, &str) = (cell.get(0), cell.get(1), cell.get(2));
        let stem = &self.table[..self.table.floor_char_boundary(NAME_BYTES)];
        let name = format!("{}.{}", quote_identifier(&self.schema), quote_identifier(&format!("{stem}_{end}")));
        // LIKE without IDENTITY: the root's counts for what comes through it
        let sql = format!(
            "SET LOCAL statement_timeout = '{MOMENT}';
             CREATE TABLE {name} (LIKE {root} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED \
                 INCLUDING STORAGE INCLUDING INDEXES);
             ALTER TABLE {name} OWNER TO {owner};
             ALTER TABLE {root} ATTACH PARTITION {name} FOR VALUES FROM ({from}) TO ({to});
             COMMIT",
            root = self.bounds.root,
            owner = quote_identifier(&self.owner),
            from = quote_literal(from),
            to = quote_literal(to),
        );
        client.batch_execute(&sql).await.map_err(|source| plan.failed(source))?;
        Ok(name)
    }
}

fn is_free(cell: &Row) -> bool {
    cell.get(3)
}

/// A refusal is about this partition alone, or, where it says so, about all; a lost link about everything.
fn judge_create(error: PassError, cell: &Row) -> Result<Option<String>, (bool, PassError)> {
    let PassError::Sql { table, source } = error else { return Err((true, error)) };
    let Some(code) = source.code() else { return Err((true, PassError::Sql { table, source })) };
    let fix = match *code {
        SqlState::LOCK_NOT_AVAILABLE | SqlState::T_R_DEADLOCK_DETECTED => return Ok(None),
        SqlState::CHECK_VIOLATION => {
            "its DEFAULT partition holds rows of that range, which are delivered as all others; it is created once they are \
             gone: retention deletes them when they are old enough (`walpost prune`); do not move them by INSERT, which \
             publishes them again"
        }
        SqlState::DUPLICATE_TABLE => "another table has its name: rename that",
        SqlState::INSUFFICIENT_PRIVILEGE => {
            "walpost's role must be a member of the table's owner, and both may CREATE in the schema"
        }
        SqlState::QUERY_CANCELED => {
            "it took too long: the server looks through the DEFAULT partition, to which nobody can write meanwhile; make that \
             one smaller, or create those to come by hand"
        }
        _ => "mend what the server says, or create it by hand",
    };
    let (from, to): (&str, &str) = (cell.get(1), cell.get(2));
    let what = format!("the partition of {table} from {from} to {to} cannot be created: {}", chain(&source));
    Err((*code == SqlState::QUERY_CANCELED, refused(what, fix.to_owned())))
}

/// What the server refuses is about this table alone; a lost link is about everything.
pub(super) fn contain(error: PassError) -> Result<PassError, PassError> {
    match error {
        PassError::Sql { table, source } if source.code().is_some() => Ok(refused(
            format!("partitions of {table} cannot be kept: {}", chain(&source)),
            "mend what the server says".to_owned(),
        )),
        PassError::Unfit { .. } => Ok(error),
        error => Err(error),
    }
}

pub(super) fn refused(what: String, fix: String) -> PassError {
    PassError::Unfit { code: CODE, what, fix }
}

fn not_by_range(outbox: &OutboxConfig) -> PassError {
    refused(
        format!(
            "table {} is partitioned neither by range of its timestamp column {} alone nor by range of its id {}, a whole \
             number, so it is not known which partitions have ended and which come next",
            outbox.table,
            quote_identifier(&outbox.columns.timestamp.name),
            quote_identifier(&outbox.columns.id)
        ),
        "leave out retention.drop_partitions and retention.partitions_ahead, or partition it so".to_owned(),
    )
}

fn no_right(table: &str, schema: &str, owner: &str) -> PassError {
    refused(
        format!("the role may neither drop nor create partitions of {table}; its rows are deleted one by one"),
        format!(
            "only its owner may: GRANT {owner} TO walpost's role; GRANT CREATE ON SCHEMA {schema} TO {owner}; or leave out \
             retention.drop_partitions and retention.partitions_ahead",
            owner = quote_identifier(owner),
            schema = quote_identifier(schema)
        ),
    )
}
