//! Minimum levels of names, which are set while the store is in use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::{Dn, Level};

/// The levels that are set. Each holds for its name, and for all names below it that have no other level.
#[derive(Debug, Default)]
pub(crate) struct LevelTable(BTreeMap<Dn, Level>);

impl LevelTable {
    /// Sets or removes the level of a name; returns the former one.
    pub(crate) fn replace(&mut self, dn: &Dn, level: Option<Level>) -> Option<Level> {
        match level {
            Some(level) => self.0.insert(dn.clone(), level),
            None => self.0.remove(dn),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Dn, Level)> {
        self.0.iter().map(|(dn, level)| (dn, *level))
    }

    /// The name whose level holds for this one, and the level.
    pub(crate) fn find(&self, dn: &Dn) -> Option<(&Dn, Level)> {
        // Of the names that come before it in their order, the last one that contains it is the nearest.
        let (set, level) = self.0.range(..=dn).rev().find(|(set, _)| dn.is_within(set))?;
        Some((set, *level))
    }

    pub(crate) fn lowest(&self) -> Option<Level> {
        self.0.values().copied().min()
    }
}

/// A minimum level that is read without a lock.
#[derive(Debug, Default)]
pub(crate) struct AtomicLevel(AtomicU8);

/// The number of no level; that of a level is one more than the level's.
const NO_LEVEL: u8 = 0;
/// A number above that of all levels.
const NONE_KEPT: u8 = 7;

impl AtomicLevel {
    pub(crate) fn set(&self, level: Option<Level>) {
        // Relaxed: the level guards no other data.
        self.0.store(level.map_or(NO_LEVEL, |level| level as u8 + 1), Ordering::Relaxed);
    }

    /// From now on it contains no level.
    pub(crate) fn exclude_all(&self) {
        self.0.store(NONE_KEPT, Ordering::Relaxed);
    }

    /// The level; `None` also after [`exclude_all`](AtomicLevel::exclude_all).
    pub(crate) fn get(&self) -> Option<Level> {
        let number = self.0.load(Ordering::Relaxed).checked_sub(1)?;
        Level::ALL.get(usize::from(number)).copied()
    }

    #[inline]
    pub(crate) fn contains(&self, level: Level) -> bool {
        level as u8 + 1 >= self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_above_decides() {
        let dn = |text: &str| text.parse::<Dn>().unwrap();
        let mut table = LevelTable::default();
        assert_eq!((table.find(&dn("a")), table.lowest()), (None, None));
        for (name, level) in [("a", Level::Warn), ("a.b.c", Level::Debug), ("a.b-c", Level::Fatal)] {
            assert_eq!(table.replace(&dn(name), Some(level)), None);
        }
        let found = |table: &LevelTable, name: &str| {
            table.find(&dn(name)).map(|(set, level)| (set.to_string(), level))
        };
        for (name, expected) in [
            ("", None),
            ("a", Some(("a", Level::Warn))),
            ("a.b", Some(("a", Level::Warn))),
            ("a.b.cc", Some(("a", Level::Warn))),
            ("a.b.c.d", Some(("a.b.c", Level::Debug))),
            ("a.z", Some(("a", Level::Warn))),
            ("ab", None),
        ] {
            assert_eq!(found(&table, name), expected.map(|(set, level)| (set.to_owned(), level)), "{name}");
        }
        assert_eq!(table.lowest(), Some(Level::Debug));
        table.replace(&Dn::root(), Some(Level::Trace));
        assert_eq!(found(&table, "ab"), Some((String::new(), Level::Trace)));
        assert_eq!(table.replace(&dn("a.b.c"), None), Some(Level::Debug));
        assert_eq!(found(&table, "a.b.c"), Some(("a".to_owned(), Level::Warn)));
    }

    #[test]
    fn an_atomic_level_contains_itself_and_what_is_above() {
        let atomic = AtomicLevel::default();
        assert!(Level::ALL.into_iter().all(|level| atomic.contains(level)) && atomic.get().is_none());
        for minimum in Level::ALL {
            atomic.set(Some(minimum));
            assert!(Level::ALL.into_iter().all(|level| atomic.contains(level) == (level >= minimum)));
            assert_eq!(atomic.get(), Some(minimum));
        }
        atomic.exclude_all();
        assert!(!Level::ALL.into_iter().any(|level| atomic.contains(level)) && atomic.get().is_none());
    }
}
