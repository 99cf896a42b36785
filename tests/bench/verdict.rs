//! Medians, and what they are held against.

use std::{fmt, fs};

/// A target.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// Reached from here upwards.
    AtLeast(f64),
    /// Reached from here downwards.
    AtMost(f64),
}

/// A measured value and its target.
#[derive(Debug)]
pub struct Verdict {
    /// Whose value, and of what.
    pub what: String,
    /// The median.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What it should be.
    pub target: Target,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (met, sign, bound) = match self.target {
            Target::AtLeast(bound) => (self.value >= bound, '≥', bound),
            Target::AtMost(bound) => (self.value <= bound, '≤', bound),
        };
        let Self { what, value, unit, .. } = self;
        write!(f, "{what:<64} {value:>8.2} {unit:<8} {sign} {bound:<5} {}", if met { "met" } else { "NOT MET" })
    }
}

/// The middle one; of two, their mean.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    f64::midpoint(values[low], values[high])
}

/// The value below which a share of the sorted values lies.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let index = (share * sorted.len() as f64) as usize;
    sorted[index.min(sorted.len() - 1)]
}

/// Processor, cores, memory and load, in one line.
pub fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1)).unwrap_or("unknown");
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = memory.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{cores} cores of {model}, {} GB, load {}", kilobytes / 1_000_000, load())
}

/// The load averages of 1, 5 and 15 minutes.
pub fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
