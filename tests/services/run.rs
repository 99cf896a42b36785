//! The run: its folder, its leash, its ports, and where the fetched servers are.

use std::{
    collections::HashSet,
    fs::{self, Permissions},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

/// Below the range that outgoing connections take their ports from, so that a server can come back on its port.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// The folder of the run and the leash that removes it. The leash holds the other end of the child's stdin.
struct Run {
    folder: PathBuf,
    _leash: Mutex<Child>,
}

static RUN: LazyLock<Run> = LazyLock::new(|| {
    let name = format!("walpost-{}-{:04x}", std::process::id(), fastrand::u16(..));
    let folder = std::env::temp_dir().join(name);
    fs::create_dir(&folder).expect("a folder for the run");
    fs::set_permissions(&folder, Permissions::from_mode(0o711)).expect("our own folder");
    let leash = Command::new(services_folder().join("leash.sh"))
        .arg(&folder)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A ^C at the terminal must not reach it before it has done its work.
        .process_group(0)
        .spawn()
        .expect("leash.sh starts");
    Run { folder, _leash: Mutex::new(leash) }
});

static COUNTER: AtomicU32 = AtomicU32::new(1);

static TAKEN_PORTS: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A new folder for one server, removed with the run at the latest.
pub fn folder(name: &str) -> PathBuf {
    let folder = RUN.folder.join(unique(name));
    fs::create_dir(&folder).expect("a folder below the run's");
    folder
}

/// `<name>_<number>`, different for each call within the run.
pub fn unique(name: &str) -> String {
    format!("{name}_{}", COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// A port of 127.0.0.1 that is free and was given to nobody else in this run.
pub fn free_port() -> u16 {
    let mut taken = TAKEN_PORTS.lock().expect("no panic while the lock is held");
    std::iter::repeat_with(|| fastrand::u16(PORTS))
        .take(10_000)
        .find(|&port| !taken.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() && taken.insert(port))
        .expect("one free port among thousands")
}

/// The folder of a server that `fetch.sh` knows by this name; fetches it when it is missing.
pub fn fetched(name: &str) -> PathBuf {
    let output = Command::new(services_folder().join("fetch.sh"))
        .arg(name)
        .stderr(Stdio::inherit())
        .output()
        .expect("fetch.sh starts");
    let answer = String::from_utf8_lossy(&output.stdout);
    let folder = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    PathBuf::from(folder.unwrap_or_else(|| panic!("no {name}: {}", String::from_utf8_lossy(&output.stderr))))
}

fn services_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/services")
}
