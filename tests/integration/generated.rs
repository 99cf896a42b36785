//! Man pages and completions that packages bring.

use std::{fs, process::Command};

use clap::CommandFactory as _;
use walpost::cli::Cli;

use crate::services::{run, walpost::Walpost};

#[test]
fn every_command_has_a_man_page_that_shows_its_example() {
    let folder = run::folder("man").join("man1");
    let ended = Walpost::run_to_end(&["generate", "man", folder.to_str().unwrap()], &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let page = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let command = Cli::command();
    for part in command.get_subcommands() {
        let name = format!("walpost-{}.1", part.get_name());
        if part.is_hide_set() {
            assert!(!folder.join(&name).exists(), "{name} is for those who make packages");
            continue;
        }
        let page = page(&name);
        let example = page.split(".SH EXAMPLE\n.nf\n  walpost ").nth(1);
        assert!(example.is_some_and(|example| example.contains("\n.fi\n")), "{name}: {page}");
    }
    let main = page("walpost.1");
    assert!(main.starts_with(".ie") && main.contains("Exit codes:"), "{main}");
    assert!(!main.contains("generate"), "{main}");
}

#[test]
fn the_completions_are_taken_by_bash() {
    let folder = run::folder("completions");
    let ended = Walpost::run_to_end(&["generate", "completions", folder.to_str().unwrap()], &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    for name in ["walpost.bash", "_walpost", "walpost.fish"] {
        assert!(folder.join(name).metadata().is_ok_and(|file| file.len() > 1000), "{name}");
    }
    let ask = ". ./walpost.bash; COMP_WORDS=(walpost st) COMP_CWORD=1; _walpost walpost st; echo \"${COMPREPLY[*]}\"";
    let answer = Command::new("bash").args(["-c", ask]).current_dir(&folder).output().expect("bash");
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "status", "{answer:?}");
}
