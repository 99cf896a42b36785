//! `[retention]`: what of the outbox is deleted, and when.

use std::time::Duration;

use super::{Located, Origin, RetentionConfig, Section};

/// `polls`: events are read from the table itself.
pub(super) fn retention(section: &mut Section<'_>, polls: bool) -> Option<RetentionConfig> {
    const DAY: Duration = Duration::from_hours(24);
    let keep = section.duration("keep", &(Duration::ZERO..=3650 * DAY));
    let batch = section.integer("batch", 1_000, &(1..=100_000));
    let interval = section.duration("interval", &(Duration::from_secs(1)..=DAY));
    let keep_dead = section.duration("keep_dead_lettered", &(Duration::ZERO..=3650 * DAY));
    let drop_partitions = section.boolean("drop_partitions", false);
    let ahead = section.integer("partitions_ahead", 0, &(0..=366));
    let minute = Located { value: Duration::from_mins(1), at: Origin::Unset };
    let interval = interval.unwrap_or(minute);
    let dead_at = keep_dead.as_ref().map_or(&Origin::Unset, |keep| &keep.at);
    let of_partitions = [("drop_partitions", &drop_partitions.at), ("partitions_ahead", &ahead.at)];
    let others = [("batch", &batch.at), ("interval", &interval.at), ("keep_dead_lettered", dead_at)];
    for (key, at) in others.into_iter().chain(of_partitions) {
        if keep.is_none() && *at != Origin::Unset {
            section.fault(at, key, "has no effect without retention.keep", "set retention.keep, for example 7d");
        }
    }
    if polls && (drop_partitions.value || ahead.value > 0) {
        let (key, at) = if drop_partitions.value { of_partitions[0] } else { of_partitions[1] };
        let remedy = "leave it out: rows are deleted one by one there; or set postgres.source = \"wal\"";
        section.fault(at, key, "has no effect where the table is polled", remedy);
    }
    if let (Some(keep), Some(dead)) = (&keep, &keep_dead)
        && dead.value < keep.value
    {
        let remedy = "set it to at least retention.keep, or leave it out to keep such rows for ever";
        section.fault(dead_at, "keep_dead_lettered", "is shorter than retention.keep", remedy);
    }
    keep.map(|keep| RetentionConfig {
        keep: keep.value,
        batch: u32::try_from(batch.value).unwrap_or(1_000),
        interval: interval.value,
        keep_dead_lettered: keep_dead.map(|keep| keep.value),
        drop_partitions: drop_partitions.value,
        partitions_ahead: u32::try_from(ahead.value).ok().filter(|ahead| *ahead > 0),
    })
}
