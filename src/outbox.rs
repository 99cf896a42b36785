//! Writing events within the transaction of the change that they are about.
//!
//! ```
//! use walpost::outbox::{self, Event};
//!
//! async fn pay(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//!     let transaction = client.transaction().await?;
//!     transaction.execute("UPDATE orders SET state = 'paid' WHERE id = 42", &[]).await?;
//!     let event = Event::new("order.paid").key("42").json(&("42", 990))?.header("traceparent", "00-…");
//!     let id = outbox::emit(&transaction, &event).await?;
//!     transaction.commit().await?; // order and event exist now, or neither does
//!     println!("event {id}");
//!     Ok(())
//! }
//! ```
//!
//! With sqlx:
//!
//! ```
//! # use walpost::outbox::{self, Event};
//! async fn pay(pool: &sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut transaction = pool.begin().await?;
//!     sqlx::query("UPDATE orders SET state = 'paid' WHERE id = 42").execute(&mut *transaction).await?;
//!     outbox::emit(&mut transaction, &Event::new("order.paid").key("42").text("{}")).await?;
//!     transaction.commit().await?;
//!     Ok(())
//! }
//! ```
//!
//! With diesel-async:
//!
//! ```
//! # use walpost::{outbox::{self, Event}, transaction::WriteError};
//! use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
//!
//! async fn pay(connection: &mut AsyncPgConnection) -> Result<(), WriteError> {
//!     connection
//!         .transaction(async |connection| {
//!             diesel::sql_query("UPDATE orders SET state = 'paid' WHERE id = 42").execute(connection).await?;
//!             outbox::emit(connection, &Event::new("order.paid").key("42").text("{}")).await?;
//!             Ok(())
//!         })
//!         .await
//! }
//! ```
//!
//! Any other table is written to by its own names:
//!
//! ```
//! use walpost::outbox::{Columns, Outbox, PayloadType};
//!
//! let columns = Columns { event_type: "type".into(), key: Some("aggregateid".into()), payload_type: PayloadType::Jsonb, ..Columns::default() };
//! let outbox = Outbox::new("shop.outbox_events", columns)?;
//! # Ok::<(), &'static str>(())
//! ```

use serde::Serialize;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::{
    table_name::{TableName, column_name, quote_identifier},
    transaction::{OpenTransaction, Parameter, Statement, WriteError},
};

/// Writes an event into `public.outbox`, as `walpost init` creates it, and returns its id.
pub async fn emit(transaction: impl OpenTransaction, event: &Event) -> Result<Uuid, WriteError> {
    Outbox::default().emit(transaction, event).await
}

/// Writes events into `public.outbox`. See [`Outbox::emit_all`].
pub async fn emit_all(transaction: impl OpenTransaction, events: &[Event]) -> Result<Vec<Uuid>, WriteError> {
    Outbox::default().emit_all(transaction, events).await
}

/// An event that is to be written.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "it is written by emit"]
#[expect(clippy::struct_field_names, reason = "event_type is the column's name")]
pub struct Event {
    id: Uuid,
    event_type: String,
    key: Option<String>,
    payload: Option<Vec<u8>>,
    headers: Map<String, Value>,
    columns: Map<String, Value>,
}

impl Event {
    /// An event of this type (for example `order.paid`), with an id of its own, no key and no payload.
    pub fn new(event_type: impl Into<String>) -> Self {
        Self {
            // grows with time, so the table's primary key is written at its end
            id: Uuid::now_v7(),
            event_type: event_type.into(),
            key: None,
            payload: None,
            headers: Map::new(),
            columns: Map::new(),
        }
    }

    /// The identity of the event: what consumers know a repetition by.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Gives it an id that was chosen before.
    pub fn with_id(mut self, id: Uuid) -> Self {
        self.id = id;
        self
    }

    /// The record key: events of one key arrive in the order in which they were committed.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// A payload of anything that serializes to JSON.
    pub fn json<T: Serialize + ?Sized>(mut self, payload: &T) -> Result<Self, serde_json::Error> {
        self.payload = Some(serde_json::to_vec(payload)?);
        Ok(self)
    }

    /// A payload of text; a column of type `json` keeps it byte for byte.
    pub fn text(mut self, payload: impl Into<String>) -> Self {
        self.payload = Some(payload.into().into_bytes());
        self
    }

    /// A payload of bytes. All but columns of type `bytea` need UTF-8.
    pub fn bytes(mut self, payload: impl Into<Vec<u8>>) -> Self {
        self.payload = Some(payload.into());
        self
    }

    /// A record header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), Value::String(value.into()));
        self
    }

    /// A further column of the table, for example one that walpost maps to a header or a topic. Within one [`emit_all`] it
    /// is NULL for the events that do not set it.
    pub fn column(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.columns.insert(name.into(), value.into());
        self
    }
}

/// How a table keeps payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PayloadType {
    /// `json`, as in the default table.
    #[default]
    Json,
    /// `jsonb`
    Jsonb,
    /// `text`
    Text,
    /// `bytea`
    Bytea,
}

/// The columns of a table, named as in `[outbox.columns]` of walpost's configuration. The default ones are those of the table
/// that `walpost init` creates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// The event's id: a type that takes a UUID. Default `id`.
    pub id: String,
    /// The event's type. Default `event_type`.
    pub event_type: String,
    /// The record key, of any type. Default `key`; `None` where the table has none.
    pub key: Option<String>,
    /// The payload. Default `payload`.
    pub payload: String,
    /// Its type. Default `json`.
    pub payload_type: PayloadType,
    /// Headers, `jsonb` or `json`. Default `headers`; `None` where the table has none.
    pub headers: Option<String>,
}

impl Default for Columns {
    fn default() -> Self {
        Self {
            id: "id".into(),
            event_type: "event_type".into(),
            key: Some("key".into()),
            payload: "payload".into(),
            payload_type: PayloadType::Json,
            headers: Some("headers".into()),
        }
    }
}

/// An outbox table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outbox {
    table: TableName,
    columns: Columns,
}

impl Default for Outbox {
    /// `public.outbox`
    fn default() -> Self {
        Self { table: TableName { schema: "public".into(), table: "outbox".into() }, columns: Columns::default() }
    }
}

impl Outbox {
    /// A table, written as in SQL, and its columns, each as the catalog has it or in double quotes. The error says what is
    /// wrong with a name.
    pub fn new(table: &str, columns: Columns) -> Result<Self, &'static str> {
        let optional = |name: Option<String>| name.map(|name| column_name(&name)).transpose();
        let columns = Columns {
            id: column_name(&columns.id)?,
            event_type: column_name(&columns.event_type)?,
            key: optional(columns.key)?,
            payload: column_name(&columns.payload)?,
            payload_type: columns.payload_type,
            headers: optional(columns.headers)?,
        };
        Ok(Self { table: TableName::parse(table)?, columns })
    }

    /// Writes an event and returns its id. Needs INSERT on the table, and nothing else.
    pub async fn emit(&self, transaction: impl OpenTransaction, event: &Event) -> Result<Uuid, WriteError> {
        transaction.write(self.statement(std::slice::from_ref(event))?).await?;
        Ok(event.id)
    }

    /// Writes events with one statement, in their order, and returns their ids.
    pub async fn emit_all(&self, transaction: impl OpenTransaction, events: &[Event]) -> Result<Vec<Uuid>, WriteError> {
        transaction.write(self.statement(events)?).await?;
        Ok(events.iter().map(|event| event.id).collect())
    }

    /// The server turns each row's JSON into the types that its columns have. The payload goes beside it: within, a payload
    /// `null` would become no payload.
    fn statement(&self, events: &[Event]) -> Result<Statement, WriteError> {
        let table = &self.table;
        let mut named: Vec<&str> = vec![&self.columns.id, &self.columns.event_type];
        named.extend(self.columns.key.as_deref());
        named.extend(self.columns.headers.as_deref());
        for name in events.iter().flat_map(|event| event.columns.keys()) {
            if !named.contains(&name.as_str()) {
                named.push(name);
            }
        }
        let named: Vec<String> = named.into_iter().map(quote_identifier).collect();
        let read: Vec<String> = named.iter().map(|name| format!("event.{name}")).collect();
        let (of_payloads, payload) = match self.columns.payload_type {
            PayloadType::Json => ("text", "raw.payload::json"),
            PayloadType::Jsonb => ("text", "raw.payload::jsonb"),
            PayloadType::Text => ("text", "raw.payload"),
            PayloadType::Bytea => ("bytea", "raw.payload"),
        };
        let sql = format!(
            "INSERT INTO {table} ({}, {}) SELECT {}, {payload} \
             FROM unnest($1::text[], $2::{of_payloads}[]) AS raw (event, payload), \
             json_populate_record(NULL::{table}, raw.event::json) AS event",
            named.join(", "),
            quote_identifier(&self.columns.payload),
            read.join(", ")
        );
        let rows = events.iter().map(|event| self.row(event).map(Some)).collect::<Result<_, _>>()?;
        Ok(Statement { sql, parameters: [Parameter::Texts(rows), self.payloads(events)?] })
    }

    fn row(&self, event: &Event) -> Result<String, WriteError> {
        let no_column = |what| WriteError::NoColumn { event_id: event.id, what };
        let mut row = event.columns.clone();
        row.insert(self.columns.id.clone(), event.id.to_string().into());
        row.insert(self.columns.event_type.clone(), event.event_type.clone().into());
        match (&self.columns.key, &event.key) {
            (Some(column), key) => drop(row.insert(column.clone(), key.clone().into())),
            (None, Some(_)) => return Err(no_column("a key")),
            (None, None) => {}
        }
        match &self.columns.headers {
            Some(column) if !event.headers.is_empty() => {
                row.insert(column.clone(), event.headers.clone().into());
            }
            None if !event.headers.is_empty() => return Err(no_column("headers")),
            _ => {}
        }
        Ok(Value::Object(row).to_string())
    }

    fn payloads(&self, events: &[Event]) -> Result<Parameter, WriteError> {
        if self.columns.payload_type == PayloadType::Bytea {
            return Ok(Parameter::Bytes(events.iter().map(|event| event.payload.clone()).collect()));
        }
        let text = |event: &Event| {
            let text = event.payload.clone().map(String::from_utf8).transpose();
            text.map_err(|_| WriteError::PayloadIsNoText { event_id: event.id })
        };
        Ok(Parameter::Texts(events.iter().map(text).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_column_is_refused_before_the_server_is_asked() {
        let outbox = Outbox::new("o", Columns { key: None, headers: None, ..Columns::default() }).unwrap();
        assert!(outbox.statement(&[Event::new("t")]).is_ok());
        let refused = |event: &Event| outbox.statement(std::slice::from_ref(event)).unwrap_err().to_string();
        assert!(refused(&Event::new("t").key("k")).contains("has a key, and no column"));
        assert!(refused(&Event::new("t").header("h", "v")).contains("has headers, and no column"));
        assert!(refused(&Event::new("t").bytes([0xff])).contains("is not UTF-8"));
    }

    #[test]
    fn names_are_quoted() {
        let columns = Columns { payload: "pay\"load".into(), ..Columns::default() };
        let outbox = Outbox::new("\"My.Schema\".o", columns).unwrap();
        let sql = outbox.statement(&[Event::new("t").column("x\" y", 1)]).unwrap().sql;
        assert!(sql.starts_with(r#"INSERT INTO "My.Schema"."o" ("#), "{sql}");
        assert!(sql.contains(r#""headers", "x"" y", "pay""load")"#), "{sql}");
        assert_eq!(
            Outbox::new("a.b.c", Columns::default()),
            Err("has more than two parts: a schema and a table will do")
        );
        assert!(Outbox::new("o", Columns { id: String::new(), ..Columns::default() }).is_err());
    }
}
