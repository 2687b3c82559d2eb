//! Audits a tree: which entries left the limits of their directory, and which count for a directory elsewhere.
//!
//! Two passes: the [first](owner_search) finds the directories that own a project, the [second](visitor)
//! [judges](judge) each entry by its project, its mark and its parent.

mod judge;
mod owner_search;
mod report;
mod visitor;
mod walk_control;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use crate::engine::QuotaEngine;
use crate::kernel::{ProjectTag, QuotaKernel};
use crate::linux::LinuxKernel;
use crate::tree::{OpenEntry, TreeVisitor, walk_tree};
use crate::{Error, ProjectId, ProjectRange, QuotaLimits, QuotaStatus};

pub use report::{AuditFinding, AuditOptions, AuditReport, AuditSummary, FindingKind, ProjectDirectories};

use judge::{KnownProjects, Scope};
use owner_search::OwnerSearch;
use report::MAX_NAMED;
use visitor::AuditVisitor;
use walk_control::{AuditStop, WalkPace, walk_error};

/// Audits the tree of a directory, until it is to end early.
pub(crate) fn audit_tree(
    engine: &QuotaEngine<LinuxKernel>,
    dir: BorrowedFd<'_>,
    options: AuditOptions,
    is_canceled: &dyn Fn() -> bool,
) -> Result<AuditReport, Error> {
    let stop = AuditStop(is_canceled);
    // A tree that is cleared at the same time would be limited again.
    let _trees = options.repair.then(|| engine.kernel.lock_trees()).transpose()?;
    // Pass 1 finds all owners before any entry is judged: an entry may count for an owner that a walk meets
    // later.
    let mut search = OwnerSearch::new(None, WalkPace::new(options.entries_per_second), stop);
    visit_tree(dir, &mut search)?;
    let listed = engine.list_projects(ProjectRange::full_range())?;
    let is_exceeded =
        |status: &&QuotaStatus| search.owned.contains(&status.project.get()) && status.is_over_limit();
    let over_limit = listed.iter().filter(is_exceeded).count() as u64;
    let limited = listed.into_iter().filter(|status| status.limits != QuotaLimits::default());
    let limited = limited.map(|status| status.project.get()).collect();
    let projects = KnownProjects { owned: search.owned, limited };
    // Pass 2 starts with the limits that the directories above the tree give it.
    let above = scope_above(&engine.kernel, dir).map_err(|source| walk_error(PathBuf::new(), source))?;
    let mut visitor = AuditVisitor::new(engine, &projects, options, stop, above);
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
    visitor.visit_inode(OpenEntry::top(dir)).map_err(|source| walk_error(PathBuf::new(), source))?;
    walk_tree(dir, visitor).map_err(|(path, source)| walk_error(path, source))
}

/// The scope of the directory above, as far as the directories above tell: a limited one whose mark is above an
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
        // The project of the tree, if it has one, starts below this directory.
        if project == 0 || !inherit || inherited.is_some_and(|below| below != project) {
            break;
        }
        inherited = Some(project);
        let next = kernel.parent_dir(above.as_fd())?;
        below = std::mem::replace(&mut above, next);
    }
    Ok(inherited.map_or(Scope::Free, |project| Scope::Limited { project, is_owned: false }))
}

/// Returns whether the parent of a directory is another one of its file system: it is not for the root of it, or of a
/// mount.
fn is_in_directory(dir: &OwnedFd, parent: &OwnedFd) -> io::Result<bool> {
    let (dir, parent) = (rustix::fs::fstat(dir)?, rustix::fs::fstat(parent)?);
    Ok(dir.st_dev == parent.st_dev && dir.st_ino != parent.st_ino)
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

    use std::fs::File;

    use super::*;
    use crate::owner::OwnerMark;
    use crate::testing::memory::MemoryKernel;

    #[test]
    fn the_directories_above_tell_what_limits_a_directory_and_whether_they_own_it() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(scratch.path().join("a/b/c")).unwrap();
        let open = |path: &str| File::open(scratch.path().join(path)).unwrap();
        let kernel = MemoryKernel::default();
        let above = |path: &str| scope_above(&kernel, open(path).as_fd()).unwrap();
        assert_eq!(above("a/b/c"), Scope::Free);
        kernel.set_project_tag(open("a").as_fd(), ProjectTag { project: 3, inherit: true }).unwrap();
        assert_eq!(above("a"), Scope::Free);
        for path in ["a/b", "a/b/c"] {
            assert_eq!(above(path), Scope::Limited { project: 3, is_owned: false }, "{path}");
        }
        let mark = OwnerMark { project: 3, previous: None };
        kernel.set_owner_mark(open("a").as_fd(), Some(mark)).unwrap();
        assert_eq!(above("a/b/c"), Scope::Limited { project: 3, is_owned: true });
        // Another program limits a part of it.
        kernel.set_project_tag(open("a/b").as_fd(), ProjectTag { project: 7, inherit: true }).unwrap();
        assert_eq!(above("a/b/c"), Scope::Limited { project: 7, is_owned: false });
        kernel.set_project_tag(open("a/b").as_fd(), ProjectTag::default()).unwrap();
        // Its owner has removed it from the project: the mark names the project that it should have.
        kernel.set_project_tag(open("a").as_fd(), ProjectTag::default()).unwrap();
        assert_eq!(above("a/b"), Scope::Limited { project: 3, is_owned: true });
    }
}
