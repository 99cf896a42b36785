//! One started process: its log, signals and end.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Mutex,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{wait_for, wait_until};

/// A process with its output in a file. It is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: i32,
    child: Mutex<Child>,
    log: PathBuf,
}

impl Process {
    /// Starts `command` in `folder`, its output appended to `<folder>/<name>.log`.
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log).expect("a log file in our own folder");
        let err = out.try_clone().expect("a second handle of the log");
        let child = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("start {name}: {error}"));
        let pid = i32::try_from(child.id()).expect("a process id fits");
        Self { name: name.to_owned(), pid, child: Mutex::new(child), log }
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// CPU time of all its threads so far; a tick is a hundredth of a second to every program on Linux.
    pub fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).expect("a living process");
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number of ticks")).sum();
        Duration::from_millis(ticks * 10)
    }

    /// All it wrote so far, in all its lives if it was started again in the same folder.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the log contains `text`; fails at once when the process ends without having said it.
    pub fn wait_for_log(&self, limit: Duration, text: &str) {
        wait_until(limit, &format!("{} logs {text:?}", self.name), || {
            let ended = self.exit_status();
            let found = self.log().contains(text);
            assert!(
                found || ended.is_none(),
                "{} ended ({ended:?}) before {text:?}:\n{}",
                self.name,
                tail(&self.log())
            );
            found
        });
    }

    /// Sends a signal; nothing happens when the process has ended.
    pub fn signal(&self, signal: Signal) {
        // The lock keeps the process from being reaped, and its id from being given to another.
        let mut child = self.child.lock().expect("no panic while the lock is held");
        if let Ok(None) = child.try_wait() {
            kill(Pid::from_raw(self.pid), signal).expect("we may signal our own child");
        }
    }

    /// How it ended, if it has.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.child.lock().expect("no panic while the lock is held").try_wait().expect("our own child")
    }

    /// Waits until it has ended.
    pub fn wait(&self, limit: Duration) -> ExitStatus {
        wait_for(limit, &format!("the end of {}", self.name), || self.exit_status())
    }

    /// Kills it and waits for its end.
    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
        self.child.lock().expect("no panic while the lock is held").wait().expect("our own child");
    }

    /// Stops it in its tracks, its children as well.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
        self.signal_children(Signal::SIGSTOP);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal_children(Signal::SIGCONT);
        self.signal(Signal::SIGCONT);
    }

    /// Whether it is stopped in its tracks.
    pub fn is_frozen(&self) -> bool {
        stat(self.pid).is_some_and(|fields| fields.starts_with(" T"))
    }

    /// Sends a signal to its direct children.
    pub fn signal_children(&self, signal: Signal) {
        for child in children(self.pid) {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(child), signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit_status().is_none() {
            let orphans = children(self.pid);
            self.kill();
            for orphan in orphans {
                let _ = kill(Pid::from_raw(orphan), Signal::SIGKILL);
            }
        }
    }
}

/// The end of a log, for a message that a person reads.
pub fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// The direct children of a process.
fn children(parent: i32) -> Vec<i32> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&pid: &i32| parent_of(pid) == Some(parent))
        .collect()
}

fn parent_of(pid: i32) -> Option<i32> {
    stat(pid)?.split_whitespace().nth(1)?.parse().ok()
}

/// What the kernel says of a process: ` <state> <parent> …`.
fn stat(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it stands in parentheses and may contain anything, even a parenthesis.
    Some(stat.rsplit_once(')')?.1.to_owned())
}
