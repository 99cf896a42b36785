//! A test's own database.

use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage};

use super::{RUNTIME, complete, postgres::Postgres, run};

/// A database that vanishes, with its slots, when this is dropped.
#[derive(Debug)]
pub struct Database<'a> {
    server: &'a Postgres,
    name: String,
    /// It stays when this is dropped.
    kept: bool,
}

impl<'a> Database<'a> {
    pub(super) fn create(server: &'a Postgres) -> Self {
        let name = run::unique("outbox");
        // template0: nobody can be connected to it, so tests may create their databases at the same time.
        batch(config(server, "postgres"), format!("CREATE DATABASE {name} TEMPLATE template0"))
            .unwrap_or_else(|error| panic!("create database {name}: {error}"));
        Self { server, name, kept: false }
    }

    /// A database that is there already.
    pub fn named(server: &'a Postgres, name: &str) -> Self {
        Self { server, name: name.to_owned(), kept: true }
    }

    /// Its name; it stays when this is gone.
    pub fn into_name(mut self) -> String {
        self.kept = true;
        self.name.clone()
    }

    /// A client of the superuser, or `None` where the server takes none.
    pub fn try_connect(&self) -> Option<Client> {
        complete(open(self.config())).ok()
    }

    /// The same database on a standby of its server.
    pub fn on<'b>(&self, standby: &'b Postgres) -> Database<'b> {
        Database { server: standby, name: self.name.clone(), kept: true }
    }

    /// Its name: unique in the run; also fit to be a slot, a publication or the prefix of topics.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its server.
    pub fn server(&self) -> &'a Postgres {
        self.server
    }

    /// A URL for the superuser over TCP.
    pub fn url(&self) -> String {
        self.url_as("postgres")
    }

    /// A URL over TCP for `user`, or `user:password`.
    pub fn url_as(&self, user: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{}", self.server.port(), self.name)
    }

    /// Runs statements as superuser; panics on an error.
    pub fn execute(&self, sql: &str) {
        batch(self.config(), sql.to_owned()).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// The rows of a query, as text.
    pub fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let (client, query) = (self.connect(), sql.to_owned());
        let messages = complete(async move { client.simple_query(&query).await });
        let messages = messages.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect()),
            _ => None,
        });
        rows.collect()
    }

    /// The first column of the first row, as text.
    pub fn value(&self, sql: &str) -> Option<String> {
        self.rows(sql).into_iter().next().unwrap_or_else(|| panic!("{sql}: no row")).remove(0)
    }

    /// A client of the superuser. Its connection lives on the services' runtime, so it works with every other.
    pub fn connect(&self) -> Client {
        complete(open(self.config())).unwrap_or_else(|error| panic!("connect to {}: {error:?}", self.name))
    }

    fn config(&self) -> Config {
        config(self.server, &self.name)
    }

    /// Best effort: the server may be stopped.
    fn remove(&self) -> Result<(), tokio_postgres::Error> {
        let slots = format!("FROM pg_replication_slots WHERE database = '{}'", self.name);
        let end_senders = format!("SELECT pg_terminate_backend(active_pid, 5000) {slots} AND active");
        let drop_slots = format!("SELECT pg_drop_replication_slot(slot_name) {slots} AND NOT active");
        batch(config(self.server, "postgres"), format!("{end_senders}; {drop_slots}"))?;
        batch(config(self.server, "postgres"), format!("DROP DATABASE {} WITH (FORCE)", self.name))
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        if !self.kept
            && self.server.is_running()
            && let Err(error) = self.remove()
        {
            eprintln!("database {} stays behind: {error:?}", self.name);
        }
    }
}

/// Over the socket, where the superuser is always let in.
fn config(server: &Postgres, database: &str) -> Config {
    let mut config = Config::new();
    config.host_path(server.socket_folder()).port(server.port()).user("postgres").dbname(database);
    config
}

async fn open(config: Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    RUNTIME.spawn(connection);
    Ok(client)
}

fn batch(config: Config, sql: String) -> Result<(), tokio_postgres::Error> {
    complete(async move { open(config).await?.batch_execute(&sql).await })
}
