//! sqlx: one round trip, but for the first of a connection, which also prepares the statement.

use sqlx::{AssertSqlSafe, Postgres, Transaction};

use super::{OpenTransaction, Parameter, Statement, WriteError, sealed::Sealed};

impl Sealed for &mut Transaction<'_, Postgres> {}

impl OpenTransaction for &mut Transaction<'_, Postgres> {
    async fn write(self, statement: Statement) -> Result<u64, WriteError> {
        // it holds quoted names and nothing else that comes from outside
        let mut query = sqlx::query(AssertSqlSafe(statement.sql));
        for parameter in statement.parameters {
            query = match parameter {
                Parameter::Text(text) => query.bind(text),
                Parameter::Texts(texts) => query.bind(texts),
                Parameter::Bytes(bytes) => query.bind(bytes),
            };
        }
        Ok(query.execute(&mut **self).await?.rows_affected())
    }
}
