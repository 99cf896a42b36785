//! The record of what was delivered: two tables beside the (first) outbox, and the looks at the server that feed them.
//!
//! It lies in the same database as the rows that it speaks of, so a crash, a failover or a restore to a point in time
//! takes both back together: a record that is there was written after the commits that it vouches for.

use tokio_postgres::{Client, error::SqlState};

use super::fence::{Fence, Interval, Leaf, Look};
use crate::{
    config::{Config, TableName},
    error::chain,
    lsn::Lsn,
    publication,
    sink::Ids,
    sql::quote_literal,
};

/// Name of the table of intervals.
pub const DELIVERED: &str = "walpost_delivered";
/// Name of the table of dead letters.
pub const DEAD_LETTERED: &str = "walpost_dead_lettered";

const SQL: &str = include_str!("../../sql/retention.sql");
/// How the file names the tables.
const NAMES: [(&str, &str); 2] =
    [("\"public\".\"walpost_delivered\"", DELIVERED), ("\"public\".\"walpost_dead_lettered\"", DEAD_LETTERED)];

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A table is missing, is someone else's, or may not be written.
    #[error("{what}; {fix}")]
    Unusable {
        /// What is the case.
        what: String,
        /// What mends it.
        fix: String,
    },
    /// A statement failed.
    #[error("keep the record of what was delivered")]
    Sql(#[from] tokio_postgres::Error),
}

/// Where the tables are: in the schema of the first outbox.
#[derive(Debug, Clone)]
pub struct Record {
    slot: String,
    delivered: TableName,
    dead_lettered: TableName,
}

const INSPECT: &str = "
    SELECT c.oid, c.relkind = 'r' AND c.relpersistence = 'p',
           c.relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
               OR (SELECT rolsuper FROM pg_roles r WHERE r.oid = c.relowner)
               OR EXISTS (SELECT FROM pg_class o JOIN pg_namespace s ON s.oid = o.relnamespace
                          WHERE s.nspname = $1 AND o.relname = $3 AND o.relowner = c.relowner),
           has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
               AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'),
           pg_get_userbyid(c.relowner)::text
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2";

impl Record {
    /// Where this configuration has it.
    pub fn new(config: &Config) -> Self {
        let schema = config.outboxes.first().map_or_else(|| "public".to_owned(), |outbox| outbox.table.schema.clone());
        let table = |name: &str| TableName { schema: schema.clone(), table: name.to_owned() };
        Self { slot: config.postgres.slot.clone(), delivered: table(DELIVERED), dead_lettered: table(DEAD_LETTERED) }
    }

    /// The statements that create it, as in `sql/retention.sql`.
    pub fn sql(&self) -> String {
        let mut sql = SQL.to_owned();
        for (default, name) in NAMES {
            let table = TableName { schema: self.delivered.schema.clone(), table: name.to_owned() };
            sql = sql.replace(default, &table.to_string());
        }
        sql
    }

    /// The table of intervals.
    pub fn delivered(&self) -> &TableName {
        &self.delivered
    }

    /// The table of dead letters.
    pub fn dead_lettered(&self) -> &TableName {
        &self.dead_lettered
    }

    /// The slot whose deliveries it speaks of.
    pub fn slot(&self) -> &str {
        &self.slot
    }

    /// Whether the tables are there, in hands that are trusted, and may be written. What anyone could have put there
    /// proves nothing.
    pub async fn inspect(&self, client: &Client, outbox: &TableName) -> Result<(), RecordError> {
        for table in [&self.delivered, &self.dead_lettered] {
            let unusable = |what: String, fix: String| Err(RecordError::Unusable { what, fix });
            let row = client.query_opt(INSPECT, &[&table.schema, &table.table, &outbox.table]).await?;
            let Some(row) = row else {
                return unusable(
                    format!("table {table}, which remembers what was delivered, does not exist"),
                    "create it with `walpost init` as the owner of the outbox".to_owned(),
                );
            };
            if !row.get::<_, bool>(1) {
                return unusable(
                    format!("{table} is no permanent, plain table"),
                    "drop it and run `walpost init`".to_owned(),
                );
            }
            if !row.get::<_, bool>(2) {
                let owner: String = row.get(4);
                return unusable(
                    format!(
                        "table {table} belongs to role {owner:?}, who could write into it what was never delivered"
                    ),
                    format!("ALTER TABLE {table} OWNER TO the owner of the outbox, after emptying it"),
                );
            }
            if !row.get::<_, bool>(3) {
                return unusable(
                    format!("the role may not keep table {table}"),
                    format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO walpost's role"),
                );
            }
        }
        Ok(())
    }

    /// Creates the tables where they are missing.
    pub async fn create(&self, client: &Client) -> Result<(), tokio_postgres::Error> {
        client.batch_execute(&self.sql()).await
    }

    /// The last interval of each leaf that this slot has on this cluster.
    pub async fn load(&self, client: &Client) -> Result<Fence, RecordError> {
        let sql = format!(
            "SELECT DISTINCT ON (relation) relation, shape, since, until, confirmed::text FROM {}
             WHERE slot = $1 AND system = (SELECT system_identifier::text FROM pg_control_system()) AND relation <> 0
             ORDER BY relation, since DESC",
            self.delivered
        );
        let rows = client.query(&sql, &[&self.slot]).await?;
        let interval = |row: &tokio_postgres::Row| Interval {
            leaf: Leaf { relation: row.get(0), shape: row.get(1) },
            since: row.get::<_, i64>(2).unsigned_abs(),
            until: row.get::<_, i64>(3).unsigned_abs(),
            confirmed: row.get::<_, &str>(4).parse().unwrap_or_default(),
        };
        Ok(Fence::resume(rows.iter().map(interval).collect()))
    }

    /// Writes intervals that are new or have grown. Ones that hold nothing go when a later one takes their place.
    pub async fn save(&self, client: &Client, intervals: &[Interval]) -> Result<(), RecordError> {
        if intervals.is_empty() {
            return Ok(());
        }
        let sql = format!(
            "WITH new AS (
                 SELECT * FROM unnest($2::oid[], $3::text[], $4::bigint[], $5::bigint[], $6::text[])
                     n(relation, shape, since, until, confirmed)
             ), cluster AS (SELECT system_identifier::text AS system FROM pg_control_system()
             ), empty AS (
                 DELETE FROM {table} d USING new, cluster
                 WHERE d.slot = $1 AND d.system = cluster.system AND d.relation = new.relation AND d.since < new.since
                   AND d.until = d.since
             )
             INSERT INTO {table} AS d (slot, system, relation, shape, since, until, confirmed)
             SELECT $1, cluster.system, relation, shape, since, until, confirmed::pg_lsn FROM new, cluster
             ON CONFLICT (slot, system, relation, since) DO UPDATE
                SET until = greatest(d.until, excluded.until), confirmed = greatest(d.confirmed, excluded.confirmed)",
            table = self.delivered
        );
        let column = |of: fn(&Interval) -> u64| -> Vec<i64> {
            intervals.iter().map(|interval| i64::try_from(of(interval)).unwrap_or(i64::MAX)).collect()
        };
        let relations: Vec<u32> = intervals.iter().map(|interval| interval.leaf.relation).collect();
        let shapes: Vec<&str> = intervals.iter().map(|interval| interval.leaf.shape.as_str()).collect();
        let (since, until) = (column(|interval| interval.since), column(|interval| interval.until));
        let confirmed: Vec<String> = intervals.iter().map(|interval| interval.confirmed.to_string()).collect();
        client.execute(&sql, &[&self.slot, &relations, &shapes, &since, &until, &confirmed]).await?;
        Ok(())
    }

    /// Notes where the slot stands, for the next process to find it there. Nobody may stream from it any more.
    pub async fn leave(&self, client: &Client) -> Result<(), RecordError> {
        let sql = format!(
            "INSERT INTO {} (slot, system, relation, shape, since, until, confirmed)
             SELECT slot_name, system_identifier::text, 0, 'left here', 0, 0, confirmed_flush_lsn
             FROM pg_replication_slots, pg_control_system() WHERE slot_name = $1::text AND NOT active
             ON CONFLICT (slot, system, relation, since) DO UPDATE SET confirmed = excluded.confirmed",
            self.delivered
        );
        client.execute(&sql, &[&self.slot]).await?;
        Ok(())
    }

    /// Where the slot was left by a process that ended in order, if the last one did. Told once.
    pub async fn take_left(&self, client: &Client) -> Result<Option<Lsn>, RecordError> {
        let sql = format!(
            "DELETE FROM {} WHERE slot = $1 AND relation = 0
             AND system = (SELECT system_identifier::text FROM pg_control_system()) RETURNING confirmed::text",
            self.delivered
        );
        let row = client.query_opt(&sql, &[&self.slot]).await?;
        Ok(row.and_then(|row| row.get::<_, &str>(0).parse().ok()))
    }

    /// Writes the ids of dead letters.
    pub async fn save_dead(&self, client: &Client, buried: &Ids) -> Result<(), RecordError> {
        if buried.ids.is_empty() {
            return Ok(());
        }
        let sql = format!(
            "INSERT INTO {} (slot, id) SELECT DISTINCT $1, id FROM unnest($2::text[]) id ON CONFLICT DO NOTHING",
            self.dead_lettered
        );
        client.execute(&sql, &[&self.slot, &buried.ids]).await?;
        Ok(())
    }
}

/// What the slot has confirmed, whoever streams from it. `None`: there is no such slot in this database.
#[derive(Debug, Clone, Copy)]
pub struct SlotSeen {
    /// Where it stands.
    pub confirmed: Lsn,
    /// Someone streams from it.
    pub active: bool,
}

/// Looks at the slot.
pub async fn slot(client: &Client, name: &str) -> Result<Option<SlotSeen>, tokio_postgres::Error> {
    let sql = "SELECT confirmed_flush_lsn::text, active FROM pg_replication_slots
               WHERE slot_name = $1::text AND slot_type = 'logical' AND database = current_database()";
    let row = client.query_opt(sql, &[&name]).await?;
    Ok(row.and_then(|row| {
        let confirmed = row.get::<_, Option<&str>>(0)?.parse().ok()?;
        Some(SlotSeen { confirmed, active: row.get(1) })
    }))
}

/// Looks at the xids, the tables and the end of the WAL, in this order. `None` on a standby, where nothing is written.
pub async fn look(client: &Client, config: &Config) -> Result<Option<Look>, tokio_postgres::Error> {
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
    let seen = look_in_one_snapshot(client, config).await;
    client.batch_execute("ROLLBACK").await?;
    let Some(mut seen) = seen? else { return Ok(None) };
    // what is not flushed yet counts as well: the position must lie behind every commit that the snapshot shows
    let wal_end = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await?;
    seen.wal_end = wal_end.get::<_, &str>(0).parse().unwrap_or(seen.wal_end);
    Ok(Some(seen))
}

/// The oldest running xid, the next one, whether this is a standby, and whether publications know schemas.
pub const XIDS: &str = "
    SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint, pg_is_in_recovery(),
           to_regclass('pg_catalog.pg_publication_namespace') IS NOT NULL
    FROM pg_current_snapshot() s";

/// All but the end of the WAL.
async fn look_in_one_snapshot(client: &Client, config: &Config) -> Result<Option<Look>, tokio_postgres::Error> {
    let row = client.query_one(XIDS, &[]).await?;
    if row.get(2) {
        return Ok(None);
    }
    let mut look = Look {
        oldest_running: row.get::<_, i64>(0).unsigned_abs(),
        next: row.get::<_, i64>(1).unsigned_abs(),
        wal_end: Lsn(u64::MAX),
        leaves: Vec::new(),
        late: None,
    };
    let published = publication::find(client, &config.postgres.publication, &config.outboxes).await?;
    let knows_schemas: bool = row.get(3);
    if !knows_schemas && published.tables.iter().any(|table| table.kind == Some('p')) {
        look.late = Some(Vec::new());
    }
    if !published.faults().is_empty() {
        return Ok(Some(look));
    }
    let tables: Vec<_> = config.outboxes.iter().map(|outbox| &outbox.table).collect();
    for row in &client.query(&leaves_sql(&config.postgres.publication, &tables, knows_schemas), &[]).await? {
        let leaf = Leaf { relation: row.get(0), shape: row.get(1) };
        match &mut look.late {
            Some(late) if row.get(2) => late.push(leaf),
            _ => look.leaves.push(leaf),
        }
    }
    Ok(Some(look))
}

/// The leaves of tables, their shapes, and whether they count as [late](super::late). `with_schemas`: publications of
/// whole schemas are known (15 and later).
pub fn leaves_sql(publication: &str, tables: &[&TableName], with_schemas: bool) -> String {
    let schemas = if with_schemas {
        "(SELECT string_agg(s.oid || ':' || s.xmin, ',' ORDER BY s.oid) FROM pg_publication_namespace s
          WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)"
    } else {
        "NULL"
    };
    let late = if with_schemas {
        "false"
    } else {
        "EXISTS (SELECT FROM pg_partition_ancestors(l.relation) a JOIN pg_inherits i ON i.inhrelid = a.relid
                 JOIN pg_class n ON n.oid = a.relid JOIN pg_type y ON y.oid = n.reltype WHERE i.xmin <> y.xmin)"
    };
    let name = |table: &&TableName| format!("({}, {})", quote_literal(&table.schema), quote_literal(&table.table));
    // each of these rows of the catalog gets another oid or xmin when the table left the publication for a while:
    // pg_type's when it was renamed or was in another schema, pg_inherits' when a partition was detached
    format!(
        "WITH roots AS (
             SELECT c.oid, c.relkind FROM (VALUES {names}) o(schema_name, table_name)
             JOIN pg_namespace n ON n.nspname = o.schema_name
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = o.table_name
         ), leaves AS (
             SELECT oid AS root, oid AS relation FROM roots WHERE relkind = 'r'
             UNION ALL
             SELECT r.oid, t.relid::oid FROM roots r, pg_partition_tree(r.oid) t WHERE r.relkind = 'p' AND t.isleaf
         )
         SELECT c.oid, concat_ws('/', c.relfilenode, p.oid || ':' || p.xmin,
             (SELECT string_agg(r.oid || ':' || r.xmin, ',' ORDER BY r.oid) FROM pg_publication_rel r
              WHERE r.prpubid = p.oid AND r.prrelid IN (l.root, l.relation)), {schemas},
             (SELECT string_agg(y.oid || ':' || y.xmin, ',' ORDER BY y.oid) FROM pg_class n
              JOIN pg_type y ON y.oid = n.reltype WHERE n.oid IN (l.root, l.relation)),
             (SELECT string_agg(i.inhparent || ':' || i.xmin, ',' ORDER BY i.inhrelid)
              FROM pg_partition_ancestors(l.relation) a JOIN pg_inherits i ON i.inhrelid = a.relid)), {late}
         FROM leaves l JOIN pg_class c ON c.oid = l.relation, pg_publication p
         -- nothing of an unlogged or a foreign table is in the WAL
         WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND p.pubname = {publication}
         ORDER BY c.oid",
        names = tables.iter().map(name).collect::<Vec<_>>().join(", "),
        publication = quote_literal(publication),
    )
}

/// Where a slot was left means nothing once walpost itself, as it was asked to, has made it anew or moved it.
pub async fn forget_where_it_was_left(client: &Client, config: &Config) {
    if let Err(error) = Record::new(config).take_left(client).await {
        tracing::debug!(error = chain(&error), "no record of where the slot was left");
    }
}

/// Before the first stream of a process: creates the tables where that is wanted and allowed, and notes from where on
/// rows can be told to be delivered. A slot that someone streams from is left to whoever does.
pub async fn open(client: &Client, config: &Config) -> Result<(), RecordError> {
    ready(client, config).await?;
    let record = Record::new(config);
    let Some(seen) = slot(client, &record.slot).await?.filter(|slot| !slot.active) else { return Ok(()) };
    let mut fence = record.load(client).await?;
    let Some(look) = look(client, config).await? else { return Ok(()) };
    if seen.confirmed > look.wal_end {
        return Ok(());
    }
    record.save(client, &fence.open(&look, seen.confirmed)).await
}

/// Creates the tables where that is wanted and allowed; fails where they cannot be used.
pub async fn ready(client: &Client, config: &Config) -> Result<(), RecordError> {
    let record = Record::new(config);
    let Some(outbox) = config.outboxes.first() else { return Ok(()) };
    let fit = record.inspect(client, &outbox.table).await;
    let unusable = matches!(fit, Err(RecordError::Unusable { .. }));
    if !unusable || !config.postgres.auto_create || !may_create(client, &record.delivered.schema).await? {
        return fit;
    }
    match record.create(client).await {
        // two walposts at once
        Err(error) if error.code() != Some(&SqlState::UNIQUE_VIOLATION) => return Err(error.into()),
        _ => {}
    }
    record.inspect(client, &outbox.table).await
}

async fn may_create(client: &Client, schema: &str) -> Result<bool, tokio_postgres::Error> {
    let sql = format!(
        "SELECT NOT pg_is_in_recovery() AND EXISTS (SELECT FROM pg_namespace n
         WHERE n.nspname = {} AND has_schema_privilege(n.oid, 'CREATE'))",
        quote_literal(schema)
    );
    Ok(client.query_one(&sql, &[]).await?.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_created_in_the_outboxes_schema() {
        let table = |name: &str| TableName { schema: "My\"Schema".to_owned(), table: name.to_owned() };
        let record = Record { slot: "s".into(), delivered: table(DELIVERED), dead_lettered: table(DEAD_LETTERED) };
        let sql = record.sql();
        assert!(sql.is_ascii() && !sql.contains("\"public\""), "{sql}");
        assert_eq!(sql.matches("\"My\"\"Schema\".\"walpost_").count(), 4, "{sql}");
    }
}
