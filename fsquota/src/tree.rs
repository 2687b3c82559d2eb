//! Changes, or counts, the projects of everything in a directory.

mod walk;

use std::collections::HashSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, StatxFlags};

use crate::kernel::ProjectTag;
use crate::{Error, linux};

pub(crate) use walk::{NamedEntry, OpenEntry, TreeVisitor, walk_tree};

/// Number of paths of immutable entries that are kept.
const MAX_IMMUTABLE_PATHS: usize = 10;

/// Number of entries of a tree that were changed or skipped; the directory itself is not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TreeSummary {
    /// Directories and files whose project was changed.
    pub changed: u64,
    /// Entries that already had the right project.
    pub unchanged: u64,
    /// Symbolic links, sockets, FIFOs and device nodes, which can't be opened to change them.
    pub special: u64,
    /// Entries with another project, directories with their own limits, and entries on which a file system or
    /// a directory is mounted.
    pub foreign: u64,
    /// Immutable entries (`chattr +i`), whose project ext4 does not change.
    pub immutable: u64,
    /// The first ten of them, relative to the directory.
    pub immutable_paths: Vec<PathBuf>,
}

/// Changes the project of every entry below `dir` from one of `from` to `to`, but not of `dir` itself.
pub(crate) fn retag_tree(dir: BorrowedFd<'_>, from: &[u32], to: u32) -> Result<TreeSummary, Error> {
    let mut retag = Retag { from, to, summary: TreeSummary::default() };
    walk_tree(dir, &mut retag).map_err(|(path, source)| Error::ChangeTree { path, source })?;
    Ok(retag.summary)
}

/// Counts the inodes of the project in the tree of `dir`, with `dir` itself, that were created before a time;
/// except those of a directory that is marked as the project's owner. Entries may be created, removed and
/// renamed during the count: no inode counts that the tree did not have at that time.
pub(crate) fn count_tree(dir: BorrowedFd<'_>, project: u32, before: SystemTime) -> Result<u64, Error> {
    let mut count = Count { project, before, inodes: HashSet::new() };
    let counted = count.visit_inode(OpenEntry::top(dir)).map_err(|source| (PathBuf::new(), source));
    counted
        .and_then(|_| walk_tree(dir, &mut count))
        .map_err(|(path, source)| Error::CountTree { path, source })?;
    Ok(count.inodes.len() as u64)
}

struct Retag<'a> {
    from: &'a [u32],
    to: u32,
    summary: TreeSummary,
}

/// Returns whether the directory was given the project itself, and is only nested in the tree.
fn is_owner(dir: BorrowedFd<'_>, project: u32) -> io::Result<bool> {
    Ok(project != 0 && linux::read_owner_mark(dir)?.is_some_and(|mark| mark.project == project))
}

impl TreeVisitor for Retag<'_> {
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
        let OpenEntry { file, is_directory, .. } = entry;
        let tag = linux::read_project_tag(file)?;
        let wanted = ProjectTag { project: self.to, inherit: is_directory && self.to != 0 };
        if tag == wanted {
            self.summary.unchanged += 1;
            return Ok(true);
        }
        // Also a directory that has the project already, and lacks only the inheritance.
        let is_ours = tag.project == self.to || self.from.contains(&tag.project);
        // An owner in the tree keeps its own limits. The walk does not enter it.
        if !is_ours || is_directory && is_owner(file, tag.project)? {
            self.summary.foreign += 1;
            return Ok(false);
        }
        match linux::write_project_tag(file, wanted) {
            Ok(()) => self.summary.changed += 1,
            // ext4 changes no immutable inode. It is counted, and the rest of the tree is changed all the
            // same.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && linux::is_immutable(file)? => {
                self.summary.immutable += 1;
                if self.summary.immutable_paths.len() < MAX_IMMUTABLE_PATHS {
                    self.summary.immutable_paths.push((entry.path)());
                }
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn visit_special(&mut self, _: NamedEntry<'_>) -> io::Result<()> {
        self.summary.special += 1;
        Ok(())
    }

    fn visit_mount(&mut self) {
        self.summary.foreign += 1;
    }
}

struct Count {
    project: u32,
    before: SystemTime,
    /// Their numbers: an inode may have several names, or be visited again where it was moved.
    inodes: HashSet<u64>,
}

impl TreeVisitor for Count {
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
        let OpenEntry { file, is_directory, .. } = entry;
        if linux::read_project_tag(file)?.project == self.project {
            if is_directory && is_owner(file, self.project)? {
                return Ok(false);
            }
            let (inode, created) = inode_and_birth(file)?;
            // Without a time of creation it may be new, and is not counted: in doubt, the directory is not
            // the owner.
            if created.is_some_and(|created| created < self.before) {
                self.inodes.insert(inode);
            }
        }
        Ok(true)
    }
}

/// The number of an inode, and when it was created, if the file system keeps that.
fn inode_and_birth(file: BorrowedFd<'_>) -> io::Result<(u64, Option<SystemTime>)> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME)?;
    let is_kept = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let seconds = u64::try_from(stat.stx_btime.tv_sec).ok().filter(|_| is_kept);
    let created = seconds.map(|seconds| Duration::new(seconds, stat.stx_btime.tv_nsec));
    Ok((stat.stx_ino, created.map(|created| SystemTime::UNIX_EPOCH + created)))
}
