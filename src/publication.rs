//! The publication: whether every insert into the outbox tables goes through it; its creation.
//!
//! What a publication leaves out is lost without a word: the server skips it and the slot moves on. So this is looked at
//! before a run and all through it. Nothing here alters a publication that exists: rows that were written meanwhile would
//! stay unnoticed.

use serde::Deserialize;
use tokio_postgres::Client;

use crate::{
    config::{OutboxConfig, TableName},
    sql::quote_identifier,
};

/// How the server has the publication and the outbox tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicationFound {
    /// Its name.
    pub name: String,
    /// Its options; `None` when it does not exist.
    pub options: Option<PublicationOptions>,
    /// The outbox tables, in the order of the configuration.
    pub tables: Vec<TableFound>,
}

/// A row of `pg_publication`. Columns that the server's version lacks have defaults.
///
/// See <https://www.postgresql.org/docs/current/catalog-pg-publication.html>.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "they are the catalog's columns")]
pub struct PublicationOptions {
    /// Publishes inserts.
    #[serde(rename = "pubinsert")]
    pub insert: bool,
    /// Publishes updates.
    #[serde(rename = "pubupdate")]
    pub update: bool,
    /// Publishes deletes.
    #[serde(rename = "pubdelete")]
    pub delete: bool,
    /// Publishes partitions as their root.
    #[serde(rename = "pubviaroot", default)]
    pub via_root: bool,
}

/// An outbox table, as the server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableFound {
    /// Its name.
    pub table: TableName,
    /// `pg_class.relkind`; `None` when there is no such table.
    pub kind: Option<char>,
    /// What is published of it; `None`: nothing.
    pub published: Option<Published>,
    /// The columns that walpost reads and the table has.
    pub mapped_columns: Vec<String>,
}

/// A row of `pg_publication_tables`. Columns that the server's version lacks are `None`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Published {
    /// The columns that are published (15 and later).
    #[serde(rename = "attnames")]
    pub columns: Option<Vec<String>>,
    /// Only rows that fulfil this are published (15 and later).
    #[serde(rename = "rowfilter")]
    pub row_filter: Option<String>,
}

/// A reason why inserts would not arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Names it for machines.
    pub code: &'static str,
    /// What is the case.
    pub what: String,
    /// Why that matters.
    pub why: &'static str,
    /// How to mend it.
    pub fix: String,
}

const LOST_WITHOUT_A_WORD: &str = "the server skips what is not published and moves on: those events would never reach Kafka, and nothing would say so";

/// What the catalog says about the publication, with one statement on any version.
const FIND: &str = "
    SELECT to_jsonb(p)::text, c.relkind::text, to_jsonb(t)::text,
           ARRAY(SELECT a.attname::text FROM pg_attribute a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
    FROM unnest($2::text[], $3::text[]) WITH ORDINALITY o(schema_name, table_name, place)
    LEFT JOIN pg_publication p ON p.pubname = $1
    LEFT JOIN pg_namespace n ON n.nspname = o.schema_name
    LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = o.table_name
    LEFT JOIN pg_publication_tables t
           ON t.pubname = $1 AND t.schemaname = o.schema_name AND t.tablename = o.table_name
    ORDER BY o.place";

/// Looks at the publication and the outbox tables.
pub async fn find(
    client: &Client,
    name: &str,
    outboxes: &[OutboxConfig],
) -> Result<PublicationFound, tokio_postgres::Error> {
    let schemas: Vec<&str> = outboxes.iter().map(|outbox| outbox.table.schema.as_str()).collect();
    let tables: Vec<&str> = outboxes.iter().map(|outbox| outbox.table.table.as_str()).collect();
    let rows = client.query(FIND, &[&name, &schemas, &tables]).await?;
    let mut found = PublicationFound { name: name.to_owned(), options: None, tables: Vec::new() };
    for (outbox, row) in outboxes.iter().zip(rows) {
        found.options = row.get::<_, Option<&str>>(0).and_then(from_json);
        let columns: Vec<String> = row.get(3);
        found.tables.push(TableFound {
            table: outbox.table.clone(),
            kind: row.get::<_, Option<&str>>(1).and_then(|kind| kind.chars().next()),
            published: row.get::<_, Option<&str>>(2).and_then(from_json),
            mapped_columns: columns.into_iter().filter(|column| is_mapped(outbox, column)).collect(),
        });
    }
    Ok(found)
}

/// The catalogs' columns have had these types since 13; a catalog without them is none that walpost knows.
fn from_json<'a, T: Deserialize<'a>>(row: &'a str) -> Option<T> {
    serde_json::from_str(row)
        .inspect_err(|error| tracing::error!(%error, "the server's catalog is not understood"))
        .ok()
}

fn is_mapped(outbox: &OutboxConfig, column: &str) -> bool {
    let columns = &outbox.columns;
    let optional = [&columns.key, &columns.headers, &columns.timestamp].map(|column| &column.name);
    [&columns.id, &columns.event_type, &columns.payload].contains(&&column.to_owned())
        || optional.iter().any(|name| *name == column)
        || outbox.header_columns.iter().any(|(_, name)| name == column)
}

impl PublicationFound {
    /// Every reason why inserts would not arrive; empty when they will.
    pub fn faults(&self) -> Vec<Fault> {
        let Some(options) = self.options else { return vec![self.missing()] };
        let mut faults = Vec::new();
        if !options.insert {
            faults.push(Fault {
                code: "publication_without_inserts",
                what: format!("publication {} does not publish inserts", quote_identifier(&self.name)),
                why: LOST_WITHOUT_A_WORD,
                fix: format!("ALTER PUBLICATION {} SET (publish = 'insert')", quote_identifier(&self.name)),
            });
        }
        faults.extend(self.tables.iter().filter_map(|table| self.table_fault(table)));
        faults
    }

    fn missing(&self) -> Fault {
        Fault {
            code: "publication_missing",
            what: format!("publication {} does not exist", quote_identifier(&self.name)),
            why: "the server publishes nothing without it: up to version 17 it ends the stream with an error, from 18 on it \
                  skips every row that is written meanwhile",
            fix: self.create_statement(),
        }
    }

    /// The statement that creates the publication.
    pub fn create_statement(&self) -> String {
        let names: Vec<TableName> = self.tables.iter().map(|found| found.table.clone()).collect();
        format!(
            "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)",
            quote_identifier(&self.name),
            table_list(&names)
        )
    }

    fn table_fault(&self, found: &TableFound) -> Option<Fault> {
        let (publication, table) = (quote_identifier(&self.name), quoted(&found.table));
        let again = format!(
            "BEGIN; ALTER PUBLICATION {publication} DROP TABLE {table}; ALTER PUBLICATION {publication} ADD TABLE {table}; COMMIT"
        );
        let fault = |code, what: String, fix: String| Some(Fault { code, what, why: LOST_WITHOUT_A_WORD, fix });
        let Some(published) = &found.published else {
            return match found.kind {
                None => fault(
                    "table_missing",
                    format!("table {table} does not exist"),
                    "create it (`walpost init` makes the default one), or name another in outbox.table".to_owned(),
                ),
                Some('p') if self.options.is_some_and(|options| !options.via_root) => fault(
                    "partitions_not_published_as_root",
                    format!(
                        "table {table} is partitioned, and publication {publication} publishes partitions, if at all, \
                             under their own names"
                    ),
                    format!("ALTER PUBLICATION {publication} SET (publish_via_partition_root = true)"),
                ),
                Some(_) => fault(
                    "table_not_published",
                    format!("publication {publication} does not publish table {table}"),
                    format!("ALTER PUBLICATION {publication} ADD TABLE {table}"),
                ),
            };
        };
        if let Some(filter) = &published.row_filter {
            let what = format!("publication {publication} publishes only those rows of {table} that fulfil {filter}");
            return fault("row_filter", what, again);
        }
        let columns = published.columns.as_ref()?;
        let hidden: Vec<_> = found.mapped_columns.iter().filter(|column| !columns.contains(column)).collect();
        if hidden.is_empty() {
            return None;
        }
        let hidden = hidden.iter().map(|column| quote_identifier(column)).collect::<Vec<_>>().join(", ");
        let what = format!(
            "publication {publication} does not publish column {hidden} of {table} (it has a column list, or the column is \
             generated)"
        );
        fault("columns_hidden", what, format!("{again}; instead of a generated column map another one"))
    }
}

/// `"public"."outbox"`
pub fn quoted(table: &TableName) -> String {
    format!("{}.{}", quote_identifier(&table.schema), quote_identifier(&table.table))
}

/// `"public"."outbox", "audit"."outbox"`
pub fn table_list(tables: &[TableName]) -> String {
    tables.iter().map(quoted).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kind: Option<char>, published: Option<&str>, via_root: bool) -> PublicationFound {
        let table = TableName { schema: "public".into(), table: "out\"box".into() };
        PublicationFound {
            name: "walpost".into(),
            options: Some(PublicationOptions { insert: true, update: false, delete: false, via_root }),
            tables: vec![TableFound {
                table,
                kind,
                published: published.and_then(from_json),
                mapped_columns: vec!["id".into(), "payload".into()],
            }],
        }
    }

    fn codes(found: &PublicationFound) -> Vec<&'static str> {
        found.faults().iter().map(|fault| fault.code).collect()
    }

    #[test]
    fn a_whole_table_is_no_fault_on_any_version() {
        let on_14 = r#"{"pubname": "walpost", "schemaname": "public", "tablename": "x"}"#;
        let on_15 = r#"{"pubname": "walpost", "attnames": ["id", "payload", "more"], "rowfilter": null}"#;
        for published in [on_14, on_15] {
            assert_eq!(codes(&found(Some('r'), Some(published), true)), [""; 0]);
        }
    }

    #[test]
    fn whatever_hides_inserts_is_a_fault() {
        assert_eq!(codes(&found(None, None, true)), ["table_missing"]);
        assert_eq!(codes(&found(Some('r'), None, true)), ["table_not_published"]);
        assert_eq!(codes(&found(Some('p'), None, false)), ["partitions_not_published_as_root"]);
        assert_eq!(codes(&found(Some('r'), Some(r#"{"rowfilter": "(key IS NOT NULL)"}"#), true)), ["row_filter"]);
        assert_eq!(codes(&found(Some('r'), Some(r#"{"attnames": ["id"]}"#), true)), ["columns_hidden"]);
        let mut silent = found(Some('r'), Some("{}"), true);
        silent.options = silent.options.map(|options| PublicationOptions { insert: false, ..options });
        assert_eq!(codes(&silent), ["publication_without_inserts"]);
        assert_eq!(codes(&PublicationFound { options: None, ..silent }), ["publication_missing"]);
    }

    #[test]
    fn identifiers_are_quoted_in_what_an_operator_pastes() {
        let fix = &found(Some('r'), None, true).faults()[0].fix;
        assert_eq!(fix, r#"ALTER PUBLICATION "walpost" ADD TABLE "public"."out""box""#);
    }
}
