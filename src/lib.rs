//! walpost tails the Postgres write-ahead log and delivers the events of a transactional outbox table to Kafka.
//!
//! Two parts, by feature:
//!
//! * `relay` (the default) is the service: its modules stand below in the order data flows, and can be run within one's own.
//! * `outbox` is what applications use to write events and to act on each only once ([`outbox`], [`inbox`]); with
//!   `tokio-postgres`, `sqlx` or `diesel-async` for the transaction. Without `relay` nothing of the service is compiled.

#[cfg(feature = "relay")]
pub mod cli;
#[cfg(feature = "relay")]
pub mod config;
#[cfg(feature = "relay")]
pub mod conninfo;

#[cfg(feature = "relay")]
pub mod lsn;

#[cfg(feature = "relay")]
pub mod event;

#[cfg(feature = "relay")]
pub mod source;

#[cfg(feature = "relay")]
pub mod decode;

#[cfg(feature = "relay")]
pub mod route;

#[cfg(feature = "relay")]
pub mod encode;

#[cfg(feature = "relay")]
pub mod sink;

#[cfg(feature = "relay")]
pub mod ack;

#[cfg(feature = "relay")]
pub mod pipeline;

#[cfg(feature = "relay")]
pub mod admin;
#[cfg(feature = "relay")]
pub mod admin_command;
#[cfg(feature = "relay")]
pub mod app;
#[cfg(feature = "relay")]
mod applications;
#[cfg(feature = "relay")]
pub mod backfill;
#[cfg(feature = "relay")]
pub mod backfill_command;
#[cfg(feature = "relay")]
pub mod backoff;
#[cfg(feature = "relay")]
pub mod check;
#[cfg(feature = "relay")]
pub mod clock;
#[cfg(feature = "relay")]
pub mod codes;
#[cfg(feature = "relay")]
pub mod commands;
#[cfg(feature = "relay")]
pub mod dead_letters_command;
#[cfg(feature = "relay")]
pub mod demo;
#[cfg(feature = "relay")]
pub mod drop_command;
#[cfg(feature = "relay")]
pub mod error;
#[cfg(feature = "relay")]
pub mod fault;
#[cfg(feature = "relay")]
pub mod generate_command;
#[cfg(feature = "relay")]
pub mod init;
#[cfg(feature = "relay")]
pub mod observe;
#[cfg(feature = "relay")]
pub mod peek_command;
#[cfg(feature = "relay")]
pub mod poll;
#[cfg(feature = "relay")]
pub mod prepare;
#[cfg(feature = "relay")]
pub mod prune_command;
#[cfg(feature = "relay")]
pub mod publication;
#[cfg(feature = "relay")]
pub mod retention;
#[cfg(feature = "relay")]
pub mod rewind_command;
#[cfg(feature = "relay")]
pub mod sql;
#[cfg(feature = "relay")]
pub mod status_command;
#[cfg(feature = "relay")]
pub mod supervisor;
#[cfg(feature = "relay")]
pub mod tailer;
#[cfg(feature = "relay")]
pub mod trace;

#[cfg(feature = "outbox")]
pub mod inbox;
#[cfg(feature = "outbox")]
pub mod outbox;
#[cfg(any(feature = "relay", feature = "outbox"))]
pub mod table_name;
#[cfg(feature = "outbox")]
pub mod transaction;
