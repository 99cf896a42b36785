//! Before the first stream of a process: what is missing is created where that is wanted, and the publication is looked at,
//! so that nobody waits for rows that the server was never going to send.

use crate::{
    config::Config,
    init::{self, InitError},
    pipeline::SessionError,
    sql,
};

/// Prepares tables, publication and slot.
pub async fn prepare(config: &Config) -> Result<(), SessionError> {
    ensure(config).await.map_err(|source| SessionError::Prepare(Box::new(source)))
}

async fn ensure(config: &Config) -> Result<(), InitError> {
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
    Ok(())
}
