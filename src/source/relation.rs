//! [`Relations`]: what the server has told about its tables on this connection.
//!
//! The server describes a table before its first row and anew after *any* invalidation, most of which change nothing. The
//! newest description always replaces the older one; only a real change is worth a log line. A cache lives as long as its
//! connection.

use std::collections::HashMap;

use super::pgoutput::Relation;

/// The descriptions by oid.
#[derive(Debug, Default)]
pub struct Relations {
    by_oid: HashMap<u32, Relation>,
}

/// What a new description changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drift {
    /// The first description of this oid.
    New,
    /// The same as before.
    Same,
    /// Columns or name differ; says how.
    Changed(String),
}

impl Relations {
    /// Takes in a description.
    pub fn replace(&mut self, relation: Relation) -> Drift {
        let drift = match self.by_oid.get(&relation.oid) {
            None => Drift::New,
            Some(old) if *old == relation => Drift::Same,
            Some(old) => Drift::Changed(difference(old, &relation)),
        };
        if drift != Drift::Same {
            self.by_oid.insert(relation.oid, relation);
        }
        drift
    }

    /// The present description of an oid.
    pub fn get(&self, oid: u32) -> Option<&Relation> {
        self.by_oid.get(&oid)
    }
}

fn difference(old: &Relation, new: &Relation) -> String {
    let mut parts = Vec::new();
    if (&old.schema, &old.table) != (&new.schema, &new.table) {
        parts.push(format!("renamed from {}.{}", old.schema, old.table));
    }
    for column in &new.columns {
        match old.columns.iter().find(|other| other.name == column.name) {
            None => parts.push(format!("+{}", column.name)),
            Some(other) if other.type_oid != column.type_oid => parts.push(format!("type of {}", column.name)),
            Some(_) => {}
        }
    }
    let gone = old.columns.iter().filter(|column| new.columns.iter().all(|other| other.name != column.name));
    parts.extend(gone.map(|column| format!("-{}", column.name)));
    if parts.is_empty() { "order of columns".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::pgoutput::Column;

    fn table(columns: &[(&str, u32)]) -> Relation {
        let columns = columns.iter().map(|(name, type_oid)| Column { name: (*name).into(), type_oid: *type_oid });
        Relation { oid: 1, schema: "public".into(), table: "outbox".into(), columns: columns.collect() }
    }

    #[test]
    fn only_real_changes_are_drift() {
        let mut relations = Relations::default();
        assert_eq!(relations.replace(table(&[("id", 1), ("a", 2)])), Drift::New);
        assert_eq!(relations.replace(table(&[("id", 1), ("a", 2)])), Drift::Same);
        assert_eq!(relations.replace(table(&[("id", 3), ("b", 2)])), Drift::Changed("type of id, +b, -a".into()));
        assert_eq!(relations.get(1).unwrap().columns[1].name, "b");
    }
}
