//! The statements of a pass: which rows may go, by age and by the record of what was delivered. Makes SQL and runs none.

use super::{age::TimeKind, record::Record};
use crate::config::RetentionConfig;

/// Stands for a partition's name.
pub(super) const LEAF: &str = "{leaf}";

/// What the statements are made of.
pub(super) struct Statements<'a> {
    pub(super) table: &'a str,
    pub(super) time: String,
    pub(super) id: String,
    pub(super) kind: TimeKind,
    pub(super) partitioned: bool,
    pub(super) may_lock: bool,
    pub(super) retention: &'a RetentionConfig,
    pub(super) record: &'a Record,
}

impl Statements<'_> {
    /// The row's transaction was delivered. A row shows 32 bits of its xid; the rest follows from the server's present
    /// one. On a server that has used more than four billion, a row from before may look like a new one: there its time
    /// must fit as well.
    pub(super) fn proven(&self) -> String {
        format!(
            "c.xmin::text::bigint > 2 AND EXISTS (
                 SELECT FROM {delivered} d, clock
                 WHERE d.slot = $1 AND d.system = clock.system AND d.relation = c.tableoid
                   AND {xid} >= d.since AND {xid} < d.until
                   AND (clock.next < 4294967296 OR {instant} >= d.since_at)
                 OFFSET 0)",
            delivered = self.record.delivered(),
            xid = XID,
            instant = self.kind.instant(&self.time),
        )
    }

    /// Dead letters have a retention of their own.
    pub(super) fn dead(&self) -> String {
        let listed = format!(
            "EXISTS (SELECT FROM {} l WHERE l.id = format('%s', c.{}) OFFSET 0)",
            self.record.dead_lettered(),
            self.id
        );
        match self.retention.keep_dead_lettered {
            None => listed,
            Some(keep) => format!("({} >= {} AND {listed})", self.time, self.kind.cutoff(keep)),
        }
    }

    pub(super) fn delete(&self, column: &str) -> String {
        let Self { table, time, kind, .. } = self;
        let lock = if self.may_lock { "FOR UPDATE OF c SKIP LOCKED" } else { "" };
        // a place alone names a row of a plain table only
        let of_that_partition =
            if self.partitioned { "AND (o.tableoid, o.ctid) IN (SELECT part, place FROM doomed)" } else { "" };
        format!(
            "WITH turn AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($2) AS mine), {CLOCK},
             doomed AS MATERIALIZED (
                 SELECT c.tableoid AS part, c.ctid AS place FROM {table} c
                 WHERE (SELECT mine FROM turn) AND {time} < {cutoff} AND {time} >= {from}
                   AND c.tableoid <> ALL ($6::oid[]) AND {proven} AND NOT {dead}
                 ORDER BY {time} LIMIT $4 OFFSET $5 {lock}
             ), gone AS (
                 DELETE FROM {table} o WHERE o.ctid = ANY (ARRAY(SELECT place FROM doomed)) {of_that_partition}
                 RETURNING o.{column} AS at
             )
             SELECT (SELECT mine FROM turn), count(*), max(at)::text, (SELECT count(*) FROM doomed) FROM gone",
            cutoff = self.kind.cutoff(self.retention.keep),
            from = kind.parameter(3),
            proven = self.proven(),
            dead = self.dead(),
        )
    }

    pub(super) fn stays(&self) -> String {
        format!(
            "WITH {CLOCK} SELECT EXISTS (
                 SELECT FROM ONLY {LEAF} c WHERE NOT coalesce({time} < {cutoff} AND {proven} AND NOT {dead}, false))",
            time = self.time,
            cutoff = self.kind.cutoff(self.retention.keep),
            proven = self.proven(),
            dead = self.dead(),
        )
    }

    pub(super) fn count(&self) -> String {
        format!(
            "WITH {CLOCK}, old AS (
                 SELECT {proven} AS proven, {dead} AS dead,
                        {XID} >= coalesce((SELECT max(d.since) FROM {delivered} d, clock
                            WHERE d.slot = $1 AND d.system = clock.system AND d.relation = c.tableoid), {XID} + 1) AS ours
                 FROM {table} c WHERE {time} < {cutoff} AND c.tableoid <> ALL ($2::oid[])
             )
             SELECT count(*) FILTER (WHERE proven AND NOT dead), count(*) FILTER (WHERE proven AND dead),
                    count(*) FILTER (WHERE NOT proven AND ours), count(*) FILTER (WHERE NOT proven AND NOT ours)
             FROM old",
            proven = self.proven(),
            dead = self.dead(),
            delivered = self.record.delivered(),
            table = self.table,
            time = self.time,
            cutoff = self.kind.cutoff(self.retention.keep),
        )
    }
}

/// The server's next xid, all 64 bits of it, and which cluster it is.
const CLOCK: &str = "clock AS MATERIALIZED (
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next,
           (SELECT system_identifier::text FROM pg_control_system()) AS system)";
/// All 64 bits of a row's xid.
const XID: &str = "((SELECT next FROM clock) - ((SELECT next FROM clock) - c.xmin::text::bigint) % 4294967296)";
