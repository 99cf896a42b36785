//! Slot and publication: there and sound, or creatable.

use tokio_postgres::Client;

use super::{Findings, server::Server, table::Table};
use crate::{
    backfill::marker_of,
    config::Config,
    observe::slot::{SlotReading, SlotState},
    publication::{PublicationFound, quoted},
    sql::quote_identifier,
};

/// Tables of the publication on which an UPDATE or DELETE would fail for want of a replica identity.
const WITHOUT_IDENTITY: &str = "
    SELECT format('%I.%I', t.schemaname, t.tablename)
    FROM pg_publication_tables t
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = $1 AND (c.relreplident = 'n' OR c.relreplident = 'd'
          AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary))
    ORDER BY 1 LIMIT 5";

/// The slot, if there is one, and what stands for it until its backfill is complete.
pub(super) struct Slot {
    name: String,
    marker_name: String,
    itself: SlotState,
    marker: SlotState,
}

impl Slot {
    /// The slot that there is, or what stands for it, with its name.
    pub(super) fn present(&self) -> Option<(&str, &SlotReading)> {
        let there = [(&self.name, &self.itself), (&self.marker_name, &self.marker)];
        there.into_iter().find_map(|(name, state)| Some((name.as_str(), state.reading()?)))
    }

    pub(super) fn is_missing(&self) -> bool {
        self.itself == SlotState::Missing && self.marker == SlotState::Missing
    }
}

pub(super) async fn look(client: &Client, config: &Config) -> Result<Slot, tokio_postgres::Error> {
    let name = &config.postgres.slot;
    let itself = crate::observe::slot::look(client, name).await?.slot;
    let marker_name = marker_of(name);
    let marker = crate::observe::slot::look(client, &marker_name).await?.slot;
    Ok(Slot { name: name.clone(), marker_name, itself, marker })
}

pub(super) fn judge(slot: &Slot, server: &Server, config: &Config, findings: &mut Findings) {
    let name = &config.postgres.slot;
    if let SlotState::Present(reading) = &slot.marker {
        let marker = marker_of(name);
        findings.warn(
            "backfill_incomplete",
            format!("the backfill of replication slot {name} was not completed: {marker} stands for it"),
            "nothing is streamed before the older rows are published, and the server keeps its WAL meanwhile",
            "let walpost run, or walpost init with outbox.backfill set, go on until it is complete",
        );
        if slot.itself == SlotState::Missing {
            return judge_present(&marker, reading, server, findings);
        }
    }
    match &slot.itself {
        SlotState::Present(reading) => judge_present(name, reading, server, findings),
        SlotState::Unknown => findings.error(
            "slot_unknown",
            format!("what the server says about replication slot {name} is not understood"),
            "it may not be usable",
            "look for a newer walpost",
        ),
        SlotState::Missing if config.postgres.auto_create => {
            findings.ok("slot", format!("replication slot {name} does not exist yet; walpost run creates it"));
            server.judge_free_slots(findings);
        }
        SlotState::Missing => {
            findings.error(
                "slot_missing",
                format!("replication slot {name} does not exist"),
                "the server keeps and sends nothing without it",
                "walpost init, or set postgres.auto_create = true",
            );
            server.judge_free_slots(findings);
        }
    }
}

fn judge_present(name: &str, slot: &SlotReading, server: &Server, findings: &mut Findings) {
    let another =
        format!("name another slot in postgres.slot, or SELECT pg_drop_replication_slot('{name}') if nobody needs it");
    let foreign = match (&slot.plugin, &slot.database) {
        (None, _) => Some("is a physical slot".to_owned()),
        (Some(plugin), _) if plugin != "pgoutput" => {
            Some(format!("uses output plugin {plugin}, walpost reads pgoutput"))
        }
        (_, Some(database)) if *database != server.database => Some(format!("belongs to database {database}")),
        _ if slot.temporary => Some("is temporary and vanishes with its session".to_owned()),
        _ if slot.two_phase => Some("was created with two_phase, which walpost does not read".to_owned()),
        _ if slot.synced == Some(true) => Some("is a standby's copy of the primary's slot".to_owned()),
        _ => None,
    };
    let state = SlotState::Present(slot.clone());
    if let Some(foreign) = foreign {
        let why = "walpost cannot stream from it";
        findings.error("slot_foreign", format!("replication slot {name} {foreign}"), why, another);
    } else if let Some(loss) = state.loss(name) {
        let why = "it will never stream again, and events may be missing";
        findings.error("slot_lost", loss, why, format!("SELECT pg_drop_replication_slot('{name}'), then walpost init"));
    } else if let Some(risk) = state.trouble(name) {
        let why = "once it is lost, events that were not delivered do not come through it any more";
        let fix = "`ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'` (or what the disk can spare) and `SELECT pg_reload_conf()`, \
                   and start walpost";
        findings.warn("slot_at_risk", risk, why, fix);
    } else {
        let user = slot.active_pid.map(|pid| format!(", and process {pid} streams from it now")).unwrap_or_default();
        findings.ok("slot", format!("replication slot {name} is ours and sound{user}"));
    }
}

pub(super) fn judge_publication(
    found: &PublicationFound,
    tables: &[Option<Table>],
    slot: &Slot,
    (server, config): (&Server, &Config),
    findings: &mut Findings,
) {
    let name = quote_identifier(&found.name);
    if found.options.is_some() || !config.postgres.auto_create {
        let faults = found.faults();
        if faults.is_empty() {
            findings.ok("publication", format!("publication {name} publishes every insert into the outbox"));
        }
        for fault in faults.into_iter().filter(|fault| fault.code != "table_missing") {
            findings.error(fault.code, fault.what, fault.why, fault.fix);
        }
        return;
    }
    if !slot.is_missing() {
        return findings.error(
            "publication_missing",
            format!("publication {name} does not exist, but replication slot {} does", config.postgres.slot),
            "rows written since the slot's position were written without the publication and would never arrive",
            format!(
                "find those rows in the table, SELECT pg_drop_replication_slot('{}'), then walpost init",
                config.postgres.slot
            ),
        );
    }
    let foreign = found.tables.iter().zip(tables).filter(|(_, table)| table.as_ref().is_some_and(|table| !table.owned));
    let foreign: Vec<_> = foreign.map(|(found, _)| quoted(&found.table)).collect();
    if server.superuser || (server.may_create && foreign.is_empty()) {
        return findings.ok("publication", format!("publication {name} does not exist yet; walpost run creates it"));
    }
    findings.error(
        "publication_not_creatable",
        format!("publication {name} does not exist, and role {} may not create it", quote_identifier(&server.role)),
        "creating one needs CREATE on the database and ownership of each table",
        format!("as the owner of the table: {}", found.create_statement()),
    );
}

/// A publication of updates and deletes makes the application's own statements fail.
pub(super) async fn replica_identity(
    client: &Client,
    publication: &str,
    findings: &mut Findings,
) -> Result<(), tokio_postgres::Error> {
    let rows = client.query(WITHOUT_IDENTITY, &[&publication]).await?;
    let tables: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    if !tables.is_empty() {
        let name = quote_identifier(publication);
        findings.warn(
            "replica_identity",
            format!("publication {name} publishes updates or deletes of tables without a key: {}", tables.join(", ")),
            "UPDATE and DELETE on those tables fail for the application; walpost needs inserts only",
            format!("ALTER PUBLICATION {name} SET (publish = 'insert')"),
        );
    }
    Ok(())
}
