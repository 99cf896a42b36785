//! `walpost init`: creates what is missing, in the one order that leaves no gap: table, publication, slot.
//!
//! The statements are the files in `sql/`, with the configured names in place of the default ones. What exists is never
//! altered: whether it will do is for `walpost check` to say.

use tokio_postgres::{Client, error::SqlState};

use crate::{
    applications,
    backfill::{self, BackfillError, Fill, Slot},
    config::{ColumnsConfig, Config, Delivery, OutboxConfig, SourceKind, TableName},
    error::chain,
    poll,
    publication::{self, Fault, PublicationFound, quoted, table_list},
    retention::record::{self, Record},
    sink::{SinkError, exactly_once},
    source::{SourceError, Wire, whereabouts},
    sql::{self, SqlError, quote_identifier, quote_literal},
};

const OUTBOX: &str = include_str!("../sql/outbox.sql");
const ROLES: &str = include_str!("../sql/roles.sql");
const PUBLICATION: &str = include_str!("../sql/publication.sql");
const SLOT: &str = include_str!("../sql/slot.sql");

/// Why something is still missing.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
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
    /// The configured table is not the default one, so only its owner knows how to create it.
    #[error(
        "table {table} does not exist, and its columns are configured: create it, or leave [outbox.columns] out so that \
         walpost creates the default one"
    )]
    TableMissing {
        /// The table, quoted.
        table: String,
    },
    /// Creating it now would hide a gap or wedge the slot.
    #[error(
        "publication {publication} does not exist, but replication slot {slot} does: rows written since the slot's position \
         were written without the publication and would never arrive (before version 18 the stream would end with an \
         error); find those rows in the outbox table, drop the slot with SELECT pg_drop_replication_slot('{slot}'), and \
         `walpost init` creates both"
    )]
    PublicationAfterSlot {
        /// The publication, quoted.
        publication: String,
        /// The slot.
        slot: String,
    },
    /// A table that is to be polled has rows, and none is marked.
    #[error(
        "{table} holds {count} rows that were written before there was a mark for what was delivered; say what shall become of \
         them: outbox.backfill = \"all\" publishes them, \"none\" marks them as delivered, and an SQL condition publishes those \
         that fulfil it"
    )]
    UnmarkedRows {
        /// The outbox.
        table: String,
        /// How many rows.
        count: i64,
    },
    /// A publication of that name leaves rows out.
    #[error("{}", list(.0))]
    PublicationFaults(Vec<Fault>),
    /// The slot was not created.
    #[error(transparent)]
    Slot(#[from] BackfillError),
    /// The progress topic says that it must not be, or cannot be written.
    #[error("prepare the progress topic")]
    Progress(#[from] SinkError),
}

impl InitError {
    /// For `map_err`: the attempt that failed.
    pub(crate) fn statement(attempt: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> Self {
        let attempt = attempt.into();
        |source| Self::Statement { attempt, source }
    }
}

fn list(faults: &[Fault]) -> String {
    let lines = faults.iter().map(|fault| format!("{}; mend it with: {}", fault.what, fault.fix));
    lines.collect::<Vec<_>>().join("; ")
}

/// Whether something had to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It was missing. Says what.
    Created(String),
    /// It was there. Says what.
    Found(String),
    /// It is missing, and stays so: walpost delivers without it.
    LeftOut {
        /// What.
        what: String,
        /// Why.
        why: String,
    },
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Created(what) => write!(f, "created {what}"),
            Self::Found(what) => write!(f, "found {what}"),
            Self::LeftOut { what, why } => write!(f, "left out {what}: {why}"),
        }
    }
}

/// Creates what is missing of table, functions, publication and slot. Each step is told to `done` as soon as it is over.
/// The slot is the last, and may need rows to be published first: those are returned.
pub async fn run(config: &Config, mut done: impl FnMut(Step)) -> Result<Option<Box<Fill>>, InitError> {
    let client = sql::connect(&config.postgres.conninfo).await?;
    for step in ensure_tables(&client, config).await? {
        done(step);
    }
    for step in applications::ensure(&client, config).await? {
        done(step);
    }
    if config.postgres.source == SourceKind::Poll {
        poll::setup::ensure(&client, config).await?.into_iter().for_each(done);
        return Ok(None);
    }
    done(ensure_record(&client, config).await?);
    done(ensure_publication(&client, config).await?);
    if announce_slot(&client, config, true).await? {
        done(Step::Created(format!("record of what is published, in topic {}", config.kafka.progress_topic)));
    }
    let pending = match backfill::ensure_slot(&client, config).await? {
        Slot::Behind(fill) => Some(fill),
        Slot::Found => {
            done(Step::Found(slot_text(config)));
            None
        }
        Slot::Created => {
            record::forget_where_it_was_left(&client, config).await;
            done(Step::Created(slot_text(config)));
            None
        }
    };
    if let Err(error) = record::open(&client, config).await {
        tracing::warn!(error = chain(&error), "retention will not know what was delivered");
    }
    Ok(pending)
}

/// The same as SQL, with the roles that [`run`] does not create.
pub fn print(config: &Config) -> String {
    let tables: Vec<TableName> = config.outboxes.iter().map(|outbox| outbox.table.clone()).collect();
    let mut parts = Vec::new();
    for outbox in &config.outboxes {
        if is_default(outbox) {
            parts.push(create_table(&outbox.table));
        }
    }
    parts.extend(applications::print(config));
    let schemas: Vec<String> = applications::schemas(config).into_iter().map(quote_identifier).collect();
    let granted = applications::granted(config);
    let record = Record::new(config);
    if config.postgres.source == SourceKind::Wal {
        parts.push(record.sql());
    }
    let mut names = vec![("SCHEMA \"public\"", format!("SCHEMA {}", schemas.join(", "))), (TABLE, table_list(&tables))];
    names.extend(granted.iter().map(|(default, names)| (default.as_str(), names.clone())));
    names.push((RECORD_TABLES[0], record.delivered().to_string()));
    names.push((RECORD_TABLES[1], record.dead_lettered().to_string()));
    if config.postgres.source == SourceKind::Poll {
        names.push(("LOGIN REPLICATION", "LOGIN".to_owned()));
        let roles = substituted(ROLES, &names);
        parts.extend(poll::setup::print(config));
        parts.push(roles);
        parts.extend(poll::setup::print_grants(config));
        return parts.join("\n");
    }
    parts.push(substituted(ROLES, &names));
    parts.push(create_publication(&config.postgres.publication, &tables));
    parts.push(substituted(SLOT, &[("'walpost'", quote_literal(&config.postgres.slot))]));
    parts.join("\n")
}

/// Creates those outbox tables that are missing and have the default columns.
pub async fn ensure_tables(client: &Client, config: &Config) -> Result<Vec<Step>, InitError> {
    let mut steps = Vec::new();
    for (outbox, found) in config.outboxes.iter().zip(find(client, config).await?.tables) {
        let what = format!("table {}", quoted(&outbox.table));
        if found.kind.is_some() {
            steps.push(Step::Found(what));
        } else if is_default(outbox) {
            create(client, &create_table(&outbox.table), &what).await?;
            steps.push(Step::Created(what));
        } else {
            return Err(InitError::TableMissing { table: quoted(&outbox.table) });
        }
    }
    Ok(steps)
}

/// Creates the tables in which walpost remembers what it has delivered. No event depends on them, only retention.
async fn ensure_record(client: &Client, config: &Config) -> Result<Step, InitError> {
    const ARE_THERE: &str = "SELECT to_regclass($1::text) IS NOT NULL AND to_regclass($2::text) IS NOT NULL";
    let record = Record::new(config);
    let (delivered, dead_lettered) = (record.delivered().to_string(), record.dead_lettered().to_string());
    let what = format!("tables {delivered} and {dead_lettered}");
    let found = client.query_one(ARE_THERE, &[&delivered, &dead_lettered]).await;
    if found.map_err(InitError::statement(format!("look for {what}")))?.get(0) {
        return Ok(Step::Found(what));
    }
    create_or_leave_out(client, &record.sql(), what, |_| {
        "permission denied; retention needs them: run walpost init as the schema's owner".to_owned()
    })
    .await
}

/// Creates what walpost delivers without; where the role may not, `why` makes a reason of the server's words.
pub(crate) async fn create_or_leave_out(
    client: &Client,
    sql: &str,
    what: String,
    why: impl FnOnce(&str) -> String,
) -> Result<Step, InitError> {
    match client.batch_execute(sql).await {
        Ok(()) => Ok(Step::Created(what)),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            let said = error.as_db_error().map_or("permission denied", |error| error.message());
            Ok(Step::LeftOut { what, why: why(said) })
        }
        Err(source) => Err(InitError::statement(format!("create {what}"))(source)),
    }
}

/// Creates the publication when it is missing and no slot has begun without it; fails when it exists and leaves rows out.
pub async fn ensure_publication(client: &Client, config: &Config) -> Result<Step, InitError> {
    let name = &config.postgres.publication;
    let what = format!("publication {}", quote_identifier(name));
    let found = find(client, config).await?;
    if found.options.is_some() {
        let faults = found.faults();
        return if faults.is_empty() { Ok(Step::Found(what)) } else { Err(InitError::PublicationFaults(faults)) };
    }
    if slot_exists(client, &config.postgres.slot).await? {
        return Err(InitError::PublicationAfterSlot {
            publication: quote_identifier(name),
            slot: config.postgres.slot.clone(),
        });
    }
    let tables: Vec<TableName> = config.outboxes.iter().map(|outbox| outbox.table.clone()).collect();
    create(client, &create_publication(name, &tables), &what).await?;
    Ok(Step::Created(what))
}

/// Fails where the publication is missing or would leave rows out.
pub async fn check_publication(client: &Client, config: &Config) -> Result<(), InitError> {
    let faults = find(client, config).await?.faults();
    if faults.is_empty() { Ok(()) } else { Err(InitError::PublicationFaults(faults)) }
}

/// Says in the progress topic, where there is one and no slot yet, that nothing is published from the slot; true when it did.
/// `replace`: a record of an earlier slot of this name does not stand against it.
pub async fn announce_slot(client: &Client, config: &Config, replace: bool) -> Result<bool, InitError> {
    if config.kafka.delivery != Delivery::ExactlyOnce || slot_exists(client, &config.postgres.slot).await? {
        return Ok(false);
    }
    let slot = |error: SourceError| InitError::Slot(error.into());
    let mut wire = Wire::connect(&config.postgres.conninfo).await.map_err(slot)?;
    let here = whereabouts::ask(&mut wire).await.map_err(slot)?;
    let config = config.clone();
    let announced = tokio::task::spawn_blocking(move || exactly_once::announce(&config, &here, replace)).await;
    announced.unwrap_or_else(|panic| Err(SinkError::Settings(panic.to_string())))?;
    Ok(true)
}

/// What the slot is called in a [`Step`].
pub fn slot_text(config: &Config) -> String {
    format!("replication slot {}", quote_identifier(&config.postgres.slot))
}

async fn slot_exists(client: &Client, slot: &str) -> Result<bool, InitError> {
    let sql = "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name IN ($1::text, $2::text))";
    let found = client.query_one(sql, &[&slot, &backfill::marker_of(slot)]).await;
    found.map(|row| row.get(0)).map_err(InitError::statement("look for the slot"))
}

async fn find(client: &Client, config: &Config) -> Result<PublicationFound, InitError> {
    publication::find(client, &config.postgres.publication, &config.outboxes)
        .await
        .map_err(InitError::statement("look for tables and publication"))
}

/// Creates what `what` names.
pub(crate) async fn create(client: &Client, sql: &str, what: &str) -> Result<(), InitError> {
    client.batch_execute(sql).await.map_err(InitError::statement(format!("create {what}")))
}

/// Whether walpost knows how to create this table: every mapping is the default one.
pub(crate) fn is_default(outbox: &OutboxConfig) -> bool {
    let ColumnsConfig { id, event_type, payload, key, headers, timestamp } = &outbox.columns;
    let names = [id, event_type, payload, &key.name, &headers.name, &timestamp.name];
    names == ["id", "event_type", "payload", "key", "headers", "created_at"] && outbox.header_columns.is_empty()
}

/// How the files in `sql/` name the tables of the record.
const RECORD_TABLES: [&str; 2] = [r#""public"."walpost_delivered""#, r#""public"."walpost_dead_lettered""#];

/// How the files in `sql/` name the table.
pub(crate) const TABLE: &str = r#""public"."outbox""#;

fn create_table(table: &TableName) -> String {
    let index = quote_identifier(&format!("{}_created_at_idx", table.table));
    substituted(OUTBOX, &[("\"outbox_created_at_idx\"", index), (TABLE, quoted(table))])
}

fn create_publication(name: &str, tables: &[TableName]) -> String {
    substituted(PUBLICATION, &[("\"walpost\"", quote_identifier(name)), (TABLE, table_list(tables))])
}

/// Puts quoted names in place of the default ones, in one pass: a name that looks like a default one stays what it is.
pub(crate) fn substituted(sql: &str, names: &[(&str, String)]) -> String {
    let mut tag = "$walpost$".to_owned();
    while names.iter().any(|(_, name)| name.contains(&tag)) {
        tag.insert(1, '_'); // so that no name ends the dollar quote
    }
    let (mut text, mut rest) = (String::new(), sql);
    let tokens = || names.iter().map(|(default, name)| (*default, name.as_str())).chain([("$walpost$", tag.as_str())]);
    while let Some((start, default, name)) =
        tokens().filter_map(|(default, name)| Some((rest.find(default)?, default, name))).min()
    {
        text.push_str(&rest[..start]);
        text.push_str(name);
        rest = &rest[start + default.len()..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, table: &str) -> TableName {
        TableName { schema: schema.into(), table: table.into() }
    }

    #[test]
    fn the_default_names_leave_the_files_as_they_are() {
        assert_eq!(create_table(&table("public", "outbox")), OUTBOX);
        assert_eq!(create_publication("walpost", &[table("public", "outbox")]), PUBLICATION);
    }

    #[test]
    fn other_names_are_quoted_wherever_the_default_ones_stood() {
        let sql = create_table(&table("My.Schema", "out\"box"));
        assert!(sql.contains(r#"CREATE TABLE IF NOT EXISTS "My.Schema"."out""box" ("#));
        assert!(sql.contains(r#""out""box_created_at_idx" ON "My.Schema"."out""box" (created_at)"#));
        assert!(!sql.contains(TABLE) && !sql.contains("\"outbox_created"));
        let sql = create_publication("P", &[table("a", "walpost"), table("b", "$walpost$")]);
        assert!(sql.contains(r#"CREATE PUBLICATION "P" FOR TABLE "a"."walpost", "b"."$walpost$""#), "{sql}");
        assert!(sql.contains("DO $_walpost$\n") && sql.contains("$_walpost$;"), "{sql}");
    }

    #[test]
    fn no_file_needs_an_encoding() {
        for sql in [OUTBOX, ROLES, PUBLICATION, SLOT] {
            assert!(sql.is_ascii(), "a server or client with another encoding would refuse it");
        }
    }

    #[test]
    fn names_stand_in_statements_only() {
        let named = [TABLE, "\"walpost\"", "'walpost'"];
        for line in [OUTBOX, ROLES, PUBLICATION, SLOT].iter().flat_map(|sql| sql.lines()) {
            let comment = line.split_once("--").map_or("", |(_, comment)| comment);
            assert!(!named.iter().any(|name| comment.contains(name)), "a name with a line break would end it: {line}");
        }
    }
}
