//! The Debian package: made of the binary under test, installed into a folder that stands for a system, and removed from it.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use crate::services::run;

/// A system with nothing on it.
struct System {
    root: PathBuf,
}

impl System {
    fn new() -> Self {
        let root = run::folder("system");
        for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "etc"] {
            fs::create_dir_all(root.join(folder)).expect("a folder of our own");
        }
        for file in ["var/lib/dpkg/status", "var/lib/dpkg/available", "etc/passwd", "etc/group"] {
            fs::write(root.join(file), "").expect("a file of our own");
        }
        Self { root }
    }

    /// What dpkg says; its own scripts see the folder as `DPKG_ROOT`, and nothing of the machine is touched.
    fn dpkg(&self, action: &str, what: &Path) -> String {
        let root = format!("--root={}", self.root.display());
        let arguments = ["--force-script-chrootless", "--force-depends", "--force-not-root", "--log=/dev/null", &root];
        let mut command = as_root("dpkg");
        let output = command.args(arguments).arg(action).arg(what).output().expect("dpkg runs");
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "dpkg {action}: {said}");
        said
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }
}

/// Files of a package belong to root; who is not gets by with the appearance.
fn as_root(program: &str) -> Command {
    if fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0) {
        return Command::new(program);
    }
    let mut command = Command::new("fakeroot");
    command.arg(program);
    command
}

/// Makes the package in a folder of its own.
fn build() -> PathBuf {
    let folder = run::folder("package");
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/debian/build.sh"))
        .args([Path::new(env!("CARGO_BIN_EXE_walpost")), &folder])
        .env("DEB_COMPRESSION", "-Zgzip -z1")
        .output()
        .expect("build.sh runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

#[test]
fn a_release_is_complete_and_lists_what_it_is_made_of() {
    let folder = run::folder("release");
    let binary = folder.join("walpost");
    let stripped = Command::new("strip").arg("-o").args([&binary, Path::new(env!("CARGO_BIN_EXE_walpost"))]).status();
    assert!(stripped.is_ok_and(|status| status.success()));
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/release.sh"))
        .arg(folder.join("files"))
        .env("WALPOST_BINARY", &binary)
        .env("DEB_COMPRESSION", "-Zgzip -z1")
        .output()
        .expect("release.sh runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sums = Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(folder.join("files")).output();
    let sums = String::from_utf8(sums.expect("sha256sum runs").stdout).expect("UTF-8");
    assert_eq!(sums.matches(": OK").count(), 4, "{sums}");
    let version = env!("CARGO_PKG_VERSION");
    let bom = fs::read(folder.join(format!("files/walpost-{version}.cdx.json"))).expect("an SBOM");
    let bom: serde_json::Value = serde_json::from_slice(&bom).expect("JSON");
    let parts: Vec<_> = bom["components"].as_array().expect("parts").iter().map(|part| &part["name"]).collect();
    assert!(
        parts.iter().any(|name| *name == "rdkafka") && parts.iter().all(|name| *name != "criterion" && *name != "sqlx")
    );
    let unsummed = bom["components"].as_array().unwrap().iter().find(|part| part["hashes"].is_null());
    assert!(unsummed.is_none(), "{unsummed:?}");
    let notes = fs::read_to_string(folder.join("files/NOTES.md")).expect("notes");
    assert!(notes.contains("### Added") && !notes.contains("\n## "), "{notes}");
}

#[test]
fn the_debian_package_installs_runs_and_goes_without_a_trace() {
    let (package, again) = (build(), build());
    assert_eq!(fs::read(&package).unwrap(), fs::read(again).unwrap(), "the same binary gives the same package");
    let machine = fs::read_to_string("/etc/passwd").unwrap();
    let system = System::new();
    system.dpkg("--install", &package);
    for file in [
        "usr/lib/systemd/system/walpost.service",
        "usr/share/man/man1/walpost-run.1.gz",
        "usr/share/bash-completion/completions/walpost",
        "usr/share/doc/walpost/copyright",
        "etc/default/walpost",
    ] {
        assert!(system.path(file).exists(), "{file}");
    }
    let binary = Command::new(system.path("usr/bin/walpost")).arg("--version").output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&binary.stdout).trim(), concat!("walpost ", env!("CARGO_PKG_VERSION")));
    assert!(system.text("etc/passwd").starts_with("walpost:"), "a user of its own");
    let settings = system.path("etc/walpost/walpost.toml");
    assert_eq!(fs::metadata(&settings).unwrap().permissions().mode() & 0o777, 0o640, "it may hold a password");

    let mine = "[postgres]\nurl = \"postgres://mine@db/app\"\n";
    fs::write(&settings, mine).unwrap();
    system.dpkg("--install", &package);
    assert_eq!(fs::read_to_string(&settings).unwrap(), mine, "an upgrade leaves the operator's settings");
    system.dpkg("--remove", Path::new("walpost"));
    assert!(!system.path("usr/bin").exists() && settings.exists(), "settings stay until they are purged");
    system.dpkg("--purge", Path::new("walpost"));
    assert!(!system.path("etc/walpost").exists() && !system.path("usr").exists());
    assert_eq!(fs::read_to_string("/etc/passwd").unwrap(), machine, "the machine's own users are none of its business");
}
