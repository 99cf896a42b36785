//! walpost tails the Postgres write-ahead log and delivers the events of a transactional outbox table to Kafka.
//!
//! The modules, in the order data flows.

pub mod cli;
pub mod config;
pub mod conninfo;

pub mod lsn;

pub mod event;

pub mod source;

pub mod decode;

pub mod route;

pub mod encode;

pub mod sink;

pub mod ack;

pub mod pipeline;

pub mod app;
mod applications;
pub mod backfill;
pub mod backfill_command;
pub mod backoff;
pub mod check;
pub mod clock;
pub mod commands;
pub mod dead_letters_command;
pub mod demo;
pub mod drop_command;
pub mod error;
pub mod fault;
pub mod init;
pub mod observe;
pub mod peek_command;
pub mod poll;
pub mod prepare;
pub mod publication;
pub mod sql;
pub mod status_command;
pub mod supervisor;
