//! Retention, where it is configured: may rows be deleted, can their age be told, is the record of deliveries there.

use tokio_postgres::Client;

use super::{Findings, table::Table};
use crate::{
    config::{Config, OutboxConfig, RetentionConfig},
    retention::{
        partitions::Partitions,
        pass::{PassError, Plan},
        record::{Record, RecordError},
    },
    sql::quote_identifier,
};

const ROWS_STAY: &str = "events arrive, but delivered rows stay in the table, which grows without bound";

const PARTITIONS_STAY: &str =
    "inserts fail as soon as there is no partition for them; ended ones stay, emptied row by row";

pub(super) async fn check(
    client: &Client,
    config: &Config,
    tables: &[Option<Table>],
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    let Some(retention) = &config.retention else { return Ok(()) };
    let record = Record::new(config);
    let Some(first) = config.outboxes.first() else { return Ok(()) };
    match record.inspect(client, &first.table).await {
        Ok(()) => {}
        Err(RecordError::Unusable { what, fix }) => findings.warn("retention_record", what, ROWS_STAY, fix),
        Err(RecordError::Sql(error)) => return Err(error),
    }
    // a table that is missing has been told of
    let there = config.outboxes.iter().zip(tables).filter(|(_, table)| table.is_some());
    for (outbox, _) in there {
        let table = outbox.table.to_string();
        match Plan::make(client, outbox, retention, &record).await {
            Ok(plan) => {
                match partitions(client, (outbox, &plan), (retention, &record)).await {
                    Err(PassError::Unfit { code, what, fix }) => findings.warn(code, what, PARTITIONS_STAY, fix),
                    Err(PassError::Sql { source, .. }) => return Err(source),
                    _ => {}
                }
                let column = quote_identifier(&outbox.columns.timestamp.name);
                if !plan.indexed {
                    findings.warn(
                        "retention_index",
                        format!("table {table} has no index that begins with {column}"),
                        "each batch of retention reads the whole table to find the oldest rows",
                        format!("CREATE INDEX CONCURRENTLY ON {table} ({column})"),
                    );
                }
                if !plan.keyed {
                    findings.warn(
                        "retention_key",
                        format!("table {table} has no primary key"),
                        "retention works without, but nothing keeps an id from standing in two rows, and those from being taken \
                         for one event",
                        format!("ALTER TABLE {table} ADD PRIMARY KEY ({})", quote_identifier(&outbox.columns.id)),
                    );
                }
                if plan.indexed && plan.keyed {
                    findings.ok("retention", format!("delivered rows of {table} can be deleted"));
                }
            }
            Err(PassError::Unfit { code, what, fix }) => findings.warn(code, what, ROWS_STAY, fix),
            Err(PassError::Sql { source, .. } | PassError::Record(RecordError::Sql(source))) => return Err(source),
            Err(PassError::Record(RecordError::Unusable { what, fix })) => {
                findings.warn("retention_record", what, ROWS_STAY, fix);
            }
        }
    }
    Ok(())
}

/// Whether partitions can be kept, and are regular.
async fn partitions(
    client: &Client,
    (outbox, plan): (&OutboxConfig, &Plan),
    (retention, record): (&RetentionConfig, &Record),
) -> Result<(), PassError> {
    match Partitions::make(client, (outbox, plan), retention, record).await? {
        Some(partitions) => {
            let missing = partitions.missing(client, plan).await?;
            partitions.gap(&missing).map_or(Ok(()), Err)
        }
        None => Ok(()),
    }
}
