//! All partitions of one table in a pass: those to come are created, delivered ones are dropped.

use tokio::time::Instant;
use tokio_postgres::Client;

use super::{
    dropping::Fate,
    partitions::{Created, Partitions, contain},
    pass::{PassError, Plan},
    record::Record,
};
use crate::config::{OutboxConfig, RetentionConfig};

/// What became of a table's partitions. Names are SQL.
#[derive(Debug, Default)]
pub struct Kept {
    /// Created.
    pub created: Vec<String>,
    /// Dropped, with so many rows; or would be.
    pub dropped: Vec<(String, u64)>,
    /// They have ended, and hold rows that must stay.
    pub staying: Vec<String>,
    /// They have ended, and somebody uses them.
    pub busy: Vec<String>,
    /// Those that will be dropped whole, later: nothing is deleted from them.
    pub spared: Vec<u32>,
    /// Why none is created or dropped at all.
    pub unfit: Option<PassError>,
    /// What was refused about single ones.
    pub refused: Vec<PassError>,
}

impl Kept {
    /// Rows in the partitions that were dropped.
    pub fn rows(&self) -> u64 {
        self.dropped.iter().map(|(_, rows)| rows).sum()
    }

    fn take(&mut self, created: Result<Created, PassError>) -> Result<(), PassError> {
        match created {
            Ok(created) => {
                self.created.extend(created.names);
                self.refused = created.refused;
            }
            Err(error) => self.refused.push(contain(error)?),
        }
        Ok(())
    }
}

/// Keeps the partitions of a table as configured; `only_look`: says what would be dropped. Fails where the link does.
pub async fn keep(
    client: &Client,
    (outbox, plan): (&OutboxConfig, &Plan),
    (retention, record): (&RetentionConfig, &Record),
    only_look: bool,
) -> Result<Kept, PassError> {
    let mut kept = Kept::default();
    let partitions = match Partitions::make(client, (outbox, plan), retention, record).await {
        Ok(Some(partitions)) => partitions,
        Ok(None) => return Ok(kept),
        Err(error @ PassError::Unfit { .. }) => return Ok(Kept { unfit: Some(error), ..kept }),
        Err(error) => return Err(error),
    };
    let began = Instant::now();
    let mut next_creation = began;
    if !only_look {
        kept.take(partitions.create(client, plan).await)?;
        next_creation += retention.interval;
    }
    let wholes = match partitions.whole(client, plan, retention.keep).await {
        Ok(wholes) => wholes,
        Err(error) => {
            kept.refused.push(contain(error)?);
            Vec::new()
        }
    };
    for whole in wholes {
        if !whole.has_ended {
            kept.spared.push(whole.relation);
            continue;
        }
        // looking at many rows takes its time, and partitions are needed meanwhile
        if !only_look && Instant::now() >= next_creation {
            kept.take(partitions.create(client, plan).await)?;
            next_creation = Instant::now() + retention.interval;
        }
        match partitions.drop(client, (plan, &whole), only_look).await {
            Ok(Fate::Dropped(rows)) => kept.dropped.push((whole.name, rows)),
            Ok(Fate::Stays) => kept.staying.push(whole.name),
            Ok(Fate::Busy) => {
                kept.spared.push(whole.relation);
                kept.busy.push(whole.name);
            }
            Err(error @ PassError::Unfit { .. }) => kept.refused.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok(kept)
}

/// Only creates the partitions to come.
pub async fn create(
    client: &Client,
    (outbox, plan): (&OutboxConfig, &Plan),
    (retention, record): (&RetentionConfig, &Record),
) -> Result<Kept, PassError> {
    let mut kept = Kept::default();
    match Partitions::make(client, (outbox, plan), retention, record).await {
        Ok(Some(partitions)) => kept.take(partitions.create(client, plan).await)?,
        Ok(None) => {}
        Err(error) => kept.unfit = Some(contain(error)?),
    }
    Ok(kept)
}
