//! Before the first stream of a process: what is missing is created where that is wanted, and the publication is looked at,
//! so that nobody waits for rows that the server was never going to send.

use tokio_postgres::Client;

use crate::{
    config::Config,
    error::chain,
    init::{self, InitError},
    lsn::Lsn,
    pipeline::{Catalog, SessionError},
    retention::record,
    sql,
};

/// Prepares tables, publication and slot; says which tables the outboxes are.
pub async fn prepare(config: &Config) -> Result<Catalog, SessionError> {
    ensure(config).await.map_err(|source| SessionError::Prepare(Box::new(source)))
}

async fn ensure(config: &Config) -> Result<Catalog, InitError> {
    let mut client = sql::connect(&config.postgres.conninfo).await?;
    let mut steps = Vec::new();
    if config.postgres.auto_create {
        steps.push(init::ensure_publication(&client, config).await?);
        let slot = init::ensure_slot(&mut client, config).await?;
        if matches!((&steps[0], &slot), (init::Step::Found(_), init::Step::Created(_))) {
            tracing::warn!(
                slot = config.postgres.slot,
                "the publication was there and the slot was not: if there was a slot before, as on a server before a \
                 failover or restore, events between its position and now are missing from kafka"
            );
        }
        steps.push(slot);
    } else {
        init::check_publication(&client, config).await?;
    }
    for step in steps {
        if let init::Step::Created(what) = step {
            tracing::info!(what, "created");
        }
    }
    if let Err(error) = record::open(&client, config).await {
        // nothing is lost: retention tells it again, and rows stay
        tracing::debug!(error = chain(&error), "no record of what is delivered");
    }
    look(&client, config)
        .await
        .map_err(|source| InitError::Statement { attempt: "look for the outbox tables".to_owned(), source })
}

/// Asked for before the oids: what is renamed in between is renamed behind it, and the stream tells of that.
const POSITION: &str =
    "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)::text";
const OIDS: &str = "
    SELECT o.place, c.oid
    FROM unnest($1::text[], $2::text[]) WITH ORDINALITY o(schema_name, table_name, place)
    JOIN pg_namespace n ON n.nspname = o.schema_name
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = o.table_name
    ORDER BY o.place";

async fn look(client: &Client, config: &Config) -> Result<Catalog, tokio_postgres::Error> {
    let row = client.query_one(POSITION, &[]).await?;
    let as_of: Lsn = row.get::<_, Option<&str>>(0).and_then(|lsn| lsn.parse().ok()).unwrap_or_default();
    let tables: Vec<_> = config.outboxes.iter().map(|outbox| outbox.table.clone()).collect();
    let (schemas, names): (Vec<_>, Vec<_>) =
        tables.iter().map(|table| (table.schema.as_str(), table.table.as_str())).unzip();
    let rows = client.query(OIDS, &[&schemas, &names]).await?;
    let oids = rows.iter().map(|row| (usize::try_from(row.get::<_, i64>(0)).unwrap_or(0), row.get::<_, u32>(1)));
    let outboxes = oids.filter_map(|(place, oid)| Some((oid, tables.get(place.checked_sub(1)?)?.clone()))).collect();
    Ok(Catalog { outboxes, as_of })
}
