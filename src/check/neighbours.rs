//! What else goes on in the cluster and touches the slot: standbys that commits wait for, standbys that the stream waits
//! for, slots of others that hold WAL, transactions that stay open.
//!
//! Catalogs alone, so that it costs a few milliseconds also where the tables are large.

use std::time::Duration;

use humantime::format_duration;
use tokio_postgres::{Client, Row};

use super::{Findings, server::Server, slot::Slot};
use crate::{
    backfill::marker_of,
    config::Config,
    observe::slot::SlotReading,
    sql::{WAL_END, quote_identifier, quote_literal},
};

/// A synchronous standby that lacks so much WAL does not keep up.
const STANDBY_LACKS: i64 = 64 * 1024 * 1024;
/// So much WAL behind what is confirmed is more than the server keeps for its own reasons.
const SLOT_PINNED: u64 = 64 * 1024 * 1024;
/// A transaction that is open for so long is no accident of the moment.
const OPEN: Duration = Duration::from_secs(10);
/// One that is open for so long is told of whatever it holds.
const OPEN_LONG: Duration = Duration::from_mins(5);

const MAY_SEE: &str = "SELECT pg_has_role('pg_read_all_stats', 'USAGE')";

/// Transactions with an id, of all databases: those that the log is kept for.
const OLDEST: &str = "
    SELECT pid, NULL::text AS gid, datname::text, usename::text,
           extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age
    FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
    UNION ALL
    SELECT NULL, gid, database::text, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8
    FROM pg_prepared_xacts
    ORDER BY age DESC LIMIT 1";

pub(super) async fn check(
    client: &Client,
    config: &Config,
    (server, slot): (&Server, &Slot),
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    let may_see: bool = client.query_one(MAY_SEE, &[]).await?.get(0);
    if !may_see {
        findings.unknown(
            "activity_unseen",
            "what other roles do on the server cannot be seen".to_owned(),
            "whether an open transaction holds the slot back, or a synchronous standby lags, is unknown",
            format!("`GRANT pg_read_all_stats TO {}`, if you want to know", quote_identifier(&server.role)),
        );
    }
    synchronous_standbys(client, server, findings).await?;
    awaited_slots(client, server, slot, findings).await?;
    other_slots(client, config, findings).await?;
    if let Some(row) = client.query_opt(OLDEST, &[]).await? {
        judge_transaction(&Transaction::new(&row), slot, config, findings);
    }
    Ok(())
}

/// Standbys that every COMMIT waits for.
async fn synchronous_standbys(
    client: &Client,
    server: &Server,
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    // a name that takes in walpost is told of elsewhere, and counts walpost as a standby
    if server.synchronous.trim().is_empty() || server.synchronous.contains('*') {
        return Ok(());
    }
    let sql = format!(
        "SELECT state IS NULL, coalesce(sync_state IN ('sync', 'quorum'), false), application_name, \
         pg_wal_lsn_diff({WAL_END}, flush_lsn)::bigint FROM pg_stat_replication ORDER BY 4"
    );
    let rows = client.query(&sql, &[]).await?;
    if rows.iter().any(|row| row.get(0)) {
        return Ok(()); // hidden, which has been told
    }
    let off =
        "`ALTER SYSTEM SET synchronous_standby_names = ''` and `SELECT pg_reload_conf()` (commits then wait for none)";
    let why = "every COMMIT of the applications, and so every event, waits for it";
    let wanted = wanted_standbys(&server.synchronous);
    let there: Vec<&Row> = rows.iter().filter(|row| row.get(1)).collect();
    let Some(last) = wanted.checked_sub(1).and_then(|last| there.get(last)) else {
        findings.warn(
            "synchronous_standby_missing",
            format!(
                "synchronous_standby_names is {:?}, and of {wanted} synchronous standbys {} are there",
                server.synchronous,
                there.len()
            ),
            why,
            format!("start the standby, or {off}"),
        );
        return Ok(());
    };
    let (name, lacks): (&str, i64) = (last.get(2), last.get::<_, Option<i64>>(3).unwrap_or_default());
    if lacks < STANDBY_LACKS {
        findings.ok("synchronous_standby", format!("synchronous standbys ({wanted}) keep up"));
        return Ok(());
    }
    findings.warn(
        "synchronous_standby_behind",
        format!("synchronous standby {name} lacks {} MB of WAL", lacks / (1024 * 1024)),
        why,
        format!("see what holds the standby up, or {off}"),
    );
    Ok(())
}

/// How many standbys a COMMIT waits for: `FIRST 2 (a, b, c)`, `ANY 1 (a, b)`, `a, b`.
///
/// <https://www.postgresql.org/docs/current/runtime-config-replication.html#GUC-SYNCHRONOUS-STANDBY-NAMES>
fn wanted_standbys(setting: &str) -> usize {
    let Some((method, _)) = setting.split_once('(') else { return 1 };
    method.split_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or(1)
}

/// Slots of standbys that must have what a failover slot may send (17 and later).
async fn awaited_slots(
    client: &Client,
    server: &Server,
    slot: &Slot,
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    const AWAY: &str = "
        SELECT wanted.name FROM (SELECT trim(both ' \"' FROM n) AS name FROM unnest(string_to_array($1, ',')) n) wanted
        LEFT JOIN pg_replication_slots s ON s.slot_name = wanted.name
        WHERE NOT coalesce(s.active, false)";
    let Some(awaited) = server.awaited_slots.as_deref().filter(|slots| !slots.is_empty()) else { return Ok(()) };
    let Some((name, SlotReading { failover: Some(failover), .. })) = slot.present() else { return Ok(()) };
    if !failover {
        let database = quote_literal(&server.database);
        findings.warn(
            "slot_without_failover",
            format!("synchronized_standby_slots is {awaited:?}, and replication slot {name} is no failover slot"),
            "it stays behind when the standby takes over, and events that were not delivered with it",
            format!(
                "stop walpost, then `psql \"dbname={database} replication=database\" -c 'ALTER_REPLICATION_SLOT {name} \
                 (FAILOVER true)'`"
            ),
        );
        return Ok(());
    }
    let away: Vec<String> = client.query(AWAY, &[&awaited]).await?.iter().map(|row| row.get(0)).collect();
    if !away.is_empty() {
        findings.error(
            "awaited_standby_away",
            format!("synchronized_standby_slots is {awaited:?}, and no standby reads {}", away.join(", ")),
            "the server sends a failover slot nothing that those standbys do not have, so nothing is delivered",
            "start the standby, or `ALTER SYSTEM SET synchronized_standby_slots = ''` and `SELECT pg_reload_conf()`",
        );
    }
    Ok(())
}

/// Slots of others for which the server keeps more WAL than by itself.
async fn other_slots(client: &Client, config: &Config, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let sql = format!(
        "SELECT slot_name::text, active_pid, pg_wal_lsn_diff({WAL_END}, restart_lsn)::bigint FROM pg_replication_slots \
         WHERE slot_name <> ALL($1) AND wal_status IN ('extended', 'unreserved') ORDER BY 3 DESC LIMIT 5"
    );
    let own = [config.postgres.slot.clone(), marker_of(&config.postgres.slot)];
    for row in client.query(&sql, &[&own.as_slice()]).await? {
        let (name, pid, bytes): (&str, Option<i32>, i64) = (row.get(0), row.get(1), row.get(2));
        let drop = format!("`SELECT pg_drop_replication_slot({})`", quote_literal(name));
        let (reader, fix) = match pid {
            None => ("nobody reads it".to_owned(), format!("start its reader; if nobody needs it: {drop}")),
            Some(pid) => (
                format!("process {pid} reads it"),
                format!(
                    "see why its reader lags, or which transaction it waits for; if nobody needs it: `SELECT pg_terminate_backend({pid}, 5000)` and {drop}"
                ),
            ),
        };
        findings.warn(
            "other_slot_holds_wal",
            format!("replication slot {name} holds back {} MB of WAL, and {reader}", bytes / (1024 * 1024)),
            "the disk that it fills is the one that walpost's slot needs",
            fix,
        );
    }
    Ok(())
}

/// The oldest transaction with an id.
struct Transaction {
    /// Of a session; none for a prepared one.
    pid: Option<i32>,
    gid: Option<String>,
    database: String,
    role: String,
    age: Duration,
}

impl Transaction {
    fn new(row: &Row) -> Self {
        let text = |index: usize| row.get::<_, Option<String>>(index).unwrap_or_default();
        let age = row.get::<_, Option<f64>>(4).unwrap_or_default().max(0.0).floor();
        Self {
            pid: row.get(0),
            gid: row.get(1),
            database: text(2),
            role: text(3),
            age: Duration::try_from_secs_f64(age).unwrap_or_default(),
        }
    }

    fn fix(&self) -> String {
        match (&self.gid, self.pid) {
            (Some(gid), _) => format!(
                "`ROLLBACK PREPARED {}` in database {}, or COMMIT PREPARED",
                quote_literal(gid),
                quote_identifier(&self.database)
            ),
            (None, pid) => format!("`SELECT pg_terminate_backend({})`, or end it otherwise", pid.unwrap_or_default()),
        }
    }
}

fn judge_transaction(transaction: &Transaction, slot: &Slot, config: &Config, findings: &mut Findings) {
    let Transaction { pid, gid, database, role, age } = transaction;
    let name = &config.postgres.slot;
    let pinned = slot.present().map(|(_, reading)| reading.confirmed_lsn.bytes_since(reading.restart_lsn));
    let why = match pinned {
        None if config.postgres.auto_create && *age >= OPEN => {
            format!("replication slot {name} cannot be created before it has ended, and walpost waits for that")
        }
        Some(bytes) if bytes >= SLOT_PINNED && *age >= OPEN => format!(
            "the server keeps {} MB of WAL for it that replication slot {name} has confirmed already",
            bytes / (1024 * 1024)
        ),
        _ if *age >= OPEN_LONG => {
            "as long as it is open, the server keeps all WAL since its beginning for the slot".to_owned()
        }
        _ => return,
    };
    let whose = match (gid, pid) {
        (Some(gid), _) => format!("prepared transaction {gid:?}"),
        (None, pid) => format!("a transaction of process {}", pid.unwrap_or_default()),
    };
    findings.warn(
        "long_transaction",
        format!("{whose} (role {role}, database {database}) is open for {}", format_duration(*age)),
        why,
        transaction.fix(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_standbys_is_read_in_every_form() {
        for (setting, number) in
            [("s1", 1), ("s1, s2", 1), ("2 (s1, s2)", 2), ("FIRST 3 (a,b,c)", 3), ("any 2(a,b)", 2)]
        {
            assert_eq!(wanted_standbys(setting), number, "{setting}");
        }
    }
}
