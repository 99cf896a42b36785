//! The page of all settings (`docs/configuration.md`), out of the example file, which a test holds against the code.

use std::fmt::Write as _;

use super::reader::variable;

const EXAMPLE: &str = include_str!("../../deploy/walpost.example.toml");

const INTRODUCTION: &str = "\
# Configuration

Written by `walpost generate configuration` from [`deploy/walpost.example.toml`](../deploy/walpost.example.toml), which is also a file
to start from. A test fails when this page, the example and the code differ.

Settings come from a TOML file (`--config FILE`, else `./walpost.toml` where it exists), over it from the environment, over that from
flags (`--set section.key=value` sets any key). Unknown keys are errors, with the nearest known key named, and all faults are
reported at once. Where the environment says enough, no file is needed. Tables and arrays are written inline in the environment:
`WALPOST_ROUTE_RULES='[{event_type = \"order.*\", topic = \"orders\"}]'`.

What the settings of a key are for when they work together: [ordering](ordering.md), [sizing](sizing.md), [security](security.md).
";

/// The page, as Markdown.
pub fn reference() -> String {
    let mut page = Page { text: INTRODUCTION.to_owned(), section: String::new(), said: Vec::new() };
    // what stands before the first section is about the file itself
    let (_, sections) = EXAMPLE.split_once("\n\n").unwrap_or_default();
    for line in sections.lines() {
        page.take(line);
    }
    page.text
}

struct Page {
    text: String,
    section: String,
    /// Comment lines since the last key.
    said: Vec<String>,
}

impl Page {
    fn take(&mut self, line: &str) {
        let (off, bare) = line.strip_prefix("# ").map_or((false, line), |bare| (true, bare));
        if bare.starts_with('[') && bare.ends_with(']') {
            self.begin(bare);
        } else if let Some((key, value)) = bare.split_once(" = ").filter(|(key, _)| is_key(key)) {
            self.key(key, value, off);
        } else if off {
            self.said.push(bare.to_owned());
        }
    }

    fn begin(&mut self, header: &str) {
        header.trim_matches(['[', ']']).clone_into(&mut self.section);
        let said = self.said();
        let _ = write!(self.text, "\n## `{header}`\n{}", if said.is_empty() { said } else { format!("\n{said}\n") });
    }

    fn key(&mut self, key: &str, value: &str, off: bool) {
        let dotted = format!("{}.{}", self.section, key.trim_matches('"'));
        let (said, variable) = (self.said(), variable(&dotted));
        let stated = match (self.section.as_str(), off) {
            // free keys: what stands there is one of many
            ("outbox.header_columns" | "kafka.properties" | "route.rules", _) => {
                format!("for example `{key} = {value}`")
            }
            ("postgres", false) if key == "url" => format!("`{variable}`, for example `{value}`"),
            (_, false) => format!("`{variable}`, default `{value}`"),
            (_, true) => format!("`{variable}`, default unset, for example `{value}`"),
        };
        let _ = writeln!(self.text, "\n- **`{dotted}`**: {stated}");
        if !said.is_empty() {
            let _ = writeln!(self.text, "  <br>{said}");
        }
    }

    fn said(&mut self) -> String {
        std::mem::take(&mut self.said).join("\n  ")
    }
}

fn is_key(text: &str) -> bool {
    let bare = text.trim_matches('"');
    !bare.is_empty() && bare.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_' || byte == b'.')
}
