//! diesel-async: two round trips, since it prepares each statement of this kind.

use diesel::{
    pg::Pg,
    sql_types::{Array, Binary, Nullable, Text},
};
use diesel_async::{AnsiTransactionManager, AsyncPgConnection, RunQueryDsl, TransactionManager};

use super::{OpenTransaction, Parameter, Statement, WriteError, sealed::Sealed};

impl Sealed for &mut AsyncPgConnection {}

impl OpenTransaction for &mut AsyncPgConnection {
    async fn write(self, statement: Statement) -> Result<u64, WriteError> {
        let status = AnsiTransactionManager::transaction_manager_status_mut(self);
        if status.transaction_depth()?.is_none() {
            return Err(WriteError::NoTransaction);
        }
        let mut query = diesel::sql_query(statement.sql).into_boxed::<Pg>();
        for parameter in statement.parameters {
            query = match parameter {
                Parameter::Text(text) => query.bind::<Text, _>(text),
                Parameter::Texts(texts) => query.bind::<Array<Nullable<Text>>, _>(texts),
                Parameter::Bytes(bytes) => query.bind::<Array<Nullable<Binary>>, _>(bytes),
            };
        }
        Ok(query.execute(self).await? as u64)
    }
}
