//! `walpost rewind`: what can be done about the past and the future of a slot.
//!
//! Postgres lets no slot go back: what was confirmed may be gone from its WAL, and it remembers no older state. So going
//! back means to publish rows once more that are still in the table. Going forward means to skip events, which is done only
//! when the operator has seen how many.

use tokio_postgres::Client;

use crate::{
    backfill_command,
    cli::{Again, Rewind},
    config::{Config, OutboxConfig},
    lsn::Lsn,
    observe::slot::{self, SlotState},
    peek_command::{self, PeekError},
    prepare,
    retention::record,
    sql::{self, SqlError, quote_identifier, quote_literal},
};

/// Why nothing was moved.
#[derive(Debug, thiserror::Error)]
pub enum RewindError {
    /// No SQL link.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// A statement failed.
    #[error("{attempt}")]
    Statement {
        /// What was tried.
        attempt: &'static str,
        /// Why it failed.
        source: tokio_postgres::Error,
    },
    /// There is no slot, or no copy of it.
    #[error(transparent)]
    Peek(#[from] PeekError),
    /// The slot is missing or lost.
    #[error("{0}")]
    Lost(String),
    /// Back.
    #[error(
        "the slot has confirmed {confirmed} and cannot go back to {to}: Postgres lets no slot do that; rows that are still in the \
         table can be published once more: `walpost rewind --events-since <time>`"
    )]
    Back {
        /// Where it stands.
        confirmed: Lsn,
        /// Where it was to go.
        to: Lsn,
    },
    /// Beyond the end.
    #[error("{to} is beyond the end of the WAL, which is {end}")]
    Beyond {
        /// Where it was to go.
        to: Lsn,
        /// Where the WAL ends.
        end: Lsn,
    },
    /// Somebody streams.
    #[error("replication slot {slot} is in use by server process {pid}; stop that walpost first")]
    InUse {
        /// The slot.
        slot: String,
        /// The server's process.
        pid: i32,
    },
    /// Rows cannot be published.
    #[error(transparent)]
    Rows(#[from] backfill_command::CommandError),
}

/// Events of the outboxes in transactions that commit before a position, behind the slot. An insert is `I` and the table's
/// oid: <https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html>.
const COUNT: &str = "
    SELECT count(*) FROM pg_logical_slot_peek_binary_changes($1, $2::text::pg_lsn, NULL, 'proto_version', '1',
        'publication_names', $3)
    WHERE get_byte(data, 0) = 73
      AND get_byte(data, 1) * 16777216::bigint + get_byte(data, 2) * 65536 + get_byte(data, 3) * 256 + get_byte(data, 4)
          = ANY ($4)";

/// Moves, or says what that would do; the exit code.
pub async fn run(config: &Config, wanted: &Rewind, mut print: impl FnMut(String)) -> Result<u8, RewindError> {
    if let Some(since) = &wanted.events_since {
        return publish_since(config, since, wanted.yes, print).await;
    }
    let Some(to) = wanted.to else { return Ok(0) };
    let client = sql::connect(&config.postgres.conninfo).await?;
    let statement = |attempt, source| RewindError::Statement { attempt, source };
    let name = &config.postgres.slot;
    let seen = slot::look(&client, name).await.map_err(|source| statement("look at the slot", source))?;
    if let Some(loss) = seen.slot.loss(name) {
        return Err(RewindError::Lost(loss));
    }
    let SlotState::Present(found) = &seen.slot else { return Ok(0) };
    if to < found.confirmed_lsn {
        return Err(RewindError::Back { confirmed: found.confirmed_lsn, to });
    }
    if to > seen.current_wal {
        return Err(RewindError::Beyond { to, end: seen.current_wal });
    }
    let skipped = count(&client, config, to).await?;
    let from = found.confirmed_lsn;
    if !wanted.yes {
        print(format!(
            "slot {name} would go from {from} to {to}: {skipped} events would never be published\n\
             their rows stay in the outbox; to do it: walpost rewind --to {to} --yes"
        ));
        return Ok(2);
    }
    if let Some(pid) = found.active_pid {
        return Err(RewindError::InUse { slot: name.clone(), pid });
    }
    let advance = "SELECT end_lsn::text FROM pg_replication_slot_advance($1, $2::text::pg_lsn)";
    let row = client.query_one(advance, &[name, &to.to_string()]).await;
    let row = row.map_err(|source| statement("advance the slot", source))?;
    record::forget_where_it_was_left(&client, config).await;
    print(format!("slot {name} went from {from} to {}: {skipped} events were skipped", row.get::<_, &str>(0)));
    Ok(0)
}

async fn count(client: &Client, config: &Config, to: Lsn) -> Result<i64, RewindError> {
    let statement = |attempt, source| RewindError::Statement { attempt, source };
    let catalog =
        prepare::look(client, config).await.map_err(|source| statement("look for the outbox tables", source))?;
    let oids: Vec<i64> = catalog.outboxes.iter().map(|(oid, _)| i64::from(*oid)).collect();
    let copy = peek_command::copy_slot(client, &config.postgres.slot).await?;
    let publication = quote_identifier(&config.postgres.publication);
    let row = client.query_one(COUNT, &[&copy, &to.to_string(), &publication, &oids]).await;
    Ok(row.map_err(|source| statement("count the events before that position", source))?.get(0))
}

async fn publish_since(
    config: &Config,
    since: &str,
    sure: bool,
    mut print: impl FnMut(String),
) -> Result<u8, RewindError> {
    let mut code = 0;
    for outbox in &config.outboxes {
        let again =
            Again { condition: condition(outbox, since), dry_run: !sure, only: Some(outbox.table.clone()), rate: None };
        code = code.max(backfill_command::run(config, &again, &mut print).await?);
    }
    if !sure {
        print("once more, behind all that was published meanwhile, with the same ids; to do it, add --yes".to_owned());
        return Ok(2);
    }
    Ok(code)
}

fn condition(outbox: &OutboxConfig, since: &str) -> String {
    format!("{} >= {}", quote_identifier(&outbox.columns.timestamp.name), quote_literal(since))
}
