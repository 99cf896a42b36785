//! [`Reader`] and [`Section`]: take typed values by key out of flags, environment and file, in that order.
//!
//! Taking a key is what makes it known. What nobody took is reported at the end, with the nearest known key: so the list
//! of keys is the code that reads them. Faults are collected; a faulty value reads as its default.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use super::{
    fault::{Fault, Origin},
    nearest,
    value::{Entries, Node, Value, parse_inline},
};

/// The three layers, and what was found wrong with them.
pub(super) struct Reader {
    /// Variable → value, those that begin with `WALPOST_` and were not taken yet.
    environment: BTreeMap<String, String>,
    /// Key → value, not taken yet.
    flags: BTreeMap<String, String>,
    known: Vec<String>,
    unknown: Vec<(String, Origin)>,
    faults: Vec<Fault>,
}

impl Reader {
    pub fn new(environment: BTreeMap<String, String>, flags: &[(String, String)]) -> Self {
        Self {
            environment,
            flags: flags.iter().cloned().collect(),
            known: Vec::new(),
            unknown: Vec::new(),
            faults: Vec::new(),
        }
    }

    /// The section that holds all others.
    pub fn root(&mut self, entries: Entries) -> Section<'_> {
        Section { reader: self, path: String::new(), entries, layered: true, at: Origin::Unset }
    }

    pub fn add(&mut self, fault: Fault) {
        self.faults.push(fault);
    }

    /// Every fault, after what was not taken has been added to them; and every key that was asked for.
    pub fn finish(mut self) -> (Vec<Fault>, Vec<String>) {
        self.known.sort();
        self.known.dedup();
        for (key, at) in self.unknown {
            self.faults.push(nearest::unknown_key(key, at, &self.known));
        }
        for key in self.flags.into_keys() {
            let at = Origin::Flag(key.clone());
            self.faults.push(nearest::unknown_key(key, at, &self.known));
        }
        for name in self.environment.into_keys() {
            self.faults.push(nearest::unknown_variable(&name, &self.known));
        }
        (self.faults, self.known)
    }
}

/// The environment variable that overrides a key.
pub(super) fn variable(key: &str) -> String {
    format!("WALPOST_{}", key.to_uppercase().replace('.', "_"))
}

/// What is said of a key that is required and not there.
pub(super) const MISSING: &str = "is missing";

/// A value and where it stands.
pub(super) struct Located<T> {
    pub value: T,
    pub at: Origin,
}

/// One table.
pub(super) struct Section<'r> {
    reader: &'r mut Reader,
    path: String,
    entries: Entries,
    /// False for an element of an array: no variable or flag can mean it.
    layered: bool,
    at: Origin,
}

impl Section<'_> {
    /// A nested table.
    pub fn section(&mut self, key: &str) -> Section<'_> {
        let node = self.take(key);
        let layered = self.layered;
        self.nested(key, node, layered)
    }

    /// An element of the array `key`, or the table `key` itself, when its node has been taken already.
    pub fn nested(&mut self, key: &str, node: Option<Node>, layered: bool) -> Section<'_> {
        let at = node.as_ref().map_or(Origin::Unset, |node| node.at.clone());
        let entries = node.map_or_else(Vec::new, |node| self.table_of(key, node));
        Section { path: self.dotted(key), reader: self.reader, entries, layered, at }
    }

    /// Reports what was not taken.
    pub fn close(self) {
        let unknown = self.entries.into_iter().map(|(key, node)| (join(&self.path, &key), node.at));
        self.reader.unknown.extend(unknown);
    }

    /// Takes a key from the first layer that has it.
    pub fn take(&mut self, key: &str) -> Option<Node> {
        let dotted = self.dotted(key);
        self.reader.known.push(dotted.clone());
        let position = self.entries.iter().position(|(name, _)| name == key);
        let in_file = position.map(|position| self.entries.remove(position).1);
        if !self.layered {
            return in_file;
        }
        let name = variable(&dotted);
        let in_environment = self.reader.environment.remove(&name);
        let in_environment = in_environment.map(|text| Node::raw(text, Origin::Variable(name)));
        let flag = self.reader.flags.remove(&dotted).map(|text| Node::raw(text, Origin::Flag(dotted)));
        flag.or(in_environment).or(in_file)
    }

    /// Takes a table or an array, which a variable or flag writes as inline TOML.
    pub fn take_typed(&mut self, key: &str) -> Option<Node> {
        let Node { value, at } = self.take(key)?;
        self.typed(key, value, &at).map(|value| Node { value, at })
    }

    /// Takes text; empty text is a fault.
    pub fn text(&mut self, key: &str) -> Option<Located<String>> {
        let text = self.text_or_empty(key)?;
        if text.value.is_empty() {
            self.fault(&text.at, key, "is empty", "give it a value, or leave it out");
            return None;
        }
        Some(text)
    }

    /// Takes text that may be empty.
    pub fn text_or_empty(&mut self, key: &str) -> Option<Located<String>> {
        let Node { value, at } = self.take(key)?;
        match value {
            Value::Raw(value) | Value::Text(value) => Some(Located { value, at }),
            _ => {
                self.fault(&at, key, "must be text", "put it in quotes");
                None
            }
        }
    }

    /// Takes a whole number within bounds.
    pub fn integer(&mut self, key: &str, default: i64, bounds: &RangeInclusive<i64>) -> Located<i64> {
        let Some(Node { value, at }) = self.take(key) else { return Located { value: default, at: Origin::Unset } };
        let number = match value {
            Value::Integer(number) => Some(number),
            Value::Raw(text) => text.trim().replace('_', "").parse().ok(),
            _ => None,
        };
        if let Some(value) = number.filter(|number| bounds.contains(number)) {
            return Located { value, at };
        }
        let what = format!("must be a whole number from {} to {}", bounds.start(), bounds.end());
        self.fault(&at, key, what, format!("the default is {default}"));
        Located { value: default, at }
    }

    /// Takes `true` or `false`.
    pub fn boolean(&mut self, key: &str, default: bool) -> Located<bool> {
        let Some(Node { value, at }) = self.take(key) else { return Located { value: default, at: Origin::Unset } };
        let boolean = match value {
            Value::Boolean(boolean) => Some(boolean),
            Value::Raw(text) => text.trim().parse().ok(),
            _ => None,
        };
        if let Some(value) = boolean {
            return Located { value, at };
        }
        self.fault(&at, key, "must be true or false", format!("the default is {default}"));
        Located { value: default, at }
    }

    /// Takes one of a few words; the first is the default.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> T {
        let default = choices[0].1;
        let Some(text) = self.text(key) else { return default };
        let found = choices.iter().find(|(name, _)| *name == text.value);
        found.map_or_else(
            || {
                let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
                let remedy = format!("the default is {}", names[0]);
                self.fault(&text.at, key, format!("must be one of {}", names.join(", ")), remedy);
                default
            },
            |(_, value)| *value,
        )
    }

    /// Takes a duration such as `7d` or `1m 30s`, within bounds.
    pub fn duration(&mut self, key: &str, bounds: &RangeInclusive<Duration>) -> Option<Located<Duration>> {
        let Located { value, at } = self.text(key)?;
        let duration = humantime::parse_duration(&value).ok().filter(|duration| bounds.contains(duration));
        if duration.is_none() {
            let show = humantime::format_duration;
            let what = format!("must be a duration from {} to {}", show(*bounds.start()), show(*bounds.end()));
            self.fault(&at, key, what, "write a number with its unit, for example 30s, 5m, 12h or 7d");
        }
        duration.map(|value| Located { value, at })
    }

    /// Takes an array.
    pub fn array(&mut self, key: &str) -> Vec<Node> {
        match self.take_typed(key) {
            Some(Node { value: Value::Array(items), .. }) => items,
            Some(Node { at, .. }) => {
                self.fault(&at, key, "must be an array of tables", "see the example configuration");
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// Takes a table with free keys. A flag `section.key.name` sets one entry of it.
    pub fn map(&mut self, key: &str) -> Entries {
        self.free_table(key, false)
    }

    /// As [`Section::map`]; a variable `WALPOST_SECTION_KEY_A_B` sets the entry `a.b`.
    pub fn dotted_map(&mut self, key: &str) -> Entries {
        self.free_table(key, true)
    }

    fn free_table(&mut self, key: &str, by_variable: bool) -> Entries {
        let mut map = self.take(key).map_or_else(Vec::new, |node| self.table_of(key, node));
        if !self.layered {
            return map;
        }
        let prefix = format!("{}_", variable(&self.dotted(key)));
        if by_variable {
            for (name, text) in extract(&mut self.reader.environment, &prefix) {
                let entry = name[prefix.len()..].to_lowercase().replace('_', ".");
                replace(&mut map, entry, Node::raw(text, Origin::Variable(name)));
            }
        }
        let prefix = format!("{}.", self.dotted(key));
        for (flag, text) in extract(&mut self.reader.flags, &prefix) {
            replace(&mut map, flag[prefix.len()..].to_owned(), Node::raw(text, Origin::Flag(flag)));
        }
        map
    }

    /// Takes and refuses the variables and flags that would mean a key below `key`, which is an array.
    pub fn refuse_overrides(&mut self, key: &str) {
        let dotted = self.dotted(key);
        let variables = extract(&mut self.reader.environment, &format!("{}_", variable(&dotted)));
        let flags = extract(&mut self.reader.flags, &format!("{dotted}."));
        let variables = variables.into_iter().map(|(name, _)| Origin::Variable(name));
        for at in variables.chain(flags.into_iter().map(|(flag, _)| Origin::Flag(flag))) {
            let remedy = format!("set it in the file, or write one [{dotted}] instead of [[{dotted}]]");
            self.fault(&at, key, format!("does not say which [[{dotted}]] it means"), remedy);
        }
    }

    /// Notes a fault of a key.
    pub fn fault(&mut self, at: &Origin, key: &str, what: impl Into<String>, remedy: impl Into<String>) {
        let fault = Fault { at: at.clone(), key: self.dotted(key), what: what.into(), remedy: remedy.into() };
        self.reader.faults.push(fault);
    }

    /// Notes that a key is missing.
    pub fn missing(&mut self, key: &str, remedy: impl Into<String>) {
        let at = self.at.clone();
        self.fault(&at, key, MISSING, remedy);
    }

    fn table_of(&mut self, key: &str, node: Node) -> Entries {
        let Node { value, at } = node;
        match self.typed(key, value, &at) {
            Some(Value::Table(entries)) => entries,
            Some(_) => {
                self.fault(&at, key, "must be a table", "see the example configuration");
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// Gives raw text the type that its TOML notation says.
    fn typed(&mut self, key: &str, value: Value, at: &Origin) -> Option<Value> {
        let Value::Raw(text) = value else { return Some(value) };
        parse_inline(&text, at)
            .map_err(|message| {
                let remedy = "write an inline TOML value such as {a = \"b\"} or [{a = \"b\"}]";
                self.fault(at, key, format!("is not valid TOML: {message}"), remedy);
            })
            .ok()
    }

    fn dotted(&self, key: &str) -> String {
        join(&self.path, key)
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

/// Takes what begins with `prefix`.
fn extract(from: &mut BTreeMap<String, String>, prefix: &str) -> Vec<(String, String)> {
    from.extract_if(.., |name, _| name.len() > prefix.len() && name.starts_with(prefix)).collect()
}

fn replace(entries: &mut Entries, name: String, node: Node) {
    match entries.iter_mut().find(|(known, _)| *known == name) {
        Some((_, old)) => *old = node,
        None => entries.push((name, node)),
    }
}
