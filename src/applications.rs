//! What applications call, as SQL: `outbox_emit` for writers, `inbox_claim` and `inbox_prune` for consumers.
//!
//! The statements are files in `sql/`, as for [`crate::init`], which calls this. A relay delivers without any of it: so what
//! the role may not create, and what would have to take another's place, is left out and said so.

use tokio_postgres::Client;

use crate::{
    config::{Config, OutboxConfig, TableName},
    init::{InitError, Step, TABLE, create_or_leave_out, is_default, substituted},
    publication::quoted,
    sql::quote_identifier,
};

const EMIT: &str = include_str!("../sql/emit.sql");
const INBOX: &str = include_str!("../sql/inbox.sql");

/// How the files name the inbox.
const INBOX_TABLE: &str = r#""public"."inbox""#;
/// The functions, as the catalog prints them.
const EMIT_FUNCTIONS: [&str; 4] = [
    "outbox_emit(text, text, text, jsonb)",
    "outbox_emit(text, text, json, jsonb)",
    "outbox_emit(text, text, jsonb, jsonb)",
    "outbox_emit(text, text, bytea, jsonb)",
];
const INBOX_FUNCTIONS: [&str; 2] = ["inbox_claim(text, uuid)", "inbox_prune(text, interval, integer)"];

/// What makes a payload's column of a text, and of bytes in UTF-8. The file has those of `json`.
const FROM_TEXT: &str = "payload::pg_catalog.json";
const FROM_BYTES: &str = "pg_catalog.convert_from(payload, 'UTF8')::pg_catalog.json";

/// Creates what is missing in the schemas of the outboxes.
pub(crate) async fn ensure(client: &Client, config: &Config) -> Result<Vec<Step>, InitError> {
    let mut steps = Vec::new();
    for outbox in emitters(config) {
        steps.push(ensure_emit(client, outbox).await?);
    }
    for schema in schemas(config) {
        steps.push(ensure_inbox(client, schema).await?);
    }
    Ok(steps)
}

/// The same as SQL.
pub(crate) fn print(config: &Config) -> Vec<String> {
    let emit = emitters(config).into_iter().map(|outbox| create_emit(&outbox.table, "json"));
    emit.chain(schemas(config).into_iter().map(create_inbox)).collect()
}

/// What `sql/roles.sql` grants on, by the names that it has there.
pub(crate) fn granted(config: &Config) -> Vec<(String, String)> {
    let schemas = schemas(config);
    let of_emitters: Vec<&str> = emitters(config).into_iter().map(|outbox| outbox.table.schema.as_str()).collect();
    // where there is none, the file says so
    let of_emitters = if of_emitters.is_empty() { &schemas } else { &of_emitters };
    let each = |schemas: &[&str], name: &str| {
        let names = schemas.iter().map(|schema| format!("{}.{name}", quote_identifier(schema)));
        (format!("\"public\".{name}"), names.collect::<Vec<_>>().join(", "))
    };
    let emit = EMIT_FUNCTIONS.iter().map(|name| each(of_emitters, name));
    let inbox = INBOX_FUNCTIONS.iter().chain(&["\"inbox\""]).map(|name| each(&schemas, name));
    emit.chain(inbox).collect()
}

/// The outboxes that events can be written into by function: the first of each schema, since the function has one name.
fn emitters(config: &Config) -> Vec<&OutboxConfig> {
    let mut emitters: Vec<&OutboxConfig> = Vec::new();
    for outbox in config.outboxes.iter().filter(|outbox| is_default(outbox)) {
        if !emitters.iter().any(|other| other.table.schema == outbox.table.schema) {
            emitters.push(outbox);
        }
    }
    emitters
}

/// The schemas of the outboxes, each once.
pub(crate) fn schemas(config: &Config) -> Vec<&str> {
    let mut schemas = Vec::new();
    for outbox in &config.outboxes {
        if !schemas.contains(&outbox.table.schema.as_str()) {
            schemas.push(outbox.table.schema.as_str());
        }
    }
    schemas
}

async fn ensure_emit(client: &Client, outbox: &OutboxConfig) -> Result<Step, InitError> {
    let what = format!("function {}.outbox_emit", quote_identifier(&outbox.table.schema));
    let payload = match payload_type(client, &outbox.table).await {
        Ok(Ok(payload)) => payload,
        Ok(Err(why)) => return Ok(Step::LeftOut { what, why }),
        Err(error) => return Err(InitError::statement("look at the outbox's columns")(error)),
    };
    let creation = Creation { functions: &EMIT_FUNCTIONS, sql: create_emit(&outbox.table, &payload), needed: false };
    ensure_functions(client, &outbox.table.schema, creation, what).await
}

async fn ensure_inbox(client: &Client, schema: &str) -> Result<Step, InitError> {
    let what = format!("inbox {}.\"inbox\" with inbox_claim and inbox_prune", quote_identifier(schema));
    let row = client.query_opt(LOOK_AT_INBOX, &[&schema]).await;
    let fits: Option<bool> = row.map_err(InitError::statement("look at the inbox"))?.map(|row| row.get(0));
    if fits != Some(false) {
        let creation = Creation { functions: &INBOX_FUNCTIONS, sql: create_inbox(schema), needed: fits.is_none() };
        return ensure_functions(client, schema, creation, what).await;
    }
    let why = "a table of that name is there, and it is not one with the columns consumer text, event_id uuid and \
               claimed_at timestamptz and the primary key (consumer, event_id)";
    Ok(Step::LeftOut { what, why: why.to_owned() })
}

/// Statements that create functions.
struct Creation {
    functions: &'static [&'static str],
    sql: String,
    /// Something else that they create is missing.
    needed: bool,
}

/// Creates unless everything exists; no function that is not walpost's is replaced.
async fn ensure_functions(
    client: &Client,
    schema: &str,
    Creation { functions, sql, needed }: Creation,
    what: String,
) -> Result<Step, InitError> {
    let found = client.query(LOOK_AT_FUNCTIONS, &[&schema, &functions]).await;
    let found = found.map_err(InitError::statement("look for functions"))?;
    if let Some(other) = found.iter().find(|row| !row.get::<_, bool>(1)) {
        let why = format!("a function {} is there that is not walpost's", other.get::<_, &str>(0));
        return Ok(Step::LeftOut { what, why });
    }
    if !needed && found.len() == functions.len() {
        return Ok(Step::Found(what));
    }
    create_or_leave_out(client, &sql, what, |said| {
        format!("{said}; if applications shall use it, run walpost init as the schema's owner")
    })
    .await
}

const LOOK_AT_FUNCTIONS: &str = "
    SELECT name, ours
    FROM (SELECT p.proname || '(' || oidvectortypes(p.proargtypes) || ')' AS name,
                 coalesce(obj_description(p.oid, 'pg_proc') LIKE 'walpost:%', false) AS ours
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
          WHERE n.nspname = $1) f
    WHERE name = ANY ($2::text[])";

/// Without the unique index every claim would be the first.
const LOOK_AT_INBOX: &str = "
    SELECT c.relkind IN ('r', 'p')
       AND 3 = (SELECT count(*) FROM pg_attribute a
                WHERE a.attrelid = c.oid AND NOT a.attisdropped
                  AND (a.attname, a.atttypid) IN (('consumer', 'text'::regtype), ('event_id', 'uuid'::regtype),
                                                  ('claimed_at', 'timestamptz'::regtype)))
       AND EXISTS (SELECT FROM pg_index i
                   WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
                     AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnatts = 2
                     AND 2 = (SELECT count(*) FROM pg_attribute a
                              WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
                                AND a.attname IN ('consumer', 'event_id')))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = 'inbox'";

const LOOK_AT_COLUMNS: &str = "
    SELECT a.attname::text, t.typname::text, a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped";

/// The type of the payload's column, or why `outbox_emit` could not write into the table.
async fn payload_type(client: &Client, table: &TableName) -> Result<Result<String, String>, tokio_postgres::Error> {
    let rows = client.query(LOOK_AT_COLUMNS, &[&table.schema, &table.table]).await?;
    let columns: Vec<(String, String, bool)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    Ok(fitting_payload(&columns))
}

/// Columns are name, type, and whether an insert must name them.
fn fitting_payload(columns: &[(String, String, bool)]) -> Result<String, String> {
    let fits: [(&str, &[&str]); 5] = [
        ("id", &["uuid"]),
        ("event_type", &["text", "varchar"]),
        ("key", &["text", "varchar"]),
        ("headers", &["jsonb", "json"]),
        ("payload", &["json", "jsonb", "text", "bytea"]),
    ];
    let mut payload = String::new();
    for (name, kinds) in fits {
        let found = columns.iter().find(|(column, ..)| column == name);
        let Some((_, kind, _)) = found.filter(|(_, kind, _)| kinds.contains(&kind.as_str())) else {
            return Err(format!("the table's column {name} is missing or not of type {}", kinds.join(" or ")));
        };
        payload.clone_from(kind);
    }
    let named = |column: &str| fits.iter().any(|(name, _)| *name == column);
    match columns.iter().find(|(column, _, required)| *required && !named(column)) {
        Some((column, ..)) => {
            Err(format!("the table's column {} must have a value that it does not know", quote_identifier(column)))
        }
        None => Ok(payload),
    }
}

fn create_emit(table: &TableName, payload: &str) -> String {
    let (from_text, from_bytes) = match payload {
        "bytea" => ("pg_catalog.convert_to(payload, 'UTF8')".to_owned(), "payload".to_owned()),
        kind => (FROM_TEXT.replace("json", kind), FROM_BYTES.replace("json", kind)),
    };
    let function = format!("{}.outbox_emit", quote_identifier(&table.schema));
    let names = [
        ("\"public\".outbox_emit", function),
        (TABLE, quoted(table)),
        (FROM_TEXT, from_text),
        (FROM_BYTES, from_bytes),
    ];
    substituted(EMIT, &names)
}

fn create_inbox(schema: &str) -> String {
    let schema = quote_identifier(schema);
    let names = [
        (INBOX_TABLE, format!("{schema}.\"inbox\"")),
        ("\"public\".inbox_claim", format!("{schema}.inbox_claim")),
        ("\"public\".inbox_prune", format!("{schema}.inbox_prune")),
    ];
    substituted(INBOX, &names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, table: &str) -> TableName {
        TableName { schema: schema.into(), table: table.into() }
    }

    #[test]
    fn the_default_names_leave_the_files_as_they_are() {
        assert_eq!(create_emit(&table("public", "outbox"), "json"), EMIT);
        assert_eq!(create_inbox("public"), INBOX);
    }

    #[test]
    fn other_names_are_quoted_wherever_the_default_ones_stood() {
        let sql = create_emit(&table("My.$walpost$", "out\"box"), "bytea");
        assert!(sql.contains(r#"FUNCTION "My.$walpost$".outbox_emit(event_type text"#), "{sql}");
        assert!(sql.contains(r#"INSERT INTO "My.$walpost$"."out""box" (id"#), "{sql}");
        assert!(sql.contains("$_walpost$\n") && !sql.contains("AS $walpost$"), "{sql}");
        assert!(!sql.contains("public") && !sql.contains("convert_from"), "{sql}");
        let sql = create_inbox("My.$walpost$");
        assert!(sql.contains(r#"CREATE TABLE "My.$walpost$"."inbox" ("#) && !sql.contains("public"), "{sql}");
    }

    #[test]
    fn no_file_needs_an_encoding_and_names_stand_in_statements_only() {
        for line in [EMIT, INBOX].iter().flat_map(|sql| sql.lines()) {
            assert!(line.is_ascii(), "a server or client with another encoding would refuse it: {line}");
            let comment = line.split_once("--").map_or("", |(_, comment)| comment);
            assert!(!comment.contains("\"public\""), "a name with a line break would end it: {line}");
        }
    }

    #[test]
    fn a_table_must_have_the_columns_that_are_written() {
        let column = |name: &str, kind: &str, required| (name.to_owned(), kind.to_owned(), required);
        let mut columns = vec![
            column("id", "uuid", false),
            column("event_type", "text", true),
            column("key", "varchar", false),
            column("payload", "bytea", false),
            column("headers", "jsonb", false),
            column("tenant", "int4", false),
        ];
        assert_eq!(fitting_payload(&columns), Ok("bytea".to_owned()));
        columns[5].2 = true;
        assert!(fitting_payload(&columns).unwrap_err().contains("\"tenant\" must have a value"));
        columns[0].1 = "int8".to_owned();
        assert!(fitting_payload(&columns).unwrap_err().contains("column id is missing or not of type uuid"));
    }
}
