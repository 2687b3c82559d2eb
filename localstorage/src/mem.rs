//! A file store in memory with injected faults.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, FileOperation, RejectReason};
use crate::file_name::{self, FileName};
use crate::file_store::FileStore;
use crate::metadata::{DirEntry, FileKind, FileMode};

/// A way in which an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InjectedFault {
    /// No space is left: nothing changes.
    NoSpace,
    /// The device has failed: nothing changes.
    IoError,
    /// The host stops before the operation: this one and all later ones fail until
    /// [`clear_fault`](MemFileStore::clear_fault).
    CrashBefore,
    /// The host stops after the operation, before it is reported: this one fails, and all later ones do.
    CrashAfter,
}

/// A file store in memory.
///
/// ```
/// use std::path::Path;
/// use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
/// use nodekeel_localstorage::{FileMode, FileStore as _};
///
/// let store = MemFileStore::default();
/// let path = Path::new("motd");
/// store.write(path, b"old", FileMode::PRIVATE_FILE)?;
/// store.fail_nth(1, InjectedFault::CrashAfter);
/// assert!(store.write(path, b"new", FileMode::PRIVATE_FILE).is_err());
/// store.clear_fault();
/// assert_eq!(store.read(path)?, b"new");
/// # Ok::<(), nodekeel_localstorage::Error>(())
/// ```
#[derive(Debug)]
pub struct MemFileStore(Mutex<MemState>);

#[derive(Debug)]
struct MemState {
    root: MemDir,
    next_inode: u64,
    /// The number of the operation that fails, counted from now, and how it fails.
    fault: Option<(u64, InjectedFault)>,
    is_down: bool,
}

#[derive(Debug)]
struct MemDir {
    entries: BTreeMap<OsString, MemNode>,
    mode: FileMode,
}

#[derive(Debug)]
struct MemNode {
    inode: u64,
    content: MemContent,
}

#[derive(Debug)]
enum MemContent {
    File { bytes: Vec<u8>, mode: FileMode },
    Dir(MemDir),
}

impl Default for MemFileStore {
    fn default() -> Self {
        Self(Mutex::new(MemState {
            root: MemDir { entries: BTreeMap::new(), mode: FileMode::PRIVATE_DIR },
            next_inode: 1,
            fault: None,
            is_down: false,
        }))
    }
}

impl MemFileStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the nth operation from now fail: 1 is the next one.
    pub fn fail_nth(&self, nth: u64, fault: InjectedFault) {
        self.lock_state().fault = Some((nth, fault));
    }

    /// Ends a crash and cancels a pending fault. Returns whether a fault was still pending.
    pub fn clear_fault(&self) -> bool {
        let mut state = self.lock_state();
        state.is_down = false;
        state.fault.take().is_some()
    }

    /// The mode of a file or directory, or none if it does not exist.
    pub fn mode_at(&self, path: impl AsRef<Path>) -> Option<FileMode> {
        let (path, state) = (path.as_ref(), self.lock_state());
        if path.as_os_str().is_empty() {
            return Some(state.root.mode);
        }
        let (parent, name) = file_name::split_last(path).ok()?;
        Some(match &state.root.find_dir(parent).ok()?.entries.get(name)?.content {
            MemContent::File { mode, .. } => *mode,
            MemContent::Dir(folder) => folder.mode,
        })
    }

    /// A panic in another thread leaves the tree consistent: each operation is a single step.
    fn lock_state(&self) -> MutexGuard<'_, MemState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_operation<T>(
        &self,
        (operation, path): (FileOperation, &Path),
        work: impl FnOnce(&mut MemState) -> io::Result<T>,
    ) -> Result<T, Error> {
        self.lock_state().run_operation(work).map_err(|source| Error::new(operation, path, source))
    }
}

impl MemState {
    fn run_operation<T>(&mut self, work: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
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
            // A host that is down fails each operation in the same way, also one with a fault of its own.
            _ if self.is_down => return Err(io::Error::other("the host is down")),
            Some(InjectedFault::NoSpace) => return Err(io::ErrorKind::StorageFull.into()),
            Some(InjectedFault::IoError) => return Err(io::Error::other("the device has failed")),
            Some(InjectedFault::CrashBefore | InjectedFault::CrashAfter) => self.is_down = true,
            None => {}
        }
        if fault == Some(InjectedFault::CrashBefore) {
            return Err(io::Error::other("the host stops"));
        }
        // For a crash after the operation, the change is made, and only its answer is lost.
        let result = work(self)?;
        if fault == Some(InjectedFault::CrashAfter) {
            Err(io::Error::other("the host stops"))
        } else {
            Ok(result)
        }
    }

    fn allocate_inode(&mut self) -> u64 {
        self.next_inode += 1;
        self.next_inode
    }
}

impl MemDir {
    fn find_dir(&self, path: &Path) -> io::Result<&Self> {
        split_components(path)?.into_iter().try_fold(self, |folder, name| match folder.entries.get(name) {
            Some(MemNode { content: MemContent::Dir(below), .. }) => Ok(below),
            Some(_) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn find_dir_mut(&mut self, path: &Path) -> io::Result<&mut Self> {
        split_components(path)?.into_iter().try_fold(self, |folder, name| {
            match folder.entries.get_mut(name) {
                Some(MemNode { content: MemContent::Dir(below), .. }) => Ok(below),
                Some(_) => Err(io::ErrorKind::NotADirectory.into()),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }
}

fn split_components(path: &Path) -> io::Result<Vec<&OsStr>> {
    if path.as_os_str().is_empty() {
        return Ok(Vec::new());
    }
    file_name::split_last(path)?;
    Ok(path.as_os_str().as_bytes().split(|&byte| byte == b'/').map(OsStr::from_bytes).collect())
}

impl FileStore for MemFileStore {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.run_operation((FileOperation::Read, path), |state| {
            let (parent, name) = file_name::split_last(path)?;
            match state.root.find_dir(parent)?.entries.get(name).map(|node| &node.content) {
                Some(MemContent::File { bytes, .. }) => Ok(bytes.clone()),
                Some(MemContent::Dir(_)) => Err(RejectReason::NotAFile.into()),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    fn write(&self, path: &Path, content: &[u8], mode: FileMode) -> Result<(), Error> {
        self.run_operation((FileOperation::Write, path), |state| {
            let (parent, name) = file_name::split_last(path)?;
            // As on a disk, a write replaces the file and so gives it a new inode.
            let inode = state.allocate_inode();
            let folder = state.root.find_dir_mut(parent)?;
            if matches!(folder.entries.get(name), Some(MemNode { content: MemContent::Dir(_), .. })) {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let content = MemContent::File { bytes: content.to_vec(), mode };
            folder.entries.insert(name.to_owned(), MemNode { inode, content });
            Ok(())
        })
    }

    fn create_dir(&self, path: &Path, mode: FileMode) -> Result<(), Error> {
        self.run_operation((FileOperation::CreateDir, path), |state| {
            // A copy, since `folder` borrows the state mutably until the last directory exists.
            let mut inode = state.next_inode;
            let mut folder = &mut state.root;
            for name in split_components(path)? {
                let node = folder.entries.entry(name.to_owned()).or_insert_with(|| {
                    inode += 1;
                    MemNode { inode, content: MemContent::Dir(MemDir { entries: BTreeMap::new(), mode }) }
                });
                // Nothing was created before such a failure: a file is only in a directory that existed.
                let MemContent::Dir(below) = &mut node.content else {
                    return Err(io::ErrorKind::NotADirectory.into());
                };
                folder = below;
            }
            // The parents keep their modes, if they existed.
            folder.mode = mode;
            state.next_inode = inode;
            Ok(())
        })
    }

    fn list(&self, path: &Path) -> Result<Vec<DirEntry>, Error> {
        self.run_operation((FileOperation::List, path), |state| {
            let entries = state.root.find_dir(path)?.entries.iter().map(|(name, node)| {
                let kind = match node.content {
                    MemContent::File { .. } => FileKind::File,
                    MemContent::Dir(_) => FileKind::Dir,
                };
                Ok(DirEntry::new(FileName::try_new(name)?, kind, node.inode))
            });
            entries.collect()
        })
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.run_operation((FileOperation::Remove, path), |state| {
            let (parent, name) = file_name::split_last(path)?;
            match state.root.find_dir_mut(parent) {
                Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(false),
                folder => Ok(folder?.entries.remove(name).is_some()),
            }
        })
    }
}
