//! walpost tails the Postgres write-ahead log and delivers the events of a transactional outbox table to Kafka.
//!
//! The modules, in the order data flows.

pub mod ack;
pub mod app;
pub mod backoff;
pub mod clock;
pub mod config;
pub mod conninfo;
pub mod decode;
pub mod encode;
pub mod error;
pub mod event;
pub mod lsn;
pub mod observe;
pub mod pipeline;
pub mod prepare;
pub mod route;
pub mod sink;
pub mod source;
pub mod sql;
