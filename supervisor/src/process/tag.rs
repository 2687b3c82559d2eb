//! The mark by which a process and all that descend from it are known.
//!
//! It is the soft limit of file locks (`RLIMIT_LOCKS`). The kernel has not looked at that limit since 2.4, but still
//! hands it down: fork, exec, setsid, a double fork, a change of user and a new namespace keep it. Setting it takes no
//! privilege, and everybody may read it, of a zombie too. The hard limit is left alone, so a supervisor that runs below
//! another can mark its own children.
//!
//! ```text
//! 63 62 | 61 | 60 … 46 | 45 … 24 | 23 … 0
//!   0 0 |  1 | program |  host   | start
//! ```

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
const START_MASK: u64 = (1 << HOST_SHIFT) - 1;

/// One start of one process, with everything that descends from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tag(u64);

/// What all tags of one program have in common: a supervisor below another has another one, also in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Program(u16);

impl Program {
    /// The program that runs this.
    pub(super) fn current() -> io::Result<Self> {
        let mut hasher = DefaultHasher::new();
        fs::read_link("/proc/self/ns/pid")?.hash(&mut hasher);
        std::process::id().hash(&mut hasher);
        procfs::stat(procfs::own_pid())?.start.hash(&mut hasher);
        Ok(Self((hasher.finish() & 0x7fff) as u16))
    }

    /// Marks what a program starts by other means than a host.
    pub(super) fn own_mark(self) -> Tag {
        Tag(MARKER | u64::from(self.0) << PROGRAM_SHIFT)
    }
}

impl Tag {
    /// The tag that a soft limit is, if it is one.
    pub(super) fn from_limit(limit: u64) -> Option<Self> {
        (limit >> 61 == 1).then_some(Self(limit))
    }

    /// The limit that carries it.
    pub(super) fn limit(self) -> u64 {
        self.0
    }

    /// Whose it is.
    pub(super) fn program(self) -> Program {
        Program((self.0 >> PROGRAM_SHIFT & 0x7fff) as u16)
    }

    /// Which host of which program gave it out.
    pub(super) fn giver(self) -> Giver {
        Giver(self.0 >> HOST_SHIFT)
    }
}

/// One host of one program: of the tags below one supervisor, those of a nested one have another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Giver(u64);

impl Giver {
    /// Whether some giver is shown so.
    pub(super) fn is_shown_as(text: &str) -> bool {
        let number = |part| u64::from_str_radix(part, 16).ok();
        let parsed = text.split_once('-').and_then(|(program, host)| Some((number(program)?, number(host)?)));
        parsed.is_some_and(|(program, host)| {
            // What is too large, and zeros in front, a sign and capitals, are nothing that is shown.
            Self(program << (PROGRAM_SHIFT - HOST_SHIFT) | host & HOST_MASK).to_string() == text
        })
    }
}

impl fmt::Display for Giver {
    /// The program's and the host's part, in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.0 >> (PROGRAM_SHIFT - HOST_SHIFT) & 0x7fff, self.0 & HOST_MASK)
    }
}

/// Gives out the tags of one host.
#[derive(Debug)]
pub(super) struct Tags {
    host: u64,
    next: AtomicU32,
}

impl Tags {
    /// `thread` is one that lives as long as the host: no other host that lives has the same.
    pub(super) fn new(program: Program, thread: i32) -> Self {
        let host = program.own_mark().0 | (u64::from(thread.unsigned_abs()) & HOST_MASK) << HOST_SHIFT;
        Self { host, next: AtomicU32::new(1) }
    }

    /// The next one. After 16 million starts they come again, and meet a process only if it has outlived all those.
    pub(super) fn next(&self) -> Tag {
        Tag(self.host | u64::from(self.next.fetch_add(1, Ordering::Relaxed)) & START_MASK)
    }

    /// The host.
    pub(super) fn giver(&self) -> Giver {
        Tag(self.host).giver()
    }

    /// Whether this host gave it out.
    pub(super) fn gave(&self, tag: Tag) -> bool {
        tag.giver() == self.giver()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_that_people_set_is_a_tag() {
        for limit in [0, 1024, u64::from(u32::MAX), i64::MAX as u64, u64::MAX] {
            assert_eq!(Tag::from_limit(limit), None, "{limit}");
        }
    }

    #[test]
    fn a_tag_survives_its_way_through_a_limit() {
        let (program, other) = (Program(0x7fff), Program(0x7ffe));
        let tags = Tags::new(program, i32::MAX);
        let (first, second) = (tags.next(), tags.next());
        assert_ne!(first, second);
        for tag in [first, second] {
            assert_eq!(Tag::from_limit(tag.limit()), Some(tag));
            assert!(tag.program() == program && tags.gave(tag));
        }
        assert!(!Tags::new(program, 1).gave(first) && !Tags::new(other, i32::MAX).gave(first));
    }
}
