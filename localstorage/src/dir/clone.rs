//! Clones of directory trees: the files of both share their blocks until one of them is written.

use std::ffi::{CString, OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode as RawMode, OFlags, Stat};
use rustix::io::Errno;

use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::metadata::{FileKind, Metadata};
use crate::syscalls::clone::{self as calls, entry_at};
use crate::syscalls::{self, DirListing};

mod attributes;
mod links;

use attributes::{AttributeCopier, owner_of};
use links::{LinkTable, MAX_TABLE_BYTES};

/// How many directories the path in an error has.
const SHOWN_LEVELS: usize = 8;

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
/// It never copies data.
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

/// What a clone contains.
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
            let [from, to] = [calls::create_unnamed_file(self)?, calls::create_unnamed_file(self)?];
            cloner.clone_file(from.as_fd(), to.as_fd())
        };
        check().map_err(|source| Error::new(FileOperation::Clone, &self.path, source))
    }

    /// Clones everything in this directory, and its own attributes, into an empty directory on the same file system
    /// that nobody else uses.
    ///
    /// Kept are names, contents, owners, modes, times, links, hard links among the entries, FIFOs, sockets, the
    /// whiteouts of overlayfs, access control lists, capabilities, and attributes of users. Device nodes are left out.
    /// Nothing is followed out of the tree, only `to` is changed, and of files only regular ones are opened.
    ///
    /// Other processes may change this tree meanwhile: each file then has the content of one moment, but two files may
    /// have those of different ones, as after a crash without a journal that orders them. A file that is renamed
    /// meanwhile may be missing, or be there under both names.
    ///
    /// It takes a bounded number of descriptors and no stack, however deep the tree is, and bounded memory for hard links:
    /// 16 MiB, about 100,000 files of which not all names are cloned yet. Beyond that, and where a path has 4096 bytes or
    /// more, each name becomes a separate file. It is durable when it returns; what an interrupted call has made is to
    /// be removed. Once `is_canceled` returns true, it fails.
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
        let mut tree = TreeClone {
            cloner,
            is_canceled,
            top: to.as_fd(),
            links,
            levels: Vec::new(),
            entry: OsString::new(),
            attributes: AttributeCopier::new(),
            summary: CloneSummary::default(),
        };
        let cloned = tree.run(self.as_fd()).and_then(|()| Ok(syscalls::sync(to)?));
        match cloned {
            Ok(()) => Ok(tree.summary),
            Err(source) => Err(Error::new(FileOperation::Clone, tree.display_path(&self.path), source)),
        }
    }
}

/// A directory and its clone.
struct DirPair {
    source: OwnedFd,
    target: OwnedFd,
}

impl DirPair {
    fn open_top(source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<Self> {
        let open = |dir| syscalls::open_beneath(dir, Path::new("."), OPEN_DIR_FLAGS);
        Ok(Self { source: open(source)?, target: open(target)? })
    }

    /// The directories above, if they are still where they were.
    fn open_parents(&self, level: &CloneLevel) -> io::Result<Self> {
        let above = Self {
            source: syscalls::open_parent(&self.source)?,
            target: syscalls::open_parent(&self.target)?,
        };
        let found = Metadata::from_stat(&syscalls::stat(&above.source)?);
        if found.is_same_file(&level.source) { Ok(above) } else { Err(RejectReason::Moved.into()) }
    }
}

/// A directory on the way down.
struct CloneLevel {
    name: OsString,
    /// The directory, to recognize it.
    source: Metadata,
    /// Its subdirectories that are still to be cloned.
    pending: Vec<OsString>,
}

struct TreeClone<'a> {
    cloner: &'a dyn FileCloner,
    is_canceled: &'a dyn Fn() -> bool,
    top: BorrowedFd<'a>,
    links: LinkTable,
    levels: Vec<CloneLevel>,
    /// The entry of the lowest directory that is being cloned.
    entry: OsString,
    attributes: AttributeCopier,
    summary: CloneSummary,
}

impl TreeClone<'_> {
    fn run(&mut self, source: BorrowedFd<'_>) -> io::Result<()> {
        let mut at = DirPair::open_top(source, self.top)?;
        self.enter(OsString::new(), &at)?;
        while let Some(level) = self.levels.last_mut() {
            if let Some(name) = level.pending.pop() {
                if let Some(below) = self.open_below(&at, name.clone())? {
                    at = below;
                    self.enter(name, &at)?;
                }
                continue;
            }
            self.levels.pop();
            // Before the mode may forbid it.
            let above = self.levels.last().map(|level| at.open_parents(level)).transpose()?;
            self.attributes.copy_attributes(at.source.as_fd(), at.target.as_fd())?;
            self.summary.entries += 1;
            if let Some(above) = above {
                at = above;
            }
        }
        Ok(())
    }

    /// Clones the entries of a directory that are not directories, and collects the others.
    fn enter(&mut self, name: OsString, at: &DirPair) -> io::Result<()> {
        let source = Metadata::from_stat(&syscalls::stat(&at.source)?);
        self.levels.push(CloneLevel { name, source, pending: Vec::new() });
        let mut pending = Vec::new();
        for entry in DirListing::reopen(&at.source)? {
            let entry = match entry {
                // The directory has been removed.
                Err(Errno::NOENT) => break,
                entry => entry?,
            };
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            if (self.is_canceled)() {
                return Err(RejectReason::CloneStopped.into());
            }
            self.entry = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            let name = self.entry.clone();
            if self.clone_entry(at, &name)? {
                pending.push(name);
            }
        }
        self.entry.clear();
        if let Some(level) = self.levels.last_mut() {
            level.pending = pending;
        }
        Ok(())
    }

    /// Clones an entry, unless it is a directory; returns whether it is one. One that has just been removed is left
    /// out, and one that is listed twice, because it was renamed, is cloned once.
    fn clone_entry(&mut self, at: &DirPair, name: &OsStr) -> io::Result<bool> {
        let stat = match syscalls::stat_at(&at.source, name) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat?,
        };
        let cloned = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(true),
            FileType::RegularFile => self.clone_file(at, name),
            FileType::Symlink => clone_symlink(at, name, &stat),
            FileType::CharacterDevice | FileType::BlockDevice if stat.st_rdev != 0 => {
                self.summary.devices += 1;
                return Ok(false);
            }
            kind => clone_node(at, name, kind, &stat),
        };
        match cloned {
            Ok(()) => self.summary.entries += 1,
            Err(error) if is_vanished(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(false)
    }

    fn clone_file(&mut self, at: &DirPair, name: &OsStr) -> io::Result<()> {
        // A link may have replaced the file meanwhile, or a device, which does something when it is opened.
        let found = syscalls::open_on_same_mount(&at.source, name, OFlags::PATH).map_err(open_error)?;
        let metadata = Metadata::from_stat(&syscalls::stat(&found)?);
        if metadata.kind != FileKind::File {
            return Err(Errno::NOENT.into());
        }
        let identity = if metadata.links > 1 { Some(calls::inode_and_birth(&found)?) } else { None };
        if let Some(identity) = identity
            && let Some(path) = self.links.find(identity)
        {
            calls::link(self.top, path, entry_at(at.target.as_fd(), name))?;
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
        let to = syscalls::create_new_file(&at.target, name)?;
        self.cloner.clone_file(from.as_fd(), to.as_fd())?;
        self.attributes.copy_attributes(from.as_fd(), to.as_fd())?;
        if let Some(identity) = identity
            && !self.links.insert(identity, self.entry_path(), metadata.links)
        {
            self.summary.separate_files += 1;
        }
        Ok(())
    }

    /// Creates and opens the clone of a directory; `None` if it has just been removed.
    fn open_below(&mut self, at: &DirPair, name: OsString) -> io::Result<Option<DirPair>> {
        self.entry = name;
        let source = match syscalls::open_on_same_mount(&at.source, &self.entry, OPEN_DIR_FLAGS) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            source => source.map_err(open_error)?,
        };
        match syscalls::make_dir(&at.target, &self.entry, RawMode::RWXU) {
            Err(Errno::EXIST) => return Ok(None),
            made => made?,
        }
        let target = syscalls::open_on_same_mount(&at.target, &self.entry, OPEN_DIR_FLAGS)?;
        self.entry.clear();
        Ok(Some(DirPair { source, target }))
    }

    /// The path of the entry that is being cloned, relative to the tree.
    fn entry_path(&self) -> PathBuf {
        let names = self.levels.iter().skip(1).map(|level| &level.name);
        names.chain(Some(&self.entry).filter(|entry| !entry.is_empty())).collect()
    }

    /// The path of the entry that is being cloned; a long one without its middle.
    fn display_path(&self, top: &Path) -> PathBuf {
        let mut path = top.to_owned();
        let below = self.levels.get(1..).unwrap_or_default();
        if below.len() > SHOWN_LEVELS {
            path.push("…");
        }
        path.extend(below[below.len().saturating_sub(SHOWN_LEVELS)..].iter().map(|level| &level.name));
        path.extend(Some(&self.entry).filter(|entry| !entry.is_empty()));
        path
    }
}

fn clone_symlink(at: &DirPair, name: &OsStr, stat: &Stat) -> io::Result<()> {
    let target: CString = syscalls::read_link(&at.source, name)?;
    let to = entry_at(at.target.as_fd(), name);
    calls::create_symlink(&target, to)?;
    calls::set_owner_at(to, owner_of(stat))?;
    Ok(calls::set_times_at(to, &calls::times_of(stat))?)
}

/// Clones a FIFO, a socket or a whiteout.
fn clone_node(at: &DirPair, name: &OsStr, kind: FileType, stat: &Stat) -> io::Result<()> {
    let to = entry_at(at.target.as_fd(), name);
    calls::create_node(to, kind, stat.st_rdev)?;
    calls::set_owner_at(to, owner_of(stat))?;
    let node = syscalls::open_beneath(to.dir, Path::new(name), OFlags::PATH)?;
    syscalls::set_mode_by_proc_path(&node, RawMode::from_raw_mode(stat.st_mode))?;
    Ok(calls::set_times_at(to, &calls::times_of(stat))?)
}

/// Whether an entry was removed or replaced after it was listed, or was cloned before.
fn is_vanished(error: &io::Error) -> bool {
    [Errno::NOENT, Errno::EXIST].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Translates the error number of opening an entry of the tree.
fn open_error(errno: Errno) -> io::Error {
    match errno {
        Errno::XDEV => RejectReason::MountPoint.into(),
        // A link has replaced it.
        Errno::LOOP => Errno::NOENT.into(),
        errno => resolve_error(errno),
    }
}

#[cfg(test)]
#[path = "clone_test.rs"]
mod tests;
