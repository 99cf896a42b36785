//! The server: version and settings.

use tokio_postgres::Client;

use super::Findings;

/// The oldest and the newest major version that walpost is tested with.
const SUPPORTED: std::ops::RangeInclusive<i32> = 14..=18;
/// First minor of each major that does not lose changes when a publication is altered while rows are written.
const SOUND_MINORS: [(i32, i32); 4] = [(14, 18), (15, 13), (16, 9), (17, 5)];

const LOOK: &str = "
    SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_setting('wal_level'),
           current_setting('max_wal_senders')::int, (SELECT count(*) FROM pg_stat_replication)::int,
           current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots)::int,
           current_setting('max_slot_wal_keep_size'), current_setting('synchronous_standby_names'),
           current_setting('idle_replication_slot_timeout', true), pg_is_in_recovery(),
           has_database_privilege(current_database(), 'CREATE'), current_user::text, current_database()::text,
           current_setting('is_superuser') = 'on',
           coalesce(current_setting('synchronized_standby_slots', true), ''),
           pg_size_bytes(current_setting('max_wal_size')),
           CASE current_setting('max_slot_wal_keep_size') WHEN '-1' THEN -1
                ELSE pg_size_bytes(current_setting('max_slot_wal_keep_size')) END,
           current_setting('max_wal_size')";

/// What the server says about itself.
#[derive(Debug, Clone, Default)]
pub(super) struct Server {
    /// For example 150018.
    pub number: i32,
    version: String,
    wal_level: String,
    senders: (i32, i32),
    slots: (i32, i32),
    slot_limit: String,
    slot_limit_bytes: i64,
    max_wal: String,
    max_wal_bytes: i64,
    /// `synchronous_standby_names`
    pub synchronous: String,
    /// `synchronized_standby_slots` (17 and later).
    pub awaited_slots: Option<String>,
    idle_timeout: Option<String>,
    in_recovery: bool,
    /// The role may create publications in the database.
    pub may_create: bool,
    /// The role.
    pub role: String,
    /// The database.
    pub database: String,
    /// The role may do anything.
    pub superuser: bool,
}

pub(super) async fn look(client: &Client) -> Result<Server, tokio_postgres::Error> {
    let row = client.query_one(LOOK, &[]).await?;
    Ok(Server {
        number: row.get(0),
        version: row.get(1),
        wal_level: row.get(2),
        senders: (row.get(3), row.get(4)),
        slots: (row.get(5), row.get(6)),
        slot_limit: row.get(7),
        synchronous: row.get(8),
        idle_timeout: row.get(9),
        in_recovery: row.get(10),
        may_create: row.get(11),
        role: row.get(12),
        database: row.get(13),
        superuser: row.get(14),
        awaited_slots: row.get(15),
        max_wal_bytes: row.get(16),
        slot_limit_bytes: row.get(17),
        max_wal: row.get(18),
    })
}

impl Server {
    pub(super) fn major(&self) -> i32 {
        self.number / 10_000
    }

    pub(super) fn judge(&self, findings: &mut Findings) {
        self.judge_version(findings);
        if self.wal_level == "logical" {
            findings.ok("wal_level", "wal_level is logical".to_owned());
        } else {
            findings.error(
                "wal_level",
                format!("wal_level is {}", self.wal_level),
                "only with logical does the server write what logical decoding needs",
                "ALTER SYSTEM SET wal_level = logical, then restart the server (on managed services: a parameter such as \
                 rds.logical_replication = 1 or cloudsql.logical_decoding = on)",
            );
        }
        if self.in_recovery && self.major() < 16 {
            findings.error(
                "standby",
                "the server is a standby".to_owned(),
                "logical decoding works on a standby only from version 16 on",
                "name the primary in postgres.url, or several hosts with target_session_attrs=read-write",
            );
        }
        let (limit, used) = self.senders;
        if used >= limit {
            findings.warn(
                "wal_senders",
                format!("all {limit} WAL senders are in use"),
                "unless one of them is walpost's own, it will not get a replication connection",
                "raise max_wal_senders (restart needed), or end other replication connections",
            );
        }
        self.judge_settings(findings);
    }

    /// What counts where no log is read.
    pub(super) fn judge_for_polling(&self, findings: &mut Findings) {
        self.judge_version(findings);
        if self.in_recovery {
            findings.error(
                "standby",
                "the server is a standby".to_owned(),
                "polling marks rows, and a standby takes no writes",
                "name the primary in postgres.url, or several hosts with target_session_attrs=read-write",
            );
        }
    }

    fn judge_version(&self, findings: &mut Findings) {
        let (major, minor) = (self.major(), self.number % 10_000);
        let what = format!("the server is Postgres {}", self.version);
        let sound = SOUND_MINORS.iter().find(|(of, _)| *of == major).map_or(0, |(_, minor)| *minor);
        if major < *SUPPORTED.start() {
            let why = "walpost supports versions 14 to 18; 13 lacks messages and options that it relies on";
            findings.error("server_version", what, why, "upgrade the server");
        } else if major > *SUPPORTED.end() {
            findings.warn(
                "server_version",
                what,
                "walpost was tested with versions 14 to 18",
                "look for a newer walpost",
            );
        } else if minor < sound {
            findings.warn(
                "server_minor",
                what,
                "this minor release may lose changes silently when a publication is altered while rows are written",
                format!("update to {major}.{sound} or later"),
            );
        } else {
            findings.ok("server_version", what);
        }
    }

    fn judge_settings(&self, findings: &mut Findings) {
        if self.slot_limit == "-1" {
            findings.warn(
                "slot_wal_unlimited",
                "max_slot_wal_keep_size is -1: a slot may hold back any amount of WAL".to_owned(),
                "if walpost or Kafka is away for long, the server's disk fills and the server stops",
                "`ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'` (or what the disk can spare; beyond it the slot is lost \
                 instead) and `SELECT pg_reload_conf()`; alert on walpost_slot_retained_wal_bytes",
            );
        } else if self.slot_limit_bytes < self.max_wal_bytes {
            findings.warn(
                "slot_wal_limit_low",
                format!(
                    "max_slot_wal_keep_size is {}, less than max_wal_size ({}), which the server keeps anyway",
                    self.slot_limit, self.max_wal
                ),
                "a short absence of walpost or Kafka costs the slot, and events with it",
                "`ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'` (or what the disk can spare) and `SELECT pg_reload_conf()`",
            );
        }
        if self.synchronous.contains('*') {
            findings.warn(
                "synchronous_standby",
                format!("synchronous_standby_names is {:?}, which takes in walpost", self.synchronous),
                "every COMMIT on the server may wait until walpost has confirmed it, and so for Kafka",
                "name the standbys instead: `ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (standby1, standby2)'` and \
                 `SELECT pg_reload_conf()`",
            );
        }
        if let Some(timeout) = self.idle_timeout.as_deref().filter(|timeout| *timeout != "0") {
            findings.warn(
                "slot_idle_timeout",
                format!("idle_replication_slot_timeout is {timeout}"),
                "a walpost that is stopped for longer loses its slot, and events with it",
                "`ALTER SYSTEM SET idle_replication_slot_timeout = 0` and `SELECT pg_reload_conf()`, or stop walpost for less",
            );
        }
    }

    /// Judged only where a slot must be created.
    pub(super) fn judge_free_slots(&self, findings: &mut Findings) {
        let (limit, used) = self.slots;
        if used >= limit {
            findings.error(
                "replication_slots",
                format!("all {limit} replication slots are in use"),
                "the slot cannot be created",
                "raise max_replication_slots (restart needed), or drop slots that nobody reads",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Severity, *};

    fn healthy() -> Server {
        Server {
            number: 180_004,
            wal_level: "logical".into(),
            senders: (10, 1),
            slots: (10, 1),
            slot_limit: "10GB".into(),
            ..Server::default()
        }
    }

    fn judged(server: &Server) -> Vec<(&'static str, Severity)> {
        let mut findings = Findings::default();
        server.judge(&mut findings);
        server.judge_free_slots(&mut findings);
        let unwell = |severity: &Severity| *severity > Severity::Ok;
        findings.into_vec().iter().map(|it| (it.code, it.severity)).filter(|(_, severity)| unwell(severity)).collect()
    }

    #[test]
    fn each_setting_that_is_in_the_way_is_named() {
        assert_eq!(judged(&healthy()), []);
        let wrong = Server {
            number: 150_012,
            wal_level: "replica".into(),
            senders: (2, 2),
            slots: (1, 1),
            slot_limit: "-1".into(),
            slot_limit_bytes: -1,
            synchronous: "ANY 1 (*)".into(),
            idle_timeout: Some("1d".into()),
            in_recovery: true,
            ..healthy()
        };
        let codes = [
            ("server_minor", Severity::Warn),
            ("wal_level", Severity::Error),
            ("standby", Severity::Error),
            ("wal_senders", Severity::Warn),
            ("slot_wal_unlimited", Severity::Warn),
            ("synchronous_standby", Severity::Warn),
            ("slot_idle_timeout", Severity::Warn),
            ("replication_slots", Severity::Error),
        ];
        assert_eq!(judged(&wrong), codes);
        let low = Server { slot_limit_bytes: 1, max_wal_bytes: 2, ..healthy() };
        assert_eq!(judged(&low), [("slot_wal_limit_low", Severity::Warn)]);
        assert_eq!(judged(&Server { number: 130_023, ..healthy() }), [("server_version", Severity::Error)]);
        assert_eq!(judged(&Server { number: 190_000, ..healthy() }), [("server_version", Severity::Warn)]);
    }
}
