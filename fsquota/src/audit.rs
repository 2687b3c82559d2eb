//! Audits a tree: which entries left the limits of their directory, and which count for a directory elsewhere.
//!
//! Two passes: the first finds the directories that own a project, the second [judges](judge) each entry by its
//! project, its mark and where it lies.

mod judge;
mod owner_search;
mod pace;
mod visitor;

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use crate::engine::QuotaEngine;
use crate::kernel::{ProjectTag, QuotaKernel};
use crate::linux::LinuxKernel;
use crate::tree::{TreeVisitor as _, walk_tree};
use crate::{Bytes, Error, Inodes, ProjectId, ProjectRange, QuotaLimits, QuotaUsage};

use judge::{KnownProjects, Scope};
use owner_search::OwnerSearch;
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
    /// Repaired entries.
    pub repaired: u64,
    /// Immutable entries (`chattr +i`), which were not repaired.
    pub immutable: u64,
    /// Symbolic links, sockets, FIFOs and device nodes, whose project this kernel does not tell: Linux 6.17 does.
    pub special: u64,
    /// Entries on which something is mounted, which are not entered.
    pub mounts: u64,
}

/// The result of an audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditReport {
    /// The totals.
    pub summary: AuditSummary,
    /// The first hundred findings.
    pub findings: Vec<AuditFinding>,
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
}

impl AuditReport {
    /// Whether nothing escaped, and nothing counts elsewhere.
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

/// Audits the tree of a directory.
pub(crate) fn audit_tree(
    engine: &QuotaEngine<LinuxKernel>,
    dir: BorrowedFd<'_>,
    options: AuditOptions,
) -> Result<AuditReport, Error> {
    let search = search_owners(dir, None, options.entries_per_second)?;
    let listed = engine.list_projects(ProjectRange::full_range())?;
    let limited = listed.into_iter().filter(|status| status.limits != QuotaLimits::default());
    let limited = limited.map(|status| status.project.get()).collect();
    let projects = KnownProjects { owned: search.owned, limited };
    let failed = |(path, source)| Error::AuditTree { path, source };
    let above = scope_above(&engine.kernel, dir).map_err(|source| failed((PathBuf::new(), source)))?;
    let mut visitor = AuditVisitor::new(engine, &projects, options, above);
    visitor.visit_inode(dir, true, &PathBuf::new).map_err(|source| failed((PathBuf::new(), source)))?;
    walk_tree(dir, &mut visitor).map_err(failed)?;
    Ok(visitor.into_report())
}

/// Finds the directories of a project in the tree of a directory.
pub(crate) fn find_directories(dir: BorrowedFd<'_>, project: ProjectId) -> Result<ProjectDirectories, Error> {
    let mut found = search_owners(dir, Some(project.get()), None)?.found;
    found.others.truncate(MAX_NAMED);
    Ok(found)
}

fn search_owners(
    dir: BorrowedFd<'_>,
    target: Option<u32>,
    entries_per_second: Option<NonZeroU32>,
) -> Result<OwnerSearch, Error> {
    let mut search = OwnerSearch::new(target, entries_per_second);
    let failed = |(path, source)| Error::AuditTree { path, source };
    search.visit_inode(dir, true, &PathBuf::new).map_err(|source| failed((PathBuf::new(), source)))?;
    walk_tree(dir, &mut search).map_err(failed)?;
    Ok(search)
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
