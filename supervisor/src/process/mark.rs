//! The mark that tells of which start a descendant of this program is.
//!
//! It is no identity: every process can set it. What else must hold, see [`Kinship`](super::descendants::Kinship) and
//! [`leftovers`](super::leftovers).
//!
//! It is the soft limit of file locks (`RLIMIT_LOCKS`). The kernel has ignored that limit since 2.4, but
//! still passes it on: fork, exec, setsid, a double fork, a change of user and a new namespace keep it.
//! Setting it needs no privilege, and every user may read it, also of a zombie. The hard limit stays
//! unchanged, so a supervisor that runs below another one can mark its own children.
//!
//! ```text
//! 63 62 | 61 | 60 … 46 | 45 … 24 |    23    | 22 … 0
//!   0 0 |  1 | program |  host   | survives | start
//! ```
//!
//! A process that survives is one that no later program may take for a leftover of this one.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use super::procfs;

const MARKER: u64 = 1 << 61;
const PROGRAM_SHIFT: u32 = 46;
const HOST_SHIFT: u32 = 24;
const HOST_MASK: u64 = (1 << 22) - 1;
const SURVIVES: u64 = 1 << 23;
const START_MASK: u64 = SURVIVES - 1;

/// The mark of one start of one process, and of all its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProcessMark(u64);

/// The part that all marks of one program share. A nested supervisor has another one, also in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProgramId(u16);

impl ProgramId {
    pub(super) fn current() -> io::Result<Self> {
        let mut hasher = DefaultHasher::new();
        // The namespace, because pids repeat in other containers, and the start time, because they repeat over time.
        fs::read_link("/proc/self/ns/pid")?.hash(&mut hasher);
        std::process::id().hash(&mut hasher);
        procfs::read_stat(procfs::own_pid())?.start.hash(&mut hasher);
        Ok(Self((hasher.finish() & 0x7fff) as u16))
    }

    /// The mark of processes that a program starts by other means than a host.
    pub(super) fn own_mark(self) -> ProcessMark {
        ProcessMark(MARKER | u64::from(self.0) << PROGRAM_SHIFT)
    }
}

impl ProcessMark {
    /// The mark in a soft limit, if there is one.
    pub(super) fn from_limit(limit: u64) -> Option<Self> {
        (limit >> 61 == 1).then_some(Self(limit))
    }

    /// The soft limit that carries it.
    pub(super) fn as_limit(self) -> u64 {
        self.0
    }

    pub(super) fn program_id(self) -> ProgramId {
        ProgramId((self.0 >> PROGRAM_SHIFT & 0x7fff) as u16)
    }

    /// Returns whether its processes may outlive the program that allocated it.
    pub(super) fn survives(self) -> bool {
        self.0 & SURVIVES != 0
    }

    pub(super) fn host_id(self) -> HostId {
        HostId(self.0 >> HOST_SHIFT)
    }
}

/// One host of one program. The marks of a nested supervisor have another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct HostId(u64);

impl HostId {
    /// The host id with this display form.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let number = |part| u64::from_str_radix(part, 16).ok();
        let (program, host) = text.split_once('-')?;
        let (program, host) = (number(program)?, number(host)?);
        let bits =
            MARKER >> HOST_SHIFT | (program & 0x7fff) << (PROGRAM_SHIFT - HOST_SHIFT) | host & HOST_MASK;
        // The display form has no leading zeros, sign or capitals, and no number out of range.
        Some(Self(bits)).filter(|id| id.to_string() == text)
    }
}

impl fmt::Display for HostId {
    /// The program's and the host's part, in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.0 >> (PROGRAM_SHIFT - HOST_SHIFT) & 0x7fff, self.0 & HOST_MASK)
    }
}

/// Allocates the marks of one host.
#[derive(Debug)]
pub(super) struct MarkAllocator {
    host: u64,
    next_mark: AtomicU32,
}

impl MarkAllocator {
    /// `thread` is a thread that exists as long as the host, so no other running host has the same id.
    pub(super) fn new(program: ProgramId, thread: i32) -> Self {
        let host = program.own_mark().0 | (u64::from(thread.unsigned_abs()) & HOST_MASK) << HOST_SHIFT;
        Self { host, next_mark: AtomicU32::new(1) }
    }

    /// The next mark, of processes that may outlive this program or not. It repeats after 8 million starts; a
    /// collision needs a process that has survived all of them.
    pub(super) fn next_mark(&self, survives: bool) -> ProcessMark {
        let start = u64::from(self.next_mark.fetch_add(1, Ordering::Relaxed)) & START_MASK;
        ProcessMark(self.host | if survives { SURVIVES } else { 0 } | start)
    }

    pub(super) fn host_id(&self) -> HostId {
        ProcessMark(self.host).host_id()
    }

    /// Returns whether this host allocated the mark.
    pub(super) fn has_allocated(&self, mark: ProcessMark) -> bool {
        mark.host_id() == self.host_id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ordinary_limit_is_a_mark() {
        for limit in [0, 1024, u64::from(u32::MAX), i64::MAX as u64, u64::MAX] {
            assert_eq!(ProcessMark::from_limit(limit), None, "{limit}");
        }
    }

    #[test]
    fn a_mark_survives_conversion_to_a_limit() {
        let (program, other) = (ProgramId(0x7fff), ProgramId(0x7ffe));
        let marks = MarkAllocator::new(program, i32::MAX);
        let (first, second) = (marks.next_mark(false), marks.next_mark(true));
        assert!(first != second && !first.survives() && second.survives());
        for mark in [first, second] {
            assert_eq!(ProcessMark::from_limit(mark.as_limit()), Some(mark));
            assert!(mark.program_id() == program && marks.has_allocated(mark));
            assert_eq!(HostId::parse(&mark.host_id().to_string()), Some(mark.host_id()));
        }
        assert!(
            !MarkAllocator::new(program, 1).has_allocated(first)
                && !MarkAllocator::new(other, i32::MAX).has_allocated(first)
        );
    }
}
