//! [`Buried`]: the ids of events that went to the dead-letter topic, on their way to whoever keeps their rows.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// More than this are not remembered: then it is only known that there were too many.
const MOST: usize = 20_000;

/// Ids that were noted and not yet taken. An id is noted before its event counts as delivered, so whoever first reads
/// what is delivered and then takes the ids has those of every dead letter among it.
#[derive(Debug, Default)]
pub struct Buried(Mutex<Ids>);

/// What was noted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Ids {
    /// The ids.
    pub ids: Vec<String>,
    /// There were more, or some event had no id.
    pub incomplete: bool,
}

impl Buried {
    /// Notes an event.
    pub fn note(&self, id: &[u8]) {
        let mut noted = self.lock();
        if id.is_empty() || noted.ids.len() >= MOST {
            noted.incomplete = true;
        } else {
            noted.ids.push(String::from_utf8_lossy(id).into_owned());
        }
    }

    /// Takes what was noted.
    pub fn take(&self) -> Ids {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Ids> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_and_a_nameless_event_are_told_as_incomplete() {
        let buried = Buried::default();
        buried.note(b"a");
        assert_eq!(buried.take(), Ids { ids: vec!["a".to_owned()], incomplete: false });
        buried.note(b"");
        assert!(buried.take().incomplete);
        (0..=MOST).for_each(|number| buried.note(number.to_string().as_bytes()));
        let taken = buried.take();
        assert_eq!((taken.ids.len(), taken.incomplete), (MOST, true));
        assert_eq!(buried.take(), Ids::default());
    }
}
