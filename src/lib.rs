//! walpost tails the Postgres write-ahead log and delivers the events of a transactional outbox table to Kafka.
//!
//! The modules, in the order data flows.

pub mod cli;
pub mod config;
pub mod conninfo;
pub mod lsn;
pub mod observe;
pub mod sql;
