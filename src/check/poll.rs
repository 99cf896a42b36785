//! A table that is polled: can what was delivered be marked in it.

use tokio_postgres::Client;

use super::Findings;
use crate::{
    config::{Config, OutboxConfig},
    publication::quoted,
    sql::quote_identifier,
};

const COLUMN: &str = "
    SELECT format_type(a.atttypid, NULL), a.attnotnull, has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),
           has_table_privilege(a.attrelid, 'SELECT'), has_table_privilege(a.attrelid, 'DELETE'),
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indpred IS NOT NULL AND i.indisvalid
                   AND strpos(pg_get_expr(i.indpred, i.indrelid), quote_ident(a.attname)) > 0)
    FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped";

/// Looks at the marks of a table that exists.
pub(super) async fn judge(
    client: &Client,
    outbox: &OutboxConfig,
    config: &Config,
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    let (table, poll) = (quoted(&outbox.table), &outbox.poll);
    let wanted = [
        ("delivered_at", &poll.delivered_at, &["timestamp with time zone"][..]),
        ("attempts", &poll.attempts, &["smallint", "integer", "bigint"]),
    ];
    for (role, name, types) in wanted {
        let column = quote_identifier(name);
        let Some(row) = client.query_opt(COLUMN, &[&outbox.table.to_string(), name]).await? else {
            findings.error(
                "poll_column_missing",
                format!("table {table} has no column {column}, which is mapped to {role}"),
                "polling marks each row that was delivered, and counts failures",
                "run `walpost init` once as the table's owner, or map the column in [outbox.columns]",
            );
            continue;
        };
        let kind: String = row.get(0);
        let [not_null, may_update, may_read, may_delete, indexed] = std::array::from_fn(|index| row.get(index + 1));
        if !types.contains(&kind.as_str()) || role == "delivered_at" && not_null {
            findings.error(
                "poll_column_type",
                format!(
                    "column {column} of {table}, mapped to {role}, is {kind}{}",
                    if not_null { " NOT NULL" } else { "" }
                ),
                "a row is undelivered as long as its delivered_at is NULL, and attempts is a whole number",
                format!("map {role} to a column of type {}, which may be NULL", types[0]),
            );
        }
        if !may_update || !may_read {
            findings.error(
                "poll_denied",
                format!("the role may not read table {table} and mark its column {column}"),
                "what was delivered could not be marked and would be sent again for ever",
                format!("GRANT SELECT, UPDATE ({column}) ON {table} TO walpost's role"),
            );
        }
        if role == "delivered_at" && !indexed {
            findings.warn(
                "poll_index_missing",
                format!("table {table} has no partial index for rows whose {column} is NULL"),
                "each poll reads the whole table",
                "run `walpost init` once as the table's owner, or build the indexes of sql/poll.sql",
            );
        }
        if role == "delivered_at" && config.retention.is_some() && !may_delete {
            findings.error(
                "poll_delete_denied",
                format!("the role may not delete from table {table}"),
                "[retention] deletes rows that were delivered",
                format!("GRANT DELETE ON {table} TO walpost's role, or leave [retention] out"),
            );
        }
    }
    Ok(())
}
