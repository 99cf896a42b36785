//! The outbox table, and events that are committed before anyone reads them.

use crate::{
    PATIENCE, Servers,
    services::{database::Database, wait_until},
};

/// The table as Debezium's users have it; `aggregatetype` decides the topic.
const TABLE: &str = "CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text NOT NULL, \
     aggregateid text NOT NULL, type text NOT NULL, payload jsonb, created_at timestamptz NOT NULL DEFAULT \
     clock_timestamp())";

/// Values of `aggregatetype`.
pub const TYPES: u64 = 3;

/// Fills the payload up to 300 bytes.
const PAD: usize = 190;

/// A database with the table and a slot that stands before all its events.
pub struct Backlog<'a> {
    /// The database; slot and publication are named after it.
    pub database: Database<'a>,
    copies: std::cell::Cell<u32>,
}

impl<'a> Backlog<'a> {
    /// No events yet.
    pub fn empty(servers: &'a Servers) -> Self {
        let database = servers.postgres.database();
        let name = database.name();
        database.execute(TABLE);
        database.execute(&format!("CREATE PUBLICATION {name} FOR TABLE outbox WITH (publish = 'insert')"));
        database.execute("CHECKPOINT");
        database.execute(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"));
        Self { database, copies: std::cell::Cell::default() }
    }

    /// Adds what `walpost init` adds where the table is polled, with the trigger that notifies or without.
    pub fn prepare_for_polling(&self, notified: bool) {
        let columns = include_str!("../../sql/poll.sql").replace("\"key\"", "\"aggregateid\"");
        self.database.execute(&columns);
        if notified {
            self.database.execute(include_str!("../../sql/notify.sql"));
        }
    }

    /// Bytes that were ever written to the log.
    pub fn written(&self) -> f64 {
        let bytes = self.database.value("SELECT pg_current_wal_insert_lsn() - '0/0'").expect("a position");
        bytes.parse().expect("a number of bytes")
    }

    /// Commits `events` events, `per_transaction` in each transaction.
    pub fn load(&self, events: u64, per_transaction: u64) {
        let (transactions, pad) = (events / per_transaction, "x".repeat(PAD));
        self.database.execute(&format!(
            "DO $$ BEGIN
             PERFORM set_config('synchronous_commit', 'off', false); -- the same log, without a wait for each commit
             FOR i IN 0..{transactions} - 1 LOOP
               INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
               SELECT 't' || n % {TYPES}, 'k' || n % 1000, 'Created', jsonb_build_object('seq', n, 'order', md5(n::text),
                 'total', n * 17 % 5000, 'currency', 'EUR', 'pad', '{pad}')
               FROM generate_series(i * {per_transaction}, (i + 1) * {per_transaction} - 1) n;
               COMMIT;
             END LOOP; END $$"
        ));
        self.database.execute("CHECKPOINT");
    }

    /// A new slot that stands where the first one does, so that each run reads the same log.
    pub fn slot(&self) -> String {
        self.copies.set(self.copies.get() + 1);
        let (name, slot) = (self.database.name(), format!("{}_{}", self.database.name(), self.copies.get()));
        self.database.execute(&format!("SELECT pg_copy_logical_replication_slot('{name}', '{slot}')"));
        slot
    }

    /// Drops a slot as soon as the server has noticed that nobody uses it any more.
    pub fn drop_slot(&self, slot: &str) {
        let active = format!("SELECT active::text FROM pg_replication_slots WHERE slot_name = '{slot}'");
        wait_until(PATIENCE, "the slot is free", || self.database.value(&active).as_deref() == Some("false"));
        self.database.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    }

    /// The end of the log now.
    pub fn end(&self) -> String {
        self.database.value("SELECT pg_current_wal_flush_lsn()").expect("a position")
    }
}
