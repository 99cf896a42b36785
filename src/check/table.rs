//! The outbox tables: are they there, can they be published, do the mapped columns hold what they must.

use tokio_postgres::{Client, error::SqlState};

use super::{Findings, server::Server};
use crate::{
    config::{Config, OutboxConfig},
    publication::quoted,
    route::{Router, Template},
    sql::quote_identifier,
};

/// So many older rows are counted, then it is "more than".
const COUNTED: i64 = 1000;

const LOOK: &str = "
    SELECT c.relkind::text, c.relpersistence::text, pg_has_role(c.relowner, 'USAGE'),
           has_table_privilege(c.oid, 'SELECT'), has_schema_privilege(n.oid, 'USAGE'), c.oid, c.reltuples::float8,
           (SELECT format('%I.%I', s.nspname, p.relname) FROM pg_partition_tree(c.oid) t
            JOIN pg_class p ON p.oid = t.relid JOIN pg_namespace s ON s.oid = p.relnamespace
            WHERE t.isleaf AND (p.relkind <> 'r' OR p.relpersistence <> 'p') LIMIT 1),
           (SELECT format('%I.%I', s.nspname, p.relname) FROM pg_partition_tree(c.oid) t
            JOIN pg_class p ON p.oid = t.relid JOIN pg_namespace s ON s.oid = p.relnamespace
            JOIN pg_type y ON y.oid = p.reltype JOIN pg_inherits i ON i.inhrelid = p.oid
            WHERE i.xmin <> y.xmin AND p.oid <> c.oid AND current_setting('server_version_num')::int < 150000 LIMIT 1)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2";

const LOOK_AT_COLUMNS: &str = "
    SELECT a.attname::text, coalesce(base.typname, t.typname)::text, a.attnotnull, a.attgenerated::text
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_type base ON base.oid = t.typbasetype
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum";

/// A table, as the catalog has it.
#[derive(Debug, Clone)]
pub(super) struct Table {
    kind: String,
    persistence: String,
    /// A partition of which nothing is in the WAL, by its name as SQL.
    hidden_partition: Option<String>,
    /// One that was attached after it was made, where that matters.
    late_partition: Option<String>,
    /// The role owns it, so it may add it to a publication.
    pub owned: bool,
    /// The role may count its rows.
    pub readable: bool,
    /// How many rows it has, roughly; -1 where nobody has counted.
    pub rows: f64,
    columns: Vec<Column>,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    /// `pg_type.typname`, of a domain its base type's.
    kind: String,
    not_null: bool,
    generated: bool,
}

pub(super) async fn look(client: &Client, outbox: &OutboxConfig) -> Result<Option<Table>, tokio_postgres::Error> {
    let Some(row) = client.query_opt(LOOK, &[&outbox.table.schema, &outbox.table.table]).await? else {
        return Ok(None);
    };
    let columns = client.query(LOOK_AT_COLUMNS, &[&row.get::<_, u32>(5)]).await?;
    let column = |row: &tokio_postgres::Row| Column {
        name: row.get(0),
        kind: row.get(1),
        not_null: row.get(2),
        generated: !row.get::<_, &str>(3).is_empty(),
    };
    Ok(Some(Table {
        kind: row.get(0),
        persistence: row.get(1),
        owned: row.get(2),
        readable: row.get::<_, bool>(3) && row.get::<_, bool>(4),
        rows: row.get(6),
        hidden_partition: row.get(7),
        late_partition: row.get(8),
        columns: columns.iter().map(column).collect(),
    }))
}

pub(super) fn judge(
    outbox: &OutboxConfig,
    table: Option<&Table>,
    server: &Server,
    config: &Config,
    findings: &mut Findings,
) {
    let name = quoted(&outbox.table);
    let Some(table) = table else {
        return findings.error(
            "table_missing",
            format!("table {name} does not exist in database {}", quote_identifier(&server.database)),
            "there is nothing to publish, and a publication cannot name it",
            "create it (`walpost init` makes the default one), or name another in outbox.table",
        );
    };
    if !table.is_table() {
        return findings.error(
            "table_kind",
            format!("{name} is no table"),
            "views, foreign tables and the like write nothing to the write-ahead log",
            "name the table behind it in outbox.table",
        );
    }
    if table.persistence != "p" {
        return findings.error(
            "table_not_logged",
            format!("table {name} is unlogged or temporary"),
            "its rows never reach the write-ahead log, so walpost cannot see them",
            format!("ALTER TABLE {name} SET LOGGED"),
        );
    }
    let before = findings.count(super::Severity::Warn);
    if let Some(partition) = &table.hidden_partition {
        findings.error(
            "partition_not_logged",
            format!("partition {partition} of table {name} is unlogged or a foreign table"),
            "rows in it never reach the write-ahead log, so their events are not published",
            format!("ALTER TABLE {partition} SET LOGGED, or for a foreign one: ALTER TABLE {name} DETACH PARTITION {partition}"),
        );
    }
    if let Some(partition) = &table.late_partition {
        findings.warn(
            "partition_attached_later",
            format!("partition {partition} of table {name} was attached after it was made, or renamed since"),
            "Postgres 14 publishes nothing of it in a session that met rows of it from before; walpost begins another session \
             once it sees that, and never deletes rows of such a partition",
            format!(
                "make partitions with CREATE TABLE … PARTITION OF {name}; or do ALTER PUBLICATION {} SET (publish = 'insert') in the \
                 transaction that attaches one, then all that follows is published; 15 and later do not have this fault",
                quote_identifier(&config.postgres.publication)
            ),
        );
    }
    judge_columns(outbox, table, server, findings);
    judge_routes(outbox, table, config, findings);
    if findings.count(super::Severity::Warn) == before {
        findings.ok("table", format!("table {name} has the mapped columns"));
    }
}

fn judge_columns(outbox: &OutboxConfig, table: &Table, server: &Server, findings: &mut Findings) {
    let name = quoted(&outbox.table);
    let columns = &outbox.columns;
    let optional = [("key", &columns.key), ("headers", &columns.headers), ("timestamp", &columns.timestamp)];
    let required = [("id", &columns.id), ("event_type", &columns.event_type), ("payload", &columns.payload)];
    let named = optional.iter().filter(|(_, column)| column.explicit).map(|(role, column)| (*role, &column.name));
    let headers = outbox.header_columns.iter().map(|(header, column)| (header.as_str(), column));
    for (role, column) in required.into_iter().chain(named).chain(headers) {
        if table.column(column).is_none() {
            findings.error(
                "column_missing",
                format!("table {name} has no column {}, which is mapped to {role}", quote_identifier(column)),
                "walpost does not publish rows that it cannot map",
                format!("map {role} to one of its columns ({}), or add the column", table.column_names()),
            );
        }
    }
    for (role, column) in required.into_iter().chain(optional.map(|(role, column)| (role, &column.name))) {
        let explicit = !optional.iter().any(|(of, column)| *of == role && !column.explicit);
        if let Some(found) = table.column(column) {
            judge_column(&name, (role, explicit), found, server, findings);
        }
    }
}

fn judge_column(
    table: &str,
    (role, explicit): (&str, bool),
    column: &Column,
    server: &Server,
    findings: &mut Findings,
) {
    let (quoted, kind) = (quote_identifier(&column.name), column.kind.as_str());
    let what = format!("column {quoted} of {table}, mapped to {role}, is of type {kind}");
    match (role, kind) {
        ("payload", "json" | "jsonb" | "text" | "varchar" | "bpchar" | "bytea")
        | ("headers", "json" | "jsonb")
        | ("timestamp", "timestamptz" | "timestamp" | "date" | "int8")
        | ("id" | "event_type" | "key", _) => {}
        ("payload", _) => findings.warn(
            "payload_type",
            what,
            "the record value will be what Postgres prints for it",
            format!(
                "if that is not wanted: ALTER TABLE {table} ALTER COLUMN {quoted} TYPE json USING to_json({quoted})"
            ),
        ),
        ("headers", "text" | "varchar") => findings.warn(
            "headers_type",
            what,
            "headers are the members of a JSON object, so each value must be the text of one: nothing sees to that",
            format!("ALTER TABLE {table} ALTER COLUMN {quoted} TYPE jsonb USING {quoted}::jsonb"),
        ),
        ("headers", _) => findings.error(
            "headers_type",
            what,
            "headers are the members of a JSON object",
            "map headers to a column of type jsonb or json",
        ),
        ("timestamp", _) if !explicit => findings.warn(
            "timestamp_type",
            what,
            "it holds no time that walpost reads, so records carry the time of the commit",
            "map timestamp to a column of type timestamptz, timestamp, date or bigint (Unix ms)",
        ),
        _ => findings.error(
            "timestamp_type",
            what,
            "the record timestamp is read from it",
            "map timestamp to a column of type timestamptz, timestamp, date or bigint (Unix ms)",
        ),
    }
    if matches!(role, "id" | "event_type") && !column.not_null {
        findings.warn(
            "column_nullable",
            format!("column {quoted} of {table}, mapped to {role}, may be NULL"),
            "a row with NULL there cannot be published and stops walpost",
            format!("ALTER TABLE {table} ALTER COLUMN {quoted} SET NOT NULL"),
        );
    }
    // from 16 on pg_publication_tables leaves those out that are not published
    if column.generated && server.major() < 16 {
        findings.error(
            "column_generated",
            format!("column {quoted} of {table}, mapped to {role}, is generated"),
            "generated columns are not published",
            format!("map {role} to another column, or let a trigger fill it"),
        );
    }
}

fn judge_routes(outbox: &OutboxConfig, table: &Table, config: &Config, findings: &mut Findings) {
    let router = match Router::new(&config.route) {
        Ok(router) => router,
        Err(error) => {
            let why = "no event has a topic without routes";
            return findings.error("route", error.to_string(), why, "mend route.topic or route.rules");
        }
    };
    let mapped = |name: &str| {
        let columns = &outbox.columns;
        matches!(name, "id" | "event_type") || (name == "key" && table.column(&columns.key.name).is_some())
    };
    let names: Vec<_> = router.templates().flat_map(Template::columns).collect();
    for column in names.into_iter().filter(|column| table.column(column).is_none() && !mapped(column)) {
        findings.error(
            "route_column_missing",
            format!("a topic template names {{{column}}}, and table {} has no such column", quoted(&outbox.table)),
            "no event of this table has a topic",
            format!("name only its columns in route.topic and route.rules: {}", table.column_names()),
        );
    }
}

impl Table {
    fn is_table(&self) -> bool {
        matches!(self.kind.as_str(), "r" | "p")
    }

    fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// `pg_type.typname` of a column, of a domain its base type's; `None` where there is no such column.
    pub(super) fn type_of(&self, column: &str) -> Option<&str> {
        self.column(column).map(|column| column.kind.as_str())
    }

    fn column_names(&self) -> String {
        self.columns.iter().map(|column| quote_identifier(&column.name)).collect::<Vec<_>>().join(", ")
    }
}

/// Before a slot is created: rows that are older than it, and what is said about them.
pub(super) async fn older_rows(
    client: &Client,
    config: &Config,
    tables: &[Option<Table>],
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    let unsaid = config.outboxes.iter().zip(tables).filter(|(outbox, _)| outbox.backfill.is_none());
    for (outbox, table) in unsaid {
        let name = quoted(&outbox.table);
        let Some(table) = table.as_ref().filter(|table| table.is_table()) else { continue };
        if !table.readable {
            findings.error(
                "table_unreadable",
                format!("the role may not read table {name}"),
                "before the slot is created, the rows that are older than it are counted",
                format!("GRANT SELECT ON {name} TO walpost's role, and USAGE on its schema"),
            );
            continue;
        }
        let sql = format!("SELECT count(*) FROM (SELECT FROM {name} LIMIT {}) older", COUNTED + 1);
        let count: i64 = match client.query_one(&sql, &[]).await {
            Ok(row) => row.get(0),
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => 0,
            Err(error) => return Err(error),
        };
        if count > 0 {
            let number = if count > COUNTED { format!("more than {COUNTED}") } else { count.to_string() };
            findings.error(
                "older_rows",
                format!("table {name} holds {number} rows, and there is no replication slot yet"),
                "rows that are older than the slot never come through it, and nobody said what shall become of them",
                "set outbox.backfill: \"all\" publishes them first, \"none\" leaves them unpublished, an SQL condition publishes \
                 those that fulfil it",
            );
        }
    }
    Ok(())
}
