//! All findings that are not well, by code: `docs/check.md` has the cause and the remedy of each.

use super::{Finding, Severity};

/// Each code with the severities that it may have, as the page says them.
const CODES: &[(&str, &str)] = &[
    ("activity_unseen", "unknown"),
    ("awaited_standby_away", "error"),
    ("backfill_incomplete", "warn"),
    ("clock_skew", "warn"),
    ("column_generated", "error"),
    ("column_missing", "error"),
    ("column_nullable", "warn"),
    ("columns_hidden", "error"),
    ("consumer_offsets", "warn"),
    ("consumer_unreadable", "warn"),
    ("header_alike", "warn"),
    ("header_odd", "warn"),
    ("header_taken", "warn"),
    ("headers_type", "error, warn"),
    ("illegal_topic", "warn"),
    ("inbox_retention", "warn"),
    ("inbox_retention_unproven", "warn"),
    ("inbox_unmarked", "warn"),
    ("inbox_unreadable", "warn"),
    ("kafka_unreachable", "error"),
    ("key_null", "warn"),
    ("long_transaction", "warn"),
    ("older_rows", "error"),
    ("other_slot_holds_wal", "warn"),
    ("partition_attached_later", "warn"),
    ("partition_not_logged", "error"),
    ("partitions_not_published_as_root", "error"),
    ("payload_type", "warn"),
    ("poll_column_missing", "error"),
    ("poll_column_type", "error"),
    ("poll_delete_denied", "error"),
    ("poll_denied", "error"),
    ("poll_index_missing", "warn"),
    ("postgres_failed", "error"),
    ("postgres_unreachable", "error"),
    ("progress_topic_missing", "error"),
    ("progress_topic_partitions", "error"),
    ("progress_topic_policy", "error"),
    ("progress_topic_replicas", "warn"),
    ("publication_missing", "error"),
    ("publication_not_creatable", "error"),
    ("publication_without_inserts", "error"),
    ("replica_identity", "warn"),
    ("replication_refused", "error"),
    ("replication_slots", "error"),
    ("retention_denied", "warn"),
    ("retention_index", "warn"),
    ("retention_key", "warn"),
    ("retention_partitions", "warn"),
    ("retention_record", "warn"),
    ("retention_timestamp", "warn"),
    ("route", "error"),
    ("route_column_missing", "error"),
    ("row_filter", "error"),
    ("server_minor", "warn"),
    ("server_version", "error, warn"),
    ("slot_at_risk", "warn"),
    ("slot_foreign", "error"),
    ("slot_idle_timeout", "warn"),
    ("slot_lost", "error"),
    ("slot_missing", "error"),
    ("slot_unknown", "error"),
    ("slot_wal_limit_low", "warn"),
    ("slot_wal_unlimited", "warn"),
    ("slot_without_failover", "warn"),
    ("standby", "error"),
    ("synchronous_standby", "warn"),
    ("synchronous_standby_behind", "warn"),
    ("synchronous_standby_missing", "warn"),
    ("table_kind", "error"),
    ("table_missing", "error"),
    ("table_not_logged", "error"),
    ("table_not_published", "error"),
    ("table_unreadable", "error"),
    ("table_unsampled", "unknown"),
    ("timestamp_type", "error, warn"),
    ("topic_limits_unknown", "warn"),
    ("topic_max_message_bytes", "warn"),
    ("topic_min_insync_impossible", "error"),
    ("topic_min_insync_replicas", "warn"),
    ("topic_missing", "error"),
    ("topic_no_spare_replica", "warn"),
    ("topic_partitions_changed", "warn"),
    ("topic_payload_too_large", "warn"),
    ("topic_records_unseen", "unknown"),
    ("topic_replicas", "warn"),
    ("topic_under_min_insync", "error"),
    ("wal_level", "error"),
    ("wal_sender_timeout", "warn"),
    ("wal_senders", "warn"),
];

/// Whether a finding is in the list.
pub(super) fn has(finding: &Finding) -> bool {
    let word = match finding.severity {
        Severity::Ok => return true,
        Severity::Unknown => "unknown",
        Severity::Warn => "warn",
        Severity::Error => "error",
    };
    CODES.iter().any(|(code, severities)| *code == finding.code && severities.contains(word))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn the_page_lists_every_finding_once_and_no_other() {
        let page = include_str!("../../docs/check.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
        let mut listed = Vec::new();
        for row in rows.filter(|row| row.split(" | ").count() == 5) {
            let cells: Vec<&str> = row.split(" | ").map(str::trim).collect();
            assert!(cells.iter().all(|cell| !cell.is_empty()), "code, severity, what, why, remedy: {row}");
            listed.push((cells[0].trim_end_matches('`'), cells[1]));
        }
        listed.sort_unstable();
        assert_eq!(listed, CODES);
    }

    #[test]
    fn each_code_stands_in_the_source_as_well() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let folder = fs::read_dir(source.join("check")).unwrap().map(|entry| entry.unwrap().path());
        let others = ["publication.rs", "retention/pass.rs", "retention/partitions.rs"].map(|name| source.join(name));
        let files = folder.filter(|path| !path.ends_with("catalog.rs")).chain(others);
        let texts: String = files.map(|path| fs::read_to_string(path).unwrap()).collect();
        for (code, _) in CODES {
            assert!(texts.contains(&format!("\"{code}\"")), "nothing finds {code}");
        }
    }
}
