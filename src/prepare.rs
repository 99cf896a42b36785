//! Before the first stream of a process: what is missing is created where that is wanted, and the publication is looked at,
//! so that nobody waits for rows that the server was never going to send.

use tokio_postgres::Client;

use crate::{
    backfill::{self, Fill, Slot},
    config::Config,
    error::chain,
    init::{self, InitError},
    lsn::Lsn,
    pipeline::{Catalog, SessionError},
    retention::record,
    sql::{self, WAL_END},
};

/// What a stream can begin with.
pub enum Prepared {
    /// The slot is there, or was not to be created; these tables are the outboxes.
    Ready(Catalog),
    /// The slot gets its name when these rows are published.
    Behind(Box<Fill>),
}

/// Prepares tables, publication and slot.
pub async fn prepare(config: &Config) -> Result<Prepared, SessionError> {
    ensure(config).await.map_err(|source| SessionError::Prepare(Box::new(source)))
}

async fn ensure(config: &Config) -> Result<Prepared, InitError> {
    let client = sql::connect(&config.postgres.conninfo).await?;
    if config.postgres.auto_create {
        let publication = init::ensure_publication(&client, config).await?;
        if let init::Step::Created(what) = &publication {
            tracing::info!(what, "created");
        }
        init::announce_slot(&client, config, false).await?;
        let slot = backfill::ensure_slot(&client, config).await?;
        if matches!((&publication, &slot), (init::Step::Found(_), Slot::Created)) {
            tracing::warn!(
                slot = config.postgres.slot,
                "the publication was there and the slot was not: if there was a slot before, as on a server before a \
                 failover or restore, events between its position and now are missing from kafka"
            );
        }
        match slot {
            Slot::Found => {}
            Slot::Created => {
                tracing::info!(what = init::slot_text(config), "created");
                record::forget_where_it_was_left(&client, config).await;
            }
            Slot::Behind(fill) => return Ok(Prepared::Behind(fill)),
        }
    } else {
        init::check_publication(&client, config).await?;
        backfill::settle(&client, config).await?;
    }
    if let Err(error) = record::open(&client, config).await {
        // nothing is lost: retention tells it again, and rows stay
        tracing::debug!(error = chain(&error), "no record of what is delivered");
    }
    let catalog = look(&client, config).await.map_err(InitError::statement("look for the outbox tables"))?;
    Ok(Prepared::Ready(catalog))
}

const OIDS: &str = "
    SELECT o.place, c.oid
    FROM unnest($1::text[], $2::text[]) WITH ORDINALITY o(schema_name, table_name, place)
    JOIN pg_namespace n ON n.nspname = o.schema_name
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = o.table_name
    ORDER BY o.place";

pub(crate) async fn look(client: &Client, config: &Config) -> Result<Catalog, tokio_postgres::Error> {
    // before the oids: what is renamed in between is renamed behind it, and the stream tells of that
    let row = client.query_one(&format!("SELECT ({WAL_END})::text"), &[]).await?;
    let as_of: Lsn = row.get::<_, Option<&str>>(0).and_then(|lsn| lsn.parse().ok()).unwrap_or_default();
    let tables: Vec<_> = config.outboxes.iter().map(|outbox| outbox.table.clone()).collect();
    let (schemas, names): (Vec<_>, Vec<_>) =
        tables.iter().map(|table| (table.schema.as_str(), table.table.as_str())).unzip();
    let rows = client.query(OIDS, &[&schemas, &names]).await?;
    let oids = rows.iter().map(|row| (usize::try_from(row.get::<_, i64>(0)).unwrap_or(0), row.get::<_, u32>(1)));
    let outboxes = oids.filter_map(|(place, oid)| Some((oid, tables.get(place.checked_sub(1)?)?.clone()))).collect();
    Ok(Catalog { outboxes, as_of })
}
