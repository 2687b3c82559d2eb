//! What a reader asks for.

use crate::{Dn, Level};

/// What a reader asks for. Begin with [`Query::new`]; the filters hold for the backlog and the live stream alike.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Query {
    /// The name to read.
    pub dn: Dn,
    /// Whether to read everything within it, too.
    pub children: bool,
    /// How much of what is stored to begin with.
    pub backlog: Backlog,
    /// Whether to go on with what is written from now on.
    pub follow: bool,
    /// Leveled, raw, or both.
    pub kind: Kind,
    /// Least level of leveled entries.
    pub min_level: Option<Level>,
    /// Whether raw lines, which have no level, pass although a `min_level` is asked for. They do not by default.
    pub raw_passes_level: bool,
    /// Only what is newer than the entry of this number: where an earlier reader stopped
    /// ([`Reader::position`](crate::Reader::position)).
    pub after: Option<u64>,
}

/// How much of what is stored a reader begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Backlog {
    /// Nothing; [`Query::after`] then has no effect.
    None,
    /// Everything.
    All,
    /// The newest so many of those that pass the filters, over all names read, oldest first.
    Last(usize),
}

/// Which kinds of entries to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Kind {
    /// Both.
    All,
    /// Messages with a level.
    Leveled,
    /// Lines without.
    Raw,
}

/// Why a query makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// Raw lines have no level: leave out one of the two.
    #[error("raw lines have no level: ask for raw lines or for a least level, not both")]
    LevelOnRaw,
}

impl Query {
    /// Everything stored under exactly this name.
    pub fn new(dn: Dn) -> Query {
        Query {
            dn,
            children: false,
            backlog: Backlog::All,
            follow: false,
            kind: Kind::All,
            min_level: None,
            raw_passes_level: false,
            after: None,
        }
    }

    /// Reads everything within the name, too.
    pub fn children(mut self) -> Query {
        self.children = true;
        self
    }

    /// Sets how much of what is stored to begin with.
    pub fn backlog(mut self, backlog: Backlog) -> Query {
        self.backlog = backlog;
        self
    }

    /// Begins with the newest `n`.
    pub fn last(self, n: usize) -> Query {
        self.backlog(Backlog::Last(n))
    }

    /// Goes on with what is written from now on.
    pub fn follow(mut self) -> Query {
        self.follow = true;
        self
    }

    /// Reads leveled or raw entries only.
    pub fn kind(mut self, kind: Kind) -> Query {
        self.kind = kind;
        self
    }

    /// Leaves out leveled entries below `level`, and raw lines unless [`Query::raw_passes_level`] is set.
    pub fn min_level(mut self, level: Level) -> Query {
        self.min_level = Some(level);
        self
    }

    /// Lets raw lines pass although a least level is asked for.
    pub fn raw_passes_level(mut self) -> Query {
        self.raw_passes_level = true;
        self
    }

    /// Leaves out what is not newer than the entry of this number.
    pub fn after(mut self, seq: u64) -> Query {
        self.after = Some(seq);
        self
    }

    pub(crate) fn matches(&self, dn: &Dn) -> bool {
        if self.children { dn.is_within(&self.dn) } else { *dn == self.dn }
    }

    /// The classes of records that pass the filters.
    pub(crate) fn mask(&self) -> Result<Mask, QueryError> {
        if self.kind == Kind::Raw && self.min_level.is_some() {
            return Err(QueryError::LevelOnRaw);
        }
        let levels = Mask::LEVELED.at_least(self.min_level.unwrap_or(Level::Trace));
        let raw_passes = self.min_level.is_none() || self.raw_passes_level;
        Ok(match self.kind {
            Kind::Leveled => levels,
            Kind::Raw => Mask::RAW,
            Kind::All if raw_passes => levels.or(Mask::RAW),
            Kind::All => levels,
        })
    }
}

/// A set of record classes: one bit per level, and one for raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mask(u8);

impl Mask {
    const LEVELED: Mask = Mask(0b011_1111);
    const RAW: Mask = Mask(1 << crate::record::RAW);

    fn at_least(self, level: Level) -> Mask {
        Mask(self.0 & (u8::MAX << level as u8))
    }

    fn or(self, other: Mask) -> Mask {
        Mask(self.0 | other.0)
    }

    pub(crate) fn admits(self, class: u8) -> bool {
        self.0 >> class & 1 == 1
    }

    /// Indices of the classes in the set.
    pub(crate) fn classes(self) -> impl Iterator<Item = usize> {
        (0..7).filter(move |&class| self.admits(class as u8))
    }

    /// Largest over the classes in the set.
    pub(crate) fn max(self, number: impl Fn(usize) -> u64) -> u64 {
        self.classes().map(number).max().unwrap_or(0)
    }

    /// Sum over the classes in the set.
    pub(crate) fn sum(self, count: impl Fn(usize) -> u64) -> u64 {
        self.classes().map(count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(query: Query) -> Vec<usize> {
        query.mask().unwrap().classes().collect()
    }

    #[test]
    fn raw_lines_pass_a_least_level_only_when_asked() {
        let warn = Query::new(Dn::root()).min_level(Level::Warn);
        assert_eq!(admitted(warn.clone()), [3, 4, 5]);
        assert_eq!(admitted(warn.clone().raw_passes_level()), [3, 4, 5, 6]);
        assert_eq!(admitted(warn.raw_passes_level().kind(Kind::Leveled)), [3, 4, 5]);
        assert_eq!(admitted(Query::new(Dn::root())), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(admitted(Query::new(Dn::root()).kind(Kind::Raw)), [6]);
    }

    #[test]
    fn raw_only_with_a_least_level_is_refused() {
        let query = Query::new(Dn::root()).kind(Kind::Raw).min_level(Level::Info);
        assert_eq!(query.mask(), Err(QueryError::LevelOnRaw));
    }
}
