//! What `walpost init` adds to a table that is polled. What is there stays as it is.

use tokio_postgres::Client;

use crate::{
    config::{Backfill, Config, OutboxConfig},
    init::{self, InitError, Step, TABLE, substituted},
    publication::quoted,
    sql::{quote_identifier, quote_literal},
};

const POLL: &str = include_str!("../../sql/poll.sql");
const ROLES: &str = include_str!("../../sql/poll_roles.sql");
const NOTIFY: &str = include_str!("../../sql/notify.sql");

const LOOK: &str = "
    SELECT count(*) FILTER (WHERE attname = $2) > 0, count(*) FILTER (WHERE attname = $3) > 0,
           coalesce(bool_or(attname = $4 AND atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype)), false),
           coalesce(bool_or(attname = $5), false), coalesce(bool_or(attname = $6), false),
           to_regclass($7) IS NOT NULL AND to_regclass($8) IS NOT NULL,
           EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass($1) AND tgname = $9)
    FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped";

/// What a table has already.
#[expect(clippy::struct_excessive_bools, reason = "answers to independent questions")]
struct Found {
    delivered_at: bool,
    attempts: bool,
    id_counts_up: bool,
    timestamp: bool,
    key: bool,
    indexes: bool,
    trigger: bool,
}

/// Adds what is missing to each outbox; the tables exist.
pub async fn ensure(client: &Client, config: &Config) -> Result<Vec<Step>, InitError> {
    let mut steps = Vec::new();
    for outbox in &config.outboxes {
        let found = look(client, outbox).await?;
        let table = quoted(&outbox.table);
        let what = format!("delivery marks of table {table}");
        if found.delivered_at && found.attempts && found.indexes {
            steps.push(Step::Found(what));
        } else {
            let marks = if found.delivered_at { String::new() } else { marks_of_old_rows(client, outbox).await? };
            let sql = format!("BEGIN; {marks}\n{}\nCOMMIT", create(outbox, &found));
            init::create(client, &sql, &what).await?;
            steps.push(Step::Created(what));
        }
        if let Some(channel) = &config.poll.notify_channel {
            let what = format!("trigger {} of table {table}", trigger(outbox));
            if found.trigger {
                steps.push(Step::Found(what));
            } else {
                init::create(client, &create_trigger(outbox, channel), &what).await?;
                steps.push(Step::Created(what));
            }
        }
    }
    Ok(steps)
}

/// The same as SQL.
pub fn print(config: &Config) -> Vec<String> {
    let all = Found {
        delivered_at: true,
        attempts: true,
        id_counts_up: false,
        timestamp: true,
        key: true,
        indexes: false,
        trigger: false,
    };
    let mut parts: Vec<String> = config.outboxes.iter().map(|outbox| create(outbox, &all)).collect();
    if let Some(channel) = &config.poll.notify_channel {
        parts.extend(config.outboxes.iter().map(|outbox| create_trigger(outbox, channel)));
    }
    parts
}

/// What the roles need beside `sql/roles.sql`.
pub fn print_grants(config: &Config) -> Vec<String> {
    config.outboxes.iter().map(|outbox| substituted(ROLES, &names(outbox, &[]))).collect()
}

async fn look(client: &Client, outbox: &OutboxConfig) -> Result<Found, InitError> {
    let (table, columns, poll) = (outbox.table.to_string(), &outbox.columns, &outbox.poll);
    let [undelivered, failed, _] = indexes(outbox).map(|name| in_schema(outbox, &name));
    let trigger = format!("{}_notify", outbox.table.table);
    let row = client
        .query_one(
            LOOK,
            &[
                &table,
                &poll.delivered_at,
                &poll.attempts,
                &columns.id,
                &columns.timestamp.name,
                &columns.key.name,
                &undelivered,
                &failed,
                &trigger,
            ],
        )
        .await
        .map_err(InitError::statement(format!("look at table {table}")))?;
    let [delivered_at, attempts, id_counts_up, timestamp, key, indexes, trigger] =
        std::array::from_fn(|index| row.get(index));
    Ok(Found { delivered_at, attempts, id_counts_up, timestamp, key, indexes, trigger })
}

/// Rows that were there before the mark: nobody can tell whether they were delivered, so somebody has to say so.
async fn marks_of_old_rows(client: &Client, outbox: &OutboxConfig) -> Result<String, InitError> {
    let (table, mark) = (outbox.table.to_string(), quote_identifier(&outbox.poll.delivered_at));
    let add = format!("ALTER TABLE {table} ADD COLUMN {mark} timestamptz");
    let count = client.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await;
    let count: i64 = count.map_err(InitError::statement(format!("count the rows of table {table}")))?.get(0);
    Ok(match &outbox.backfill {
        _ if count == 0 => String::new(),
        None => return Err(InitError::UnmarkedRows { table, count }),
        Some(Backfill::All) => String::new(),
        // as a default that is dropped again it rewrites nothing
        Some(Backfill::None) => format!("{add} DEFAULT now(); ALTER TABLE {table} ALTER COLUMN {mark} DROP DEFAULT;"),
        // the line break ends a comment in the condition
        Some(Backfill::Where(condition)) => {
            format!("{add}; UPDATE {table} SET {mark} = now() WHERE ({condition}\n) IS NOT TRUE;")
        }
    })
}

fn create(outbox: &OutboxConfig, found: &Found) -> String {
    let (columns, poll) = (&outbox.columns, &outbox.poll);
    let order = match &poll.order {
        Some(order) => vec![order],
        None if found.id_counts_up || !found.timestamp => vec![&columns.id],
        None => vec![&columns.timestamp.name, &columns.id],
    };
    let order: Vec<_> = order.into_iter().map(|column| quote_identifier(column)).collect();
    let key = if found.key { &columns.key.name } else { &columns.id };
    let [undelivered, failed, delivered] = indexes(outbox).map(|name| quote_identifier(&name));
    let own = [
        ("\"outbox_undelivered_idx\"", undelivered),
        ("\"outbox_failed_idx\"", failed),
        ("\"outbox_delivered_idx\"", delivered),
        ("\"created_at\", \"id\"", order.join(", ")),
        ("\"key\"", quote_identifier(key)),
    ];
    substituted(POLL, &names(outbox, &own))
}

fn create_trigger(outbox: &OutboxConfig, channel: &str) -> String {
    let function = format!("{}.{}", quote_identifier(&outbox.table.schema), trigger(outbox));
    let names = [
        ("\"public\".\"outbox_notify\"", function),
        ("\"outbox_notify\"", trigger(outbox)),
        (TABLE, quoted(&outbox.table)),
        ("'walpost'", quote_literal(channel)),
    ];
    substituted(NOTIFY, &names)
}

fn names<'a>(outbox: &OutboxConfig, own: &[(&'a str, String)]) -> Vec<(&'a str, String)> {
    let poll = &outbox.poll;
    let mut names = vec![
        (TABLE, quoted(&outbox.table)),
        ("\"delivered_at\"", quote_identifier(&poll.delivered_at)),
        ("\"attempts\"", quote_identifier(&poll.attempts)),
    ];
    names.extend_from_slice(own);
    names
}

fn indexes(outbox: &OutboxConfig) -> [String; 3] {
    ["undelivered", "failed", "delivered"].map(|what| format!("{}_{what}_idx", outbox.table.table))
}

fn trigger(outbox: &OutboxConfig) -> String {
    quote_identifier(&format!("{}_notify", outbox.table.table))
}

fn in_schema(outbox: &OutboxConfig, name: &str) -> String {
    format!("{}.{}", quote_identifier(&outbox.table.schema), quote_identifier(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_from;

    fn config(text: &str) -> Config {
        let text = format!("[postgres]\nurl = 'host=h'\nsource = 'poll'\n{text}");
        load_from(Some(("f", &text)), std::iter::empty(), &[]).unwrap()
    }

    #[test]
    fn the_default_names_leave_the_files_as_they_are() {
        let config = config("[poll]\nnotify_channel = 'walpost'");
        assert_eq!(print(&config), [POLL, NOTIFY]);
        assert_eq!(print_grants(&config), [ROLES]);
    }

    #[test]
    fn other_names_are_quoted_wherever_the_default_ones_stood() {
        let config = config(
            "[outbox]\ntable = '\"My\".\"out\"\"box\"'\n[outbox.columns]\ndelivered_at = 'tarqatilgan_vaqt'\n\
             attempts = 'urinishlar'\norder = 'n\"o'\nkey = 'k'\n[poll]\nnotify_channel = \"it's\"",
        );
        let sql = print(&config).join("\n") + &print_grants(&config).join("\n");
        for part in [
            r#""out""box_undelivered_idx" ON "My"."out""box" ("n""o") WHERE "tarqatilgan_vaqt" IS NULL;"#,
            r#"("k") WHERE "tarqatilgan_vaqt" IS NULL AND "urinishlar" > 0;"#,
            "pg_notify('it''s', '')",
            r#"EXECUTE FUNCTION "My"."out""box_notify"();"#,
            r#"GRANT UPDATE ("tarqatilgan_vaqt", "urinishlar") ON "My"."out""box" TO"#,
        ] {
            assert!(sql.contains(part), "{part} is not in {sql}");
        }
        assert!(!sql.contains("\"public\"") && !sql.contains("\"outbox"), "{sql}");
    }

    #[test]
    fn no_file_needs_an_encoding() {
        assert!([POLL, ROLES, NOTIFY].iter().all(|sql| sql.is_ascii()));
    }
}
