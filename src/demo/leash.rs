//! [`Leash`]: the demo's folder, and the shell that ends and removes everything in it.
//!
//! The shell waits for the end of the demo at the other end of a pipe, so it does its work also when the demo was killed.
//! Every process of the demo works in a folder below the demo's own; that is how the shell recognises them, so that no list
//! of process ids can be stale. It looks into /proc: where there is none, a demo that was killed leaves its server behind.

use std::{
    env,
    fs::DirBuilder,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{DemoError, account::Account};

/// `$1` is the folder. Postgres is asked to stop at once, so that it removes its shared memory; what stays is killed.
const SCRIPT: &str = r#"
run=$1
read -r _
below() {
    ls -ld /proc/[0-9]*/cwd 2>/dev/null | while read -r line; do
        case $line in
            *" -> $1" | *" -> $1/"*) line=${line%/cwd -> *}; echo "${line##*/}" ;;
        esac
    done
}
kill -KILL $(below "$run/walpost") 2>/dev/null
kill -QUIT $(below "$run/data") 2>/dev/null
tries=0
while left=$(below "$run"); [ -n "$left" ] && [ $tries -lt 60 ]; do
    [ $tries -lt 40 ] || kill -KILL $left 2>/dev/null
    tries=$((tries + 1))
    sleep 0.05 2>/dev/null || sleep 1
done
rm -rf "$run"
"#;

/// What a socket's path may have, by the narrowest system (bytes, without the terminating one).
const SOCKET_PATH: usize = 103;
/// How a socket is named below the folder.
const SOCKET_NAME: usize = "/.s.PGSQL.5432".len();

/// Owns the folder. Dropping it ends every process that works there and removes it.
pub struct Leash {
    folder: PathBuf,
    shell: Child,
}

impl Leash {
    /// Makes the folder, for `account` alone where there is one, and the shell.
    pub fn new(account: Option<Account>) -> Result<Self, DemoError> {
        let folder = make_folder(&env::temp_dir())?;
        let failed = |attempt: &str| DemoError::io(format!("{attempt} {}", folder.display()));
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "walpost-demo-leash"])
            .arg(&folder)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // a ^C at the terminal must not reach it before it has done its work
            .process_group(0)
            .spawn()
            .map_err(failed("start the shell that removes"))?;
        if let Some(account) = account {
            chown(&folder, Some(account.uid), Some(account.gid)).map_err(failed("give away"))?;
        }
        Ok(Self { folder, shell })
    }

    /// The folder: absolute, without symbolic links.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Leash {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // there is nobody left to tell
        let _ = self.shell.wait();
    }
}

/// Nobody else may enter it: the server there trusts whoever reaches its socket.
fn make_folder(parent: &Path) -> Result<PathBuf, DemoError> {
    let name = format!("walpost-demo-{}-{:04x}", std::process::id(), fastrand::u16(..));
    let failed = |attempt: &str| DemoError::io(format!("{attempt} {}", parent.display()));
    let parent = parent.canonicalize().map_err(failed("find the folder for temporary files,"))?;
    let mut folder = parent.join(&name);
    if folder.as_os_str().as_bytes().len() + SOCKET_NAME > SOCKET_PATH {
        folder =
            Path::new("/tmp").canonicalize().map_err(failed("find /tmp, as this is too long a path:"))?.join(&name);
    }
    DirBuilder::new().mode(0o700).create(&folder).map_err(failed("make a folder in"))?;
    Ok(folder)
}
