//! `walpost::outbox` and `walpost::inbox` within the transactions of tokio-postgres, sqlx and diesel-async.

use std::collections::BTreeSet;

use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use sqlx::{Connection, PgConnection};
use tokio_postgres::NoTls;
use uuid::Uuid;
use walpost::{
    inbox::{self, Claim},
    outbox::{self, Columns, Event, Outbox as Table, PayloadType},
    transaction::{OpenTransaction, WriteError},
};

use crate::{
    applications::initialised,
    outbox::{Outbox, PATIENCE, at_both_ends},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        topics::Received,
    },
};

/// An application's role, which may insert and nothing else.
fn application(outbox: &Outbox<'_>) -> String {
    let role = format!("{}_app", outbox.database.name());
    outbox.execute(&format!("CREATE ROLE {role} LOGIN; GRANT INSERT ON outbox, inbox TO {role}"));
    outbox.database.url_as(&role)
}

fn forget_application(outbox: &Outbox<'_>) {
    let role = format!("{}_app", outbox.database.name());
    outbox.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

fn events(count: usize) -> Vec<Event> {
    (0..count)
        .map(|number| {
            Event::new("t").key("k").json(&("order", number)).expect("JSON").header("number", number.to_string())
        })
        .collect()
}

async fn emit_by_tokio_postgres(url: &str, commit: bool) -> Vec<Uuid> {
    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection");
    tokio::spawn(connection);
    let transaction = client.transaction().await.expect("a transaction");
    let mut ids = vec![outbox::emit(&transaction, &events(1)[0]).await.expect("it is written")];
    ids.extend(outbox::emit_all(&transaction, &events(3)).await.expect("they are written"));
    let claims = (
        inbox::claim(&transaction, "billing", ids[0]).await.expect("a claim"),
        inbox::claim(&transaction, "billing", ids[0]).await.expect("a claim"),
    );
    assert_eq!(claims, (Claim::First, Claim::Repeated));
    if commit { transaction.commit().await } else { transaction.rollback().await }.expect("an end");
    ids
}

async fn emit_by_sqlx(url: &str, commit: bool) -> Vec<Uuid> {
    let mut connection = PgConnection::connect(url).await.expect("a connection");
    let mut transaction = connection.begin().await.expect("a transaction");
    let mut ids = vec![outbox::emit(&mut transaction, &events(1)[0]).await.expect("it is written")];
    ids.extend(outbox::emit_all(&mut transaction, &events(3)).await.expect("they are written"));
    let claims = (
        inbox::claim(&mut transaction, "billing", ids[0]).await.expect("a claim"),
        inbox::claim(&mut transaction, "billing", ids[0]).await.expect("a claim"),
    );
    assert_eq!(claims, (Claim::First, Claim::Repeated));
    if commit { transaction.commit().await } else { transaction.rollback().await }.expect("an end");
    ids
}

async fn emit_by_diesel(url: &str, commit: bool) -> Vec<Uuid> {
    let mut connection = AsyncPgConnection::establish(url).await.expect("a connection");
    let mut ids = Vec::new();
    let outcome = connection
        .transaction(async |connection| {
            ids.push(outbox::emit(&mut *connection, &events(1)[0]).await?);
            ids.extend(outbox::emit_all(&mut *connection, &events(3)).await?);
            let claims = (
                inbox::claim(&mut *connection, "billing", ids[0]).await?,
                inbox::claim(&mut *connection, "billing", ids[0]).await?,
            );
            assert_eq!(claims, (Claim::First, Claim::Repeated));
            if commit { Ok(()) } else { Err(WriteError::from(diesel::result::Error::RollbackTransaction)) }
        })
        .await;
    assert_eq!(outcome.is_ok(), commit, "{outcome:?}");
    ids
}

/// Events of each library arrive with id, key, payload and headers, in their order; rolled-back ones leave nothing.
#[test]
fn events_of_each_library_arrive_in_order_and_a_rollback_leaves_nothing() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let url = application(&outbox);
        let topic = outbox.topic("t", 1);
        let walpost = outbox.relay(&[]);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let ids = runtime.block_on(async {
            let mut ids = Vec::new();
            for commit in [false, true] {
                ids = emit_by_tokio_postgres(&url, commit).await;
                ids.extend(emit_by_sqlx(&url, commit).await);
                ids.extend(emit_by_diesel(&url, commit).await);
            }
            ids
        });
        let records = outbox.kafka.read_until(&[&topic], PATIENCE, |records| records.len() >= ids.len());
        let arrived: Vec<_> = records.iter().map(|record| record.header("id").expect("an id").to_owned()).collect();
        assert_eq!(arrived, ids.iter().map(Uuid::to_string).collect::<Vec<_>>(), "{version:?}");
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 12);
        for (index, record) in records.iter().enumerate() {
            let number = [0, 0, 1, 2][index % 4].to_string();
            assert_eq!(record.header("number"), Some(number.as_str()));
            assert_eq!(value(record), format!("[\"order\",{number}]"));
            assert_eq!(record.key.as_deref(), Some(&b"k"[..]));
        }
        assert_eq!(outbox.text("SELECT count(*) FROM outbox"), "12");
        assert_eq!(outbox.text("SELECT count(*) FROM inbox"), "3");
        assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
        drop(runtime);
        forget_application(&outbox);
    });
}

fn value(record: &Received) -> String {
    String::from_utf8_lossy(record.value.as_deref().expect("a value")).into_owned()
}

#[test]
fn outside_of_a_transaction_diesel_is_refused() {
    let outbox = initialised(Version::NEWEST);
    let url = outbox.database.url();
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let mut connection = AsyncPgConnection::establish(&url).await.expect("a connection");
        let refused = outbox::emit(&mut connection, &Event::new("t")).await;
        assert!(matches!(refused, Err(WriteError::NoTransaction)), "{refused:?}");
        let refused = inbox::claim(&mut connection, "c", Uuid::nil()).await;
        assert!(matches!(refused, Err(WriteError::NoTransaction)), "{refused:?}");
        diesel::sql_query("SELECT 1").execute(&mut connection).await.expect("the connection is well");
    });
    assert_eq!(outbox.text("SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM inbox)"), "0");
}

/// A table as others have it, and every way to say no payload.
const LESSON: &str = r#"
    CREATE SCHEMA "Do'kon";
    CREATE TYPE "Do'kon".tur AS ENUM ('order.paid');
    CREATE TABLE "Do'kon"."Hodisa""lar" (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        hodisa_id uuid NOT NULL UNIQUE,
        tur "Do'kon".tur NOT NULL,
        foydalanuvchi_id bigint NOT NULL,
        malumot jsonb,
        tenant int[],
        yaratilgan_vaqt timestamptz NOT NULL DEFAULT now(),
        urinishlar int NOT NULL DEFAULT 0
    )"#;

#[test]
fn a_table_of_ones_own_is_written_by_column_mapping_whatever_its_types() {
    at_both_ends(|version| {
        let outbox = Outbox::with(Postgres::shared(version), Kafka::shared(), LESSON);
        let columns = Columns {
            id: "hodisa_id".into(),
            event_type: "tur".into(),
            key: Some("foydalanuvchi_id".into()),
            payload: "malumot".into(),
            payload_type: PayloadType::Jsonb,
            headers: None,
        };
        let table = Table::new(r#""Do'kon"."Hodisa""lar""#, columns).expect("names");
        let url = outbox.database.url();
        tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
            let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
            tokio::spawn(connection);
            let transaction = client.transaction().await.expect("a transaction");
            let events = [
                Event::new("order.paid").key("42").text("{\"a\": 1}").column("tenant", vec![1, 2]),
                Event::new("order.paid").key("43").json(&None::<i32>).expect("JSON"),
                Event::new("order.paid").key("44"),
            ];
            let ids = table.emit_all(&transaction, &events).await.expect("they are written");
            assert_eq!(ids, events.each_ref().map(Event::id));
            transaction.commit().await.expect("a commit");
        });
        let written = outbox.text(
            r#"SELECT string_agg(concat_ws(' ', tur, foydalanuvchi_id, coalesce(malumot::text, 'none'), tenant), ', '
               ORDER BY id) FROM "Do'kon"."Hodisa""lar" "#,
        );
        assert_eq!(written, "order.paid 42 {\"a\": 1} {1,2}, order.paid 43 null, order.paid 44 none");
    });
}

#[test]
fn payloads_stay_what_they_are_byte_for_byte() {
    let text = "{\"b\": 1,  \"a\":\t\"\u{1F980}\"}";
    for (kind, payload_type, payload, expected) in [
        ("json", PayloadType::Json, text.as_bytes(), text.to_owned()),
        ("text", PayloadType::Text, b"no JSON", "no JSON".to_owned()),
        ("bytea", PayloadType::Bytea, &[0, 0xff, b'\\'], r"\x00ff5c".to_owned()),
    ] {
        let tables = format!("CREATE TABLE o (id text, event_type text, key text, payload {kind}, headers json)");
        let outbox = Outbox::with(Postgres::shared(Version::NEWEST), Kafka::shared(), &tables);
        let table = Table::new("o", Columns { payload_type, ..Columns::default() }).expect("names");
        let url = outbox.database.url();
        tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
            let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
            tokio::spawn(connection);
            let transaction = client.transaction().await.expect("a transaction");
            emit_twice(&table, &transaction, payload).await.expect("they are written");
            transaction.commit().await.expect("a commit");
            let mut connection = PgConnection::connect(&url).await.expect("a connection");
            let mut transaction = connection.begin().await.expect("a transaction");
            table.emit(&mut transaction, &Event::new("t").bytes(payload)).await.expect("it is written");
            transaction.commit().await.expect("a commit");
            let mut connection = AsyncPgConnection::establish(&url).await.expect("a connection");
            let event = Event::new("t").bytes(payload);
            let emit = async |connection: &mut AsyncPgConnection| table.emit(connection, &event).await;
            connection.transaction(emit).await.expect("it is written");
        });
        assert_eq!(outbox.text("SELECT string_agg(DISTINCT payload::text, ' and ') FROM o"), expected);
        assert_eq!(outbox.text("SELECT count(DISTINCT id) FROM o"), "4");
    }
}

/// A transaction is borrowed for a moment, so the same one takes further events.
async fn emit_twice<'a, T>(table: &Table, transaction: &'a T, payload: &[u8]) -> Result<(), WriteError>
where
    &'a T: OpenTransaction,
{
    table.emit(transaction, &Event::new("t").bytes(payload)).await?;
    table.emit(transaction, &Event::new("t").bytes(payload)).await?;
    Ok(())
}

#[test]
fn what_the_server_refuses_is_told_with_its_code() {
    let outbox = initialised(Version::NEWEST);
    let url = outbox.database.url();
    let code = tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let transaction = client.transaction().await.expect("a transaction");
        match outbox::emit(&transaction, &Event::new("t").text("{")).await {
            Err(WriteError::TokioPostgres(error)) => error.code().map(|code| code.code().to_owned()),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(code.as_deref(), Some("22P02"));
}

#[test]
fn many_events_are_one_statement_and_keep_their_order() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let url = outbox.database.url();
        let ids = tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
            let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
            tokio::spawn(connection);
            let transaction = client.transaction().await.expect("a transaction");
            let none = outbox::emit_all(&transaction, &[]).await.expect("nothing to write");
            assert!(none.is_empty());
            let ids = outbox::emit_all(&transaction, &events(5_000)).await.expect("they are written");
            transaction.commit().await.expect("a commit");
            ids
        });
        let written = outbox.text("SELECT string_agg(id::text, ' ' ORDER BY ctid) FROM outbox");
        assert!(written.split(' ').eq(ids.iter().map(Uuid::to_string)), "{version:?}: in another order");
        assert_eq!(outbox.text("SELECT count(DISTINCT xmin::text) FROM outbox"), "1");
    });
}

#[test]
fn a_second_claim_waits_for_the_end_of_the_first() {
    at_both_ends(|version| {
        let outbox = initialised(version);
        let url = outbox.database.url();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let connect = || async {
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("a connection");
            tokio::spawn(connection);
            client
        };
        for (commits, expected) in [(false, Claim::First), (true, Claim::Repeated)] {
            let id = Uuid::from_u128(u128::from(commits));
            let (mut first, mut second) = runtime.block_on(async { (connect().await, connect().await) });
            let transaction = runtime.block_on(first.transaction()).expect("a transaction");
            let claimed = runtime.block_on(inbox::claim(&transaction, "billing", id)).expect("a claim");
            assert_eq!(claimed, Claim::First);
            let waiting = runtime.spawn(async move {
                let transaction = second.transaction().await.expect("a transaction");
                let claimed = inbox::claim(&transaction, "billing", id).await.expect("a claim");
                transaction.commit().await.expect("a repetition aborts nothing");
                claimed
            });
            outbox.wait_until_true(
                PATIENCE,
                "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
            );
            assert!(!waiting.is_finished());
            let end = async { if commits { transaction.commit().await } else { transaction.rollback().await } };
            runtime.block_on(end).expect("an end");
            assert_eq!(runtime.block_on(waiting).expect("no panic"), expected, "{version:?}");
        }
    });
}
