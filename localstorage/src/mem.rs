//! A placement in memory, which can be told to fail.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Operation, Refusal};
use crate::metadata::{Entry, FileKind, Mode};
use crate::name::{self, Name};
use crate::placement::Placement;

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No space is left: nothing happens.
    Full,
    /// The device has failed: nothing happens.
    Device,
    /// The machine stops before the operation: it and all that follow fail until the [restart](MemPlacement::restart).
    CrashBefore,
    /// The machine stops after the operation, and before it is reported: this fails, as do all that follow.
    CrashAfter,
}

/// A placement in memory.
///
/// ```
/// use std::path::Path;
/// use nodekeel_localstorage::mem::{Fault, MemPlacement};
/// use nodekeel_localstorage::{Mode, Placement as _};
///
/// let placement = MemPlacement::default();
/// let path = Path::new("motd");
/// placement.write(path, b"old", Mode::PRIVATE_FILE)?;
/// placement.fail(1, Fault::CrashAfter);
/// assert!(placement.write(path, b"new", Mode::PRIVATE_FILE).is_err());
/// placement.restart();
/// assert_eq!(placement.read(path)?, b"new");
/// # Ok::<(), nodekeel_localstorage::Error>(())
/// ```
#[derive(Debug)]
pub struct MemPlacement(Mutex<State>);

#[derive(Debug)]
struct State {
    top: Folder,
    next_inode: u64,
    /// How many operations from now on fail how.
    fault: Option<(u64, Fault)>,
    is_down: bool,
}

#[derive(Debug)]
struct Folder {
    entries: BTreeMap<OsString, Node>,
    mode: Mode,
}

#[derive(Debug)]
struct Node {
    inode: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    File { bytes: Vec<u8>, mode: Mode },
    Folder(Folder),
}

impl Default for MemPlacement {
    fn default() -> Self {
        Self(Mutex::new(State {
            top: Folder { entries: BTreeMap::new(), mode: Mode::PRIVATE_DIR },
            next_inode: 1,
            fault: None,
            is_down: false,
        }))
    }
}

impl MemPlacement {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets one of the next operations fail: 1 is the very next.
    pub fn fail(&self, nth: u64, fault: Fault) {
        self.state().fault = Some((nth, fault));
    }

    /// Ends a crash, and forgets a failure that has not come yet. Tells whether one was still to come.
    pub fn restart(&self) -> bool {
        let mut state = self.state();
        state.is_down = false;
        state.fault.take().is_some()
    }

    /// The mode of a file or directory, if there is one of that name.
    pub fn mode(&self, path: impl AsRef<Path>) -> Option<Mode> {
        let (path, state) = (path.as_ref(), self.state());
        if path.as_os_str().is_empty() {
            return Some(state.top.mode);
        }
        let (parent, name) = name::split(path).ok()?;
        Some(match &state.top.at(parent).ok()?.entries.get(name)?.content {
            Content::File { mode, .. } => *mode,
            Content::Folder(folder) => folder.mode,
        })
    }

    /// A panic in another thread leaves the tree whole: each operation is one step.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn operate<T>(
        &self,
        (operation, path): (Operation, &Path),
        work: impl FnOnce(&mut State) -> io::Result<T>,
    ) -> Result<T, Error> {
        self.state().operate(work).map_err(|source| Error::new(operation, path, source))
    }
}

impl State {
    fn operate<T>(&mut self, work: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
        let fault = match &mut self.fault {
            Some((1, fault)) => Some(*fault),
            Some((left, _)) => {
                *left -= 1;
                None
            }
            None => None,
        };
        if fault.is_some() {
            self.fault = None;
        }
        match fault {
            _ if self.is_down => return Err(io::Error::other("the machine is down")),
            Some(Fault::Full) => return Err(io::ErrorKind::StorageFull.into()),
            Some(Fault::Device) => return Err(io::Error::other("the device has failed")),
            Some(Fault::CrashBefore | Fault::CrashAfter) => self.is_down = true,
            None => {}
        }
        if fault == Some(Fault::CrashBefore) {
            return Err(io::Error::other("the machine stops"));
        }
        let done = work(self)?;
        if fault == Some(Fault::CrashAfter) { Err(io::Error::other("the machine stops")) } else { Ok(done) }
    }

    fn inode(&mut self) -> u64 {
        self.next_inode += 1;
        self.next_inode
    }
}

impl Folder {
    fn at(&self, path: &Path) -> io::Result<&Self> {
        components(path)?.into_iter().try_fold(self, |folder, name| match folder.entries.get(name) {
            Some(Node { content: Content::Folder(below), .. }) => Ok(below),
            Some(_) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn at_mut(&mut self, path: &Path) -> io::Result<&mut Self> {
        components(path)?.into_iter().try_fold(self, |folder, name| match folder.entries.get_mut(name) {
            Some(Node { content: Content::Folder(below), .. }) => Ok(below),
            Some(_) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        })
    }
}

fn components(path: &Path) -> io::Result<Vec<&OsStr>> {
    if path.as_os_str().is_empty() {
        return Ok(Vec::new());
    }
    name::split(path)?;
    Ok(path.as_os_str().as_bytes().split(|&byte| byte == b'/').map(OsStr::from_bytes).collect())
}

impl Placement for MemPlacement {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.operate((Operation::Read, path), |state| {
            let (parent, name) = name::split(path)?;
            match state.top.at(parent)?.entries.get(name).map(|node| &node.content) {
                Some(Content::File { bytes, .. }) => Ok(bytes.clone()),
                Some(Content::Folder(_)) => Err(Refusal::NotAFile.into()),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    fn write(&self, path: &Path, content: &[u8], mode: Mode) -> Result<(), Error> {
        self.operate((Operation::Write, path), |state| {
            let (parent, name) = name::split(path)?;
            let inode = state.inode();
            let folder = state.top.at_mut(parent)?;
            if matches!(folder.entries.get(name), Some(Node { content: Content::Folder(_), .. })) {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let content = Content::File { bytes: content.to_vec(), mode };
            folder.entries.insert(name.to_owned(), Node { inode, content });
            Ok(())
        })
    }

    fn create_dir(&self, path: &Path, mode: Mode) -> Result<(), Error> {
        self.operate((Operation::CreateDir, path), |state| {
            let mut inode = state.next_inode;
            let mut folder = &mut state.top;
            for name in components(path)? {
                let node = folder.entries.entry(name.to_owned()).or_insert_with(|| {
                    inode += 1;
                    Node { inode, content: Content::Folder(Folder { entries: BTreeMap::new(), mode }) }
                });
                let Content::Folder(below) = &mut node.content else {
                    return Err(io::ErrorKind::NotADirectory.into());
                };
                folder = below;
            }
            folder.mode = mode;
            state.next_inode = inode;
            Ok(())
        })
    }

    fn list(&self, path: &Path) -> Result<Vec<Entry>, Error> {
        self.operate((Operation::List, path), |state| {
            let entries = state.top.at(path)?.entries.iter().map(|(name, node)| {
                let kind = match node.content {
                    Content::File { .. } => FileKind::File,
                    Content::Folder(_) => FileKind::Dir,
                };
                Ok(Entry::new(Name::try_new(name)?, kind, node.inode))
            });
            entries.collect()
        })
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.operate((Operation::Remove, path), |state| {
            let (parent, name) = name::split(path)?;
            match state.top.at_mut(parent) {
                Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(false),
                folder => Ok(folder?.entries.remove(name).is_some()),
            }
        })
    }
}
