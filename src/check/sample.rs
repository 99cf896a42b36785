//! What some rows of the outbox tables say: how large payloads are, whether keys are missing, which headers come.
//!
//! Bounded in rows and in time, so that a huge table costs what a small one does. Rows that were delivered long ago count
//! as well: they tell what the application writes.

use std::{collections::BTreeSet, time::Duration};

use tokio_postgres::{Client, Row, error::SqlState};

use super::{Findings, server::Server, table, table::Table, topics};
use crate::{
    config::{Config, OutboxConfig},
    encode::RESERVED,
    publication::quoted,
    sql::quote_identifier,
};

/// So many rows are looked at.
pub(super) const ROWS: u32 = 10_000;
/// A table with more rows is sampled by blocks.
const SMALL: f64 = 20_000.0;
/// So many of the payloads that take the most room are measured, and so many names of headers taken.
const LARGEST: u32 = 50;
const NAMES: u32 = 200;
/// How long one question may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Fewer NULL keys are exceptions.
const NULLS_OF: i64 = 100;

/// The largest payload among the sampled events of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Payload {
    pub topic: String,
    pub event_type: String,
    pub bytes: u64,
}

/// Runs one bounded, read-only statement.
pub(super) async fn ask(client: &Client, sql: &str) -> Result<Vec<Row>, tokio_postgres::Error> {
    let limit = format!("BEGIN READ ONLY; SET LOCAL statement_timeout = {}", TIMEOUT.as_millis());
    client.batch_execute(&limit).await?;
    let answer = client.query(sql, &[]).await;
    client.batch_execute("ROLLBACK").await?;
    answer
}

pub(super) async fn check(client: &Client, config: &Config, findings: &mut Findings) -> Vec<Payload> {
    let mut largest = Vec::new();
    let Ok(server) = super::server::look(client).await else { return largest };
    for outbox in &config.outboxes {
        // what is missing or cannot be read at all is told of elsewhere
        let Ok(Some(table)) = table::look(client, outbox).await else { continue };
        let sampled = Sampled { outbox, rows: source(outbox, &table), table: &table };
        let result = match sampled.payloads(client, config).await {
            Ok(payloads) => {
                largest.extend(payloads);
                sampled.look(client, findings).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            unseen(outbox, &server, &error, findings);
        }
    }
    largest
}

/// What stands behind FROM.
fn source(outbox: &OutboxConfig, table: &Table) -> String {
    let name = quoted(&outbox.table);
    if table.rows <= SMALL {
        return format!("{name} LIMIT {ROWS}");
    }
    let percent = (200.0 * f64::from(ROWS) / table.rows).min(100.0);
    format!("{name} TABLESAMPLE SYSTEM ({percent:.9}) LIMIT {ROWS}")
}

fn unseen(outbox: &OutboxConfig, server: &Server, error: &tokio_postgres::Error, findings: &mut Findings) {
    let name = quoted(&outbox.table);
    let (what, fix) = match error.code() {
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => (
            format!("the role may not read table {name}"),
            format!("`GRANT SELECT ON {name} TO {}`, if you want to know", quote_identifier(&server.role)),
        ),
        Some(&SqlState::QUERY_CANCELED) => (
            format!("a sample of table {name} takes longer than {} s", TIMEOUT.as_secs()),
            format!(
                "`ANALYZE {name}`, so that it can be sampled by blocks, or look again when the server is less busy"
            ),
        ),
        // a column that is missing, for one, is told of elsewhere
        _ => return tracing::debug!(%error, table = name, "the table cannot be sampled"),
    };
    let why = "how large payloads are, whether keys are missing, and which headers come, is unknown";
    findings.unknown("table_unsampled", what, why, fix);
}

/// A table and the rows that are looked at.
struct Sampled<'a> {
    outbox: &'a OutboxConfig,
    table: &'a Table,
    rows: String,
}

impl Sampled<'_> {
    async fn payloads(&self, client: &Client, config: &Config) -> Result<Vec<Payload>, tokio_postgres::Error> {
        let columns = &self.outbox.columns;
        let (event_type, payload) = (quote_identifier(&columns.event_type), quote_identifier(&columns.payload));
        // of these types the size is known without reading what lies outside of the row
        let bytes = match self.table.type_of(&columns.payload) {
            Some("bytea" | "text" | "varchar") => "octet_length(payload)",
            _ => "octet_length(payload::text)",
        };
        let sql = format!(
            "SELECT event_type, max({bytes})::bigint FROM (SELECT {event_type}::text AS event_type, {payload} AS payload \
             FROM (SELECT {event_type}, {payload} FROM {}) sampled WHERE {payload} IS NOT NULL AND {event_type} IS NOT NULL \
             ORDER BY pg_column_size({payload}) DESC LIMIT {LARGEST}) largest GROUP BY 1",
            self.rows
        );
        let rows = ask(client, &sql).await?;
        let payload = |row: &Row| {
            let event_type: String = row.get(0);
            let topic = topics::topic(config, self.outbox, &event_type)?;
            Some(Payload { topic, event_type, bytes: u64::try_from(row.get::<_, i64>(1)).ok()? })
        };
        Ok(rows.iter().filter_map(payload).collect())
    }

    async fn look(&self, client: &Client, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
        let columns = &self.outbox.columns;
        if self.table.type_of(&columns.key.name).is_some() {
            let key = quote_identifier(&columns.key.name);
            let sql =
                format!("SELECT count(*), count(*) - count({key}) FROM (SELECT {key} FROM {}) sampled", self.rows);
            if let Some(row) = ask(client, &sql).await?.first() {
                self.judge_keys((row.get(0), row.get(1)), findings);
            }
        }
        let mut members = Vec::new();
        if let Some("json" | "jsonb") = self.table.type_of(&columns.headers.name) {
            let headers = quote_identifier(&columns.headers.name);
            let sql = format!(
                "SELECT DISTINCT name FROM (SELECT {headers}::jsonb AS headers FROM {}) sampled, \
                 jsonb_object_keys(CASE jsonb_typeof(headers) WHEN 'object' THEN headers ELSE '{{}}' END) name LIMIT {NAMES}",
                self.rows
            );
            members = ask(client, &sql).await?.iter().map(|row| row.get(0)).collect();
        }
        self.judge_headers(members, findings);
        Ok(())
    }

    fn judge_keys(&self, (rows, nulls): (i64, i64), findings: &mut Findings) {
        if nulls == 0 || nulls * NULLS_OF < rows {
            return;
        }
        let (name, key) = (quoted(&self.outbox.table), quote_identifier(&self.outbox.columns.key.name));
        findings.warn(
            "key_null",
            format!("of {rows} sampled rows of table {name} {nulls} have no key ({key} is NULL)"),
            "events without a key are spread over all partitions, so consumers see them in any order",
            format!(
                "where order matters, write the key, or map another column: outbox.columns.key; to have the database refuse \
                 rows without: `ALTER TABLE {name} ADD CHECK ({key} IS NOT NULL) NOT VALID`"
            ),
        );
    }

    /// As [`crate::encode::Headers`] fills them in: reserved ones, then those of columns, then the members.
    fn judge_headers(&self, members: Vec<String>, findings: &mut Findings) {
        let name = quoted(&self.outbox.table);
        let mut taken: BTreeSet<String> = RESERVED.iter().map(|&name| name.to_owned()).collect();
        let columns = self.outbox.header_columns.iter().map(|(header, column)| {
            (header.clone(), format!("of column {}", quote_identifier(column)), "outbox.header_columns")
        });
        let json = quote_identifier(&self.outbox.columns.headers.name);
        let members = members.into_iter().map(|member| (member, format!("in column {json}"), "what writes the event"));
        for (header, from, place) in columns.chain(members) {
            let what = format!("header {header:?} {from} of table {name}");
            let fix = format!("give it another name, in {place}");
            if taken.contains(&header) || header.starts_with("walpost_") {
                let why = "no header comes twice: it is left out, or stands for something else in a dead letter";
                findings.warn("header_taken", format!("{what} has a name that is taken"), why, fix);
            } else if let Some(other) = taken.iter().find(|other| other.eq_ignore_ascii_case(&header)) {
                findings.warn(
                    "header_alike",
                    format!("{what} is spelt as {other:?} but for the case"),
                    "Kafka tells them apart, many consumers and bridges to HTTP do not, and see one of the two",
                    fix,
                );
            } else if header.is_empty() || !header.bytes().all(|byte| byte.is_ascii_graphic()) {
                findings.warn(
                    "header_odd",
                    format!("{what} is empty, or has blanks or other characters than printable ASCII"),
                    "some consumers and bridges drop such a header, or refuse the record",
                    fix,
                );
            }
            taken.insert(header);
        }
    }
}
