//! Walpost against real Postgres and real Kafka. One module per capability; one binary, so that the servers are shared.

#[expect(dead_code, reason = "the tests and the benches each use a part of the services")]
#[path = "../services/mod.rs"]
mod services;

mod crashes;
mod delivery;
mod demo;
mod deploy;
mod frost;
mod ledger;
mod outbox;
mod records;
mod servers;
mod stream;
