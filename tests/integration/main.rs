//! Walpost against real Postgres and real Kafka. One module per capability; one binary, so that the servers are shared.

#[expect(dead_code, reason = "the tests and the benches each use a part of the services")]
#[path = "../services/mod.rs"]
mod services;

mod access;
mod ahead;
mod ailments;
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
mod exactly_once;
mod failover;
mod frost;
mod generated;
mod halts;
mod hostile;
mod learn;
mod ledger;
mod libraries;
mod links;
mod metrics;
mod monitoring;
mod operate;
mod outbox;
mod own_sink;
mod packaging;
mod page;
mod partition_edges;
mod partitions;
mod past;
mod peek;
mod polling;
mod proofs;
mod records;
mod renames;
mod retention;
mod runbook;
mod secured;
mod servers;
mod service_manager;
mod stream;
mod traces;
mod verdicts;
mod victim;
