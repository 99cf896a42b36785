//! The judge: compares what was written with what arrived. Pure.
//!
//! It goes by the events' ids and the order within each key, never by counts.

use std::collections::{HashMap, HashSet};

use tokio::time::{Duration, Instant};

/// An event of a committed transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The event's id.
    pub id: String,
    /// The topic that it is for.
    pub topic: String,
    /// The record key.
    pub key: String,
    /// Grows with each event of the key, in commit order.
    pub number: i64,
    /// The payload, byte for byte.
    pub payload: String,
    /// When the writer sent COMMIT.
    pub committing: Instant,
}

/// A record as the consumer received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// The header `id`.
    pub id: String,
    /// The topic.
    pub topic: String,
    /// The record key.
    pub key: String,
    /// The value.
    pub payload: String,
    /// When the consumer had it.
    pub at: Instant,
}

/// What the comparison says. Everything but `twice` must be 0 where it is a fault.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Committed events.
    pub written: usize,
    /// Committed events that arrived at least once.
    pub delivered: usize,
    /// Committed events that never arrived.
    pub lost: usize,
    /// Records beyond the first of a committed event.
    pub twice: usize,
    /// First deliveries that a later event of the same key and topic had overtaken.
    pub inversions: usize,
    /// Events that arrived and were never committed.
    pub phantoms: usize,
    /// Records of committed events with another topic, key or payload than was written.
    pub altered: usize,
}

#[cfg(test)]
impl Verdict {
    /// Whether every promise was kept.
    pub fn holds(&self) -> bool {
        let Self { written, delivered, lost, twice: _, inversions, phantoms, altered } = self;
        written == delivered && [lost, inversions, phantoms, altered].into_iter().all(|faults| *faults == 0)
    }
}

/// Judges. `arrivals` stand in the order of their arrival.
pub fn judge(written: &HashMap<String, Written>, arrivals: &[Arrival]) -> Verdict {
    let mut verdict = Verdict { written: written.len(), ..Verdict::default() };
    let (mut delivered, mut phantoms) = (HashSet::new(), HashSet::new());
    let mut furthest: HashMap<(&str, &str), i64> = HashMap::new();
    for arrival in arrivals {
        let Some(event) = written.get(&arrival.id) else {
            phantoms.insert(&arrival.id);
            continue;
        };
        let faithful = (&event.topic, &event.key, &event.payload) == (&arrival.topic, &arrival.key, &arrival.payload);
        verdict.altered += usize::from(!faithful);
        if !delivered.insert(&arrival.id) {
            verdict.twice += 1;
            continue;
        }
        let furthest = furthest.entry((&event.topic, &event.key)).or_insert(event.number);
        verdict.inversions += usize::from(event.number < *furthest);
        *furthest = event.number.max(*furthest);
    }
    verdict.delivered = delivered.len();
    verdict.lost = verdict.written - verdict.delivered;
    verdict.phantoms = phantoms.len();
    verdict
}

/// How long first deliveries took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Latency {
    /// Of how many events.
    pub events: usize,
    /// Half of them took no longer.
    pub median: Duration,
    /// 99 of 100 took no longer.
    pub p99: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Latency {
    /// Of these waits, by nearest rank.
    pub fn of(mut waits: Vec<Duration>) -> Self {
        waits.sort_unstable();
        let rank = |percent: usize| waits.get((waits.len() * percent).div_ceil(100).saturating_sub(1)).copied();
        let rank = |percent| rank(percent).unwrap_or_default();
        Self { events: waits.len(), median: rank(50), p99: rank(99), longest: rank(100) }
    }
}

/// From the moment a writer sent COMMIT to the moment the consumer had the record first, of the events for which `wanted`.
pub fn latency(written: &HashMap<String, Written>, arrivals: &[Arrival], wanted: impl Fn(&Written) -> bool) -> Latency {
    let mut seen = HashSet::new();
    let first = arrivals.iter().filter(|arrival| seen.insert(&arrival.id));
    let known = first.filter_map(|arrival| Some((arrival.at, written.get(&arrival.id)?)));
    let wanted = known.filter(|(_, event)| wanted(event));
    Latency::of(wanted.map(|(at, event)| at.duration_since(event.committing)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(events: &[(&str, &str, i64)]) -> HashMap<String, Written> {
        let committing = Instant::now();
        let event = |&(id, key, number): &(&str, &str, i64)| Written {
            id: id.into(),
            topic: "t".into(),
            key: key.into(),
            number,
            payload: format!("payload of {id}"),
            committing,
        };
        events.iter().map(event).map(|event| (event.id.clone(), event)).collect()
    }

    fn arrived(events: &HashMap<String, Written>, ids: &[&str]) -> Vec<Arrival> {
        let arrival = |(index, &id): (u64, &&str)| {
            let event = events.get(id);
            let text = |field: fn(&Written) -> &String| event.map(field).cloned().unwrap_or_default();
            let at = event.map_or_else(Instant::now, |event| event.committing) + Duration::from_millis(index);
            let (topic, key, payload) = (text(|event| &event.topic), text(|event| &event.key), text(|it| &it.payload));
            Arrival { id: id.into(), topic, key, payload, at }
        };
        (1..).zip(ids).map(arrival).collect()
    }

    fn story() -> HashMap<String, Written> {
        written(&[("a1", "a", 1), ("a2", "a", 2), ("a3", "a", 3), ("b1", "b", 1)])
    }

    fn verdict(ids: &[&str]) -> Verdict {
        judge(&story(), &arrived(&story(), ids))
    }

    #[test]
    fn everything_once_and_in_order_is_faultless() {
        let expected = Verdict { written: 4, delivered: 4, ..Verdict::default() };
        for order in [["a1", "a2", "a3", "b1"], ["b1", "a1", "a2", "a3"]] {
            assert_eq!(verdict(&order), expected);
            assert!(verdict(&order).holds());
        }
    }

    #[test]
    fn what_never_arrives_is_lost() {
        let verdict = verdict(&["a1", "a3", "b1"]);
        assert_eq!((verdict.lost, verdict.delivered, verdict.inversions), (1, 3, 0));
        assert!(!verdict.holds());
    }

    #[test]
    fn duplicates_cannot_make_up_for_a_loss() {
        let verdict = verdict(&["a1", "a1", "a2", "a3"]);
        assert_eq!((verdict.lost, verdict.twice), (1, 1));
        assert!(!verdict.holds());
    }

    #[test]
    fn a_resent_stretch_is_twice_but_in_order() {
        let verdict = verdict(&["a1", "a2", "a1", "a2", "a3", "b1"]);
        assert_eq!(verdict, Verdict { written: 4, delivered: 4, twice: 2, ..Verdict::default() });
        assert!(verdict.holds());
    }

    #[test]
    fn a_first_delivery_behind_a_later_event_is_an_inversion() {
        let verdict = verdict(&["a1", "a3", "a2", "a3", "b1"]);
        assert_eq!((verdict.inversions, verdict.lost, verdict.twice), (1, 0, 1));
        assert!(!verdict.holds());
    }

    #[test]
    fn topics_have_no_common_order() {
        let mut events = story();
        events.get_mut("a2").unwrap().topic = "other".into();
        assert_eq!(judge(&events, &arrived(&events, &["a1", "a3", "a2", "b1"])).inversions, 0);
    }

    #[test]
    fn what_was_rolled_back_is_a_phantom_however_often_it_comes() {
        let verdict = verdict(&["a1", "ghost", "a2", "ghost", "a3", "b1"]);
        assert_eq!((verdict.phantoms, verdict.delivered, verdict.twice), (1, 4, 0));
        assert!(!verdict.holds());
    }

    #[test]
    fn another_key_topic_or_payload_is_altered() {
        let changes: [fn(&mut Arrival); 3] =
            [|it| it.key.push('x'), |it| it.topic.push('x'), |it| it.payload.push('x')];
        for change in changes {
            let mut arrivals = arrived(&story(), &["a1", "a2", "a3", "b1"]);
            change(&mut arrivals[1]);
            let verdict = judge(&story(), &arrivals);
            assert_eq!((verdict.altered, verdict.lost, verdict.holds()), (1, 0, false));
        }
    }

    #[test]
    fn latency_counts_first_deliveries_by_nearest_rank() {
        let events = story();
        // after 1, 2, 4 and 5 ms; the re-send in between does not count, nor does the phantom
        let arrivals = arrived(&events, &["a1", "a2", "a1", "a3", "b1", "ghost"]);
        let ms = Duration::from_millis;
        let expected = Latency { events: 4, median: ms(2), p99: ms(5), longest: ms(5) };
        assert_eq!(latency(&events, &arrivals, |_| true), expected);
        assert_eq!(latency(&events, &arrivals, |event| event.key == "b").median, ms(5));
        assert_eq!(latency(&events, &arrivals, |_| false), Latency::default());
    }
}
