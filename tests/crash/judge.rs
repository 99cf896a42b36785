//! What Kafka holds in the end, against the table and the ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tokio_postgres::SimpleQueryMessage;

use crate::{
    services::{complete, topics::Received},
    watch::Found,
    world::World,
    writers::{payload, topic_of},
};

/// Everything that can be counted.
#[derive(Debug, Default)]
pub struct Tally {
    committed: usize,
    records: usize,
    watched: Found,
    /// Committed by the ledger's word and not in the table: then the kit itself is wrong.
    unknown: Vec<String>,
    lost: Vec<String>,
    phantoms: Vec<String>,
    inversions: Vec<String>,
    mismatches: Vec<String>,
    /// The last record of a key and topic is not its newest event: whoever keeps the last has an old one.
    stale: Vec<String>,
    duplicates: usize,
    /// Rows that retention has deleted.
    gone: usize,
    /// … before Kafka had a record of them.
    gone_early: Vec<String>,
    /// Under exactly-once delivery: records of transactions that were not committed.
    aborted: Option<usize>,
}

impl Tally {
    /// Heals the world, ends it and counts.
    pub fn of(world: &World) -> Self {
        world.heal();
        let watched = world.watch.finish();
        let topics = world.shared.topics();
        let topics: Vec<_> = topics.iter().map(String::as_str).collect();
        let ledger = world.writers.ledger.lock().expect("no panic");
        let records = world.shared.kafka.read_all(&topics);
        let aborted = || world.shared.kafka.read_all_uncommitted(&topics).len() - records.len();
        let aborted = world.shared.once.then(aborted);
        let tables = Tables::of(world);
        let mut tally = Self::compare(&tables.committed, ledger.iter().map(|(id, _)| id), &records);
        tally.hold_against(&tables.gone, &records);
        Self { watched, aborted, ..tally }
    }

    /// What is in Kafka against what is committed.
    fn compare<'a>(table: &BTreeSet<String>, ledger: impl Iterator<Item = &'a String>, records: &[Received]) -> Self {
        let mut tally = Self {
            committed: table.len(),
            records: records.len(),
            unknown: ledger.filter(|id| !table.contains(*id)).cloned().collect(),
            ..Self::default()
        };
        let (mut seen, mut last) = (BTreeSet::new(), BTreeMap::new());
        let (mut newest, mut at_end) = (BTreeMap::new(), BTreeMap::new());
        for record in records {
            let id = record.header("id").expect("every record has an id");
            if !table.contains(id) {
                tally.phantoms.push(id.to_owned());
                continue;
            }
            let (topic_and_key, number) = id.rsplit_once('/').expect("an id of ours");
            if !is_itself(record, id, topic_and_key) {
                tally.mismatches.push(id.to_owned());
            }
            let number = number.parse::<u64>().unwrap_or_default();
            at_end.insert(topic_and_key, number);
            newest.entry(topic_and_key).and_modify(|newest: &mut u64| *newest = number.max(*newest)).or_insert(number);
            if !seen.insert(id) {
                tally.duplicates += 1;
                continue;
            }
            let place = (record.partition, number);
            let (partition, before) = last.insert(topic_and_key, place).unwrap_or(place);
            if partition != place.0 || before > place.1 {
                tally.inversions.push(id.to_owned());
            }
        }
        let stale = at_end.iter().filter(|(key, number)| newest.get(*key) != Some(number));
        tally.stale = stale.map(|(key, number)| format!("{key}/{number}")).collect();
        tally.lost = table.iter().filter(|id| !seen.contains(id.as_str())).cloned().collect();
        tally
    }

    /// What retention has deleted, and when, Unix ms, against what was in Kafka by then.
    fn hold_against(&mut self, gone: &BTreeMap<String, i64>, records: &[Received]) {
        let mut there = BTreeMap::new();
        for record in records {
            let (id, at) = (record.header("id").expect("every record has an id"), record.timestamp.unwrap_or(i64::MAX));
            there.entry(id).and_modify(|first: &mut i64| *first = at.min(*first)).or_insert(at);
        }
        let early = gone.iter().filter(|(id, gone)| there.get(id.as_str()).is_none_or(|there| there > gone));
        self.gone_early = early.map(|(id, _)| id.clone()).collect();
        self.gone = gone.len();
    }

    /// How many rows retention has deleted.
    pub fn gone(&self) -> usize {
        self.gone
    }

    /// How many records came again.
    pub fn duplicates(&self) -> usize {
        self.duplicates
    }

    /// Nothing but duplicates; under exactly-once delivery not even those, and transactions that did end in the middle.
    pub fn is_clean(&self) -> bool {
        let wrong = [
            &self.unknown,
            &self.lost,
            &self.phantoms,
            &self.inversions,
            &self.mismatches,
            &self.stale,
            &self.gone_early,
        ];
        let right = wrong.iter().all(|list| list.is_empty()) && self.watched.early.is_empty();
        let once = self.aborted.is_none_or(|aborted| self.duplicates == 0 && aborted > 0);
        right && once && self.committed > 0 && self.watched.looks > 0
    }
}

/// Whether the record is what its id says, in the topic that its id says.
fn is_itself(record: &Received, id: &str, topic_and_key: &str) -> bool {
    let key = topic_and_key.rsplit('/').next().unwrap_or_default();
    record.value == payload(id).map(String::into_bytes)
        && record.key.as_deref() == Some(key.as_bytes())
        && record.topic.ends_with(&format!(".t{}", topic_of(id)))
}

/// What the database holds in the end.
struct Tables {
    /// Every event: in the outbox, or gone.
    committed: BTreeSet<String>,
    gone: BTreeMap<String, i64>,
}

impl Tables {
    fn of(world: &World) -> Self {
        // retention goes on: both in one snapshot
        let sql =
            "SELECT id, NULL FROM outbox UNION ALL SELECT id, ceil(extract(epoch FROM at) * 1000)::bigint FROM gone";
        let client = Arc::new(world.shared.connect().expect("the server runs"));
        let rows = complete(async move { client.simple_query(sql).await }).expect("the tables are there");
        let mut tables = Self { committed: BTreeSet::new(), gone: BTreeMap::new() };
        for message in rows {
            let SimpleQueryMessage::Row(row) = message else { continue };
            let id = row.get(0).expect("an id").to_owned();
            if let Some(at) = row.get(1) {
                tables.gone.insert(id.clone(), at.parse().expect("a number"));
            }
            tables.committed.insert(id);
        }
        tables
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let early: Vec<_> = self.watched.early.iter().cloned().collect();
        let mut row = |name: &str, list: &[String]| {
            let some: Vec<_> = list.iter().take(5).cloned().collect();
            writeln!(f, "{name:<24}{:>9}  {}", list.len(), some.join(" "))
        };
        row("lost", &self.lost)?;
        row("phantom", &self.phantoms)?;
        row("out of order", &self.inversions)?;
        row("old behind new", &self.stale)?;
        row("value or key differs", &self.mismatches)?;
        row("confirmed early", &early)?;
        row("ledger against table", &self.unknown)?;
        row("deleted undelivered", &self.gone_early)?;
        writeln!(f, "{:<24}{:>9}", "events committed", self.committed)?;
        writeln!(f, "{:<24}{:>9}", "deleted by retention", self.gone)?;
        writeln!(f, "{:<24}{:>9}", "records in Kafka", self.records)?;
        writeln!(f, "{:<24}{:>9}", "sent more than once", self.duplicates)?;
        if let Some(aborted) = self.aborted {
            writeln!(f, "{:<24}{aborted:>9}", "sent and not committed")?;
        }
        writeln!(f, "{:<24}{:>9}", "looks at the slot", self.watched.looks)?;
        writeln!(f, "{:<24}{:>9}", "looks without answer", self.watched.blind)?;
        write!(f, "{:<24}{:>9}", "confirms checked", self.watched.checked)
    }
}

const TABLE: [&str; 3] = ["0/k/1000001", "0/k/1000002", "1/k/2000001"];

/// A record of Kafka, as it ought to be.
fn record(id: &str) -> Received {
    Received {
        topic: format!("database.t{}", topic_of(id)),
        partition: 0,
        offset: 0,
        key: Some(b"k".to_vec()),
        value: payload(id).map(String::into_bytes),
        headers: vec![("id".to_owned(), Some(id.as_bytes().to_vec()))],
        timestamp: None,
    }
}

fn compared(records: &[Received]) -> Tally {
    let table: BTreeSet<String> = TABLE.map(str::to_owned).into();
    let tally = Tally::compare(&table, table.iter(), records);
    Tally { watched: Found { looks: 1, ..Found::default() }, ..tally }
}

#[test]
fn the_judge_is_content_with_all_in_order_and_with_repetitions() {
    let tally = compared(&[TABLE[0], TABLE[1], TABLE[0], TABLE[1], TABLE[2]].map(record));
    assert!(tally.is_clean(), "{tally}");
    assert_eq!(tally.duplicates, 2);
}

#[test]
fn the_judge_sees_what_is_lost() {
    let tally = compared(&[TABLE[0], TABLE[2]].map(record));
    assert_eq!((tally.lost.as_slice(), tally.is_clean()), (&[TABLE[1].to_owned()][..], false));
}

#[test]
fn the_judge_sees_what_was_never_committed() {
    let tally = compared(&[TABLE[0], TABLE[1], TABLE[2], "0/k/undone9"].map(record));
    assert_eq!((tally.phantoms.len(), tally.is_clean()), (1, false));
}

#[test]
fn the_judge_sees_what_was_overtaken() {
    let tally = compared(&[TABLE[1], TABLE[0], TABLE[2]].map(record));
    assert_eq!((tally.inversions.as_slice(), tally.is_clean()), (&[TABLE[0].to_owned()][..], false));
    let elsewhere = Received { partition: 1, ..record(TABLE[1]) };
    let tally = compared(&[record(TABLE[0]), elsewhere, record(TABLE[2])]);
    assert_eq!((tally.inversions.len(), tally.is_clean()), (1, false));
}

#[test]
fn the_judge_sees_an_old_event_that_was_sent_again_behind_a_newer_one() {
    let tally = compared(&[TABLE[0], TABLE[1], TABLE[0], TABLE[2]].map(record));
    assert_eq!((tally.stale.as_slice(), tally.is_clean()), (&[TABLE[0].to_owned()][..], false));
}

#[test]
fn the_judge_sees_what_was_altered_or_misplaced() {
    let right = record(TABLE[0]);
    let wrong = [
        Received { value: Some(b"payload of another".to_vec()), ..right.clone() },
        Received { value: None, ..right.clone() },
        Received { key: None, ..right.clone() },
        Received { topic: "database.t1".to_owned(), ..right.clone() },
    ];
    for altered in wrong {
        let tally = compared(&[altered, record(TABLE[1]), record(TABLE[2])]);
        assert_eq!((tally.mismatches.len(), tally.is_clean()), (1, false));
    }
}

#[test]
fn the_judge_sees_a_row_that_was_deleted_before_kafka_had_it() {
    let records = TABLE.map(|id| Received { timestamp: Some(1000), ..record(id) });
    let deleted = |id: &str, at| {
        let mut tally = compared(&records);
        tally.hold_against(&BTreeMap::from([(id.to_owned(), at)]), &records);
        (tally.gone, tally.gone_early.len(), tally.is_clean())
    };
    assert_eq!(deleted(TABLE[0], 1000), (1, 0, true));
    assert_eq!(deleted(TABLE[0], 999), (1, 1, false));
    assert_eq!(deleted("1/k/3000001", 2000), (1, 1, false), "no record at all");
}

#[test]
fn the_judge_sees_a_ledger_that_the_table_does_not_know() {
    let tally = Tally::compare(&BTreeSet::new(), [TABLE[0].to_owned()].iter(), &[]);
    assert_eq!((tally.unknown.len(), tally.is_clean()), (1, false));
}
