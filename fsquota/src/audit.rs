//! Audits a tree: which entries left the limits of their directory, and which count for a directory elsewhere.
//!
//! Two passes: the first finds the directories that own a project, the second [judges](judge) each entry by its
//! project, its mark and where it lies.

mod judge;
mod owner_search;
mod pace;
mod unread;
mod visitor;

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use crate::engine::QuotaEngine;
use crate::kernel::{ProjectTag, QuotaKernel};
use crate::linux::LinuxKernel;
use crate::tree::{OpenEntry, TreeVisitor, walk_tree};
use crate::{Bytes, Error, Inodes, ProjectId, ProjectRange, QuotaLimits, QuotaStatus, QuotaUsage};

use judge::{KnownProjects, Scope};
use owner_search::OwnerSearch;
use pace::WalkPace;
use unread::{AuditStop, UnreadEntries, walk_error};
use visitor::AuditVisitor;

/// How many findings and paths a report names; its totals count all.
const MAX_NAMED: usize = 100;

/// How a tree is audited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditOptions {
    /// Whether what can be repaired is: escaped entries return to the project of their directory, and entries outside
    /// of their owner lose its project. Default: no.
    pub repair: bool,
    /// The most entries that are inspected in a second, in each of the two passes, so that a large tree takes little of
    /// the disk. Default: no limit.
    pub entries_per_second: Option<NonZeroU32>,
}

/// Why an entry does not count where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// It lies below a limited directory and has another project, or none, or its new entries would: its owner changed
    /// that with an ioctl, or a backup was restored into the directory. A directory with a project that has limits and no
    /// known owner is [`Unowned`](Self::Unowned) instead.
    Escaped,
    /// It has the project of a limited directory elsewhere, out of which it was moved.
    MovedOut,
    /// It is a copy of a limited directory with all attributes, or lies in one; the original exists.
    Copied,
    /// It is a copy of a limited directory with all attributes, or lies in one, and the original is not in the tree: a
    /// restored backup.
    Restored,
    /// It has a project without a marked owner in the tree: an earlier release or another program limited it, or the
    /// owner lies outside of the tree.
    Unowned,
}

/// An entry that does not count where it lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct AuditFinding {
    /// Its path, relative to the audited directory, which is the empty path.
    pub path: PathBuf,
    /// Why it is found.
    pub kind: FindingKind,
    /// Its project; `None` for an entry without one.
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
    /// What escaped from limits: [`FindingKind::Escaped`].
    pub escaped: QuotaUsage,
    /// What counts for a directory elsewhere: [`FindingKind::MovedOut`] and [`FindingKind::Copied`].
    pub outside: QuotaUsage,
    /// What has a project of an unknown owner, which is never changed: [`FindingKind::Restored`] and
    /// [`FindingKind::Unowned`], and all entries that lie in them.
    pub unowned: QuotaUsage,
    /// Directories that own a project and use more than its limits: processes with `CAP_SYS_RESOURCE` exceed those of ext4,
    /// those with `CAP_FOWNER` on XFS return to a project what left it, or a limit was set below the usage.
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
    /// The first hundred of the others that have it, without those below them: moved, copied, restored, or limited by an
    /// earlier release or another program.
    pub others: Vec<PathBuf>,
    /// Directories that could not be read, or only in part, because they were moved away meanwhile: the owner may be one
    /// of them.
    pub unread: u64,
}

impl AuditReport {
    /// Whether all was inspected, and repaired if that was asked for and possible.
    pub fn is_complete(&self) -> bool {
        self.summary.unread == 0
    }

    /// Whether nothing that was inspected escaped, and nothing counts elsewhere.
    pub fn is_clean(&self) -> bool {
        self.summary.escaped == QuotaUsage::default() && self.summary.outside == QuotaUsage::default()
    }

    fn add(&mut self, kind: FindingKind, bytes: u64, name: impl FnOnce() -> AuditFinding) {
        self.summary.add(kind, bytes);
        if self.findings.len() < MAX_NAMED {
            self.findings.push(name());
        }
    }
}

impl AuditSummary {
    fn add(&mut self, kind: FindingKind, bytes: u64) {
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

/// Audits the tree of a directory, until it is to end early.
pub(crate) fn audit_tree(
    engine: &QuotaEngine<LinuxKernel>,
    dir: BorrowedFd<'_>,
    (options, is_canceled): (AuditOptions, &dyn Fn() -> bool),
) -> Result<AuditReport, Error> {
    let stop = AuditStop(is_canceled);
    // A tree that is cleared meanwhile would be limited again.
    let _trees = options.repair.then(|| engine.kernel.lock_trees()).transpose()?;
    let mut search = OwnerSearch::new(None, WalkPace::new(options.entries_per_second), stop);
    visit_tree(dir, &mut search)?;
    let listed = engine.list_projects(ProjectRange::full_range())?;
    let is_exceeded =
        |status: &&QuotaStatus| search.owned.contains(&status.project.get()) && status.is_over_limit();
    let over_limit = listed.iter().filter(is_exceeded).count() as u64;
    let limited = listed.into_iter().filter(|status| status.limits != QuotaLimits::default());
    let limited = limited.map(|status| status.project.get()).collect();
    let projects = KnownProjects { owned: search.owned, limited };
    let above = scope_above(&engine.kernel, dir).map_err(|source| walk_error((PathBuf::new(), source)))?;
    let mut visitor = AuditVisitor::new((engine, &projects), (options, stop), above);
    visit_tree(dir, &mut visitor)?;
    let mut report = visitor.into_report(search.unread);
    report.summary.over_limit = over_limit;
    Ok(report)
}

/// Finds the directories of a project in the tree of a directory.
pub(crate) fn find_directories(dir: BorrowedFd<'_>, project: ProjectId) -> Result<ProjectDirectories, Error> {
    let mut search = OwnerSearch::new(Some(project.get()), WalkPace::new(None), AuditStop::NEVER);
    visit_tree(dir, &mut search)?;
    let OwnerSearch { mut found, unread, .. } = search;
    found.others.truncate(MAX_NAMED);
    Ok(ProjectDirectories { unread: unread.count, ..found })
}

/// Visits a directory and everything below it.
fn visit_tree(dir: BorrowedFd<'_>, visitor: &mut dyn TreeVisitor) -> Result<(), Error> {
    visitor.visit_inode(OpenEntry::top(dir)).map_err(|source| walk_error((PathBuf::new(), source)))?;
    walk_tree(dir, visitor).map_err(walk_error)
}

/// What the directory above is for this one, as far as the directories above tell: a limited one whose mark lies beyond an
/// escaped one is not found.
fn scope_above(kernel: &impl QuotaKernel, dir: BorrowedFd<'_>) -> io::Result<Scope> {
    let (mut below, mut above) = (dir.try_clone_to_owned()?, kernel.parent_dir(dir)?);
    let mut inherited = None;
    while is_in_directory(&below, &above)? {
        if let Some(mark) = kernel.owner_mark(above.as_fd())?
            && inherited.is_none_or(|below| below == mark.project)
        {
            return Ok(Scope::Limited { project: mark.project, is_owned: true });
        }
        let ProjectTag { project, inherit } = kernel.project_tag(above.as_fd())?;
        if project == 0 || !inherit || inherited.is_some_and(|below| below != project) {
            break;
        }
        inherited = Some(project);
        let next = kernel.parent_dir(above.as_fd())?;
        below = std::mem::replace(&mut above, next);
    }
    Ok(inherited.map_or(Scope::Free, |project| Scope::Limited { project, is_owned: false }))
}

/// Whether the parent of a directory is another one of its file system: it is not for the root of it, or of a mount.
fn is_in_directory(dir: &OwnedFd, parent: &OwnedFd) -> io::Result<bool> {
    let (dir, parent) = (rustix::fs::fstat(dir)?, rustix::fs::fstat(parent)?);
    Ok(dir.st_dev == parent.st_dev && dir.st_ino != parent.st_ino)
}

#[cfg(all(test, feature = "testing"))]
#[path = "audit/scope_test.rs"]
mod tests;
