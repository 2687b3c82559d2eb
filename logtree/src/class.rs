//! The classes of records, by which readers filter without decoding them: the six levels, and raw.

use crate::Level;

/// The class of raw records; the class of leveled records is their level.
pub(crate) const RAW_CLASS: u8 = 6;

/// One number per record class.
pub(crate) type ClassCounts = [u64; 7];

/// A set of record classes: one bit per level, and one for raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassMask(u8);

impl ClassMask {
    pub(crate) const LEVELED: ClassMask = ClassMask(0b011_1111);
    pub(crate) const RAW: ClassMask = ClassMask(1 << RAW_CLASS);

    /// Those of its levels that are not below this one.
    pub(crate) fn at_least(self, level: Level) -> ClassMask {
        ClassMask(self.0 & (u8::MAX << level as u8))
    }

    pub(crate) fn union(self, other: ClassMask) -> ClassMask {
        ClassMask(self.0 | other.0)
    }

    pub(crate) fn contains(self, class: u8) -> bool {
        self.0 >> class & 1 == 1
    }

    /// Indices of the classes in the set.
    pub(crate) fn classes(self) -> impl Iterator<Item = usize> {
        (0..7).filter(move |&class| self.contains(class as u8))
    }

    /// Largest over the classes in the set.
    pub(crate) fn max_over(self, number: impl Fn(usize) -> u64) -> u64 {
        self.classes().map(number).max().unwrap_or(0)
    }

    /// Sum over the classes in the set.
    pub(crate) fn sum_over(self, count: impl Fn(usize) -> u64) -> u64 {
        self.classes().map(count).sum()
    }
}
