//! [`OpenTransaction`]: the caller's transaction, of whichever library it uses.
//!
//! A pool or a connection outside of a transaction is none: an event that is not part of the transaction of its change is what
//! an outbox is there to prevent. With tokio-postgres and sqlx the compiler sees to that. diesel-async has no type for a
//! transaction, so there the connection is asked whether one is open.

#[cfg(feature = "diesel-async")]
mod diesel_async;
#[cfg(feature = "sqlx")]
mod sqlx;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;

use std::future::Future;

use uuid::Uuid;

/// A transaction that the caller has begun and will end: `&tokio_postgres::Transaction`, `&mut sqlx::Transaction<Postgres>`,
/// or `&mut diesel_async::AsyncPgConnection` within its `transaction`. Each under the feature of that name.
///
/// Neither a pool nor a connection will do:
///
/// ```compile_fail,E0277
/// async fn emit(pool: &sqlx::PgPool) {
///     walpost::outbox::emit(pool, &walpost::outbox::Event::new("order.paid")).await.unwrap();
/// }
/// ```
///
/// ```compile_fail,E0277
/// async fn emit(client: &tokio_postgres::Client) {
///     walpost::outbox::emit(client, &walpost::outbox::Event::new("order.paid")).await.unwrap();
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "an event is written within a transaction, and `{Self}` is none",
    note = "begin a transaction and pass `&transaction` (tokio-postgres) or `&mut transaction` (sqlx)",
    note = "is the feature of your library on: tokio-postgres, sqlx or diesel-async?"
)]
pub trait OpenTransaction: sealed::Sealed {
    /// Runs a statement and says how many rows it wrote.
    #[doc(hidden)]
    fn write(self, statement: Statement) -> impl Future<Output = Result<u64, WriteError>> + Send;
}

mod sealed {
    /// Who else's type were a transaction could be a pool.
    pub trait Sealed {}
}

/// A statement with its parameters, numbered from 1.
#[doc(hidden)]
#[cfg_attr(
    not(any(feature = "tokio-postgres", feature = "sqlx", feature = "diesel-async")),
    expect(dead_code, reason = "a library's transaction reads it")
)]
#[derive(Debug)]
pub struct Statement {
    pub(crate) sql: String,
    pub(crate) parameters: [Parameter; 2],
}

/// Of a type that every library knows without asking the server.
#[cfg_attr(
    not(any(feature = "tokio-postgres", feature = "sqlx", feature = "diesel-async")),
    expect(dead_code, reason = "a library's transaction reads it")
)]
#[derive(Debug)]
pub(crate) enum Parameter {
    /// `text`
    Text(String),
    /// `text[]`
    Texts(Vec<Option<String>>),
    /// `bytea[]`
    Bytes(Vec<Option<Vec<u8>>>),
}

/// Why nothing was written. What the server refused has aborted the transaction: roll it back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The connection is outside of a transaction.
    #[error("no transaction is open on this connection; write the event within connection.transaction(…)")]
    NoTransaction,
    /// The payload is bytes, and its column takes text.
    #[error(
        "the payload of event {event_id} is not UTF-8; such bytes need a column of type bytea (PayloadType::Bytea)"
    )]
    PayloadIsNoText {
        /// The event.
        event_id: Uuid,
    },
    /// The event has something for which the table has no column.
    #[error("event {event_id} has {what}, and no column of the table is mapped to that (outbox::Columns)")]
    NoColumn {
        /// The event.
        event_id: Uuid,
        /// What there is no column for.
        what: &'static str,
    },
    /// The server or the connection failed.
    #[cfg(feature = "tokio-postgres")]
    #[error("run the statement")]
    TokioPostgres(#[from] ::tokio_postgres::Error),
    /// The server or the connection failed.
    #[cfg(feature = "sqlx")]
    #[error("run the statement")]
    Sqlx(#[from] ::sqlx::Error),
    /// The server or the connection failed.
    #[cfg(feature = "diesel-async")]
    #[error("run the statement")]
    Diesel(#[from] ::diesel::result::Error),
}
