//! The place of a store: tells whether its directory is still the one that was opened.

use std::io::ErrorKind;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, OnceLock};

use nodekeel_localstorage::{Dir, DirLock, Error as DirError, FileMode};
use rustix::fs::{AtFlags, StatxFlags};
use tokio::sync::Notify;

use crate::dir_store::error::DirStoreError;
use crate::dir_store::stored_dirs::{StoredDirs, VOLUMES_DIR};
use crate::store_id::StoreId;

const IDENTITY_FILE: &str = "store-id";

/// Maximum length of the file: more than a UUID and a newline.
const MAX_IDENTITY_BYTES: u64 = 64;

/// A directory as a mount shows it: the device, the inode, and the mount.
#[derive(PartialEq, Eq)]
pub(super) struct MountedDir {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

impl MountedDir {
    pub(super) fn from_fd(dir: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let wanted = StatxFlags::INO | StatxFlags::MNT_ID;
        let stat = rustix::fs::statx(dir, "", AtFlags::EMPTY_PATH, wanted)?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        Ok(Self { device, inode: stat.stx_ino, mount: stat.stx_mnt_id })
    }
}

/// Reads the identity through the descriptor of the directory; `None` if it has none.
pub(super) fn read_identity(base: &Dir) -> Result<Option<StoreId>, DirStoreError> {
    match base.read_at_most(IDENTITY_FILE, MAX_IDENTITY_BYTES) {
        Ok(content) => {
            let text = String::from_utf8(content).unwrap_or_default();
            let invalid = |_| DirStoreError::InvalidIdentity { path: base.path().join(IDENTITY_FILE) };
            text.trim_end().parse().map(Some).map_err(invalid)
        }
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(DirStoreError::Directory(error)),
    }
}

/// Locks `volumes` against other stores; `None` if another one has the lock. Its parent stays unlocked: it may be the
/// root of its file system, which processes of earlier releases lock that set limits there; they would wait for this
/// store forever.
pub(super) fn try_lock(volumes: &Dir) -> Result<Option<DirLock>, DirStoreError> {
    volumes
        .try_lock()
        .map_err(|error| DirStoreError::Lock { path: volumes.path().to_owned(), source: error.into_cause() })
}

/// The open directory of a store, and its identity.
pub(super) struct StoreLocation {
    dirs: Arc<StoredDirs>,
    identity: OnceLock<StoreId>,
    /// Notified when a call has found that the directory is not the store.
    pub(super) missed: Notify,
}

impl StoreLocation {
    pub(super) fn new(dirs: Arc<StoredDirs>, identity: Option<StoreId>) -> Self {
        let identity = identity.map(OnceLock::from).unwrap_or_default();
        Self { dirs, identity, missed: Notify::new() }
    }

    pub(super) fn identity(&self) -> Option<&StoreId> {
        self.identity.get()
    }

    /// Checks that the path leads to the directory that was opened, and that it has the same identity. A store
    /// without an identity can be anywhere.
    pub(super) fn check(&self) -> Result<(), DirStoreError> {
        let Some(identity) = self.identity.get() else { return Ok(()) };
        let found = match self.is_in_place() {
            Ok(true) => read_identity(&self.dirs.base),
            Ok(false) => Ok(None),
            Err(error) => Err(DirStoreError::Directory(error)),
        };
        match found {
            Ok(Some(found)) if found == *identity => Ok(()),
            // Without file descriptors or memory, the look tells nothing about the directory.
            Err(error) if error.is_out_of_resources() => Err(error),
            found => {
                // Also if a failing disk can't be read: `wait_until_lost` looks again.
                self.missed.notify_one();
                found.and_then(|_| Err(DirStoreError::Lost { path: self.dirs.base.path().to_owned() }))
            }
        }
    }

    /// Returns whether the paths of the store lead to its open directories. Fails if that can't be told: the process is
    /// out of resources, or the disk fails.
    fn is_in_place(&self) -> Result<bool, DirError> {
        let is_same = |found: Result<Dir, DirError>, open: &Dir| match found {
            Ok(dir) => {
                let found = MountedDir::from_fd(dir.as_fd()).ok();
                Ok(found.is_some() && found == MountedDir::from_fd(open.as_fd()).ok())
            }
            // Nothing, a file or a link is there instead.
            Err(error)
                if error.is_not_found()
                    || matches!(error.io_kind(), ErrorKind::NotADirectory | ErrorKind::InvalidInput) =>
            {
                Ok(false)
            }
            // An I/O error, say, is no reason to mount the disk again.
            Err(error) => Err(error),
        };
        Ok(is_same(Dir::open(self.dirs.base.path()), &self.dirs.base)?
            && is_same(self.dirs.base.open_dir(VOLUMES_DIR), &self.dirs.volumes)?)
    }

    /// Rejects changes without an identity: the volumes may be on a disk that isn't mounted.
    pub(super) fn require_identity(&self) -> Result<(), DirStoreError> {
        let no_identity = || DirStoreError::NoIdentity { path: self.dirs.base.path().to_owned() };
        self.identity.get().map(drop).ok_or_else(no_identity)
    }

    /// Writes a new identity, unless there is one.
    pub(super) fn create_identity(&self) -> Result<StoreId, DirStoreError> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity.clone());
        }
        // A restart must find the identity that PersistentVolumes name, so it is durable before any caller
        // knows it.
        let new = StoreId::generate().map_err(DirStoreError::GenerateIdentity)?;
        let content = format!("{new}\n");
        let base = &self.dirs.base;
        base.write(IDENTITY_FILE, content.as_bytes(), FileMode::PRIVATE_FILE)
            .map_err(DirStoreError::Directory)?;
        tracing::info!(store = %new, directory = %base.path().display(), "created the identity of the store");
        Ok(self.identity.get_or_init(|| new).clone())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use nodekeel_fsquota::testing::MemQuota;
    use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
    use rustix::io::Errno;

    use super::*;
    use crate::dir_store::DirStore;

    #[test]
    fn without_free_descriptors_a_call_fails_and_the_store_is_not_lost() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
        let inner = store.slot.store().expect("it is open");
        let location = &inner.location;
        location.create_identity().expect("an identity");
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            for failing in ["open", "openat2"] {
                let hook = move |call: &'static str| {
                    if call == failing {
                        SyscallAction::Fail(errno.raw_os_error())
                    } else {
                        SyscallAction::Proceed
                    }
                };
                let error = with_failpoint_hook(hook, || location.check()).expect_err("it fails");
                assert!(matches!(error, DirStoreError::Directory(_)), "{failing}: {error}");
            }
        }
        assert!(location.missed.notified().now_or_never().is_none(), "nothing is to be opened again");
        location.check().expect("it is in place");
    }

    #[test]
    fn a_disk_that_fails_is_reported_as_such_and_not_as_unmounted() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
        let inner = store.slot.store().expect("it is open");
        inner.location.create_identity().expect("an identity");
        for failing in ["open", "openat2"] {
            let hook = move |call: &'static str| match call {
                call if call == failing => SyscallAction::Fail(Errno::IO.raw_os_error()),
                _ => SyscallAction::Proceed,
            };
            let error = with_failpoint_hook(hook, || inner.location.check()).expect_err("it fails");
            assert!(matches!(error, DirStoreError::Directory(_)), "{failing}: {error}");
            assert!(inner.location.missed.notified().now_or_never().is_some(), "it is looked at again");
        }
        std::fs::rename(base.path().join("volumes"), base.path().join("other")).expect("a rename");
        let error = inner.location.check().expect_err("it is elsewhere");
        assert!(matches!(error, DirStoreError::Lost { .. }), "{error}");
    }
}
