//! Retention: deletes rows of the outbox that are older than `retention.keep` *and* known to have been delivered.
//!
//! The hard part is to know. A row's age proves nothing, and neither does the slot's position alone: a slot that was
//! made anew, or moved by hand, stands behind rows that never left. So walpost keeps a record ([`record`], two small
//! tables beside the outbox) of which transactions it has seen through to the end by itself: all with an xid from
//! `since` to before `until`. [`fence`] decides what may go into that record, without I/O; [`pass`] deletes by it,
//! [`partitions`] creates whole partitions and [`dropping`] drops them, [`keeping`] all of a table's; [`upkeep`] does all of it
//! on a schedule, over a link of its own. Must never touch the replication socket, and never end the process.

mod age;
mod bounds;
pub mod dropping;
pub mod fence;
pub mod keeping;
pub mod late;
pub mod partitions;
pub mod pass;
pub mod record;
mod statements;
pub mod upkeep;
mod witness;

pub use witness::Witness;
