//! [`Run`]: the loop that joins rows, stages and sink until every row is acknowledged.
//!
//! To the sink each row is a transaction of its own, with the row's number for a position: so what is durable is a number of
//! rows, and a sink that fails costs no repetition of what was acknowledged before. What consumers read in
//! `walpost_position` is another thing.

use std::time::Duration;

use tokio::time::Instant;

use super::{BackfillError, Reading};
use crate::{
    clock,
    event::Position,
    fault,
    lsn::Lsn,
    pipeline::{Open, Sent, SessionError, Signals, Stages, Telltale, Wish},
    sink::{KafkaSink, Sink},
};

/// After so many rows the loop looks at wishes and reports, however much more has arrived.
const ROWS_PER_TURN: u32 = 512;
/// How often it looks around while nothing happens.
const LOOK: Duration = Duration::from_millis(250);
/// How often it tells how far it is.
const TELL: Duration = Duration::from_secs(5);
/// What a limited rate may make up for after a delay.
const CATCH_UP: Duration = Duration::from_millis(100);

/// How the rows ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// The brokers have every one.
    Complete,
    /// The operator wants the end.
    Interrupted,
}

/// What a turn stopped for.
enum Pause {
    /// A look around.
    Nothing,
    /// The next row has not arrived.
    Rows,
    /// The sink has no room.
    Room,
    /// The rate.
    Until(Instant),
    /// All rows are handed over.
    End,
}

/// State of the loop.
pub(super) struct Run<'a> {
    reading: &'a mut Reading,
    /// Of the next row, from 0.
    number: u64,
    /// The row before which everything was acknowledged at the start.
    first: u64,
    began: bool,
    rate: u32,
    due: Instant,
    started: Instant,
    told: Instant,
    telltale: Telltale<'a>,
}

impl<'a> Run<'a> {
    pub(super) fn new(reading: &'a mut Reading, first: u64, rate: u32, telltale: Telltale<'a>) -> Self {
        let now = Instant::now();
        Self { reading, number: first, first, began: false, rate, due: now, started: now, told: now, telltale }
    }

    /// How many rows are acknowledged, from the first on.
    pub(super) fn done(&self, sink: &KafkaSink) -> u64 {
        if self.began { sink.durable().0 } else { self.first }
    }

    pub(super) async fn publish(
        &mut self,
        sink: &mut KafkaSink,
        stages: &mut Stages,
        signals: &mut Signals,
    ) -> Result<Filled, SessionError> {
        sink.recover(Lsn(self.first))?;
        self.began = true;
        stages.forget();
        for relation in self.reading.snapshot.relations() {
            stages.describe(relation, Lsn(u64::MAX))?;
        }
        self.reading.snapshot.seek(self.first).await?;
        tracing::info!(
            rows = self.reading.snapshot.total(),
            acknowledged = self.first,
            position = %self.reading.base,
            "backfilling: publishing rows that are in the table"
        );
        loop {
            if *signals.wish.borrow_and_update() > Wish::Run {
                return Ok(Filled::Interrupted);
            }
            sink.tick(0)?;
            let held = *signals.pause.borrow_and_update();
            let pause = if held { Pause::Until(Instant::now() + LOOK) } else { self.work(sink, stages)? };
            self.tell(sink);
            let wake = match pause {
                Pause::Nothing => {
                    tokio::task::yield_now().await;
                    continue;
                }
                Pause::End if sink.in_flight().0 == 0 => {
                    tracing::info!(rows = self.number, "backfilled: the brokers have every row");
                    return Ok(Filled::Complete);
                }
                Pause::Until(due) => due,
                Pause::Rows | Pause::Room | Pause::End => Instant::now() + LOOK,
            };
            // the order: wishes first, then news that make room or bring work, the timer last
            tokio::select! {
                biased;
                Ok(()) = signals.wish.changed() => {}
                Ok(()) = signals.pause.changed() => {}
                () = sink.ready(), if matches!(pause, Pause::Room | Pause::End) => {}
                moved = self.reading.snapshot.drive(), if matches!(pause, Pause::Rows) => {
                    moved.map_err(BackfillError::from)?;
                }
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    fn work(&mut self, sink: &mut KafkaSink, stages: &mut Stages) -> Result<Pause, SessionError> {
        let now = Instant::now();
        for _ in 0..ROWS_PER_TURN {
            if self.rate > 0 && self.due > now {
                return Ok(Pause::Until(self.due));
            }
            let Some((relation, row)) = self.reading.snapshot.peek().map_err(BackfillError::from)? else {
                return Ok(if self.reading.snapshot.is_exhausted() { Pause::End } else { Pause::Rows });
            };
            let base = self.reading.base;
            let position = Position { ordinal: base.ordinal + self.number, ..base };
            let open = Open { commit_us: clock::unix_us(), position, row: Some(self.number) };
            if stages.publish(relation.oid, row, open, sink)? == Sent::Full {
                return Ok(Pause::Room);
            }
            self.reading.snapshot.consume();
            self.number += 1;
            sink.seal(Lsn(self.number));
            fault::point("in_backfill");
            if self.rate > 0 {
                let behind = now.checked_sub(CATCH_UP).unwrap_or(now);
                self.due = self.due.max(behind) + Duration::from_secs(1) / self.rate;
            }
        }
        Ok(Pause::Nothing)
    }

    fn tell(&mut self, sink: &KafkaSink) {
        let confirmed = self.telltale.progress.confirmed_lsn();
        self.telltale.progress.set(confirmed, confirmed, sink.in_flight(), sink.oldest_commit_us());
        if self.told.elapsed() >= TELL {
            self.told = Instant::now();
            let (acknowledged, total) = (sink.durable().0, self.reading.snapshot.total());
            let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
            let per_second = (acknowledged - self.first.min(acknowledged)) * 1000 / millis;
            tracing::info!(acknowledged, total, per_second, "backfilling");
        }
    }
}
