//! Options of an audit, and the report of it.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;

use crate::{Bytes, Inodes, ProjectId, QuotaUsage};

/// Number of findings and paths that a report names; its totals count all.
pub(super) const MAX_NAMED: usize = 100;

/// Options of an audit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditOptions {
    /// Repairs what can be repaired: escaped entries return to the project of their directory, and entries outside
    /// of their owner lose its project. Default: no.
    pub repair: bool,
    /// The most entries that are inspected in a second, in each of the two passes, so that a large tree takes little of
    /// the disk. Default: no limit.
    pub entries_per_second: Option<NonZeroU32>,
}

/// The reason why an entry does not count for the directory that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// Below a limited directory, with another project, or none, or one that gives another to new entries: its owner
    /// changed that with an ioctl, or a backup was restored into the directory. A directory with a project that has
    /// limits and no known owner is [`Unowned`](Self::Unowned) instead.
    Escaped,
    /// In the project of a limited directory elsewhere, out of which it was moved.
    MovedOut,
    /// A copy of a limited directory with all attributes, or is in one; the original exists.
    Copied,
    /// A copy of a limited directory with all attributes, or is in one, and the original is not in the tree: a
    /// restored backup.
    Restored,
    /// In a project without a marked owner in the tree: an earlier release or another program limited it, or the
    /// owner is outside of the tree.
    Unowned,
}

/// An entry that does not count for the directory that it is in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct AuditFinding {
    /// Path relative to the audited directory, which is the empty path.
    pub path: PathBuf,
    /// Reason of the finding.
    pub kind: FindingKind,
    /// The project; `None` for an entry without one.
    pub project: Option<ProjectId>,
}

/// The totals of an audit, as metrics have them. An inode with several names counts once; one that
/// has the project of another directory only if all of its names are in the tree, and none is below that directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct AuditSummary {
    /// Inspected entries, with the directory itself.
    pub entries: u64,
    /// Directories that own a project.
    pub owners: u64,
    /// Usage that escaped from limits: [`FindingKind::Escaped`].
    pub escaped: QuotaUsage,
    /// Usage that counts for a directory elsewhere: [`FindingKind::MovedOut`] and [`FindingKind::Copied`].
    pub outside: QuotaUsage,
    /// Usage in projects of unknown owners, which is never changed: [`FindingKind::Restored`] and
    /// [`FindingKind::Unowned`], and all entries in them.
    pub unowned: QuotaUsage,
    /// Directories that own a project and use more than its limits: processes with `CAP_SYS_RESOURCE` exceed those of
    /// ext4, those with `CAP_FOWNER` on XFS return to a project what left it, or a limit was set below the usage.
    pub over_limit: u64,
    /// Repaired entries.
    pub repaired: u64,
    /// Immutable entries (`chattr +i`), which were not repaired.
    pub immutable: u64,
    /// Symbolic links, sockets, FIFOs and device nodes, whose project this kernel does not tell: Linux 6.17 does.
    pub special: u64,
    /// Entries on which something is mounted, which are not entered.
    pub mounts: u64,
    /// Entries that could not be inspected, or not be repaired: a process held a lease on them, the kernel reported an
    /// error of them, or they are directories that were moved away while they were inspected. An audit that is repeated
    /// may reach them.
    pub unread: u64,
}

/// The result of an audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditReport {
    /// The totals.
    pub summary: AuditSummary,
    /// The directories that own a project and have entries that don't count against it, and how many: of
    /// [`FindingKind::Escaped`], in other projects, and directories that own another one. Paths are relative to the
    /// audited directory; entries that were repaired are counted, too.
    pub uncounted: BTreeMap<PathBuf, u64>,
    /// The first hundred findings.
    pub findings: Vec<AuditFinding>,
    /// The first hundred entries that could not be inspected, or not be repaired, relative to the audited directory.
    pub unread: Vec<PathBuf>,
}

/// The directories of a project, relative to the searched one, which is the empty path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProjectDirectories {
    /// The directory that is marked as its owner.
    pub owner: Option<PathBuf>,
    /// The first hundred of the others that have it, without those below them: moved, copied, restored, or limited by
    /// an earlier release or another program.
    pub others: Vec<PathBuf>,
    /// Directories that could not be read, or only in part, because they were moved away at the same time: the owner
    /// may be one of them.
    pub unread: u64,
}

impl AuditReport {
    /// Returns whether all was inspected, and repaired if that was asked for and possible.
    pub fn is_complete(&self) -> bool {
        self.summary.unread == 0
    }

    /// Returns whether nothing that was inspected escaped, and nothing counts elsewhere.
    pub fn is_clean(&self) -> bool {
        self.summary.escaped == QuotaUsage::default() && self.summary.outside == QuotaUsage::default()
    }

    pub(super) fn add(&mut self, kind: FindingKind, bytes: u64, name: impl FnOnce() -> AuditFinding) {
        self.summary.add(kind, bytes);
        if self.findings.len() < MAX_NAMED {
            self.findings.push(name());
        }
    }
}

impl AuditSummary {
    pub(super) fn add(&mut self, kind: FindingKind, bytes: u64) {
        let total = match kind {
            FindingKind::Escaped => &mut self.escaped,
            FindingKind::MovedOut | FindingKind::Copied => &mut self.outside,
            FindingKind::Restored | FindingKind::Unowned => &mut self.unowned,
        };
        let QuotaUsage { bytes: Bytes(sum), inodes: Inodes(count) } = total;
        *sum = sum.saturating_add(bytes);
        *count += 1;
    }
}
