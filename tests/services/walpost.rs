//! The walpost binary itself.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, ExitStatus},
    time::Duration,
};

use nix::sys::signal::Signal;

use super::{
    database::Database,
    http::{self, Answer},
    kafka::Kafka,
    process::{Process, tail},
    run, wait_for,
};

/// How long a command that is to end by itself may take.
const PATIENCE: Duration = Duration::from_mins(2);

/// What a command that ended by itself left.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Its standard output and standard error, in the order they were written.
    pub output: String,
}

/// A running walpost; killed when this is dropped.
#[derive(Debug)]
pub struct Walpost {
    process: Process,
    http_port: u16,
}

impl Walpost {
    /// Starts `walpost run` with exactly these variables, and an HTTP listener on a free port unless they name one.
    pub fn start(env: &[(&str, &str)]) -> Self {
        Self::start_with(&["run"], env)
    }

    /// Starts any command.
    pub fn start_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_build(Path::new(TESTED), args, env)
    }

    /// Starts any command of another build of walpost.
    pub fn start_build(binary: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let named = env.iter().find(|(name, _)| *name == LISTEN).map(|(_, address)| *address);
        let port = |address: &str| address.rsplit(':').next().and_then(|port| port.parse().ok());
        let http_port = named.and_then(port).unwrap_or_else(run::free_port);
        let mut command = command(binary, args, env);
        if named.is_none() {
            command.env(LISTEN, format!("127.0.0.1:{http_port}"));
        }
        Self { process: Process::start("walpost", &run::folder("walpost"), &mut command), http_port }
    }

    /// Starts `walpost run` from a database's outbox to a Kafka: slot, publication and the topics' prefix are named after
    /// the database. `env` adds to that and wins.
    pub fn relay(database: &Database<'_>, kafka: &Kafka, env: &[(&str, &str)]) -> Self {
        with_environment(database, kafka, env, Self::start)
    }

    /// Runs a command to its end.
    pub fn run_to_end(args: &[&str], env: &[(&str, &str)]) -> Ended {
        let process = Process::start("walpost", &run::folder("walpost"), &mut command(Path::new(TESTED), args, env));
        let code = process.wait(PATIENCE).code();
        Ended { code, output: process.log() }
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// All it logged so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Waits until the log contains `text`.
    pub fn wait_for_log(&self, limit: Duration, text: &str) {
        self.process.wait_for_log(limit, text);
    }

    /// Ends it as a crash does.
    pub fn kill9(&self) {
        self.process.kill();
    }

    /// Asks it to stop and waits; the exit code, `None` when a signal ended it.
    pub fn sigterm_and_wait(&self, limit: Duration) -> Option<i32> {
        self.process.signal(Signal::SIGTERM);
        self.wait(limit).code()
    }

    /// Waits until it has ended by itself.
    pub fn wait(&self, limit: Duration) -> ExitStatus {
        self.process.wait(limit)
    }

    /// Stops it in its tracks.
    pub fn freeze(&self) {
        self.process.freeze();
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.process.thaw();
    }

    /// The share of a core that it takes during a while.
    pub fn core_share(&self, during: Duration) -> f64 {
        let before = self.process.cpu();
        std::thread::sleep(during);
        self.process.cpu().saturating_sub(before).as_secs_f64() / during.as_secs_f64()
    }

    /// Resident memory in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most memory that was ever resident, MB.
    pub fn peak_mb(&self) -> f64 {
        f64::from(u32::try_from(self.memory("VmHWM:") / 1024).expect("below 4 TB")) * 1024.0 / 1e6
    }

    fn memory(&self, what: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("a living process has memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") * 1024
    }

    /// The HTTP listener's port.
    pub fn http_port(&self) -> u16 {
        self.http_port
    }

    /// `GET path`, repeated until the listener is up.
    pub fn get(&self, path: &str) -> Answer {
        wait_for(PATIENCE, &format!("an answer to GET {path}"), || {
            assert!(self.process.exit_status().is_none(), "walpost ended:\n{}", tail(&self.log()));
            http::get(self.http_port, path).ok()
        })
    }

    /// Waits until `/readyz` says 200.
    pub fn wait_until_ready(&self, limit: Duration) {
        let mut last = String::new();
        wait_for(limit, "walpost is ready; see its log above", || {
            let answer = self.get("/readyz");
            if answer.body != last {
                last.clone_from(&answer.body);
                eprintln!("readyz: {} {last}\n{}", answer.status, tail(&self.log()));
            }
            (answer.status == 200).then_some(())
        });
    }

    /// `/status`.
    pub fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.get("/status").body).expect("/status is JSON")
    }

    /// `/metrics`: name with labels as printed → value.
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        parse_metrics(&self.get("/metrics").body)
    }

    /// One metric, by name with labels as printed; panics when there is none.
    pub fn metric(&self, name: &str) -> f64 {
        *self.metrics().get(name).unwrap_or_else(|| panic!("no metric {name}"))
    }
}

impl Drop for Walpost {
    /// A test that fails should show what walpost had to say.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("walpost's log:\n{}", self.log());
        }
    }
}

const LISTEN: &str = "WALPOST_HTTP_LISTEN";

/// The build under test.
const TESTED: &str = env!("CARGO_BIN_EXE_walpost");

/// The variables of [`Walpost::relay`].
pub fn environment(database: &Database<'_>, kafka: &Kafka) -> Vec<(&'static str, String)> {
    vec![
        ("WALPOST_POSTGRES_URL", database.url()),
        ("WALPOST_POSTGRES_SLOT", database.name().to_owned()),
        ("WALPOST_POSTGRES_PUBLICATION", database.name().to_owned()),
        ("WALPOST_KAFKA_BROKERS", kafka.brokers()),
        ("WALPOST_ROUTE_TOPIC", format!("{}.{{event_type}}", database.name())),
    ]
}

/// Does something with the variables of [`environment`] and others, which win; of two others with one name, the last.
pub fn with_environment<T>(
    database: &Database<'_>,
    kafka: &Kafka,
    env: &[(&str, &str)],
    act: impl FnOnce(&[(&str, &str)]) -> T,
) -> T {
    let base = environment(database, kafka);
    let all: Vec<(&str, &str)> =
        base.iter().map(|(name, value)| (*name, value.as_str())).chain(env.iter().copied()).collect();
    act(&all)
}

fn command(binary: &Path, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary);
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin").envs(env.iter().copied());
    command
}

fn parse_metrics(text: &str) -> BTreeMap<String, f64> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let samples = samples.filter_map(|line| line.rsplit_once(' '));
    samples.map(|(name, value)| (name.to_owned(), value.parse().expect("a sample is a number"))).collect()
}
