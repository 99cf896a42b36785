//! Walpost against real Postgres and real Kafka. One module per capability; one binary, so that the servers are shared.

#[path = "../services/mod.rs"]
mod services;

mod servers;
mod stream;
