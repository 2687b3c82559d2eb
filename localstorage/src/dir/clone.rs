//! Clones of directory trees: the files of both share their blocks until one of them is written.

use std::ffi::{CString, OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode as RawMode, OFlags, Stat};
use rustix::io::Errno;

use super::walk::{OpenOutcome, TreeWalk, WalkEvent};
use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason};
use crate::metadata::{FileKind, Metadata};
use crate::syscalls::clone::{self as calls, entry_at};
use crate::syscalls::{self, EntryAt};

mod attributes;
mod links;
mod stream;

use attributes::{AttributeBuffers, owner_of};
use links::{LinkTable, MAX_TABLE_BYTES};
#[cfg(any(test, feature = "testing"))]
pub use stream::fuzz_tree_stream;

/// Copies the content of files.
///
/// # Contract
/// - [`clone_file`](Self::clone_file): `to` is an empty, new regular file, open for writing. After the call it has the
///   size and the content that `from` had at one moment of the call, with its holes. It changes nothing else.
/// - What it has written is as durable as the metadata of `to`: a sync of its directory makes both durable.
pub trait FileCloner: Send + Sync + fmt::Debug {
    /// Copies the content of a file.
    ///
    /// # Errors
    /// The kernel's; `to` may then have any content.
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()>;
}

/// Shares the blocks of the files, in a time that does not depend on their size: XFS made with `reflink=1`, or btrfs.
/// Data are never copied.
///
/// *Source:* ioctl_ficlone(2).
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "it has no state")]
pub struct Reflink;

impl FileCloner for Reflink {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        calls::share_blocks(from, to).map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NOTTY => RejectReason::NoReflink.into(),
            errno => errno.into(),
        })
    }
}

/// The contents of a clone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloneSummary {
    /// Files, links and directories.
    pub entries: u64,
    /// Device nodes, which are left out.
    pub devices: u64,
    /// Names of files with several names that are separate files in the clone, because there are too many such files,
    /// or their paths are too long.
    pub separate_files: u64,
}

impl Dir {
    /// Checks that files in this directory can be cloned. It leaves nothing behind.
    ///
    /// # Errors
    /// [`FileOperation::Clone`]; [`is_clone_unsupported`](Error::is_clone_unsupported) if the file system can't.
    pub fn check_cloner(&self, cloner: &dyn FileCloner) -> Result<(), Error> {
        let check = || {
            // Files without a name vanish with their descriptors, also if the process is killed here.
            let [from, to] = [calls::create_unnamed_file(self)?, calls::create_unnamed_file(self)?];
            cloner.clone_file(from.as_fd(), to.as_fd())
        };
        check().map_err(|source| Error::new(FileOperation::Clone, &self.path, source))
    }

    /// Clones everything in this directory, and its own attributes, into an empty directory on the same file system
    /// that only the caller uses.
    ///
    /// Kept are names, contents, owners, modes, times, links, hard links among the entries, FIFOs, sockets, the
    /// whiteouts of overlayfs, access control lists, capabilities, and attributes of users. Device nodes are left out.
    /// Nothing is followed out of the tree, only `to` is changed, and of files only regular ones are opened.
    ///
    /// Other processes may change this tree at the same time: each file then has the content of one moment, but two
    /// files may have those of different ones, as after a crash without a journal that orders them. A file that is
    /// renamed during the clone may be missing, or be there under both names.
    ///
    /// A clone takes a bounded number of descriptors and no stack, however deep the tree is, and bounded memory for
    /// hard links: 16 MiB, about 100,000 files of which not all names are cloned yet. Beyond that, and where a path
    /// has 4096 bytes or more, each name becomes a separate file. It is durable when it returns; what an interrupted
    /// call has made is to be removed. Once `is_canceled` returns true, it fails.
    ///
    /// # Errors
    /// [`FileOperation::Clone`], with the path of the entry. [`is_clone_unsupported`](Error::is_clone_unsupported);
    /// [`is_mount_point`](Error::is_mount_point); [`is_full`](Error::is_full), also if a limit of `to` is reached;
    /// [`is_stopped`](Error::is_stopped) if it was canceled.
    pub fn clone_tree(
        &self,
        to: &Self,
        cloner: &dyn FileCloner,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<CloneSummary, Error> {
        self.clone_tree_with(to, cloner, is_canceled, LinkTable::new(MAX_TABLE_BYTES))
    }

    fn clone_tree_with(
        &self,
        to: &Self,
        cloner: &dyn FileCloner,
        is_canceled: &dyn Fn() -> bool,
        links: LinkTable,
    ) -> Result<CloneSummary, Error> {
        let to_error = |source: io::Error| Error::new(FileOperation::Clone, &self.path, source);
        let mut tree = TreeClone {
            cloner,
            is_canceled,
            walk: TreeWalk::open(self).map_err(to_error)?,
            top: to.as_fd(),
            target: syscalls::open_beneath(to, Path::new("."), OPEN_DIR_FLAGS)
                .map_err(|source| to_error(source.into()))?,
            links,
            entry: None,
            attributes: AttributeBuffers::new(),
            summary: CloneSummary::default(),
        };
        // XFS makes its log durable up to the last change of the top, which comes after those of all entries.
        match tree.run().and_then(|()| Ok(syscalls::sync(to)?)) {
            Ok(()) => Ok(tree.summary),
            Err(source) => {
                let path = tree.walk.display_path((&self.path, 1), tree.entry.as_deref());
                Err(Error::new(FileOperation::Clone, path, source))
            }
        }
    }
}

struct TreeClone<'a> {
    cloner: &'a dyn FileCloner,
    is_canceled: &'a dyn Fn() -> bool,
    walk: TreeWalk,
    /// The clone of the tree.
    top: BorrowedFd<'a>,
    /// The clone of the directory in which the walk is.
    target: OwnedFd,
    links: LinkTable,
    /// The entry of that directory that is being cloned.
    entry: Option<OsString>,
    attributes: AttributeBuffers,
    summary: CloneSummary,
}

impl TreeClone<'_> {
    fn run(&mut self) -> io::Result<()> {
        while let Some(event) = self.walk.next_event()? {
            if (self.is_canceled)() {
                return Err(RejectReason::CloneStopped.into());
            }
            match event {
                WalkEvent::Entry { name, .. } => {
                    self.entry = Some(name.clone());
                    self.clone_entry(&name)?;
                }
                WalkEvent::Directory { name } => {
                    self.entry = Some(name.clone());
                    self.clone_dir(&name)?;
                }
                WalkEvent::Leave { dir, .. } => self.leave_dir(dir.as_fd())?,
                // Its clone is incomplete, and the walk may already have passed the place to which it was moved.
                WalkEvent::Moved { .. } => return Err(RejectReason::Moved.into()),
            }
            self.entry = None;
        }
        Ok(())
    }

    /// Clones an entry that is not a directory. One that has just been removed is left out, and one that is listed
    /// twice, because it was renamed, is cloned once.
    fn clone_entry(&mut self, name: &OsStr) -> io::Result<()> {
        let stat = match syscalls::stat_at(self.walk.dir(), name) {
            Err(Errno::NOENT) => return Ok(()),
            stat => stat?,
        };
        let (from, to) = (self.walk.dir(), entry_at(self.target.as_fd(), name));
        let cloned = match FileType::from_raw_mode(stat.st_mode) {
            // It has replaced the entry.
            FileType::Directory => return Ok(()),
            FileType::RegularFile => self.clone_file(name),
            FileType::Symlink => clone_symlink(from, to, &stat),
            // The character device 0:0 is a whiteout of overlayfs, and is cloned below.
            FileType::CharacterDevice | FileType::BlockDevice if stat.st_rdev != 0 => {
                self.summary.devices += 1;
                return Ok(());
            }
            kind => clone_node(to, kind, &stat),
        };
        match cloned {
            Ok(()) => self.summary.entries += 1,
            // Other processes may remove or replace entries at any time: the clone goes on without this one.
            Err(error) if is_vanished(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn clone_file(&mut self, name: &OsStr) -> io::Result<()> {
        let (found, metadata) = find_file(&self.walk, name)?;
        // Only a file with several names has to be recognized, so a tree without hard links needs no table.
        let identity = if metadata.links > 1 { Some(calls::inode_and_birth(&found)?) } else { None };
        if let Some(identity) = identity
            && let Some(path) = self.links.find(identity)
        {
            // The table keeps paths: a descriptor of each such file would exceed the limit of open files.
            calls::link(self.top, path, entry_at(self.target.as_fd(), name))?;
            self.links.count_link(identity);
            return Ok(());
        }
        // A lease does not block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let from = syscalls::reopen(&found, flags).map_err(|errno| match errno {
            // Also a file that has just been removed is reached so.
            Errno::NOENT => RejectReason::NoProc.into(),
            errno => io::Error::from(errno),
        })?;
        // Fails with EEXIST for an entry that was renamed and so listed twice: it is cloned once.
        let to = syscalls::create_new_file(&self.target, name)?;
        self.cloner.clone_file(from.as_fd(), to.as_fd())?;
        self.attributes.copy_attributes(from.as_fd(), to.as_fd())?;
        // Recorded only now that the copy is complete: the other names become links to it.
        if let Some(identity) = identity
            && !self.links.insert(identity, self.walk.path(Some(name)), metadata.links)
        {
            self.summary.separate_files += 1;
        }
        Ok(())
    }

    /// Creates the clone of a directory, and enters both, unless it has just been removed, or was cloned before.
    fn clone_dir(&mut self, name: &OsStr) -> io::Result<()> {
        let dir = match opened(self.walk.open_dir(name)?) {
            Err(error) if is_vanished(&error) => return Ok(()),
            dir => dir?,
        };
        // The final mode may forbid its owner to write: it is set when the walk leaves the directory.
        match syscalls::make_dir(&self.target, name, RawMode::RWXU) {
            Err(Errno::EXIST) => return Ok(()),
            made => made?,
        }
        self.target = syscalls::open_on_same_mount(&self.target, name, OPEN_DIR_FLAGS)?;
        self.walk.enter(name, dir)
    }

    /// Completes the clone of a directory.
    fn leave_dir(&mut self, dir: BorrowedFd<'_>) -> io::Result<()> {
        // Before the mode may forbid it.
        let above = (self.walk.depth() > 0).then(|| syscalls::open_parent(&self.target)).transpose()?;
        self.attributes.copy_attributes(dir, self.target.as_fd())?;
        self.summary.entries += 1;
        if let Some(above) = above {
            self.target = above;
        }
        Ok(())
    }
}

/// The open entry of a tree, or the error of opening it.
fn opened(outcome: OpenOutcome) -> io::Result<OwnedFd> {
    match outcome {
        OpenOutcome::Opened(file) => Ok(file),
        OpenOutcome::Vanished => Err(Errno::NOENT.into()),
        OpenOutcome::MountPoint => Err(RejectReason::MountPoint.into()),
    }
}

/// A file of the tree, not opened for reading. By now a link may have replaced it, or a device, which does something when it
/// is opened.
fn find_file(walk: &TreeWalk, name: &OsStr) -> io::Result<(OwnedFd, Metadata)> {
    let found = opened(walk.open_path(name)?)?;
    let metadata = Metadata::from_stat(&syscalls::stat(&found)?);
    if metadata.kind == FileKind::File { Ok((found, metadata)) } else { Err(Errno::NOENT.into()) }
}

fn clone_symlink(from: BorrowedFd<'_>, to: EntryAt<'_>, stat: &Stat) -> io::Result<()> {
    let target: CString = syscalls::read_link(from, to.name)?;
    calls::create_symlink(&target, to)?;
    calls::set_owner_at(to, owner_of(stat))?;
    Ok(calls::set_times_at(to, &calls::times_of(stat))?)
}

/// Clones a FIFO, a socket or a whiteout.
fn clone_node(to: EntryAt<'_>, kind: FileType, stat: &Stat) -> io::Result<()> {
    calls::create_node(to, kind, stat.st_rdev)?;
    calls::set_owner_at(to, owner_of(stat))?;
    // mknod(2) applies the umask. The mode is set by a descriptor that does not open the device or pipe.
    let node = syscalls::open_beneath(to.dir, Path::new(to.name), OFlags::PATH)?;
    syscalls::set_mode_by_proc_path(&node, RawMode::from_raw_mode(stat.st_mode))?;
    Ok(calls::set_times_at(to, &calls::times_of(stat))?)
}

/// Returns whether an entry was removed or replaced after it was listed, or was cloned before.
fn is_vanished(error: &io::Error) -> bool {
    [Errno::NOENT, Errno::EXIST].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
#[path = "clone_test.rs"]
mod tests;
