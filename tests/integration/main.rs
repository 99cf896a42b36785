//! Walpost against real Postgres and real Kafka. One module per capability; one binary, so that the servers are shared.

#[expect(dead_code, reason = "the tests and the benches each use a part of the services")]
#[path = "../services/mod.rs"]
mod services;

mod access;
mod applications;
mod backfill;
mod bounds;
mod catalog;
mod clients;
mod consumer;
mod crashes;
mod dead_letters;
mod delivery;
mod demo;
mod denied;
mod deploy;
mod doctor;
mod failover;
mod frost;
mod halts;
mod hostile;
mod ledger;
mod libraries;
mod links;
mod outbox;
mod own_sink;
mod partitions;
mod peek;
mod polling;
mod proofs;
mod records;
mod renames;
mod retention;
mod secured;
mod servers;
mod stream;
mod verdicts;
mod victim;
