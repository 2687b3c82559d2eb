//! Removal of whole trees, of any depth, in bounded stack and descriptors.

use std::ffi::{OsStr, OsString};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, IFlags, Mode as RawMode, OFlags};
use rustix::io::Errno;

use super::{Dir, LISTABLE};
use crate::calls::{self, Listing};
use crate::error::{Error, Operation, Refusal, resolved};
use crate::metadata::Metadata;

/// How many directories of the way down are held open. Deeper ones are reached again through `..`, which is compared
/// with what was there on the way down.
const HELD_OPEN: usize = 32;

/// How often a directory that was emptied may turn out not to be.
const ATTEMPTS: u32 = 100;

/// How far a removal has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// Files, links and directories so far.
    pub entries: u64,
}

impl Dir {
    /// Removes a file, or a directory with all that is below it, and tells whether there was something.
    ///
    /// Nothing is followed: no symbolic link, and no mount point, at which it stops instead. Nothing in the tree forbids
    /// its removal: files and directories lose the marks of being immutable or append-only, and directories get the
    /// permissions that their owner needs. It takes a bounded number of descriptors and no stack, however
    /// deep the tree is. It can be killed at any point and called again; durable once it has returned.
    ///
    /// # Errors
    /// [`Operation::Remove`]; what was removed stays removed, and a call with the same path goes on.
    /// [`is_mount_point`](Error::is_mount_point) names what to unmount first.
    pub fn remove_tree(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        self.remove_tree_with(path, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`remove_tree`](Self::remove_tree), with a hook that is called after each removal, and may stop it.
    ///
    /// # Errors
    /// As there; [`is_stopped`](Error::is_stopped) where the hook has stopped it.
    pub fn remove_tree_with(
        &self,
        path: impl AsRef<Path>,
        hook: &mut dyn FnMut(Removed) -> ControlFlow<()>,
    ) -> Result<bool, Error> {
        let path = path.as_ref();
        let (parent, name) = match self.parent(path, Operation::Remove) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        let mut removal = Removal { levels: Vec::new(), removed: Removed::default(), hook };
        let was_there = removal
            .run(parent.as_fd(), name)
            .map_err(|source| Error::new(Operation::Remove, removal.shown(&self.full(path)), source))?;
        calls::sync(&parent).map_err(|source| Error::new(Operation::Remove, self.full(path), source))?;
        Ok(was_there)
    }
}

/// A directory on the way down.
#[derive(Debug)]
struct Level {
    /// Its name in the one above.
    name: OsString,
    identity: Metadata,
    /// None while so many below it are held open that this one isn't.
    listing: Option<Listing>,
    attempts: u32,
}

impl Level {
    fn new(name: OsString, fd: OwnedFd) -> io::Result<Self> {
        let identity = Metadata::of(&calls::stat(&fd)?);
        Ok(Self { name, identity, listing: Some(Listing::new(fd)?), attempts: 0 })
    }

    /// The next entry, or the end, after which the listing starts anew.
    fn next(&mut self) -> io::Result<Option<(OsString, FileType)>> {
        let listing = self.listing.as_mut().expect("the lowest level is held open");
        loop {
            match listing.next().transpose()? {
                None => return Ok(None),
                Some(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Some(entry) => {
                    let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                    return Ok(Some((name, entry.file_type())));
                }
            }
        }
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.listing.as_ref().expect("the lowest level is held open").fd()?)
    }
}

struct Removal<'a> {
    levels: Vec<Level>,
    removed: Removed,
    hook: &'a mut dyn FnMut(Removed) -> ControlFlow<()>,
}

impl Removal<'_> {
    /// Removes what has the name in the directory.
    fn run(&mut self, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<bool> {
        let outcome = remove_or_open(Holder::outside(parent), name.to_owned(), FileType::Unknown)?;
        let was_there = !matches!(outcome, Outcome::Absent);
        self.go_on(outcome)?;
        while let Some(level) = self.levels.last_mut() {
            match level.next()? {
                Some((name, kind)) => {
                    let outcome = remove_or_open(Holder::inside(level.fd()?), name, kind)?;
                    self.go_on(outcome)?;
                }
                None => self.leave(parent)?,
            }
        }
        Ok(was_there)
    }

    fn go_on(&mut self, outcome: Outcome) -> io::Result<()> {
        match outcome {
            Outcome::Absent => Ok(()),
            Outcome::Removed => self.count(),
            Outcome::Opened(level) => {
                self.enter(level);
                Ok(())
            }
        }
    }

    fn enter(&mut self, level: Level) {
        self.levels.push(level);
        if let Some(far) = self.levels.len().checked_sub(HELD_OPEN + 1) {
            self.levels[far].listing = None;
        }
    }

    /// Removes the lowest directory, of which nothing was left.
    fn leave(&mut self, top: BorrowedFd<'_>) -> io::Result<()> {
        let above = self.above()?;
        let holder = above.as_ref().map_or(Holder::outside(top), |above| Holder::inside(above.as_fd()));
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        match forced(holder, &level.name, || calls::remove_dir(holder.dir, &level.name)) {
            Ok(()) => {
                self.levels.pop();
                self.count()
            }
            Err(Errno::NOENT) => {
                self.levels.pop();
                Ok(())
            }
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                level.attempts += 1;
                if level.attempts == ATTEMPTS {
                    return Err(Refusal::Changing.into());
                }
                if let Some(listing) = &mut level.listing {
                    listing.rewind();
                }
                Ok(())
            }
            Err(source) => Err(mounted(source)),
        }
    }

    /// The directory above the lowest, opened again where it isn't open any more.
    fn above(&mut self) -> io::Result<Option<OwnedFd>> {
        let [.., above, lowest] = self.levels.as_mut_slice() else { return Ok(None) };
        if above.listing.is_none() {
            let fd = calls::open_above(lowest.fd()?)?;
            // Somebody has moved the lowest: elsewhere nothing is ours to remove.
            if !Metadata::of(&calls::stat(&fd)?).is_same_file(&above.identity) {
                return Err(Refusal::Changing.into());
            }
            above.listing = Some(Listing::new(fd)?);
        }
        Ok(Some(above.fd()?.try_clone_to_owned()?))
    }

    fn count(&mut self) -> io::Result<()> {
        self.removed.entries += 1;
        match (self.hook)(self.removed) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Refusal::Stopped.into()),
        }
    }

    /// The path of the lowest directory, without the middle of a long one.
    fn shown(&self, top: &Path) -> PathBuf {
        let mut path = top.to_owned();
        let below = self.levels.get(1..).unwrap_or_default();
        if below.len() > 8 {
            path.push("…");
        }
        path.extend(below[below.len().saturating_sub(8)..].iter().map(|level| &level.name));
        path
    }
}

/// The directory that an entry is in.
#[derive(Clone, Copy, Debug)]
struct Holder<'a> {
    dir: BorrowedFd<'a>,
    /// Whether it is of the tree. The one that the tree is in keeps what its owner has forbidden.
    is_inside: bool,
}

impl<'a> Holder<'a> {
    fn outside(dir: BorrowedFd<'a>) -> Self {
        Self { dir, is_inside: false }
    }

    fn inside(dir: BorrowedFd<'a>) -> Self {
        Self { dir, is_inside: true }
    }
}

/// What became of an entry.
#[derive(Debug)]
enum Outcome {
    /// Somebody else was faster.
    Absent,
    Removed,
    /// It is a directory, to be emptied first.
    Opened(Level),
}

/// Removes what has the name, unless it is a directory. A listing need not tell the kind, and what it tells may have
/// changed.
fn remove_or_open(holder: Holder<'_>, name: OsString, kind: FileType) -> io::Result<Outcome> {
    if kind != FileType::Directory && kind != FileType::Unknown {
        match forced(holder, &name, || calls::unlink(holder.dir, &name)) {
            Ok(()) => return Ok(Outcome::Removed),
            Err(Errno::NOENT) => return Ok(Outcome::Absent),
            Err(Errno::ISDIR) => {}
            Err(source) => return Err(mounted(source)),
        }
    }
    let open = || calls::open_same_mount(holder.dir, &name, LISTABLE);
    let opened = match open() {
        Err(Errno::ACCESS) => let_in(holder, &name).and_then(|()| open()),
        opened => opened,
    };
    match opened {
        Ok(fd) => Ok(Outcome::Opened(Level::new(name, fd)?)),
        Err(Errno::NOENT) => Ok(Outcome::Absent),
        // Any kind but a directory, and never asked for twice.
        Err(Errno::NOTDIR | Errno::LOOP) if kind != FileType::RegularFile => {
            remove_or_open(holder, name, FileType::RegularFile)
        }
        Err(source) => Err(mounted(source)),
    }
}

/// Says what an error number of a removal means.
fn mounted(errno: Errno) -> io::Error {
    match errno {
        Errno::XDEV | Errno::BUSY => Refusal::MountPoint.into(),
        errno => resolved(errno),
    }
}

/// Removes; where that is forbidden, once more without what forbids it on the entry and on its directory.
fn forced(
    holder: Holder<'_>,
    name: &OsStr,
    remove: impl Fn() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let forbidden = match remove() {
        Err(forbidden @ (Errno::PERM | Errno::ACCESS)) => forbidden,
        done => return done,
    };
    if holder.is_inside {
        unmark(holder.dir);
        let_owner_in(holder.dir);
    }
    // Only of what may be opened without an effect: devices and pipes have no such marks.
    let kind = calls::stat_at(holder.dir, name).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if forbidden == Errno::PERM && matches!(kind, Ok(FileType::RegularFile | FileType::Directory)) {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        if let Ok(file) = calls::open_same_mount(holder.dir, name, flags) {
            unmark(file.as_fd());
        }
    }
    remove()
}

/// Takes the marks off, where there are any; whether that was allowed shows when the removal is tried again.
fn unmark(file: BorrowedFd<'_>) {
    let marks = IFlags::IMMUTABLE | IFlags::APPEND;
    if let Ok(flags) = calls::inode_flags(file)
        && flags.intersects(marks)
    {
        let _ = calls::set_inode_flags(file, flags.difference(marks));
    }
}

/// Lets a directory's owner remove what is in it; likewise.
fn let_owner_in(dir: BorrowedFd<'_>) {
    if let Ok(stat) = calls::stat(dir)
        && !RawMode::from_raw_mode(stat.st_mode).contains(RawMode::RWXU)
    {
        let _ = calls::set_mode(dir, RawMode::from_raw_mode(stat.st_mode) | RawMode::RWXU);
    }
}

/// Lets the owner of a directory into it who may not even open it; and into the one that it is in.
fn let_in(holder: Holder<'_>, name: &OsStr) -> rustix::io::Result<()> {
    if holder.is_inside {
        let_owner_in(holder.dir);
    }
    let shut = calls::open_same_mount(holder.dir, name, OFlags::PATH | OFlags::DIRECTORY)?;
    let mode = RawMode::from_raw_mode(calls::stat(&shut)?.st_mode);
    calls::set_mode_of_path(&shut, mode | RawMode::RWXU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_path_is_shown_without_its_middle() {
        let temporary = tempfile::tempdir().unwrap();
        let level = |index: usize| {
            let fd = calls::open(temporary.path(), LISTABLE).unwrap();
            Level::new(format!("l{index}").into(), fd).unwrap()
        };
        let hook = &mut |_| ControlFlow::Continue(());
        let mut removal = Removal { levels: vec![level(0)], removed: Removed::default(), hook };
        assert_eq!(removal.shown(Path::new("/t")), Path::new("/t"));
        removal.levels.extend((1..20).map(level));
        assert_eq!(removal.shown(Path::new("/t")), Path::new("/t/…/l12/l13/l14/l15/l16/l17/l18/l19"));
    }
}
