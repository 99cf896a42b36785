//! Logging: which events are written, and how a line looks. All lines go to standard error.

use std::{
    io::{self, IsTerminal},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Reads a level or a filter such as `walpost=debug,info`. The error says what is wrong.
///
/// A bare word is a level, or an error: the filter syntax would take a misspelt level for the name of a module.
pub fn filter(text: &str) -> Result<EnvFilter, String> {
    for directive in text.split(',').map(str::trim) {
        let bare = !directive.contains(['=', '[']);
        if bare && !LEVELS.iter().any(|level| level.eq_ignore_ascii_case(directive)) {
            return Err(format!("`{directive}` is no level"));
        }
    }
    EnvFilter::builder().parse(text).map_err(|error| format!("is no filter: {error}"))
}

/// Starts logging for this process; a second call changes nothing. `level` is one that [`filter`] takes, else `info`.
pub fn init(format: LogFormat, level: &str) {
    let filter = filter(level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && format == LogFormat::Text);
    // An error here means that a logger is installed already, as in tests.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
    };
}

/// Lets some lines of a kind through, so that a flood of them does not fill a disk.
#[derive(Debug, Default)]
pub struct Sparse {
    /// Begin of the present window, lines in it, lines left out since the last one that was let through.
    state: Mutex<(Option<Instant>, u32, u64)>,
}

impl Sparse {
    const WINDOW: Duration = Duration::from_mins(1);
    const LINES: u32 = 10;

    /// Nothing was let through yet.
    pub const fn new() -> Self {
        Self { state: Mutex::new((None, 0, 0)) }
    }

    /// Whether a line may be written now; then, how many were left out before it.
    pub fn turn(&self) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, lines, untold) = &mut *state;
        if since.is_none_or(|since| since.elapsed() >= Self::WINDOW) {
            (*since, *lines) = (Some(Instant::now()), 0);
        }
        if *lines >= Self::LINES {
            *untold += 1;
            return None;
        }
        *lines += 1;
        Some(std::mem::take(untold))
    }
}

#[cfg(test)]
mod tests {
    use super::{Sparse, filter};

    #[test]
    fn a_flood_of_lines_is_thinned_out() {
        let sparse = Sparse::new();
        let told = (0..1000).filter_map(|_| sparse.turn()).collect::<Vec<_>>();
        assert_eq!(told, [0; 10]);
        assert_eq!(sparse.state.lock().unwrap().2, 990);
    }

    #[test]
    fn levels_and_filters_are_read() {
        for text in ["info", "WARN", "off", "walpost=debug,info", "librdkafka=trace, warn", "walpost[session]=debug"] {
            assert!(filter(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_misspelt_level_is_not_taken_for_a_module() {
        for text in ["inof", "walpost", "walpost=debug,inof", "walpost=loud", ""] {
            assert!(filter(text).is_err(), "{text}");
        }
    }
}
