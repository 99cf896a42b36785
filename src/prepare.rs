//! Before the first stream: what must exist is created where that is wanted, and what is there is checked.

use crate::{
    config::Config,
    pipeline::SessionError,
    source::{SourceError, Wire, quote_identifier, slot},
};

/// Prepares database and slot.
pub async fn prepare(config: &Config, wire: &mut Wire) -> Result<(), SessionError> {
    let postgres = &config.postgres;
    if matches!(slot::look(wire, &postgres.slot).await, Err(SourceError::SlotMissing(_))) && postgres.auto_create {
        let mut sql = crate::sql::connect(&postgres.conninfo).await.map_err(|e| SourceError::Refused(e.to_string()))?;
        let tables: Vec<_> = config
            .outboxes
            .iter()
            .map(|o| format!("{}.{}", quote_identifier(&o.table.schema), quote_identifier(&o.table.table)))
            .collect();
        let _ = sql
            .batch_execute(&format!(
                "CREATE PUBLICATION {} FOR TABLE {} WITH (publish='insert')",
                quote_identifier(&postgres.publication),
                tables.join(", ")
            ))
            .await;
        slot::create(&postgres.conninfo, &mut sql, &postgres.slot, &config.outboxes)
            .await
            .map_err(|e| SourceError::Refused(crate::error::chain(&e)))?;
    }
    Ok(())
}
