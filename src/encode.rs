//! Event + topic → [`Record`]: key, value, headers in their order, timestamp.

use std::{borrow::Cow, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::{
    decode::Cells,
    event::{OutboxEvent, Position},
    lsn::Lsn,
};

/// Headers that walpost sets itself; no other source may use their names.
pub const RESERVED: [&str; 3] = ["id", "event_type", "walpost_position"];

/// Why a record goes to the dead-letter topic, as its headers say it.
#[derive(Debug, Clone, Copy)]
pub struct Unfit<'a> {
    /// `walpost_error`: what was wrong.
    pub error: &'a str,
    /// `walpost_topic`: the topic that it was meant for; empty when it has none.
    pub topic: &'a [u8],
    /// `walpost_attempts`: how often it was sent.
    pub attempts: u32,
}

/// How a dead letter is counted: the labels of its metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dead<'a> {
    /// The topic that it was meant for; empty when that is no legal name.
    pub topic: &'a str,
    /// A word of a fixed list.
    pub reason: &'static str,
}

/// A record, ready to be produced. Borrows everything.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// The topic; a legal name.
    pub topic: &'a str,
    /// The key; `None` stays null.
    pub key: Option<&'a [u8]>,
    /// The value; `None` stays null.
    pub value: Option<&'a [u8]>,
    /// The headers, in order.
    pub headers: &'a Headers,
    /// Unix ms, at least 1.
    pub timestamp_ms: i64,
    /// The event's id, for errors.
    pub event_id: &'a [u8],
    /// Set for a dead letter.
    pub dead: Option<Dead<'a>>,
}

impl Record<'_> {
    /// What the producer keeps beside the bytes of a record, roughly.
    pub const OVERHEAD: usize = 400;

    /// What it weighs while in flight: its bytes, and what the producer keeps beside them.
    pub fn weight(&self) -> usize {
        self.key.map_or(0, <[u8]>::len) + self.value.map_or(0, <[u8]>::len) + self.headers.bytes.len() + Self::OVERHEAD
    }
}

/// The `headers` column holds something other than a JSON object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the headers column must hold a JSON object (or NULL)")]
pub struct BadHeaders;

/// Headers in one buffer that is kept from record to record.
#[derive(Debug, Clone, Default)]
pub struct Headers {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    position: PositionText,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    start: usize,
    name_end: usize,
    value_end: usize,
}

impl Headers {
    /// Fills in the headers of an event. `columns` are (header, column index).
    pub fn fill(
        &mut self,
        event: &OutboxEvent<'_>,
        cells: &Cells<'_>,
        columns: &[(String, usize)],
    ) -> Result<(), BadHeaders> {
        self.bytes.clear();
        self.entries.clear();
        self.push(b"id", event.id);
        self.push(b"event_type", event.event_type);
        self.push_position(event.position);
        for (name, index) in columns {
            if let Some(value) = cells.get(*index) {
                self.push_new(name.as_bytes(), value);
            }
        }
        match event.headers {
            Some(json) => self.members(json),
            None => Ok(()),
        }
    }

    /// Fills in what can be said of a row that is no event: whatever of it could be read.
    pub fn fill_partly(&mut self, id: Option<&[u8]>, event_type: Option<&[u8]>, position: Position) {
        self.bytes.clear();
        self.entries.clear();
        for (name, value) in [(&b"id"[..], id), (b"event_type", event_type)] {
            if let Some(value) = value {
                self.push(name, value);
            }
        }
        self.push_position(position);
    }

    /// An event that was not read from the log has no place in it, and so no such header.
    fn push_position(&mut self, position: Position) {
        if position.commit_lsn == Lsn::ZERO {
            return;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(b"walpost_position");
        let name_end = self.bytes.len();
        self.position.write(position, &mut self.bytes);
        self.entries.push(Entry { start, name_end, value_end: self.bytes.len() });
    }

    /// Appends a header as it is.
    pub fn append(&mut self, name: &[u8], value: &[u8]) {
        self.push(name, value);
    }

    /// Says why the record is dead.
    pub fn mark_dead(&mut self, unfit: &Unfit<'_>) {
        self.replace(b"walpost_error", unfit.error.as_bytes());
        self.replace(b"walpost_topic", unfit.topic);
        self.replace(b"walpost_attempts", unfit.attempts.to_string().as_bytes());
    }

    /// Says what value the record would have.
    pub fn mark_missing_value(&mut self, bytes: usize, sha256: &[u8; 32]) {
        self.replace(b"walpost_value_bytes", bytes.to_string().as_bytes());
        self.replace(b"walpost_value_sha256", hex::encode(sha256).as_bytes());
    }

    /// The value of a header.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.iter().find_map(|(found, value)| (found == name).then_some(value))
    }

    /// (name, value), in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&[u8], &[u8])> {
        self.entries
            .iter()
            .map(|entry| (&self.bytes[entry.start..entry.name_end], &self.bytes[entry.name_end..entry.value_end]))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True before the first [`Self::fill`].
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn push(&mut self, name: &[u8], value: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(name);
        let name_end = self.bytes.len();
        self.bytes.extend_from_slice(value);
        self.entries.push(Entry { start, name_end, value_end: self.bytes.len() });
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) {
        let found = self.iter().position(|(taken, _)| taken == name);
        if let Some(index) = found {
            self.entries.remove(index);
        }
        self.push(name, value);
    }

    fn push_new(&mut self, name: &[u8], value: &[u8]) {
        if !self.iter().any(|(taken, _)| taken == name) {
            self.push(name, value);
        }
    }

    /// Appends the members of a JSON object: strings as they read, other values as JSON, nulls left out.
    fn members(&mut self, json: &[u8]) -> Result<(), BadHeaders> {
        if json == b"null" {
            return Ok(());
        }
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let own = self.entries.len();
        Members { headers: self, own }.deserialize(&mut deserializer).map_err(|_| BadHeaders)?;
        deserializer.end().map_err(|_| BadHeaders)
    }

    fn push_member(&mut self, own: usize, name: &[u8], value: &[u8]) {
        let found = self.iter().position(|(taken, _)| taken == name);
        match found {
            Some(index) if index < own => {} // ours win
            Some(index) => {
                // a name twice in one object (json, not jsonb): the last one counts, as in jsonb
                self.entries.remove(index);
                self.push(name, value);
            }
            None => self.push(name, value),
        }
    }
}

struct Members<'h> {
    headers: &'h mut Headers,
    own: usize,
}

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some((name, value)) = members.next_entry::<JsonText<'de>, &'de RawValue>()? {
            let text = value.get();
            if text != "null" {
                let unquoted = text.starts_with('"').then(|| unquote(text));
                self.headers.push_member(self.own, name.0.as_bytes(), unquoted.as_deref().unwrap_or(text).as_bytes());
            }
        }
        Ok(())
    }
}

/// A member's name, borrowed where nothing in it is escaped.
#[derive(serde::Deserialize)]
struct JsonText<'a>(#[serde(borrow)] Cow<'a, str>);

/// The text of a JSON string. One that is no text (a lone surrogate, say) keeps its escapes.
fn unquote(json: &str) -> Cow<'_, str> {
    match serde_json::from_str::<JsonText<'_>>(json) {
        Ok(text) => text.0,
        Err(_) => Cow::Borrowed(json.trim_matches('"')),
    }
}

/// Writes positions; the text of the commit LSN is kept as long as the transaction lasts.
#[derive(Debug, Clone, Default)]
struct PositionText {
    commit_lsn: Lsn,
    text: String,
}

impl PositionText {
    fn write(&mut self, position: Position, bytes: &mut Vec<u8>) {
        if self.text.is_empty() || self.commit_lsn != position.commit_lsn {
            self.commit_lsn = position.commit_lsn;
            self.text = format!("{}/", position.commit_lsn);
        }
        bytes.extend_from_slice(self.text.as_bytes());
        let mut digits = [0; 20];
        let (mut rest, mut start) = (position.ordinal, digits.len());
        loop {
            start -= 1;
            digits[start] = b'0' + u8::try_from(rest % 10).unwrap_or_default();
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        bytes.extend_from_slice(&digits[start..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(headers: Option<&str>) -> Result<Vec<(String, String)>, BadHeaders> {
        let mut all = Headers::default();
        let event = OutboxEvent {
            id: b"7",
            event_type: b"order.paid",
            key: None,
            payload: None,
            headers: headers.map(str::as_bytes),
            timestamp_ms: 1,
            position: Position { commit_lsn: Lsn(0x16B_3748), ordinal: 12 },
        };
        all.fill(&event, &Cells::default(), &[])?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(all.iter().map(|(name, value)| (text(name), text(value))).collect())
    }

    fn members(headers: &str) -> Vec<(String, String)> {
        filled(Some(headers)).unwrap().split_off(3)
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn own_headers_come_first_and_in_order() {
        let expected = pairs(&[("id", "7"), ("event_type", "order.paid"), ("walpost_position", "0/16B3748/12")]);
        assert_eq!(filled(None), Ok(expected.clone()));
        assert_eq!(filled(Some("null")), Ok(expected));
    }

    #[test]
    fn members_follow_in_order_strings_bare_and_the_rest_as_json() {
        let json = r#"{"b": "x \"q\" é", "a": 1.50, "n": null, "o": {"k": [1, 2]}, "t": true, "e": ""}"#;
        let expected = pairs(&[("b", "x \"q\" é"), ("a", "1.50"), ("o", r#"{"k": [1, 2]}"#), ("t", "true"), ("e", "")]);
        assert_eq!(members(json), expected);
    }

    #[test]
    fn reserved_names_win_and_none_comes_twice() {
        assert_eq!(members(r#"{"id": "mine", "a": "1", "a": "2", "event_type": "x"}"#), pairs(&[("a", "2")]));
    }

    /// Case 30, in headers.
    #[test]
    fn odd_strings_keep_their_escapes_and_do_not_panic() {
        assert_eq!(members(r#"{"s": "\ud800", "\u00e9": "😀"}"#), pairs(&[("s", "\\ud800"), ("é", "😀")]));
    }

    #[test]
    fn other_json_is_refused() {
        for json in ["[]", "1", "\"x\"", "{", "{} x", ""] {
            assert_eq!(filled(Some(json)), Err(BadHeaders), "{json}");
        }
    }
}
