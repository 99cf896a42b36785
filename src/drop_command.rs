//! `walpost drop`: the end of a walpost. Drops the slot, which otherwise keeps the write-ahead log for ever, and then the
//! publication. The outbox table and its rows stay.

use std::fmt;

use tokio_postgres::Client;

use crate::{
    backfill,
    config::Config,
    publication,
    sql::{self, SqlError, quote_identifier},
};

/// Why something is still there.
#[derive(Debug, thiserror::Error)]
pub enum DropError {
    /// No SQL link.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// A statement failed.
    #[error("{attempt}")]
    Statement {
        /// What was tried.
        attempt: String,
        /// Why it failed.
        source: tokio_postgres::Error,
    },
    /// Somebody streams.
    #[error("replication slot {slot} is in use by server process {pid}; stop that walpost first")]
    InUse {
        /// The slot.
        slot: String,
        /// The server's process.
        pid: i32,
    },
    /// The slot is not walpost's.
    #[error("replication slot {slot} is not walpost's: {why}; it stays")]
    Foreign {
        /// The slot.
        slot: String,
        /// What tells.
        why: String,
    },
}

/// What is there, or was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftovers {
    /// The slot, and that of a backfill that was not completed: name, and how many bytes of WAL it has not confirmed.
    slots: Vec<(String, i64)>,
    /// The publication; `None` where there is none.
    publication: Option<String>,
    /// Other tables in the publication: it stays then.
    others: Vec<String>,
    dropped: bool,
}

impl Leftovers {
    /// Whether there is anything to drop.
    pub fn is_nothing(&self) -> bool {
        self.slots.is_empty() && (self.publication.is_none() || !self.others.is_empty())
    }
}

/// Looks, and with `sure` drops.
pub async fn run(config: &Config, sure: bool) -> Result<Leftovers, DropError> {
    let client = sql::connect(&config.postgres.conninfo).await?;
    let mut found = look(&client, config).await?;
    if !sure {
        return Ok(found);
    }
    for (slot, _) in &found.slots {
        let dropped = client.execute("SELECT pg_drop_replication_slot($1)", &[slot]).await;
        dropped.map_err(|source| statement(&format!("drop replication slot {slot}"), source))?;
    }
    if let Some(name) = found.publication.as_ref().filter(|_| found.others.is_empty()) {
        let dropped = client.batch_execute(&format!("DROP PUBLICATION {name}")).await;
        dropped.map_err(|source| statement(&format!("drop publication {name}"), source))?;
    }
    found.dropped = true;
    Ok(found)
}

const SLOT: &str = "
    SELECT slot_type::text, coalesce(plugin, '-')::text, coalesce(database, '-')::text, database = current_database(),
           active_pid, coalesce((CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END
                                 - confirmed_flush_lsn)::bigint, 0)
    FROM pg_replication_slots WHERE slot_name = $1::text";
const TABLES: &str = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = $1::text";

async fn look(client: &Client, config: &Config) -> Result<Leftovers, DropError> {
    let mut slots = Vec::new();
    for name in [config.postgres.slot.clone(), backfill::marker_of(&config.postgres.slot)] {
        let row = client.query_opt(SLOT, &[&name]).await.map_err(|source| statement("look for the slot", source))?;
        let Some(row) = row else { continue };
        let foreign = |why: String| DropError::Foreign { slot: name.clone(), why };
        match (row.get::<_, &str>(0), row.get::<_, &str>(1), row.get::<_, Option<bool>>(3)) {
            ("physical", ..) => return Err(foreign("it is a physical slot".to_owned())),
            (_, "pgoutput", Some(true)) => {}
            (_, "pgoutput", _) => return Err(foreign(format!("it belongs to database {:?}", row.get::<_, &str>(2)))),
            (_, plugin, _) => return Err(foreign(format!("its output plugin is {plugin:?}"))),
        }
        if let Some(pid) = row.get(4) {
            return Err(DropError::InUse { slot: name.clone(), pid });
        }
        slots.push((name, row.get(5)));
    }
    let publication = publication::find(client, &config.postgres.publication, &config.outboxes)
        .await
        .map_err(|source| statement("look for the publication", source))?;
    let tables = client
        .query(TABLES, &[&config.postgres.publication])
        .await
        .map_err(|source| statement("look for the publication", source))?;
    let ours = |schema: &str, table: &str| {
        config.outboxes.iter().any(|outbox| outbox.table.schema == schema && outbox.table.table == table)
    };
    let others = tables.iter().map(|row| (row.get::<_, String>(0), row.get::<_, String>(1)));
    let others =
        others.filter(|(schema, table)| !ours(schema, table)).map(|(schema, table)| format!("{schema}.{table}"));
    Ok(Leftovers {
        slots,
        publication: publication.options.map(|_| quote_identifier(&config.postgres.publication)),
        others: others.collect(),
        dropped: false,
    })
}

fn statement(attempt: &str, source: tokio_postgres::Error) -> DropError {
    DropError::Statement { attempt: attempt.to_owned(), source }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.dropped { "dropped" } else { "would drop" };
        if self.is_nothing() {
            writeln!(f, "nothing to drop")?;
        }
        for (slot, behind) in &self.slots {
            write!(f, "{verb} replication slot {slot}")?;
            if *behind > 0 {
                write!(f, ", which had {behind} bytes of WAL before it: events in them are not published any more")?;
            }
            writeln!(f)?;
        }
        if let Some(publication) = &self.publication {
            match self.others.as_slice() {
                [] => writeln!(f, "{verb} publication {publication}")?,
                others => writeln!(f, "publication {publication} stays: it publishes {} as well", others.join(", "))?,
            }
        }
        if !self.dropped && !self.is_nothing() {
            writeln!(f, "nothing was dropped; `walpost drop --yes` does it")?;
        }
        Ok(())
    }
}
