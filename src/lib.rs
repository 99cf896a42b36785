//! walpost tails the Postgres write-ahead log and delivers the events of a transactional outbox table to Kafka.
//!
//! The modules, in the order data flows.

pub mod config;
pub mod conninfo;
pub mod lsn;
pub mod event;
pub mod source;
pub mod publication;
pub mod decode;
pub mod route;
pub mod encode;
pub mod sink;
pub mod ack;
pub mod pipeline;
pub mod error;
pub mod backoff;
pub mod clock;
pub mod observe;
pub mod sql;
pub mod app;
pub mod prepare;
pub mod init;
pub mod check;
pub mod status_command;
