//! Event → topic, compiled at start.
//!
//! Rules by glob over the event type, first match wins, then the template. A name that Kafka would not take is found here,
//! before anything is produced.

use wildmatch::WildMatch;

use crate::{
    config::{OnIllegalTopic, RouteConfig},
    decode::{Cells, Decoder},
};

/// Kafka's limit on a topic's name, bytes.
const MAX_TOPIC_BYTES: usize = 249;

/// Why an event has no topic.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A template is malformed.
    #[error("topic template {template:?}: {problem}")]
    Template {
        /// The template.
        template: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A template names a column that the table lacks.
    #[error("topic template {template:?} names column {column:?}, which table {table} does not have")]
    UnknownColumn {
        /// The template.
        template: String,
        /// The column.
        column: String,
        /// The table.
        table: String,
    },
    /// Kafka would refuse the name.
    #[error("{topic:?} is no legal topic name: {problem}")]
    IllegalTopic {
        /// The name.
        topic: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// A template split into its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Column(String),
}

impl Template {
    /// Splits `outbox.{event_type}` into its parts.
    pub fn parse(text: &str) -> Result<Self, RouteError> {
        let fail = |problem| RouteError::Template { template: text.to_owned(), problem };
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(open) = rest.find(['{', '}']) {
            let (literal, tail) = rest.split_at(open);
            let inner = tail.strip_prefix('{').ok_or_else(|| fail("a } without its {"))?;
            let (column, behind) = inner.split_once('}').ok_or_else(|| fail("a { without its }"))?;
            if column.is_empty() || column.contains('{') {
                return Err(fail("braces must hold the name of a column"));
            }
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(Part::Column(column.to_owned()));
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        if parts.is_empty() {
            return Err(fail("it is empty"));
        }
        let template = Self { text: text.to_owned(), parts };
        if let Some(topic) = template.fixed() {
            legal(topic.as_bytes()).map_err(fail)?;
        }
        Ok(template)
    }

    /// The topic, where it does not depend on the row.
    pub fn fixed(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [Part::Literal(topic)] => Some(topic),
            _ => None,
        }
    }

    /// The columns it names.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Column(column) => Some(column.as_str()),
            Part::Literal(_) => None,
        })
    }
}

/// The routes of a configuration.
#[derive(Debug, Clone)]
pub struct Router {
    rules: Vec<(WildMatch, Template)>,
    otherwise: Template,
    on_illegal: OnIllegalTopic,
}

impl Router {
    /// Compiles the routes.
    pub fn new(config: &RouteConfig) -> Result<Self, RouteError> {
        let rule =
            |rule: &crate::config::RouteRule| Ok((WildMatch::new(&rule.event_type), Template::parse(&rule.topic)?));
        Ok(Self {
            rules: config.rules.iter().map(rule).collect::<Result<_, RouteError>>()?,
            otherwise: Template::parse(&config.topic)?,
            on_illegal: config.on_illegal_topic,
        })
    }

    /// Which rule an event type matches, counted from 1 (`None`: none, so the template decides), its glob, and its template.
    pub fn explain(&self, event_type: &str) -> (Option<usize>, Option<String>, &str) {
        let found = self.rules.iter().position(|(glob, _)| glob.matches(event_type));
        found.map_or((None, None, &self.otherwise.text), |index| {
            let (glob, template) = &self.rules[index];
            (Some(index + 1), Some(glob.to_string()), &template.text)
        })
    }

    /// All templates, the rules' first.
    pub fn templates(&self) -> impl Iterator<Item = &Template> {
        self.rules.iter().map(|(_, template)| template).chain([&self.otherwise])
    }

    /// Binds the routes to the columns of one table.
    pub fn bind(&self, decoder: &Decoder, table: &str) -> Result<Routes, RouteError> {
        let bound = |template: &Template| bind(template, decoder, table);
        let rule = |(glob, template): &(WildMatch, Template)| Ok((glob.clone(), bound(template)?));
        Ok(Routes {
            rules: self.rules.iter().map(rule).collect::<Result<_, RouteError>>()?,
            otherwise: bound(&self.otherwise)?,
            sanitize: self.on_illegal == OnIllegalTopic::Sanitize,
            topic: Vec::new(),
        })
    }
}

/// The routes of one table.
#[derive(Debug)]
pub struct Routes {
    rules: Vec<(WildMatch, Vec<BoundPart>)>,
    otherwise: Vec<BoundPart>,
    sanitize: bool,
    topic: Vec<u8>,
}

#[derive(Debug, Clone)]
enum BoundPart {
    Literal(Vec<u8>),
    Column(usize),
}

fn bind(template: &Template, decoder: &Decoder, table: &str) -> Result<Vec<BoundPart>, RouteError> {
    let bound = |part: &Part| match part {
        Part::Literal(text) => Ok(BoundPart::Literal(text.clone().into_bytes())),
        Part::Column(name) => decoder.index_of(name).map(BoundPart::Column).ok_or_else(|| RouteError::UnknownColumn {
            template: template.text.clone(),
            column: name.clone(),
            table: table.to_owned(),
        }),
    };
    template.parts.iter().map(bound).collect()
}

impl Routes {
    /// The topic of an event.
    pub fn topic(&mut self, event_type: &[u8], cells: &Cells<'_>) -> Result<&str, RouteError> {
        let parts = if self.rules.is_empty() {
            &self.otherwise
        } else {
            let text = String::from_utf8_lossy(event_type);
            self.rules.iter().find(|(glob, _)| glob.matches(&text)).map_or(&self.otherwise, |(_, parts)| parts)
        };
        self.topic.clear();
        let mut null = false;
        for part in parts {
            match part {
                BoundPart::Literal(text) => self.topic.extend_from_slice(text),
                BoundPart::Column(index) => match cells.get(*index) {
                    Some(value) => self.topic.extend_from_slice(value),
                    None => null = true,
                },
            }
        }
        let verdict = if null { Err("a column of its template is NULL") } else { legal(&self.topic) };
        if let Err(problem) = verdict {
            if !self.sanitize {
                return Err(RouteError::IllegalTopic { topic: shortened(&self.topic), problem });
            }
            self.topic = sanitized(&self.topic);
        }
        // legal names and sanitized ones are ASCII
        std::str::from_utf8(&self.topic)
            .map_err(|_| RouteError::IllegalTopic { topic: shortened(&self.topic), problem: "not ASCII" })
    }
}

/// Checks a topic's name by Kafka's rules (`org.apache.kafka.common.internals.Topic`).
pub fn legal(name: &[u8]) -> Result<(), &'static str> {
    match name {
        b"" => Err("it is empty"),
        b"." | b".." => Err("it is a relative path"),
        _ if name.len() > MAX_TOPIC_BYTES => Err("it is longer than 249 characters"),
        _ if name.starts_with(b"__") => Err("names that begin with __ are Kafka's own"),
        _ if name.iter().all(|byte| is_legal(*byte)) => Ok(()),
        _ => Err("only letters, digits, '.', '_' and '-' are allowed"),
    }
}

fn is_legal(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// Replaces what is illegal by `_`; a hash of the original keeps different names apart.
fn sanitized(name: &[u8]) -> Vec<u8> {
    let suffix = format!("-{:016x}", fnv1a(name));
    let kept = name.iter().take(MAX_TOPIC_BYTES - suffix.len());
    let mut topic: Vec<u8> = kept.map(|byte| if is_legal(*byte) { *byte } else { b'_' }).collect();
    if topic.starts_with(b"__") {
        topic[0] = b'-';
    }
    topic.extend_from_slice(suffix.as_bytes());
    topic
}

/// FNV-1a, 64 bits: the same on every machine and in every version, since topics are named by it.
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn shortened(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn templates_are_split_and_faults_named() {
        let template = Template::parse("a.{x}-{y}").unwrap();
        assert_eq!(template.columns().collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(template.fixed(), None);
        assert_eq!(Template::parse("orders").unwrap().fixed(), Some("orders"));
        for text in ["", "a{", "a}", "{}", "{a{b}}", "a b", "..", "__mine"] {
            assert!(Template::parse(text).is_err(), "{text:?} was taken");
        }
    }

    /// Case 35.
    #[test]
    fn illegal_names_are_found() {
        for name in ["", ".", "..", "Order Created", "a/b", "Outer$Inner", "é", "__consumer_offsets"] {
            assert!(legal(name.as_bytes()).is_err(), "{name:?}");
        }
        assert!(legal(&[b'x'; 250]).is_err());
        for name in ["a", "a.b_c-D9", "_a", "...", &"x".repeat(249)] {
            assert!(legal(name.as_bytes()).is_ok(), "{name:?}");
        }
    }

    proptest! {
        /// Case 35: no two types are merged.
        #[test]
        fn sanitized_names_are_legal_and_stay_apart(a in proptest::collection::vec(any::<u8>(), 0..300), b in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(legal(&sanitized(&a)).is_ok());
            prop_assert_eq!(sanitized(&a) == sanitized(&b), a == b);
        }
    }
}
