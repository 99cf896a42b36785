//! How long the first undelivered event of a table waits, asked by whoever does not poll.

use tokio_postgres::Client;

use crate::{config::OutboxConfig, sql::quote_identifier};

const TIME: &str = "
    SELECT EXISTS (SELECT FROM pg_attribute
        WHERE attrelid = to_regclass($1::text) AND attname = $2 AND NOT attisdropped
        AND atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype))";

/// Seconds; 0 when nothing waits, `None` where the table has no time.
pub async fn waiting_seconds(client: &Client, outbox: &OutboxConfig) -> Result<Option<f64>, tokio_postgres::Error> {
    let (table, timestamp) = (outbox.table.to_string(), &outbox.columns.timestamp.name);
    if !client.query_one(TIME, &[&table, timestamp]).await?.get::<_, bool>(0) {
        return Ok(None);
    }
    let (timestamp, delivered_at) = (quote_identifier(timestamp), quote_identifier(&outbox.poll.delivered_at));
    let sql = format!(
        "SELECT coalesce(greatest(extract(epoch FROM clock_timestamp() - min({timestamp})), 0), 0)::float8 \
         FROM {table} WHERE {delivered_at} IS NULL AND isfinite({timestamp})"
    );
    client.query_one(&sql, &[]).await?.try_get(0).map(Some)
}
