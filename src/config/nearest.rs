//! What to say about a key or variable that nobody knows.

use super::{
    fault::{Fault, Origin},
    reader::variable,
};

/// An unknown key of the file or the command line.
pub(super) fn unknown_key(key: String, at: Origin, known: &[String]) -> Fault {
    let remedy = match resembling(&key, known) {
        Some(near) => format!("did you mean {near}?"),
        None => keys_beside(&key, known),
    };
    Fault { at, key, what: "is an unknown key".into(), remedy }
}

/// An unknown variable that begins with `WALPOST_`.
pub(super) fn unknown_variable(name: &str, known: &[String]) -> Fault {
    let candidates: Vec<_> = known.iter().map(|key| variable(key)).collect();
    let scored = candidates.iter().map(|known| (strsim::normalized_damerau_levenshtein(name, known), known));
    let remedy = match scored.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((score, near)) if score > 0.75 => format!("did you mean {near}?"),
        _ => "variables are named WALPOST_<SECTION>_<KEY>, for example WALPOST_POSTGRES_URL; unset this one".into(),
    };
    Fault { at: Origin::Variable(name.into()), key: String::new(), what: "is an unknown variable".into(), remedy }
}

fn split(key: &str) -> (&str, &str) {
    key.rsplit_once('.').unwrap_or(("", key))
}

/// A key of the same section with a similar name, else one of any section with the same name, else a similar one.
fn resembling<'k>(key: &str, known: &'k [String]) -> Option<&'k str> {
    let (section, name) = split(key);
    let best = |candidates: Vec<(f64, &'k String)>, least: f64| {
        let best = candidates.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(score, _)| *score >= least).map(|(_, key)| key.as_str())
    };
    let similar = strsim::normalized_damerau_levenshtein;
    let beside = known.iter().filter(|known| split(known).0 == section);
    best(beside.map(|known| (similar(name, split(known).1), known)).collect(), 0.55)
        .or_else(|| known.iter().find(|known| split(known).1 == name).map(String::as_str))
        .or_else(|| best(known.iter().map(|known| (similar(key, known), known)).collect(), 0.75))
}

fn keys_beside(key: &str, known: &[String]) -> String {
    let (section, _) = split(key);
    let beside: Vec<_> = known.iter().filter(|known| split(known).0 == section).map(|known| split(known).1).collect();
    match (section, beside.is_empty()) {
        (_, true) => "remove it".into(),
        ("", _) => format!("known are {}", beside.join(", ")),
        _ => format!("known in [{section}] are {}", beside.join(", ")),
    }
}

/// Variables that Kubernetes sets in every pod for a service named `walpost…`; they are not meant for us.
pub(super) fn set_by_kubernetes(name: &str) -> bool {
    let tail = |mark: &str| name.rfind(mark).map(|start| &name[start + mark.len()..]);
    if name.ends_with("_SERVICE_HOST")
        || tail("_SERVICE_PORT").is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    {
        return true;
    }
    let Some(port) = tail("_PORT") else { return false };
    let mut parts = port.split('_').skip(1);
    let number = parts.next().is_none_or(|part| part.parse::<u16>().is_ok());
    let protocol = parts.next().is_none_or(|part| ["TCP", "UDP", "SCTP"].contains(&part));
    port.is_empty() || (port.starts_with('_') && number && protocol)
}
