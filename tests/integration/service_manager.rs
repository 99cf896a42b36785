//! What a service manager hears over a socket such as systemd's, and what a health check is told.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    outbox::{Outbox, PATIENCE},
    services::{kafka::Kafka, postgres::Version, run, wait_for, wait_until, walpost::Walpost},
};

const UNIT: &str = include_str!("../../deploy/systemd/walpost.service");
/// Long enough that a machine that is busy with other tests keeps walpost from no sign of life.
const WATCHDOG_USEC: &str = "20000000";

/// The manager's end.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn new() -> Self {
        let path = run::folder("manager").join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket in our own folder");
        socket.set_read_timeout(Some(PATIENCE)).expect("a time");
        Self { socket, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().expect("a path of ours is UTF-8")
    }

    /// The next message; `None` when there is none in time.
    fn next(&self, time: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(time)).expect("a time");
        let mut message = [0; 4096];
        let length = self.socket.recv(&mut message).ok()?;
        Some(String::from_utf8(message[..length].to_vec()).expect("UTF-8"))
    }

    /// Reads on until a message contains `text`, and returns all that were read.
    fn hear(&self, text: &str) -> Vec<String> {
        let mut heard = Vec::new();
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            heard.extend(self.next(PATIENCE));
            if heard.last().is_some_and(|last| last.contains(text)) {
                return heard;
            }
        }
        panic!("{text:?} was not heard: {heard:?}");
    }
}

/// A walpost that the manager starts.
fn managed(outbox: &Outbox<'_>, manager: &Manager, more: &[(&str, &str)]) -> Walpost {
    let socket = [("NOTIFY_SOCKET", manager.path()), ("WATCHDOG_USEC", WATCHDOG_USEC)];
    outbox.start(&["run"], &[&socket, more].concat())
}

#[test]
fn the_manager_hears_that_it_streams_lives_and_stops() {
    let (outbox, manager) = (Outbox::shared(Version::NEWEST), Manager::new());
    let walpost = managed(&outbox, &manager, &[("WALPOST_SHUTDOWN_DRAIN_TIMEOUT_MS", "20000")]);
    let heard = manager.hear("READY=1");
    assert!(
        heard.iter().filter(|message| message.contains("STATUS=not ready")).all(|message| !message.contains("READY"))
    );
    manager.hear(&format!("STATUS=streaming from slot {}\n", outbox.database.name()));
    for _ in 0..3 {
        manager.hear("WATCHDOG=1");
    }
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let farewell = manager.hear("STATUS=stopped as asked").concat();
    assert!(farewell.contains("STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000\n"), "{farewell}");
}

#[test]
fn a_standby_is_ready_for_the_manager_and_for_those_who_ask_for_one() {
    let (outbox, manager) = (Outbox::shared(Version::NEWEST), Manager::new());
    let first = outbox.relay(&[]);
    let second = managed(&outbox, &manager, &[]);
    manager.hear("READY=1");
    manager.hear("STATUS=standing by: another walpost holds the slot");
    let strict = second.get("/readyz");
    assert_eq!(strict.status, 503, "it does not stream: {}", strict.body);
    let probe = |walpost: &Walpost, what| {
        let listen = format!("127.0.0.1:{}", walpost.http_port());
        outbox.command(&["status", "--probe", what, "--listen", &listen], &[])
    };
    wait_until(PATIENCE, "the second stands by", || second.get("/readyz?standby=ok").status == 200);
    let codes = |walpost| ["live", "ready", "standby"].map(|what| probe(walpost, what).code);
    assert_eq!(codes(&second), [Some(0), Some(1), Some(0)]);
    assert_eq!(codes(&first), [Some(0), Some(0), Some(0)]);
    assert_eq!(first.sigterm_and_wait(PATIENCE), Some(0));
    let gone = probe(&first, "live");
    assert!(gone.code == Some(1) && gone.output.contains("no answer at"), "{}", gone.output);
    second.wait_until_ready(PATIENCE);
    manager.hear("STATUS=streaming from slot");
}

#[test]
fn a_database_that_is_away_is_no_reason_to_be_ready() {
    let (outbox, manager) = (Outbox::shared(Version::NEWEST), Manager::new());
    let nowhere = format!("postgres://nobody@127.0.0.1:{}/none", run::free_port());
    let walpost = managed(&outbox, &manager, &[("WALPOST_POSTGRES_URL", &nowhere)]);
    let heard = manager.hear("STATUS=not ready: stream: ").concat();
    assert!(!heard.contains("READY=1"), "{heard}");
    assert!(manager.hear("WATCHDOG=1").iter().all(|message| !message.contains("READY=1")), "it lives all the same");
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
}

#[test]
fn a_loop_that_stands_gives_the_watchdog_no_sign() {
    let (outbox, manager) = (Outbox::shared(Version::NEWEST), Manager::new());
    outbox.topic("a", 1);
    let _walpost = managed(&outbox, &manager, &[("CRASH_BUG", "standing_loop")]);
    manager.hear("STATUS=streaming");
    outbox.execute("INSERT INTO outbox (event_type, payload) VALUES ('a', '{}')");
    // signs come twice a second while it turns
    let silence = Duration::from_secs(2);
    wait_for(PATIENCE, "no more signs of life", || manager.next(silence).is_none().then_some(()));
}

#[test]
fn the_unit_starts_what_the_command_line_knows_and_systemd_takes_it() {
    let line = |key: &str| UNIT.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key}"));
    let start: Vec<_> = line("ExecStart=").split(' ').collect();
    assert!(clap::Parser::try_parse_from(&start).is_ok_and(|_: walpost::cli::Cli| true), "{start:?}");
    assert_eq!((line("Type="), line("RestartPreventExitStatus=")), ("notify", "1 2 3"));
    if !Path::new("/usr/bin/systemd-analyze").exists() {
        return; // not every system has systemd
    }
    let unit = run::folder("unit").join("walpost.service");
    fs::write(&unit, UNIT.replace("/usr/bin/walpost", env!("CARGO_BIN_EXE_walpost"))).expect("a file of our own");
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().expect("it runs");
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(!said.contains("walpost.service"), "{said}");
}

#[test]
fn nobody_asks_where_nothing_listens() {
    let outbox = Outbox::new(crate::services::postgres::Postgres::shared(Version::NEWEST), Kafka::shared());
    let ended = outbox.command(&["status", "--probe", "live"], &[("WALPOST_HTTP_LISTEN", "")]);
    assert!(ended.code == Some(1) && ended.output.contains("http.listen is empty"), "{}", ended.output);
}
