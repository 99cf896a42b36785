//! Acting on each event only once, however often it is delivered.
//!
//! A consumer claims the event within the transaction of its action: mark and action commit or vanish together. A second
//! delivery at the same moment waits until the first has ended. `walpost init` creates the table (`sql/inbox.sql`).
//!
//! ```
//! use uuid::Uuid;
//! use walpost::inbox::{self, Claim};
//!
//! /// `id` is the record header of that name.
//! async fn consume(client: &mut tokio_postgres::Client, id: Uuid) -> Result<(), Box<dyn std::error::Error>> {
//!     let transaction = client.transaction().await?;
//!     if inbox::claim(&transaction, "billing", id).await? == Claim::First {
//!         transaction.execute("UPDATE balance SET cents = cents + 990", &[]).await?;
//!     }
//!     transaction.commit().await?; // only now may the offset be stored
//!     Ok(())
//! }
//! ```

use uuid::Uuid;

use crate::{
    table_name::TableName,
    transaction::{OpenTransaction, Parameter, Statement, WriteError},
};

/// What a claim says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a repeated event must not be acted upon"]
pub enum Claim {
    /// Nobody has dealt with the event: act. The claim holds once the transaction has committed.
    First,
    /// The event was dealt with already: do nothing and commit.
    Repeated,
}

/// Claims an event for a consumer in `public.inbox`. See [`Inbox::claim`].
pub async fn claim(transaction: impl OpenTransaction, consumer: &str, event_id: Uuid) -> Result<Claim, WriteError> {
    Inbox::default().claim(transaction, consumer, event_id).await
}

/// An inbox's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inbox {
    table: TableName,
}

impl Default for Inbox {
    /// `public.inbox`
    fn default() -> Self {
        Self { table: TableName { schema: "public".into(), table: "inbox".into() } }
    }
}

impl Inbox {
    /// Another table with the columns of `sql/inbox.sql`, written as in SQL. The error says what is wrong with the name.
    pub fn new(table: &str) -> Result<Self, &'static str> {
        Ok(Self { table: TableName::parse(table)? })
    }

    /// Claims an event; `consumer` is the consumer group, or another name that all of its instances share.
    ///
    /// A repetition aborts nothing. While another transaction holds the claim, this waits for its end. Under REPEATABLE READ
    /// and SERIALIZABLE, that other's commit makes this a serialization failure (SQLSTATE 40001): roll back and begin anew.
    pub async fn claim(
        &self,
        transaction: impl OpenTransaction,
        consumer: &str,
        event_id: Uuid,
    ) -> Result<Claim, WriteError> {
        // without columns behind ON CONFLICT, which would need SELECT
        let sql = format!(
            "INSERT INTO {} (consumer, event_id) VALUES ($1::text, $2::text::uuid) ON CONFLICT DO NOTHING",
            self.table
        );
        let parameters = [Parameter::Text(consumer.to_owned()), Parameter::Text(event_id.to_string())];
        let rows = transaction.write(Statement { sql, parameters }).await?;
        Ok(if rows > 0 { Claim::First } else { Claim::Repeated })
    }
}
