//! Who the servers run as: never root.

use std::{fs, os::unix::fs::MetadataExt, os::unix::process::CommandExt, path::Path, process::Command};

/// A Unix account.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    uid: u32,
    gid: u32,
}

impl Account {
    /// The account for servers: `None` when we are not root, so that they run as ourselves.
    pub fn for_servers() -> Option<Self> {
        let uid = fs::metadata("/proc/self").expect("/proc is mounted").uid();
        if uid != 0 {
            return None;
        }
        let passwd = fs::read_to_string("/etc/passwd").expect("/etc/passwd is readable");
        let account = ["postgres", "nobody"].iter().find_map(|name| Self::parse(&passwd, name));
        Some(account.expect("an account postgres or nobody, as a server may not run as root"))
    }

    fn parse(passwd: &str, name: &str) -> Option<Self> {
        let mut fields =
            passwd.lines().map(|line| line.split(':')).find(|fields| fields.clone().next() == Some(name))?;
        Some(Self { uid: fields.nth(2)?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    }

    /// Makes `command` run as this account.
    pub fn runs(self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    /// Gives `path` to this account.
    pub fn owns(self, path: &Path) {
        std::os::unix::fs::chown(path, Some(self.uid), Some(self.gid)).expect("root may give files away");
    }
}
