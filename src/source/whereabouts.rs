//! [`Whereabouts`]: which log is read, so that a position in it means something.

use super::{SourceError, Wire};
use crate::lsn::Lsn;

/// The log that a slot reads, and how far it goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// The cluster's system identifier, which a standby shares with its primary.
    pub system: String,
    /// The timeline: one more after each promotion.
    pub timeline: u32,
    /// The database.
    pub database: String,
    /// What is flushed of the log.
    pub wal_end: Lsn,
    /// Where earlier timelines ended, each with its number.
    pub switches: Vec<(u32, Lsn)>,
}

/// Asks the server, through the replication connection itself.
pub async fn ask(wire: &mut Wire) -> Result<Whereabouts, SourceError> {
    let rows = wire.query("IDENTIFY_SYSTEM").await?;
    let text = |index: usize| rows.first().and_then(|row| row.get(index)).and_then(Option::as_deref);
    let parsed = || Some((text(0)?, text(1)?.parse().ok()?, text(2)?.parse().ok()?, text(3)?));
    let Some((system, timeline, wal_end, database)) = parsed() else {
        return Err(SourceError::Protocol("an answer to IDENTIFY_SYSTEM without its columns".into()));
    };
    let (system, database) = (system.to_owned(), database.to_owned());
    let switches = if timeline > 1 { history(wire, timeline).await? } else { Vec::new() };
    Ok(Whereabouts { system, timeline, database, wal_end, switches })
}

async fn history(wire: &mut Wire, timeline: u32) -> Result<Vec<(u32, Lsn)>, SourceError> {
    let rows = wire.query(&format!("TIMELINE_HISTORY {timeline}")).await?;
    let text = rows.first().and_then(|row| row.get(1)).and_then(Option::as_deref);
    Ok(text.map(switches).unwrap_or_default())
}

/// Reads a history file: a line for each earlier timeline, its number, where it ended, and why; or a comment.
/// <https://www.postgresql.org/docs/current/continuous-archiving.html#BACKUP-TIMELINES>
fn switches(history: &str) -> Vec<(u32, Lsn)> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    history.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_file_says_where_each_timeline_ended() {
        let history = "# none before\n1\t0/16B3748\tno recovery target specified\n\n2\t1/0\tbefore transaction 7\n";
        assert_eq!(switches(history), [(1, Lsn(0x16B_3748)), (2, Lsn(1 << 32))]);
    }
}
