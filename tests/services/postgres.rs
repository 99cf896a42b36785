//! Postgres servers, each with a private cluster.

use std::{
    env, fs,
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, Mutex, OnceLock},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use super::{
    account::Account,
    database::Database,
    process::{Process, tail},
    run, wait_until,
};

/// How long a server may take to start or stop.
const PATIENCE: Duration = Duration::from_mins(1);

/// Settings of every cluster; a test's own come after them and win.
const BASE_SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    ("wal_level", "logical"),
    ("max_connections", "300"),
    ("max_wal_senders", "100"),
    ("max_replication_slots", "200"),
    ("fsync", "off"),
    ("full_page_writes", "off"),
    ("max_wal_size", "4GB"),
    ("lc_messages", "C"),
    // Where the leash removes it with the folder, also after a SIGKILL.
    ("dynamic_shared_memory_type", "mmap"),
];

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// The one that is installed on this machine.
    System,
    /// The newest patch of this major that is served.
    Major(u8),
}

impl Version {
    /// Every supported major.
    pub const MAJORS: [Self; 5] = [Self::OLDEST, Self::Major(15), Self::Major(16), Self::Major(17), Self::NEWEST];
    /// The oldest supported major.
    pub const OLDEST: Self = Self::Major(14);
    /// The newest supported major.
    pub const NEWEST: Self = Self::Major(18);

    fn bin(self) -> PathBuf {
        match self {
            Self::Major(major) => run::fetched(&format!("postgres-{major}")).join("bin"),
            Self::System => {
                system_bin().expect("a Postgres server in PATH or /usr/lib/postgresql (package postgresql)")
            }
        }
    }

    fn label(self) -> String {
        match self {
            Self::System => "pg".to_owned(),
            Self::Major(major) => format!("pg{major}"),
        }
    }
}

/// The folder of the system's `initdb`; the newest where there are several.
fn system_bin() -> Option<PathBuf> {
    let in_path = env::split_paths(&env::var_os("PATH")?).find(|folder| folder.join("initdb").exists());
    let packaged = || {
        let majors = fs::read_dir("/usr/lib/postgresql").ok()?;
        let majors = majors.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u8>().ok());
        Some(Path::new("/usr/lib/postgresql").join(majors.max()?.to_string()).join("bin"))
    };
    in_path.or_else(packaged)
}

/// How a cluster differs from the default one.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    lines: Vec<(String, String)>,
    hba: Option<String>,
    files: Vec<(String, Vec<u8>)>,
    variables: Vec<(String, String)>,
}

impl Settings {
    /// A line of `postgresql.conf`.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.lines.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The lines of `pg_hba.conf` for TCP; by default everything from 127.0.0.1 is trusted. The socket always is.
    #[must_use]
    pub fn hba(mut self, lines: &str) -> Self {
        self.hba = Some(lines.to_owned());
        self
    }

    /// A variable in the server's environment.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A file in the data folder, readable by the server alone: certificates and keys.
    #[must_use]
    pub fn file(mut self, name: &str, content: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.to_owned(), content.into()));
        self
    }
}

/// How a server is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Connections are ended; the WAL senders first send all there is.
    Fast,
    /// As in a crash.
    Immediate,
}

/// A private cluster and its server; stopped and removed when this is dropped.
#[derive(Debug)]
pub struct Postgres {
    version: Version,
    bin: PathBuf,
    folder: PathBuf,
    port: u16,
    variables: Vec<(String, String)>,
    server: Mutex<Option<Process>>,
}

impl Postgres {
    /// The server that all tests of this run share; started by the first. Break nothing in it but your own database.
    pub fn shared(version: Version) -> &'static Self {
        static SYSTEM: OnceLock<Postgres> = OnceLock::new();
        static MAJORS: LazyLock<[OnceLock<Postgres>; 5]> = LazyLock::new(Default::default);
        let slot = match Version::MAJORS.iter().position(|&major| major == version) {
            Some(index) => &MAJORS[index],
            None if version == Version::System => &SYSTEM,
            None => panic!("{version:?} is not supported"),
        };
        slot.get_or_init(|| Self::start(version, &Settings::default()))
    }

    /// A server of the test's own.
    pub fn start(version: Version, settings: &Settings) -> Self {
        let folder = run::folder(&version.label());
        let account = Account::for_servers();
        if let Some(account) = account {
            account.owns(&folder);
        }
        let server = Self {
            version,
            bin: version.bin(),
            folder,
            port: run::free_port(),
            variables: settings.variables.clone(),
            server: Mutex::new(None),
        };
        server.create_cluster(settings);
        server.start_again();
        server
    }

    /// A standby of this server, which is stopped for the moment that the copy takes and started again. `settings` are the
    /// standby's own.
    pub fn standby(&self, settings: &Settings) -> Self {
        self.stop(Stop::Fast);
        let folder = run::folder(&self.version.label());
        let account = Account::for_servers();
        if let Some(account) = account {
            account.owns(&folder);
        }
        let standby = Self {
            version: self.version,
            bin: self.bin.clone(),
            folder,
            port: run::free_port(),
            variables: settings.variables.clone(),
            server: Mutex::new(None),
        };
        // the fetched servers bring no pg_basebackup
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(self.data()).arg(standby.data());
        let copy = Process::start("copy", &standby.folder, &mut copy);
        assert!(copy.wait(PATIENCE).success(), "the copy failed:\n{}", copy.log());
        for slot in fs::read_dir(standby.data().join("pg_replslot")).expect("a data folder").flatten() {
            fs::remove_dir_all(slot.path()).expect("our own file");
        }
        let primary = format!("host={} port={} user=postgres dbname=postgres", self.folder.display(), self.port);
        let own = [
            ("port", standby.port.to_string()),
            ("unix_socket_directories", standby.folder.display().to_string()),
            ("primary_conninfo", primary),
        ];
        let own = own.iter().map(|(name, value)| (*name, value.as_str()));
        let lines = own.chain(settings.lines.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let lines: Vec<_> = lines.map(|(name, value)| format!("{name} = '{value}'\n")).collect();
        let written = fs::read_to_string(standby.data().join("postgresql.conf")).expect("it was copied");
        standby.write("postgresql.conf", format!("{written}\n{}", lines.concat()).as_bytes());
        standby.write("standby.signal", b"");
        self.start_again();
        standby.start_again();
        standby
    }

    fn create_cluster(&self, settings: &Settings) {
        let mut initdb = self.command("initdb");
        initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"]);
        initdb.arg(self.data());
        let initdb = Process::start("initdb", &self.folder, &mut initdb);
        assert!(initdb.wait(PATIENCE).success(), "initdb failed:\n{}", tail(&initdb.log()));

        let own = [("port", self.port.to_string()), ("unix_socket_directories", self.folder.display().to_string())];
        let lines = BASE_SETTINGS.iter().map(|&(name, value)| (name, value));
        let lines = lines.chain(own.iter().map(|(name, value)| (*name, value.as_str())));
        let lines = lines.chain(settings.lines.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let lines: Vec<_> = lines.map(|(name, value)| format!("{name} = '{}'\n", value.replace('\'', "''"))).collect();
        // After what initdb wrote; what comes later wins.
        let written = fs::read_to_string(self.data().join("postgresql.conf")).expect("initdb wrote it");
        self.write("postgresql.conf", format!("{written}\n{}", lines.concat()).as_bytes());

        let trust_all = "host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n";
        let tcp = settings.hba.as_deref().unwrap_or(trust_all);
        let hba = format!("local all all trust\nlocal replication all trust\n{tcp}\n");
        self.write("pg_hba.conf", hba.as_bytes());
        for (name, content) in &settings.files {
            self.write(name, content);
        }
    }

    fn write(&self, name: &str, content: &[u8]) {
        let path = self.data().join(name);
        fs::write(&path, content).expect("a file in the data folder");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our own file");
        if let Some(account) = Account::for_servers() {
            account.owns(&path);
        }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        // Neither locale nor time zone nor any PG* of the caller is to matter.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C").env("TZ", "UTC");
        if let Some(account) = Account::for_servers() {
            account.runs(&mut command);
        }
        command
    }

    /// Starts the stopped server on its old port and waits until it takes connections.
    pub fn start_again(&self) {
        let mut server = self.server.lock().expect("no panic while the lock is held");
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).envs(self.variables.iter().map(|(name, value)| (name, value)));
        let process = Process::start("postgres", &self.folder, &mut command);
        let what =
            format!("{:?} takes connections; its log: {}", self.version, self.folder.join("postgres.log").display());
        wait_until(PATIENCE, &what, || {
            assert!(process.exit_status().is_none(), "{:?} does not start:\n{}", self.version, tail(&process.log()));
            self.is_ready()
        });
        *server = Some(process);
    }

    /// The server says so in the eighth line of its lock file; `standby` means that it takes connections that only read.
    fn is_ready(&self) -> bool {
        let lines = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        lines.lines().nth(7).is_some_and(|status| matches!(status.trim(), "ready" | "standby"))
    }

    /// Stops the server and says how long it took.
    pub fn stop(&self, mode: Stop) -> Duration {
        let start = Instant::now();
        if let Some(server) = self.server.lock().expect("no panic while the lock is held").take() {
            server.thaw();
            server.signal(match mode {
                Stop::Fast => Signal::SIGINT,
                Stop::Immediate => Signal::SIGQUIT,
            });
            server.wait(PATIENCE);
        }
        start.elapsed()
    }

    /// Stops the server in its tracks with all its processes: connections stay open and silent.
    pub fn freeze(&self) {
        self.with_server(Process::freeze);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.with_server(Process::thaw);
    }

    /// Whether it takes connections now, so far as we know.
    pub fn is_running(&self) -> bool {
        self.server.lock().is_ok_and(|server| server.as_ref().is_some_and(|process| !process.is_frozen()))
    }

    /// What the server logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("postgres.log")).unwrap_or_default()
    }

    fn with_server(&self, act: impl FnOnce(&Process)) {
        act(self.server.lock().expect("no panic while the lock is held").as_ref().expect("the server runs"));
    }

    /// A new database with a name that is unique in this run, and a legal slot, publication and topic prefix as well.
    pub fn database(&self) -> Database<'_> {
        Database::create(self)
    }

    /// Which server this is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// A program that came with the server; the fetched servers bring no clients.
    pub fn program(&self, name: &str) -> PathBuf {
        // What stands in PATH may be a link to the server's own, or a script around a client.
        fs::canonicalize(self.bin.join("initdb")).expect("the server was started").with_file_name(name)
    }

    /// The TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of the Unix socket.
    pub fn socket_folder(&self) -> &Path {
        &self.folder
    }

    /// The data folder.
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let server = self.server.get_mut().ok().and_then(Option::take);
        if let Some(server) = server {
            server.thaw();
            server.signal(Signal::SIGQUIT);
            server.wait(PATIENCE);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
