//! tokio-postgres: one round trip, since the types are sent along and nothing is prepared.

use tokio_postgres::{
    Transaction,
    types::{ToSql, Type},
};

use super::{OpenTransaction, Parameter, Statement, WriteError, sealed::Sealed};

impl Sealed for &Transaction<'_> {}

impl OpenTransaction for &Transaction<'_> {
    async fn write(self, statement: Statement) -> Result<u64, WriteError> {
        let parameters = statement.parameters.each_ref().map(typed);
        Ok(self.execute_typed(&statement.sql, &parameters).await?)
    }
}

fn typed(parameter: &Parameter) -> (&(dyn ToSql + Sync), Type) {
    match parameter {
        Parameter::Text(text) => (text, Type::TEXT),
        Parameter::Texts(texts) => (texts, Type::TEXT_ARRAY),
        Parameter::Bytes(bytes) => (bytes, Type::BYTEA_ARRAY),
    }
}
