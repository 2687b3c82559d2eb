//! The range of project numbers, and the search for a free one.

use std::io;

use crate::ProjectId;

/// The project numbers that are allocated to directories: `[first, last]`.
///
/// The default avoids conflicts on the host: administrators number by hand from 1, the kubelet from
/// 1,048,577.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProjectRange {
    first_id: ProjectId,
    last_id: ProjectId,
}

impl ProjectRange {
    /// The numbers from `first` to `last`, both included; `None` if that range is empty.
    pub const fn new(first: ProjectId, last: ProjectId) -> Option<Self> {
        if first.get() <= last.get() { Some(Self { first_id: first, last_id: last }) } else { None }
    }

    /// Every valid project number.
    pub(crate) fn full_range() -> Self {
        const FIRST: ProjectId = ProjectId::new(1).expect("a valid number");
        const LAST: ProjectId = ProjectId::new(u32::MAX - 1).expect("a valid number");
        Self { first_id: FIRST, last_id: LAST }
    }

    /// The smallest project number.
    pub const fn first_id(self) -> ProjectId {
        self.first_id
    }

    /// The largest project number.
    pub const fn last_id(self) -> ProjectId {
        self.last_id
    }

    /// Returns whether the project number is in the range.
    pub fn contains(self, project: ProjectId) -> bool {
        (self.first_id..=self.last_id).contains(&project)
    }

    /// The number after this one; after the last comes the first.
    pub(crate) fn next_after(self, project: ProjectId) -> ProjectId {
        let next = project.get().checked_add(1).and_then(ProjectId::new);
        next.filter(|next| self.contains(*next)).unwrap_or(self.first_id)
    }

    /// The number at which one of several uncoordinated allocators starts, by a number `of` each that differs
    /// between them.
    pub(crate) fn start_of_part(self, of: u64) -> ProjectId {
        const PARTS: u64 = 64;
        // Fibonacci hashing: neighbours land far from each other.
        let part = of.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        let length = u64::from(self.last_id.get() - self.first_id.get()) + 1;
        let offset = u32::try_from(length / PARTS * part).unwrap_or(0);
        ProjectId::new(self.first_id.get() + offset).unwrap_or(self.first_id)
    }
}

impl Default for ProjectRange {
    /// `[2_000_000_000, 2_147_483_646]`: recognizable, dense in the quota file, and positive where a tool
    /// prints it signed.
    fn default() -> Self {
        const FIRST: ProjectId = ProjectId::new(2_000_000_000).expect("a valid number");
        const LAST: ProjectId = ProjectId::new(2_147_483_646).expect("a valid number");
        Self { first_id: FIRST, last_id: LAST }
    }
}

/// Looks up which projects of a file system are allocated.
pub(crate) trait ProjectLookup {
    /// Returns whether any inode belongs to the project, or a limit is set for it.
    fn is_allocated(&self, project: u32) -> io::Result<bool>;
    /// The first allocated number that is not below this one.
    fn next_allocated(&self, from: u32) -> io::Result<Option<u32>>;
}

/// A free number of the range, the one at the cursor if possible; `None` when all are allocated.
///
/// One lookup if the number at the cursor is free. If n allocated numbers follow the cursor, as in a process
/// that has just started, 2 log₂ n lookups: strides double until a number is free, then a bisection finds the
/// end of the run. Only a range that is nearly full is scanned.
pub(crate) fn find_free_project(
    projects: &impl ProjectLookup,
    range: ProjectRange,
    cursor: ProjectId,
) -> io::Result<Option<ProjectId>> {
    let (first, last, cursor) = (range.first_id.get(), range.last_id.get(), cursor.get());
    let mut found = probe_forward(projects, cursor, last)?;
    // The numbers before the cursor may have been released.
    if found.is_none() && cursor > first {
        found = probe_forward(projects, first, cursor - 1)?;
    }
    // The probes skip most numbers: only a scan tells that none is free.
    if found.is_none() {
        found = scan_range(projects, first, last)?;
    }
    Ok(found.and_then(ProjectId::new))
}

fn probe_forward(projects: &impl ProjectLookup, from: u32, to: u32) -> io::Result<Option<u32>> {
    if !projects.is_allocated(from)? {
        return Ok(Some(from));
    }
    // The strides may skip free numbers, which does no harm: any one will do.
    let (mut used, mut step) = (from, 1u32);
    while used < to {
        let ahead = used.saturating_add(step).min(to);
        if !projects.is_allocated(ahead)? {
            return bisect_run(projects, used, ahead).map(Some);
        }
        used = ahead;
        step = step.saturating_mul(2);
    }
    Ok(None)
}

/// A free number above `used` and not above `free`, whose predecessor is allocated.
fn bisect_run(projects: &impl ProjectLookup, mut used: u32, mut free: u32) -> io::Result<u32> {
    while free - used > 1 {
        let middle = used + (free - used) / 2;
        if projects.is_allocated(middle)? {
            used = middle;
        } else {
            free = middle;
        }
    }
    Ok(free)
}

fn scan_range(projects: &impl ProjectLookup, first: u32, last: u32) -> io::Result<Option<u32>> {
    let mut candidate = first;
    loop {
        match projects.next_allocated(candidate)? {
            Some(number) if number == candidate && number < last => candidate += 1,
            Some(number) if number == candidate => return Ok(None),
            _ => return Ok(Some(candidate)),
        }
    }
}

#[cfg(test)]
#[path = "range_test.rs"]
mod tests;
