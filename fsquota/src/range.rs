//! Which project numbers are given away, and which is next.

use std::io;

use crate::ProjectId;

/// The project numbers that are given to directories: `[first, last]`.
///
/// The default is out of the way of others on the machine: people number by hand from 1, the kubelet from 1,048,577.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProjectRange {
    first: ProjectId,
    last: ProjectId,
}

impl ProjectRange {
    /// The numbers from `first` to `last`, both included; `None` if there are none.
    pub const fn new(first: ProjectId, last: ProjectId) -> Option<Self> {
        if first.get() <= last.get() { Some(Self { first, last }) } else { None }
    }

    /// Every number that there can be.
    pub(crate) fn all() -> Self {
        const FIRST: ProjectId = ProjectId::new(1).expect("a valid number");
        const LAST: ProjectId = ProjectId::new(u32::MAX - 1).expect("a valid number");
        Self { first: FIRST, last: LAST }
    }

    /// The smallest.
    pub const fn first(self) -> ProjectId {
        self.first
    }

    /// The largest.
    pub const fn last(self) -> ProjectId {
        self.last
    }

    /// Whether the number is one of them.
    pub fn contains(self, project: ProjectId) -> bool {
        (self.first..=self.last).contains(&project)
    }

    /// The number after this one, around the end.
    pub(crate) fn after(self, project: ProjectId) -> ProjectId {
        let next = project.get().checked_add(1).and_then(ProjectId::new);
        next.filter(|next| self.contains(*next)).unwrap_or(self.first)
    }

    /// Where one of several that know nothing of each other begins, `of` a number that differs between them.
    pub(crate) fn part(self, of: u64) -> ProjectId {
        const PARTS: u64 = 64;
        // Fibonacci hashing: neighbours land far from each other.
        let part = of.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        let length = u64::from(self.last.get() - self.first.get()) + 1;
        let offset = u32::try_from(length / PARTS * part).unwrap_or(0);
        ProjectId::new(self.first.get() + offset).unwrap_or(self.first)
    }
}

impl Default for ProjectRange {
    /// `[2_000_000_000, 2_147_483_646]`: recognizable, dense in the quota file, and positive where a tool prints it signed.
    fn default() -> Self {
        const FIRST: ProjectId = ProjectId::new(2_000_000_000).expect("a valid number");
        const LAST: ProjectId = ProjectId::new(2_147_483_646).expect("a valid number");
        Self { first: FIRST, last: LAST }
    }
}

/// What is known of the projects of a file system.
pub(crate) trait Taken {
    /// Whether anything belongs to the number, or a limit is kept for it.
    fn is_taken(&self, project: u32) -> io::Result<bool>;
    /// The first taken number that is not below this one.
    fn next_taken(&self, from: u32) -> io::Result<Option<u32>>;
}

/// A number of the range that is not taken, the one at the cursor if possible; `None` when all are.
///
/// One question where the cursor is right. Where a run of n taken numbers begins there, as for a process that has just
/// started, 2 log₂ n of them: strides that double until a number is free, then halves back to the end of the run. Only
/// a range that is nearly full is searched through.
pub(crate) fn find_free(
    taken: &impl Taken,
    range: ProjectRange,
    cursor: ProjectId,
) -> io::Result<Option<ProjectId>> {
    let (first, last, cursor) = (range.first.get(), range.last.get(), cursor.get());
    let mut found = stride(taken, cursor, last)?;
    if found.is_none() && cursor > first {
        found = stride(taken, first, cursor - 1)?;
    }
    if found.is_none() {
        found = search(taken, first, last)?;
    }
    Ok(found.and_then(ProjectId::new))
}

fn stride(taken: &impl Taken, from: u32, to: u32) -> io::Result<Option<u32>> {
    if !taken.is_taken(from)? {
        return Ok(Some(from));
    }
    let (mut used, mut step) = (from, 1u32);
    while used < to {
        let ahead = used.saturating_add(step).min(to);
        if !taken.is_taken(ahead)? {
            return halve(taken, used, ahead).map(Some);
        }
        used = ahead;
        step = step.saturating_mul(2);
    }
    Ok(None)
}

/// A free number above `used` and not above `free`, whose predecessor is taken.
fn halve(taken: &impl Taken, mut used: u32, mut free: u32) -> io::Result<u32> {
    while free - used > 1 {
        let middle = used + (free - used) / 2;
        if taken.is_taken(middle)? {
            used = middle;
        } else {
            free = middle;
        }
    }
    Ok(free)
}

fn search(taken: &impl Taken, first: u32, last: u32) -> io::Result<Option<u32>> {
    let mut candidate = first;
    loop {
        match taken.next_taken(candidate)? {
            Some(number) if number == candidate && number < last => candidate += 1,
            Some(number) if number == candidate => return Ok(None),
            _ => return Ok(Some(candidate)),
        }
    }
}

#[cfg(test)]
#[path = "range_test.rs"]
mod tests;
