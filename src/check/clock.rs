//! Whether the database's clock and ours agree. The brokers tell nobody theirs.

use std::time::Duration;

use humantime::format_duration;
use tokio_postgres::Client;

use super::Findings;
use crate::clock::unix_us;

/// More than two clocks that are kept by NTP differ.
const APART_US: i64 = 1_000_000;
/// The best of so many questions counts: an answer may be late for other reasons.
const QUESTIONS: usize = 3;

pub(super) async fn check(client: &Client, findings: &mut Findings) {
    let mut best: Option<(i64, i64)> = None;
    for _ in 0..QUESTIONS {
        let before = unix_us();
        let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let Ok(row) = client.query_one(sql, &[]).await else { return };
        let after = unix_us();
        let (ahead, unsure) = (row.get::<_, i64>(0) - i64::midpoint(before, after), (after - before).max(0) / 2);
        if best.is_none_or(|(_, least)| unsure < least) {
            best = Some((ahead, unsure));
        }
    }
    let Some((ahead, unsure)) = best else { return };
    if ahead.abs() - unsure < APART_US {
        return findings.ok("clock", "the clocks of the database and of this machine agree".to_owned());
    }
    let apart = format_duration(Duration::from_millis(ahead.unsigned_abs() / 1000));
    let way = if ahead > 0 { "ahead of" } else { "behind" };
    findings.warn(
        "clock_skew",
        format!("the database's clock is {apart} {way} this machine's"),
        "records carry the database's time: brokers delete them by it and refuse what lies far in the future, and consumers \
         take it for true",
        "see which is wrong (`chronyc tracking`, `timedatectl`), and there `chronyc makestep`",
    );
}
