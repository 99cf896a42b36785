//! All partitions of one table in a pass: those to come are created, delivered ones are dropped.

use tokio::time::Instant;
use tokio_postgres::Client;

use super::{
    dropping::Fate,
    partitions::{Partitions, Whole, contain},
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
    /// Why some were not created, at the last try.
    pub uncreated: Vec<PassError>,
    /// Why some were not dropped.
    pub refused: Vec<PassError>,
}

impl Kept {
    /// Rows in the partitions that were dropped.
    pub fn rows(&self) -> u64 {
        self.dropped.iter().map(|(_, rows)| rows).sum()
    }
}

/// Keeps the partitions of a table as configured. What is refused is in `kept`; what fails is the link.
#[derive(Debug)]
pub struct Keeper {
    /// `None`: there are none to keep.
    partitions: Option<Partitions>,
    /// So far.
    pub kept: Kept,
    retention: RetentionConfig,
    next_creation: Instant,
}

impl Keeper {
    /// Looks what there is to keep.
    pub async fn start(
        client: &Client,
        (outbox, plan): (&OutboxConfig, &Plan),
        (retention, record): (&RetentionConfig, &Record),
    ) -> Result<Self, PassError> {
        let (partitions, unfit) = match Partitions::make(client, (outbox, plan), retention, record).await {
            Ok(partitions) => (partitions, None),
            Err(error) => (None, Some(contain(error)?)),
        };
        let kept = Kept { unfit, ..Kept::default() };
        Ok(Self { partitions, kept, retention: *retention, next_creation: Instant::now() })
    }

    /// Creates the partitions to come.
    pub async fn create(&mut self, client: &Client, plan: &Plan) -> Result<(), PassError> {
        let Some(partitions) = &self.partitions else { return Ok(()) };
        match partitions.create(client, plan).await {
            Ok(created) => {
                self.kept.created.extend(created.names);
                self.kept.uncreated = created.refused;
            }
            Err(error) => self.kept.uncreated = vec![contain(error)?],
        }
        self.next_creation = Instant::now() + self.retention.interval;
        Ok(())
    }

    /// Drops those whose rows may all go; `only_look`: says what would be dropped.
    pub async fn drop(&mut self, client: &Client, plan: &Plan, only_look: bool) -> Result<(), PassError> {
        let Some(partitions) = &self.partitions else { return Ok(()) };
        let wholes = match partitions.whole(client, plan, self.retention.keep).await {
            Ok(wholes) => wholes,
            Err(error) => {
                self.kept.refused.push(contain(error)?);
                return Ok(());
            }
        };
        for whole in wholes {
            if !whole.has_ended {
                self.kept.spared.push(whole.relation);
                continue;
            }
            // looking at many rows takes its time, and partitions are needed meanwhile
            if !only_look && Instant::now() >= self.next_creation {
                self.create(client, plan).await?;
            }
            self.drop_one(client, plan, (whole, only_look)).await?;
        }
        Ok(())
    }

    async fn drop_one(
        &mut self,
        client: &Client,
        plan: &Plan,
        (whole, only_look): (Whole, bool),
    ) -> Result<(), PassError> {
        let Some(partitions) = &self.partitions else { return Ok(()) };
        let kept = &mut self.kept;
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
        Ok(())
    }
}
