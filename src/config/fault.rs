//! [`Faults`]: everything that is wrong with a configuration, each with its place and its remedy.

use std::fmt;

/// Where a value stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of the file, from 1.
    File {
        /// The file's name as it was given.
        name: String,
        /// The line.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// The command line, by the key it sets.
    Flag(String),
    /// Nowhere: the value is missing.
    Unset,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Flag(key) => write!(f, "command line, {key}"),
            Self::Unset => f.write_str("nowhere set"),
        }
    }
}

/// One thing that is wrong. Holds no value that could be a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where it stands.
    pub at: Origin,
    /// The key, for example `postgres.slot`; empty where no key is to blame.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{} ", self.key)?;
        }
        write!(f, "({}): {}", self.at, self.what)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// Everything that is wrong; at least one fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a fault:")?,
            n => write!(f, "the configuration has {n} faults:")?,
        }
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}
