//! `walpost check`: everything that `run` needs, looked at before it is needed. Changes nothing.
//!
//! Each finding says what is the case, why that matters, and what mends it. Errors mean that `run` would not deliver every
//! event; warnings, that it will until something else happens.

mod catalog;
mod clock;
mod consumer;
mod findings;
mod kafka;
mod neighbours;
mod placement;
mod poll;
mod progress;
mod retention;
mod sample;
mod server;
mod slot;
mod table;
mod topics;

use tokio_postgres::Client;

pub use consumer::Consumer;
pub use findings::{Finding, Findings, Report, Severity};

use crate::{
    config::{Config, SourceKind},
    error::{self, Verdict, chain},
    pipeline::SessionError,
    publication,
    source::{SourceError, WAL_SENDER_TIMEOUT, Wire},
    sql::{self, SqlError},
};

/// Looks at everything: Postgres, then Kafka, then the inbox of a consumer.
pub async fn run(config: &Config, consumer: Option<&Consumer>) -> Report {
    let mut findings = Findings::default();
    let (mut event_types, mut payloads) = (Vec::new(), Vec::new());
    let client = sql::connect(&config.postgres.conninfo).await;
    match &client {
        Ok(client) => {
            be_patient_no_longer(client).await;
            findings.ok("postgres_reachable", format!("Postgres answers at {}", config.postgres.conninfo.redacted()));
            if config.postgres.source == SourceKind::Wal {
                replication_link(config, &mut findings).await;
            }
            findings.extend(postgres(client, config).await);
            clock::check(client, &mut findings).await;
            payloads = sample::check(client, config, &mut findings).await;
            event_types = topics::event_types(client, config).await;
        }
        Err(error) => unreachable(error, &mut findings),
    }
    let topics = topics::wanted(config, &event_types, &mut findings);
    kafka::check(&config.kafka, (&topics, &payloads), &mut findings).await;
    if let Some(consumer) = consumer {
        consumer::check(client.as_ref().ok(), config, consumer, (&topics, &mut findings)).await;
    }
    progress::check(config, &mut findings).await;
    Report::new(findings)
}

/// A table that somebody has locked must not hold up the whole examination: even the catalog's views may wait for it.
async fn be_patient_no_longer(client: &Client) {
    // where it fails, so does what comes next, which tells of it
    let _ = client.batch_execute("SET lock_timeout = '5s'; SET statement_timeout = '10s'").await;
}

/// Looks at what Postgres says over an open link: server, tables, publication and slot.
pub async fn postgres(client: &Client, config: &Config) -> Vec<Finding> {
    let mut findings = Findings::default();
    if let Err(error) = look(client, config, &mut findings).await {
        findings.error(
            "postgres_failed",
            format!("a look at the catalog failed: {}", chain(&error)),
            "what could not be looked at may be wrong",
            "run walpost check again; if it stays so, see the server's log, and who holds locks: `SELECT * FROM pg_locks WHERE \
             NOT granted`",
        );
    }
    findings.into_vec()
}

async fn look(client: &Client, config: &Config, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let server = server::look(client).await?;
    if config.postgres.source == SourceKind::Poll {
        server.judge_for_polling(findings);
        for outbox in &config.outboxes {
            let table = table::look(client, outbox).await?;
            table::judge(outbox, table.as_ref(), &server, config, findings);
            if table.is_some() {
                poll::judge(client, outbox, config, findings).await?;
            }
        }
        return Ok(());
    }
    server.judge(findings);
    let published = publication::find(client, &config.postgres.publication, &config.outboxes).await?;
    let mut tables = Vec::new();
    for (outbox, found) in config.outboxes.iter().zip(&published.tables) {
        let table = table::look(client, outbox).await?;
        table::judge(outbox, table.as_ref(), &server, config, findings);
        debug_assert_eq!(found.table, outbox.table, "both are in the order of the configuration");
        tables.push(table);
    }
    let slot = slot::look(client, config).await?;
    slot::judge_publication(&published, &tables, &slot, (&server, config), findings);
    if published.options.is_some_and(|options| options.update || options.delete) {
        slot::replica_identity(client, &config.postgres.publication, findings).await?;
    }
    slot::judge(&slot, &server, config, findings);
    neighbours::check(client, config, (&server, &slot), findings).await?;
    retention::check(client, config, &tables, findings).await?;
    if slot.is_missing() && config.postgres.auto_create {
        table::older_rows(client, config, &tables, findings).await?;
    }
    Ok(())
}

/// Whether the server takes us as a walsender: tried, since no catalog knows (`pg_hba.conf`, managed services' own roles).
async fn replication_link(config: &Config, findings: &mut Findings) {
    let error = match walsender(config).await {
        Ok(mut link) => {
            findings.ok("replication_allowed", "the role may open a replication connection".to_owned());
            return judge_sender_timeout(&mut link, config, findings).await;
        }
        Err(error) => error,
    };
    let what = format!("no replication connection: {}", chain(&error));
    let fix = match &error {
        SourceError::Server(server) if server.code == "53300" => {
            "raise max_wal_senders (restart needed), or end other replication connections".to_owned()
        }
        _ => hint(error),
    };
    findings.error("replication_refused", what, "walpost reads the write-ahead log over such a connection", fix);
}

/// A link that understands replication: what stands in between may have dropped the wish for it, and answer all the same.
async fn walsender(config: &Config) -> Result<Wire, SourceError> {
    let mut link = Wire::connect(&config.postgres.conninfo).await?;
    link.query("IDENTIFY_SYSTEM").await?;
    Ok(link)
}

/// Whether the server took the timeout that was asked for: poolers and login triggers may undo it.
async fn judge_sender_timeout(link: &mut Wire, config: &Config, findings: &mut Findings) {
    let Ok(rows) = link.query("SHOW wal_sender_timeout").await else { return };
    let timeout = rows.first().and_then(|row| row.first()).and_then(Option::as_deref).unwrap_or_default();
    if timeout == WAL_SENDER_TIMEOUT {
        return;
    }
    let role = config.postgres.conninfo.config.get_user().unwrap_or_default();
    findings.warn(
        "wal_sender_timeout",
        format!("walpost asks for wal_sender_timeout = {WAL_SENDER_TIMEOUT}, and the server has {timeout} for it"),
        "with 0 a walpost that vanished holds the slot until TCP gives it up, so no other takes over; with little, a busy one is \
         cut off",
        format!(
            "connect to Postgres itself (a pooler drops what it does not know), or `ALTER ROLE {} SET wal_sender_timeout = \
             '{WAL_SENDER_TIMEOUT}'`; look for login triggers: `SELECT evtname FROM pg_event_trigger`",
            sql::quote_identifier(role)
        ),
    );
}

fn hint(error: SourceError) -> String {
    let hint = match error::judge(&SessionError::from(error)) {
        Verdict::RetrySlowly(hint) | Verdict::Halt(hint) | Verdict::Misconfigured(hint) | Verdict::SlotLost(hint) => {
            hint
        }
        Verdict::Retry => "check host, port and network in postgres.url",
    };
    hint.to_owned()
}

fn unreachable(error: &SqlError, findings: &mut Findings) {
    let fix = match error.code().map(tokio_postgres::error::SqlState::code) {
        Some("28P01") => "mend the password in postgres.url, postgres.password_file or PGPASSWORD",
        Some("28000") => "allow role, database and address in pg_hba.conf",
        Some("3D000") => "name an existing database in postgres.url",
        Some("53300") => "raise max_connections, or the role's or database's CONNECTION LIMIT",
        Some("57P03") => "wait until the server has started",
        _ => "check host, port, sslmode and network in postgres.url",
    };
    findings.error(
        "postgres_unreachable",
        format!("no link to Postgres: {}", chain(error)),
        "nothing works without it",
        fix,
    );
}
