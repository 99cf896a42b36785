//! The bounds of an outbox's partitions as the catalog has them, which of them have ended, and which are missing in the
//! time to come. Makes SQL and runs none.
//!
//! Times are compared as `timestamp` in UTC, ids as `numeric`: what is computed from them cannot overflow.

use std::time::Duration;

use super::age::TimeKind;
use crate::sql::quote_literal;

/// So many of the newest partitions must be of one width, for more of that width to be made.
const REGULAR: u32 = 3;

/// By what a table is partitioned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    /// The mapped timestamp.
    Time(TimeKind),
    /// The mapped id, a whole number.
    Id,
}

/// The width of the newest partitions, as the server's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Width {
    /// Where the newest partition ends.
    pub anchor: String,
    /// An interval, or a number of ids.
    pub step: String,
    /// So many months, whose days differ; 0: none.
    pub months: i32,
}

/// A table that is partitioned by range of one column.
#[derive(Debug)]
pub(super) struct Bounds {
    pub relation: u32,
    pub root: String,
    pub key: Key,
    pub id_name: String,
    /// The columns' names as SQL.
    pub id: String,
    pub time: String,
    pub time_kind: TimeKind,
}

impl Bounds {
    /// Partitions without partitions of their own that end somewhere: name as SQL, oid, and whether the end has come. By time
    /// that is so when it lies `keep` back; by id when a row behind it does.
    pub(super) fn whole(&self, keep: Duration) -> String {
        let ended = match self.key {
            Key::Time(_) => {
                format!("b.upper < (now() AT TIME ZONE 'UTC') - make_interval(secs => {})", keep.as_secs_f64())
            }
            Key::Id => format!(
                "EXISTS (SELECT FROM {root} c WHERE c.{id} >= b.upper AND c.{time} < {cutoff})",
                root = self.root,
                id = self.id,
                time = self.time,
                cutoff = self.time_kind.cutoff(keep),
            ),
        };
        format!(
            "SELECT format('%I.%I', n.nspname, c.relname), c.oid, {ended} FROM ({catalog}) b
             JOIN pg_class c ON c.oid = b.leaf AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE b.upper IS NOT NULL ORDER BY b.upper",
            catalog = self.catalog(),
        )
    }

    /// The width of the newest partitions: anchor, step (NULL: they differ), months, and how many there are. Without any,
    /// days by UTC.
    pub(super) fn width(&self) -> String {
        let newest = format!(
            "SELECT lower, upper FROM ({}) b WHERE lower IS NOT NULL AND upper IS NOT NULL ORDER BY upper DESC
             LIMIT {REGULAR}",
            self.catalog()
        );
        match self.key {
            Key::Id => format!(
                "SELECT max(upper)::text, CASE WHEN min(upper - lower) = max(upper - lower) THEN min(upper - lower)::text END,
                        0, count(*) FROM ({newest}) newest"
            ),
            Key::Time(_) => format!(
                "SELECT coalesce(max(upper), date_trunc('day', now() AT TIME ZONE 'UTC'))::text,
                        CASE WHEN count(*) = 0 THEN '1 day'
                             WHEN bool_and(calendar) AND min(months) = max(months) THEN make_interval(months => min(months))::text
                             WHEN min(width) = max(width) THEN min(width)::text END,
                        CASE WHEN bool_and(calendar) AND min(months) = max(months) THEN min(months) ELSE 0 END, count(*)
                 FROM (SELECT upper, upper - lower AS width, months,
                              months > 0 AND lower + make_interval(months => months) = upper AS calendar
                       FROM (SELECT *, (extract(year FROM age(upper, lower)) * 12
                                        + extract(month FROM age(upper, lower)))::int AS months
                             FROM ({newest}) newest) aged) widths"
            ),
        }
    }

    /// How far the ids have come; NULL in an empty table whose ids no sequence of its own makes.
    fn position(&self) -> String {
        format!(
            "greatest((SELECT max({id}) FROM {root}),
                 (SELECT s.last_value FROM pg_sequences s
                  WHERE format('%I.%I', s.schemaname, s.sequencename)
                        = pg_get_serial_sequence({root_text}, {id_text})))::numeric",
            id = self.id,
            root = self.root,
            root_text = quote_literal(&self.root),
            id_text = quote_literal(&self.id_name),
        )
    }

    /// The partition that is written to now and so many behind it, as far as something of them is not covered: a name's end,
    /// both bounds as the column has them, and whether no partition touches it.
    pub(super) fn missing(&self, width: &Width, ahead: u32) -> String {
        // the width is the server's own text, without a quote in it
        let Width { anchor, step, .. } = width;
        let Lattice { present, first, name, types: [value, width_type, factor], bound } = match self.key {
            Key::Id => self.ids(),
            Key::Time(kind) => times(kind, width),
        };
        format!(
            "WITH known AS MATERIALIZED ({catalog}), here AS MATERIALIZED (
                 SELECT {present} AS present, '{anchor}'::{value} AS anchor, '{step}'::{width_type} AS step
             ), cells AS (
                 SELECT anchor + step * k::{factor} AS lower, anchor + step * (k + 1)::{factor} AS upper, step
                 FROM here, generate_series({first}::bigint - 1, {first}::bigint + {ahead} + 2) k
                 WHERE anchor + step * (k + 1)::{factor} > present ORDER BY k LIMIT {ahead} + 1
             )
             SELECT {name}, {from}, {to}, free FROM (
                 SELECT cells.*, greatest(lower, present) AS rest, NOT EXISTS (SELECT FROM known b WHERE NOT b.is_default
                     AND (b.lower IS NULL OR b.lower < cells.upper) AND (b.upper IS NULL OR b.upper > cells.lower)) AS free
                 FROM cells, here) cells
             WHERE free OR NOT EXISTS (SELECT FROM known WHERE is_default) AND upper - rest > (
                 SELECT coalesce(sum(least(b.upper, cells.upper) - greatest(b.lower, rest)), rest - rest)
                 FROM known b WHERE (b.lower IS NULL OR b.lower < cells.upper) AND (b.upper IS NULL OR b.upper > rest))
             ORDER BY lower",
            catalog = self.catalog(),
            from = bound.replace(BOUND, "lower"),
            to = bound.replace(BOUND, "upper"),
        )
    }

    fn ids(&self) -> Lattice {
        Lattice {
            present: format!("coalesce({}, (SELECT min(lower) FROM known), 0)", self.position()),
            first: "floor((present - anchor) / step)".to_owned(),
            name: "lower::text",
            types: ["numeric", "numeric", "numeric"],
            bound: format!("{BOUND}::text"),
        }
    }

    /// The direct partitions with the values between which their rows lie; NULL for no end. Not those on the way out.
    fn catalog(&self) -> String {
        let value = |text: &str| match self.key {
            Key::Id => format!("({text})::numeric"),
            Key::Time(TimeKind::Timestamptz) => format!("({text})::timestamptz AT TIME ZONE 'UTC'"),
            Key::Time(TimeKind::Timestamp) => format!("({text})::timestamp"),
            Key::Time(TimeKind::Date) => format!("({text})::date::timestamp"),
            // a number that is no time is as good as no end
            Key::Time(TimeKind::UnixMillis) => format!(
                "CASE WHEN ({text})::bigint BETWEEN -200000000000000 AND 9000000000000000
                 THEN to_timestamp(({text})::bigint / 1000.0) AT TIME ZONE 'UTC' END"
            ),
        };
        format!(
            "SELECT leaf, bound = 'DEFAULT' AS is_default, {lower} AS lower, {upper} AS upper FROM (
                 SELECT leaf, bound, (regexp_match(bound, $re$FROM \\('?(-?[0-9][^')]*)$re$))[1] AS lower_text,
                        (regexp_match(bound, $re$TO \\('?(-?[0-9][^')]*)$re$))[1] AS upper_text
                 FROM (SELECT i.inhrelid AS leaf, pg_get_expr(p.relpartbound, p.oid) AS bound
                       FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
                       WHERE i.inhparent = {relation} AND NOT i.inhdetachpending) of_catalog OFFSET 0) texts",
            lower = value("lower_text"),
            upper = value("upper_text"),
            relation = self.relation,
        )
    }
}

/// Stands for a bound.
const BOUND: &str = "{bound}";

/// What the search for missing partitions is made of, as SQL.
struct Lattice {
    /// What is written now.
    present: String,
    /// So many widths from the anchor to it, rounded down or by one too few.
    first: String,
    /// The end of a partition's name.
    name: &'static str,
    /// The types of a bound, of a width and of a factor of it.
    types: [&'static str; 3],
    /// A bound as text that the column takes.
    bound: String,
}

fn times(kind: TimeKind, width: &Width) -> Lattice {
    let first = match width.months {
        0 => "floor(extract(epoch FROM present - anchor) / extract(epoch FROM step))".to_owned(),
        months => format!(
            "floor((extract(year FROM present) * 12 + extract(month FROM present)
                 - extract(year FROM anchor) * 12 - extract(month FROM anchor)) / {months})"
        ),
    };
    Lattice {
        present: "(now() AT TIME ZONE 'UTC')".to_owned(),
        first,
        name:
            "to_char(lower, CASE WHEN lower = date_trunc('day', lower) AND extract(epoch FROM step)::bigint % 86400 = 0
                                   THEN 'YYYYMMDD' ELSE 'YYYYMMDD\"T\"HH24MISS' END)",
        types: ["timestamp", "interval", "float8"],
        bound: match kind {
            TimeKind::Timestamptz => format!("({BOUND} AT TIME ZONE 'UTC')::text"),
            TimeKind::Timestamp => format!("{BOUND}::text"),
            TimeKind::Date => format!("{BOUND}::date::text"),
            TimeKind::UnixMillis => format!("(extract(epoch FROM {BOUND}) * 1000)::bigint::text"),
        },
    }
}
