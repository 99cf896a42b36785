//! `walpost demo`: what a person sees who tries walpost for the first time.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::services::{
    kafka::Kafka,
    wait_until,
    walpost::{Ended, Walpost},
};

const PATIENCE: Duration = Duration::from_mins(1);

/// The rows that stand at the end, with the number that some must have.
const ROWS: [(&str, Option<&str>); 9] = [
    ("written (committed)", None),
    ("rolled back on purpose", None),
    ("delivered", None),
    ("lost", Some("0")),
    ("out of order per key", Some("0")),
    ("phantom", Some("0")),
    ("altered", Some("0")),
    ("sent twice", None),
    ("after the clean stop", Some("0")),
];

#[test]
fn the_demo_keeps_its_promises_and_leaves_nothing_behind() {
    let Ended { code, output } = Walpost::run_to_end(&["demo"], &[]);
    assert_eq!(code, Some(0), "{output}");
    assert_table(&output);
    assert_plain(&output);
    assert_gone(&folder(&output));
}

#[test]
fn the_demo_uses_a_real_broker_and_deletes_its_topics() {
    let kafka = Kafka::shared();
    let Ended { code, output } = Walpost::run_to_end(&["demo", "--brokers", &kafka.brokers()], &[]);
    assert_eq!(code, Some(0), "{output}");
    assert_table(&output);
    assert_gone(&folder(&output));
    let prefix = after(&output, "topics ").trim_end_matches(".*");
    for name in ["naive", "order.placed", "stock.reserved", "order.cancelled", "lesson.dual-write", "lesson.inbox"] {
        let topic = format!("{prefix}.{name}");
        wait_until(PATIENCE, &format!("{topic} is gone"), || kafka.partitions(&topic).is_none());
    }
}

#[test]
fn nothing_of_an_interrupted_or_killed_demo_is_left() {
    for end in ["INT", "KILL"] {
        let demo = Walpost::start_with(&["demo"], &[]);
        demo.wait_for_log(PATIENCE, "2. An outbox");
        let folder = folder(&demo.log());
        assert!(!processes_in(&folder).is_empty(), "the server works in its folder");
        if end == "INT" {
            demo.process().signal(Signal::SIGINT);
            assert_eq!(demo.wait(PATIENCE).code(), Some(1), "{}", demo.log());
        } else {
            demo.kill9();
        }
        wait_until(PATIENCE, "the folder is gone", || !fs::exists(&folder).unwrap_or(true));
        assert_gone(&folder);
    }
}

/// What each chapter of the lesson must come to, by its own words.
const CHAPTERS: [&[(&str, usize)]; 7] = [
    &[("orders in the database", 100), ("deaths after COMMIT", 10), ("events in Kafka", 90)],
    &[("orders in the database", 100), ("deaths after COMMIT", 10), ("events in Kafka", 100)],
    &[
        ("rolled back: orders in the database", 0),
        ("rolled back: events in Kafka", 0),
        ("committed: orders in the database", 1),
        ("committed: events in Kafka", 1),
    ],
    &[("different events, by the header `id`", 100)],
    &[("deliveries to the consumer, of which first", 1), ("actions in the database", 1)],
    &[("attempts to read, change or delete, refused", 4), ("events written by outbox_emit", 1)],
    &[("events by the log", 100), ("events by polling", 100)],
];

#[test]
fn each_chapter_can_be_told_alone_and_as_json() {
    for (number, expected) in (1..).zip(CHAPTERS) {
        let Ended { code, output } = Walpost::run_to_end(&["demo", "--json", "--chapter", &number.to_string()], &[]);
        assert_eq!(code, Some(0), "{output}");
        let told: Value = serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"));
        assert_eq!(told["holds"], true);
        let [chapter] = told["chapters"].as_array().expect("chapters").as_slice() else { panic!("{output}") };
        assert_eq!(chapter["chapter"], number);
        let rows = chapter["rows"].as_array().expect("rows");
        for (what, measured) in expected {
            let row = rows.iter().find(|row| row["what"] == *what).unwrap_or_else(|| panic!("no {what:?}: {output}"));
            assert_eq!(row["measured"], *measured, "{what}: {output}");
        }
    }
}

fn assert_table(output: &str) {
    for heading in [
        "1. A dual write",
        "2. An outbox",
        "3. ROLLBACK",
        "4. The tailer",
        "5. One event",
        "6. The appl",
        "7. Reading",
        "8. All",
    ] {
        assert!(output.contains(heading), "no {heading:?} in\n{output}");
    }
    for (name, number) in ROWS {
        let row = output.lines().find_map(|line| line.trim_start().strip_prefix(name));
        let row = row.unwrap_or_else(|| panic!("no row {name:?} in\n{output}"));
        let found = row.split_whitespace().next().unwrap_or_default();
        assert!(number.is_none_or(|number| number == found), "{name} is {found} in\n{output}");
    }
    for text in ["before the kills", "median", "p99", "Nothing lost, nothing invented, nothing out of order."] {
        assert!(output.contains(text), "no {text:?} in\n{output}");
    }
}

/// No colours, nothing rewritten in place: the output of a log.
fn assert_plain(output: &str) {
    let odd: Vec<char> = output.chars().filter(|it| it.is_control() && *it != '\n').collect();
    assert!(odd.is_empty(), "control codes {odd:?} in\n{output}");
}

/// What stands behind `label` up to the next space.
fn after<'a>(output: &'a str, label: &str) -> &'a str {
    let found = output.split_once(label).and_then(|(_, rest)| rest.split_whitespace().next());
    found.unwrap_or_else(|| panic!("no {label:?} in\n{output}"))
}

/// The demo's own folder, where all its processes work.
fn folder(output: &str) -> PathBuf {
    let line = output.lines().find(|line| line.contains("(fsync on)"));
    PathBuf::from(after(line.unwrap_or_default(), " in "))
}

fn assert_gone(folder: &Path) {
    assert!(!fs::exists(folder).unwrap_or(true), "{} is still there", folder.display());
    assert_eq!(processes_in(folder), Vec::<String>::new());
}

/// The ids of the processes that work in or below the folder, even if it is deleted.
fn processes_in(folder: &Path) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let within =
        |process: &fs::DirEntry| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    let ids = processes.filter(within).map(|process| process.file_name().to_string_lossy().into_owned());
    ids.collect()
}
