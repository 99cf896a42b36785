//! What an operator sees: metrics, health, HTTP, logging. Reads the pipeline's state; never steers it.

pub mod health;
pub mod history;
pub mod http;
pub mod log;
pub mod metrics;
pub mod monitor;
pub mod once;
mod overview;
mod page;
pub mod progress;
pub mod service_manager;
pub mod slot;
pub mod status;

pub use health::{Health, NOT_REACHED_YET, NOT_SEEN_YET, Part};
pub use history::History;
pub use metrics::Metrics;
pub use monitor::Monitor;
pub use progress::{Progress, Stage};
pub use slot::{Observation, ServerState, SlotReading, SlotState, WalStatus};
pub use status::{Status, View};
