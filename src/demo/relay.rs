//! [`Relay`]: the real `walpost run`, as a process of its own, configured by its environment alone.

use std::{
    env,
    fs::DirBuilder,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use tokio::process::{Child, Command};

use super::{DemoError, open_log, tail};

/// How long a told stop may take: longer than `shutdown.drain_timeout_ms`.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// How a walpost of this demo is started.
pub struct Recipe {
    folder: PathBuf,
    environment: Vec<(&'static str, String)>,
}

impl Recipe {
    /// Works in a folder below `run`, which the leash watches.
    pub fn new(run: &Path, environment: Vec<(&'static str, String)>) -> Result<Self, DemoError> {
        let folder = run.join("walpost");
        DirBuilder::new().recursive(true).create(&folder).map_err(DemoError::io("make a folder for walpost"))?;
        Ok(Self { folder, environment })
    }

    /// The same with one more setting.
    pub fn with(&self, name: &'static str, value: &str) -> Self {
        let mut environment = self.environment.clone();
        environment.push((name, value.to_owned()));
        Self { folder: self.folder.clone(), environment }
    }

    /// The command `walpost …`, its output in the log.
    pub fn command(&self, arguments: &[&str]) -> Result<Command, DemoError> {
        let program = env::current_exe().map_err(DemoError::io("find the walpost binary"))?;
        let (out, err) = open_log(&self.log())?;
        let mut command = Command::new(program);
        // whatever is configured here for a real walpost stays out
        command.args(arguments).env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.folder).stdin(Stdio::null()).stdout(out).stderr(err);
        // a ^C is for the demo to obey
        command.process_group(0).kill_on_drop(true);
        Ok(command)
    }

    /// Starts `walpost …` to run until it is stopped.
    pub fn start(&self, arguments: &[&str]) -> Result<Relay, DemoError> {
        let child = self.command(arguments)?.spawn().map_err(DemoError::io("start walpost"))?;
        Ok(Relay { child, log: self.log() })
    }

    /// Runs a command that ends by itself, and gives what it printed.
    pub async fn run(&self, arguments: &[&str]) -> Result<String, DemoError> {
        let mut command = self.command(arguments)?;
        let output = command.stdout(Stdio::piped()).output().await.map_err(DemoError::io("start walpost"))?;
        if !output.status.success() {
            return Err(DemoError::Ended { program: "walpost", log: tail(&self.log()) });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Where its output goes.
    pub fn log(&self) -> PathBuf {
        self.folder.join("walpost.log")
    }
}

/// A running one; killed when this is dropped.
pub struct Relay {
    child: Child,
    log: PathBuf,
}

impl Relay {
    /// Fails when it has ended by itself.
    pub fn must_run(&mut self) -> Result<(), DemoError> {
        match self.child.try_wait().map_err(DemoError::io("look after walpost"))? {
            None => Ok(()),
            Some(_) => Err(DemoError::Ended { program: "walpost", log: tail(&self.log) }),
        }
    }

    /// SIGKILL, and waits for its end.
    pub async fn kill9(mut self) -> Result<(), DemoError> {
        self.must_run()?;
        self.child.kill().await.map_err(DemoError::io("kill walpost"))
    }

    /// SIGTERM, and waits for its end, which must be exit code 0.
    pub async fn stop(mut self) -> Result<(), DemoError> {
        self.must_run()?;
        let id = self.child.id().unwrap_or_default().to_string();
        let told = Command::new("/bin/sh").args(["-c", "kill -TERM \"$1\"", "kill", &id]).status().await;
        told.map_err(DemoError::io("send SIGTERM to walpost"))?;
        let Ok(ended) = tokio::time::timeout(STOP_LIMIT, self.child.wait()).await else {
            return Err(DemoError::InVain { what: "walpost obeyed SIGTERM", log: tail(&self.log) });
        };
        let status: ExitStatus = ended.map_err(DemoError::io("wait for walpost"))?;
        if status == ExitStatus::from_raw(0) {
            return Ok(());
        }
        Err(DemoError::Ended { program: "walpost", log: tail(&self.log) })
    }
}
