//! [`Batch`]: what is in the Kafka transaction that is open, and what is counted when it is committed.

use tokio::time::Instant;

/// Events of one transaction of Postgres.
#[derive(Debug, Clone, Copy)]
struct Commits {
    commit_us: i64,
    events: u64,
}

/// The records of an open Kafka transaction.
#[derive(Debug, Default)]
pub struct Batch {
    /// When the first one was handed over.
    since: Option<Instant>,
    events: u64,
    bytes: u64,
    /// By the number of the account: records and bytes.
    accounts: Vec<(u64, u64)>,
    commits: Vec<Commits>,
}

impl Batch {
    /// A record was handed over.
    pub fn add(&mut self, now: impl FnOnce() -> Instant, account: u32, weight: u64, commit_us: i64) {
        self.since.get_or_insert_with(now);
        self.events += 1;
        self.bytes += weight;
        let index = account as usize;
        if index >= self.accounts.len() {
            self.accounts.resize(index + 1, (0, 0));
        }
        self.accounts[index].0 += 1;
        self.accounts[index].1 += weight;
        match self.commits.last_mut() {
            Some(last) if last.commit_us == commit_us => last.events += 1,
            _ => self.commits.push(Commits { commit_us, events: 1 }),
        }
    }

    /// Records and bytes.
    pub fn size(&self) -> (u64, u64) {
        (self.events, self.bytes)
    }

    /// When the first record was handed over.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }

    /// Commit time of the oldest transaction; 0 when there is none.
    pub fn oldest_commit_us(&self) -> i64 {
        self.commits.first().map_or(0, |commits| commits.commit_us)
    }

    /// Each account that has records: its number, records and bytes.
    pub fn accounts(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        let numbered = (0_u32..).zip(&self.accounts);
        numbered.filter(|(_, (events, _))| *events > 0).map(|(number, (events, bytes))| (number, *events, *bytes))
    }

    /// Commit time and number of events of each transaction.
    pub fn commits(&self) -> impl Iterator<Item = (i64, u64)> {
        self.commits.iter().map(|commits| (commits.commit_us, commits.events))
    }

    /// Forgets all; what it has allocated stays.
    pub fn clear(&mut self) {
        (self.since, self.events, self.bytes) = (None, 0, 0);
        self.accounts.fill((0, 0));
        self.commits.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_by_account_and_by_transaction_and_begins_anew() {
        let mut batch = Batch::default();
        let now = Instant::now();
        for (account, weight, commit_us) in [(2, 10, 5), (0, 1, 5), (2, 20, 6)] {
            batch.add(|| now, account, weight, commit_us);
        }
        assert_eq!((batch.size(), batch.since(), batch.oldest_commit_us()), ((3, 31), Some(now), 5));
        assert_eq!(batch.accounts().collect::<Vec<_>>(), [(0, 1, 1), (2, 2, 30)]);
        assert_eq!(batch.commits().collect::<Vec<_>>(), [(5, 2), (6, 1)]);
        batch.clear();
        assert_eq!((batch.size(), batch.since(), batch.oldest_commit_us()), ((0, 0), None, 0));
        assert_eq!(batch.accounts().count() + batch.commits().count(), 0);
    }
}
