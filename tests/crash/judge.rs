//! What Kafka holds in the end, against the table and the ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tokio_postgres::SimpleQueryMessage;

use crate::{services::complete, watch::Found, world::World, writers::payload};

/// Everything that can be counted.
#[derive(Debug, Default)]
pub struct Tally {
    committed: usize,
    records: usize,
    looks: u64,
    /// Committed by the ledger's word and not in the table: then the kit itself is wrong.
    unknown: Vec<String>,
    pub lost: Vec<String>,
    pub phantoms: Vec<String>,
    pub inversions: Vec<String>,
    pub mismatches: Vec<String>,
    pub early: Vec<String>,
    duplicates: usize,
}

impl Tally {
    /// Heals the world, ends it and counts.
    pub fn of(world: &World) -> Self {
        world.heal();
        let found = world.watch.join();
        Self::count(world, found)
    }

    /// Counts what there is now.
    pub fn count(world: &World, found: Found) -> Self {
        let shared = &world.shared;
        let table = table(world);
        let topics = shared.topics();
        let topics: Vec<_> = topics.iter().map(String::as_str).collect();
        let records = shared.kafka.read_all(&topics);
        let ledger = world.writers.ledger.lock().expect("no panic");
        let mut tally = Self {
            committed: table.len(),
            records: records.len(),
            looks: found.looks,
            early: found.early,
            unknown: ledger.keys().filter(|id| !table.contains(*id)).cloned().collect(),
            ..Self::default()
        };
        let (mut seen, mut last) = (BTreeSet::new(), BTreeMap::new());
        for record in &records {
            let id = record.header("id").expect("every record has an id");
            if !table.contains(id) {
                tally.phantoms.push(id.to_owned());
                continue;
            }
            let (topic_and_key, number) = id.rsplit_once('/').expect("an id of ours");
            let key = topic_and_key.rsplit('/').next().unwrap_or_default();
            if record.value.as_deref() != Some(payload(id).as_bytes()) || record.key.as_deref() != Some(key.as_bytes())
            {
                tally.mismatches.push(id.to_owned());
            }
            if !seen.insert(id) {
                tally.duplicates += 1;
                continue;
            }
            let place = (record.partition, number.parse::<u64>().unwrap_or_default());
            let (partition, before) = last.insert(topic_and_key, place).unwrap_or(place);
            if partition != place.0 || before > place.1 {
                tally.inversions.push(id.to_owned());
            }
        }
        tally.lost = table.iter().filter(|id| !seen.contains(id.as_str())).cloned().collect();
        tally
    }

    /// Nothing but duplicates.
    pub fn is_clean(&self) -> bool {
        let wrong = [&self.unknown, &self.lost, &self.phantoms, &self.inversions, &self.mismatches, &self.early];
        wrong.iter().all(|list| list.is_empty()) && self.committed > 0 && self.looks > 0
    }
}

/// What is committed: nothing is ever deleted.
fn table(world: &World) -> BTreeSet<String> {
    let client = Arc::new(world.shared.connect().expect("the server runs"));
    let rows = complete(async move { client.simple_query("SELECT id FROM outbox").await }).expect("the table is there");
    let ids = rows.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    ids.collect()
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, list: &[String]| {
            let some: Vec<_> = list.iter().take(5).cloned().collect();
            writeln!(f, "{name:<24}{:>9}  {}", list.len(), some.join(" "))
        };
        row("lost", &self.lost)?;
        row("phantom", &self.phantoms)?;
        row("out of order", &self.inversions)?;
        row("value or key differs", &self.mismatches)?;
        row("confirmed early", &self.early)?;
        row("ledger against table", &self.unknown)?;
        writeln!(f, "{:<24}{:>9}", "events committed", self.committed)?;
        writeln!(f, "{:<24}{:>9}", "records in Kafka", self.records)?;
        writeln!(f, "{:<24}{:>9}", "sent more than once", self.duplicates)?;
        write!(f, "{:<24}{:>9}", "looks at the slot", self.looks)
    }
}
