//! [`Cluster`]: a private Postgres, reached through a Unix socket that only we can reach.

use std::{
    cmp::Reverse,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use tokio::{process::Child, time::Instant};
use tokio_postgres::{Client, NoTls};

use super::{DemoError, account::Account, open_log, tail};

/// The oldest server that walpost supports.
const OLDEST: u32 = 14;
/// How long the server may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);
/// How often a condition is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// No TCP port is opened. `fsync` stays on: a demo of durability should not cheat.
const SETTINGS: &str = "
listen_addresses = ''
wal_level = logical
max_wal_senders = 4
max_replication_slots = 4
max_connections = 50
shared_buffers = 32MB
lc_messages = 'C'
dynamic_shared_memory_type = mmap
";

/// A running server. The leash ends it.
pub struct Cluster {
    folder: PathBuf,
    version: String,
    server: Child,
}

impl Cluster {
    /// Creates a cluster in `folder` and starts its server.
    pub async fn start(folder: &Path, account: Option<Account>) -> Result<Self, DemoError> {
        let Program { bin, version, .. } = find()?;
        let data = folder.join("data");
        let command = |program: &str| command(&bin.join(program), folder, account);

        let mut initdb = command("initdb")?;
        initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"]);
        let created = tokio::process::Command::from(initdb).arg(&data).kill_on_drop(true).status().await;
        if !created.map_err(DemoError::io("start initdb"))?.success() {
            return Err(DemoError::Ended { program: "initdb", log: tail(&folder.join("initdb.log")) });
        }
        let mut postgres = command("postgres")?;
        postgres.arg("-D").arg(&data).arg("-k").arg(folder);
        for line in SETTINGS.lines().filter(|line| !line.is_empty()) {
            postgres.arg("-c").arg(line.replace(" = ", "=").replace('\'', ""));
        }
        let server = tokio::process::Command::from(postgres).spawn().map_err(DemoError::io("start postgres"))?;
        let mut cluster = Self { folder: folder.to_owned(), version, server };
        cluster.wait_until_ready().await?;
        Ok(cluster)
    }

    /// The version as the server says it, for example `15.13`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// A connection string for `user`.
    pub fn conninfo(&self, user: &str) -> String {
        let folder = self.folder.display().to_string().replace('\\', r"\\").replace('\'', r"\'");
        format!("host='{folder}' user={user} dbname=postgres")
    }

    /// Opens a link as `user`.
    pub async fn connect(&self, user: &str) -> Result<Client, DemoError> {
        connect(&self.conninfo(user)).await.map_err(DemoError::sql("connect to the private Postgres"))
    }

    async fn wait_until_ready(&mut self) -> Result<(), DemoError> {
        let began = Instant::now();
        loop {
            let Err(error) = self.connect("postgres").await else { return Ok(()) };
            let ended = self.server.try_wait().map_err(DemoError::io("look after postgres"))?.is_some();
            if ended {
                return Err(DemoError::Ended { program: "postgres", log: tail(&self.folder.join("postgres.log")) });
            }
            if began.elapsed() > START_LIMIT {
                return Err(error);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Opens a link whose driver runs as a task of its own.
pub async fn connect(conninfo: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await?;
    // its end shows in the next statement of the client
    tokio::spawn(connection);
    Ok(client)
}

/// A program of the server, its output in a log named after it. Neither locale nor PG* of the caller is to matter.
fn command(path: &Path, folder: &Path, account: Option<Account>) -> Result<Command, DemoError> {
    use std::os::unix::process::CommandExt;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (out, err) = open_log(&folder.join(format!("{name}.log")))?;
    let mut command = Command::new(path);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C").env("TZ", "UTC").current_dir(folder);
    // a ^C is for the demo to obey
    command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    Ok(command)
}

/// Where a server's programs are.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Program {
    bin: PathBuf,
    version: String,
    major: u32,
}

/// Asks every server that can be found.
fn find() -> Result<Program, DemoError> {
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).filter_map(|folder| folder.join("initdb").canonicalize().ok());
    let in_path = in_path.filter_map(|initdb| ask_version(initdb.parent()?)).collect();
    choose(in_path, packaged().iter().filter_map(|bin| ask_version(bin)).collect())
}

/// The first one in PATH, else the newest that a package brought; none that is too old.
fn choose(in_path: Vec<Program>, mut packaged: Vec<Program>) -> Result<Program, DemoError> {
    packaged.sort_by_key(|program| Reverse(program.major));
    let mut all = in_path.into_iter().chain(packaged).peekable();
    let found = all.peek().map(|program| program.version.clone());
    all.find(|program| program.major >= OLDEST).ok_or(DemoError::NoPostgres { found })
}

/// `/usr/lib/postgresql/*/bin` and `/usr/pgsql-*/bin`.
fn packaged() -> Vec<PathBuf> {
    let entries = |folder: &str| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let debian = entries("/usr/lib/postgresql");
    let redhat = entries("/usr").filter(|path| path.to_string_lossy().starts_with("/usr/pgsql-"));
    debian.chain(redhat).map(|folder| folder.join("bin")).collect()
}

fn ask_version(bin: &Path) -> Option<Program> {
    let answer = Command::new(bin.join("postgres")).arg("--version").output().ok()?;
    bin.join("initdb").exists().then_some(())?;
    let (version, major) = parse_version(&String::from_utf8_lossy(&answer.stdout))?;
    Some(Program { bin: bin.to_owned(), version, major })
}

/// `postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)` → `15.13` and 15.
fn parse_version(answer: &str) -> Option<(String, u32)> {
    let version = answer.split_whitespace().nth(2)?;
    let digits = version.find(|character: char| !character.is_ascii_digit()).unwrap_or(version.len());
    Some((version.to_owned(), version[..digits].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(major: u32, bin: &str) -> Program {
        Program { bin: bin.into(), version: format!("{major}.1"), major }
    }

    #[test]
    fn the_server_in_path_wins_unless_it_is_too_old() {
        let packaged = || vec![program(14, "b"), program(17, "c"), program(15, "d")];
        assert_eq!(choose(vec![program(16, "a")], packaged()).unwrap(), program(16, "a"));
        assert_eq!(choose(vec![program(13, "a")], packaged()).unwrap(), program(17, "c"));
    }

    #[test]
    fn without_a_server_the_error_names_the_package() {
        let none = choose(Vec::new(), Vec::new()).unwrap_err().to_string();
        assert!(none.contains("apt-get install postgresql") && !none.contains("only"), "{none}");
        assert!(choose(Vec::new(), vec![program(13, "a")]).unwrap_err().to_string().contains("(only 13.1)"));
    }

    #[test]
    fn versions_are_read_with_and_without_a_packager() {
        let version = |text: &str, major| Some((text.to_owned(), major));
        assert_eq!(parse_version("postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)\n"), version("15.13", 15));
        assert_eq!(parse_version("postgres (PostgreSQL) 18beta1"), version("18beta1", 18));
        assert_eq!(parse_version("nonsense"), None);
    }
}
