//! How one partition is dropped.
//!
//! Its age picks it and proves nothing: each row must be as a pass would delete it. That is looked at twice. Once while
//! others go on, since most partitions that stay are known by this; then in the transaction that keeps writers out (SHARE)
//! and detaches and drops it. Not `DETACH … CONCURRENTLY`: while that is pending, the server publishes nothing of what a
//! transaction with an older snapshot still writes into the partition (see `docs/decisions/0012-partitions.md`).
//!
//! Must never keep applications waiting: what needs the root's lock is given up after a moment, and is one message that
//! ends with COMMIT, so that the server never waits for walpost meanwhile.

use tokio_postgres::{Client, error::SqlState};

use super::{
    partitions::{MOMENT, Partitions, Whole, refused},
    pass::{PassError, Plan},
};
use crate::{error::chain, sql::quote_identifier};

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

/// Rows are looked at for so long at most, and by someone who sees them all: a policy that hides some is an error.
const LOOKS: &str = "SET LOCAL statement_timeout = '10min'; SET LOCAL row_security = off;
    SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// A sequence that goes with the partition, and that the table may go on to take its ids from.
const SEQUENCE: &str = "
    SELECT format('%I.%I', n.nspname, s.relname) FROM pg_depend d
    JOIN pg_class s ON s.oid = d.objid AND s.relkind = 'S' JOIN pg_namespace n ON n.oid = s.relnamespace
    WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = $1
      AND d.deptype = 'a' LIMIT 1";

/// Somebody waits for a partition, having locked the table perhaps: who waits for that in turn could make a deadlock of it.
const AWAITED: &str = "
    SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_database b ON b.oid = l.database
                   WHERE b.datname = current_database() AND l.relation = $1 AND NOT l.granted)";

impl Partitions {
    /// Drops a partition if every row in it has been delivered and may go; `only_look`: says whether it would.
    pub async fn drop(
        &self,
        client: &Client,
        (plan, ended): (&Plan, &Whole),
        only_look: bool,
    ) -> Result<Fate, PassError> {
        let fate = self.look_freely(client, plan, ended).await;
        let fate = self.settled(client, plan, (ended, fate)).await?;
        let Fate::Dropped(rows) = fate else { return Ok(fate) };
        if only_look {
            return Ok(fate);
        }
        match self.drop_or_fail(client, plan, ended).await {
            Ok(None) => Ok(Fate::Dropped(rows)),
            Ok(Some(fate)) => self.settled(client, plan, (ended, Ok(fate))).await,
            Err(error) => self.settled(client, plan, (ended, Err(error))).await,
        }
    }

    /// Ends a transaction that has changed nothing.
    async fn settled(
        &self,
        client: &Client,
        plan: &Plan,
        (ended, fate): (&Whole, Result<Fate, PassError>),
    ) -> Result<Fate, PassError> {
        client.batch_execute("ROLLBACK").await.map_err(|source| plan.failed(source))?;
        fate.or_else(|error| self.judge_drop(error, ended))
    }

    async fn look_freely(&self, client: &Client, plan: &Plan, ended: &Whole) -> Result<Fate, PassError> {
        let failed = |source| plan.failed(source);
        client.batch_execute(&format!("BEGIN; {LOOKS}")).await.map_err(failed)?;
        if let Some(row) = client.query_opt(SEQUENCE, &[&ended.relation]).await.map_err(failed)? {
            let sequence: String = row.get(0);
            return Err(refused(
                format!(
                    "partition {} is not dropped: sequence {sequence}, which may be in use, would go with it",
                    ended.name
                ),
                format!("ALTER SEQUENCE {sequence} OWNED BY NONE"),
            ));
        }
        if self.has_row_that_stays(client, plan, ended).await? {
            return Ok(Fate::Stays);
        }
        let count =
            client.query_one(&format!("SELECT count(*) FROM ONLY {}", ended.name), &[]).await.map_err(failed)?;
        Ok(Fate::Dropped(count.get::<_, i64>(0).unsigned_abs()))
    }

    /// `None`: it is gone, and that is committed.
    async fn drop_or_fail(&self, client: &Client, plan: &Plan, ended: &Whole) -> Result<Option<Fate>, PassError> {
        let failed = |source| plan.failed(source);
        client.batch_execute(&format!("BEGIN; {LOOKS}")).await.map_err(failed)?;
        if !self.takes_turn(client, plan).await? {
            return Ok(Some(Fate::Busy));
        }
        // a row that someone has written and not committed holds a lock that this waits for
        client.batch_execute(&format!("LOCK TABLE ONLY {} IN SHARE MODE", ended.name)).await.map_err(failed)?;
        if self.has_row_that_stays(client, plan, ended).await? {
            return Ok(Some(Fate::Stays));
        }
        let awaited = client.query_one(AWAITED, &[&ended.relation]).await.map_err(failed)?;
        if awaited.get(0) {
            return Ok(Some(Fate::Busy));
        }
        client.batch_execute(&self.drop_statements(ended)).await.map_err(failed)?;
        Ok(None)
    }

    /// Whoever begins to wait for the partition now looks for a deadlock after `deadlock_timeout`: by then nobody waits here.
    fn drop_statements(&self, ended: &Whole) -> String {
        let patience = |most: u32, part: u32| {
            format!(
                "SELECT set_config('lock_timeout', greatest(1, least({most}, setting::int / {part}))::text, true)
                 FROM pg_settings WHERE name = 'deadlock_timeout'"
            )
        };
        format!(
            "SET LOCAL statement_timeout = '{MOMENT}';
             {first}; LOCK TABLE ONLY {root} IN ACCESS EXCLUSIVE MODE;
             -- everybody waits from here on, for whoever has locked the partition, the DEFAULT one or what foreign keys name
             {others}; ALTER TABLE {root} DETACH PARTITION {name};
             DROP TABLE {name};
             -- fails where the name has come to mean another table than the one that was looked at
             SELECT 1 / (1 - count(*)) FROM pg_class WHERE oid = {oid};
             -- an oid may come to name another table
             DELETE FROM {delivered} d WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = d.relation);
             COMMIT",
            first = patience(200, 4),
            others = patience(50, 20),
            root = self.bounds.root,
            name = ended.name,
            oid = ended.relation,
            delivered = self.record.delivered(),
        )
    }

    async fn has_row_that_stays(&self, client: &Client, plan: &Plan, ended: &Whole) -> Result<bool, PassError> {
        let stays = client.query_one(&plan.stays(&ended.name), &[&self.record.slot()]).await;
        Ok(stays.map_err(|source| plan.failed(source))?.get(0))
    }

    /// A refusal is about this partition alone; a lost link about everything.
    fn judge_drop(&self, error: PassError, ended: &Whole) -> Result<Fate, PassError> {
        let PassError::Sql { table, source } = error else { return Err(error) };
        let Some(code) = source.code() else { return Err(PassError::Sql { table, source }) };
        let (name, owner) = (&ended.name, quote_identifier(&self.owner));
        let fix = match *code {
            // another cleaner, or its owner, was faster; or the name means another table by now
            SqlState::LOCK_NOT_AVAILABLE
            | SqlState::T_R_DEADLOCK_DETECTED
            | SqlState::UNDEFINED_TABLE
            | SqlState::DIVISION_BY_ZERO => return Ok(Fate::Busy),
            SqlState::INSUFFICIENT_PRIVILEGE => {
                format!("ALTER TABLE {name} OWNER TO {owner}; ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY")
            }
            SqlState::DEPENDENT_OBJECTS_STILL_EXIST => {
                "drop the view or foreign key that depends on it, or make it depend on the root".to_owned()
            }
            SqlState::QUERY_CANCELED => format!(
                "it took too long: its rows are looked at for ten minutes at most, and everybody waits for its end for \
                 {MOMENT} at most; drop it by hand once `walpost prune --dry-run` names it"
            ),
            _ => "mend what the server says; its rows are deleted one by one meanwhile".to_owned(),
        };
        Err(refused(format!("partition {name} of {table} cannot be dropped: {}", chain(&source)), fix))
    }
}
