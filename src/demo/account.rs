//! Who the server runs as: Postgres refuses to be root.

use std::{fs, os::unix::fs::MetadataExt};

use super::DemoError;

/// A Unix account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// The user's number.
    pub uid: u32,
    /// The number of the user's own group.
    pub gid: u32,
}

impl Account {
    /// The account for the server: `None` when we are not root, so that it runs as ourselves.
    pub fn for_server() -> Result<Option<Self>, DemoError> {
        // where there is no /proc, the server itself says that root is refused
        if fs::metadata("/proc/self").map_or(true, |process| process.uid() != 0) {
            return Ok(None);
        }
        let passwd = fs::read_to_string("/etc/passwd").map_err(DemoError::io("read /etc/passwd"))?;
        let account = ["postgres", "nobody"].iter().find_map(|name| find(&passwd, name));
        account.map(Some).ok_or(DemoError::NoAccount)
    }
}

fn find(passwd: &str, name: &str) -> Option<Account> {
    let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
    let mut numbers = line.split(':').skip(2).map_while(|field| field.parse().ok());
    Some(Account { uid: numbers.next()?, gid: numbers.next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0::/root:/bin/bash\npostgresql:x:9:9::/:\npostgres:x:101:104:,,,:/var:/bin/bash\nx:x:y:z";

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        assert_eq!(find(PASSWD, "postgres"), Some(Account { uid: 101, gid: 104 }));
        assert_eq!(find(PASSWD, "nobody"), None);
    }

    #[test]
    fn a_broken_line_is_no_account() {
        assert_eq!(find(PASSWD, "x"), None);
    }
}
