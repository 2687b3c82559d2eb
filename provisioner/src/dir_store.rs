//! Volumes as directories with limits.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodekeel_fsquota::{Limits, QuotaSetter, Status};
use nodekeel_localstorage::{Dir, Error as DirError, FileKind, Mode, Rename};
use rustix::fs::{AtFlags, FlockOperation};
use rustix::io::Errno;

use crate::chain::chain;
use crate::id::VolumeId;
use crate::step::{Hook, Step, Steps};
use crate::store::{OpenVolume, StoreError, VolumeStore, VolumeUsage, larger};

mod error;
mod grave;

pub use error::DirStoreError;

#[cfg(any(test, feature = "testing"))]
pub(crate) use grave::read as read_grave;

use error::named;
use grave::{Eraser, Grave, Queue};

/// Where volumes are, by id.
const VOLUMES: &str = "volumes";

/// Where volumes are born.
const NEW: &str = ".new";

/// Where volumes go to be erased.
const TRASH: &str = ".trash";

/// How many volumes can be worked on at the same time; two that share a lock wait for each other.
const LOCKS: usize = 64;

/// A store that keeps each volume as a directory with a quota of its own.
///
/// ```text
/// <base>/volumes/pvc-<uid>          a volume: limited, at its final place since the moment of its birth
///        .new/pvc-<uid>             a directory that is not a volume yet: nobody has seen it
///        .trash/pvc-<uid>.7.0/      a grave: what was volume 7 of the quota, and is none for anybody any more
///               └─ volume           what is left of it
/// ```
///
/// The three are `0700`, so that nobody else reaches a volume but through its mount; a volume itself has the
/// [mode](DirStoreOptions::mode) that pods need.
///
/// # The directories are the journal
/// There is no record beside the directories that could contradict them: what is in `.new` was never handed out, what is in
/// `volumes` is whole and has its limits, and what is in a grave is to be erased. Both renames are atomic and synced, so
/// a crash at any point leaves each volume in exactly one of the three, and the place tells what is to be done. The one
/// fact that the erased directory took with it, its project number, is in the name of the grave, which is removed last.
///
/// A new store over the same directory sweeps `.new` and goes on erasing. So there is one store per directory: it locks
/// `volumes` (`flock`) until it is dropped and what it has begun is done, and the kernel unlocks it for whoever is killed.
///
/// # Erasing
/// It goes on in a thread of its own, one grave after the other, so that the death of a large volume holds up neither births
/// nor other deaths. Dropping the store stops it between two files; the next store goes on.
pub struct DirStore {
    inner: Arc<Inner>,
    eraser: Eraser,
}

/// What can be chosen about a [`DirStore`]; the default is what pods need.
#[derive(Clone)]
#[non_exhaustive]
pub struct DirStoreOptions {
    /// The mode of a volume's directory. Default `0777`: containers run as any user, and a class without fsGroup support gives
    /// them no other way to write. Nobody else gets past the `0700` above it.
    pub mode: Mode,
    /// Hears of each step.
    pub hook: Option<Arc<dyn Hook>>,
}

impl Default for DirStoreOptions {
    fn default() -> Self {
        Self { mode: Mode::new(0o777), hook: None }
    }
}

struct Inner {
    volumes: Dir,
    new: Dir,
    trash: Dir,
    quota: Arc<dyn QuotaSetter>,
    mode: Mode,
    steps: Steps,
    locks: [Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl DirStore {
    /// A store in this directory, as [`DirStoreOptions::default`] says. It blocks while it sweeps what a crash left behind.
    ///
    /// # Errors
    /// [`DirStoreError`]: the directory can't be used; the text says what to change.
    pub fn new(base: Dir, quota: Arc<dyn QuotaSetter>) -> Result<Self, DirStoreError> {
        Self::with(base, quota, DirStoreOptions::default())
    }

    /// As [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        let ensure = |name| base.ensure_dir(name, Mode::PRIVATE_DIR).map_err(DirStoreError::Directory);
        let inner = Arc::new(Inner {
            volumes: ensure(VOLUMES)?,
            new: ensure(NEW)?,
            trash: ensure(TRASH)?,
            quota,
            mode: options.mode,
            steps: Steps::new(options.hook),
            locks: [const { Mutex::new(()) }; LOCKS],
            hasher: RandomState::new(),
        });
        inner.lock()?;
        inner.sweep_new()?;
        let graves = inner.graves()?;
        inner.release_unused(&graves);
        let eraser = Eraser::start(&inner, graves).map_err(DirStoreError::Thread)?;
        Ok(Self { inner, eraser })
    }

    /// Whether a store works on this directory at the moment. It changes nothing; but a store that is opened in the same
    /// moment may be told so, too.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Lock`].
    pub fn is_in_use(base: &Dir) -> Result<bool, DirStoreError> {
        match base.open_dir(VOLUMES) {
            Ok(volumes) => try_lock(&volumes).map(|is_free| !is_free),
            // Where there are no volumes yet, nobody works on them.
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }

    /// Waits until nothing is left to erase.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn erased(&self) {
        self.eraser.idle().await;
    }

    /// How many volumes are still being erased.
    pub fn erasing(&self) -> usize {
        self.eraser.pending()
    }

    /// Does blocking work for one volume, or for none, on a thread that may block.
    async fn block<T: Send + 'static>(
        &self,
        id: Option<&VolumeId>,
        work: impl FnOnce(&Inner) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        let (inner, id) = (Arc::clone(&self.inner), id.cloned());
        let work = move || {
            let _held = id.map(|id| inner.hold(&id));
            work(&inner)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(DirStoreError::Stopped))
    }
}

impl Inner {
    /// Keeps other stores from the directory. Not by the directory above, which may be the root of its file system: whoever
    /// sets a limit there locks that, and would wait for this store for ever.
    fn lock(&self) -> Result<(), DirStoreError> {
        match try_lock(&self.volumes)? {
            true => Ok(()),
            false => Err(DirStoreError::InUse { path: self.volumes.path().to_owned() }),
        }
    }

    /// Keeps everybody else from a volume.
    fn hold(&self, id: &VolumeId) -> MutexGuard<'_, ()> {
        let lock = usize::try_from(self.hasher.hash_one(id) % LOCKS as u64).unwrap_or_default();
        self.locks[lock].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A volume's directory, if there is one.
    fn find(&self, id: &VolumeId) -> Result<Option<Dir>, DirStoreError> {
        match self.volumes.open_dir(id.as_str()) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }

    fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), DirStoreError> {
        if let Some(dir) = self.find(id)? {
            self.raise(&dir, limits)?;
            return self.settle();
        }
        let born = self.bear(id, limits);
        if born.is_err() {
            // The claim may go to another node, and then nobody comes back to this one. What stays is removed at the next start.
            if let Err(error) = self.discard(id) {
                tracing::warn!(handle = %id, "left in {}: {}", self.new.path().display(), chain(&error));
            }
        }
        born
    }

    /// Makes durable what an instance has renamed or removed that was killed before it could.
    fn settle(&self) -> Result<(), DirStoreError> {
        self.volumes.sync().map_err(DirStoreError::Directory)
    }

    fn bear(&self, id: &VolumeId, limits: Limits) -> Result<(), DirStoreError> {
        let make = || self.new.ensure_dir(id.as_str(), self.mode);
        let dir = self.steps.make(Step::MakeDirectory, make).map_err(DirStoreError::Directory)?;
        self.steps.make(Step::Limit, || self.limit(&dir, limits))?;
        // The rename comes after the limits in the file system's log, so the sync that makes it durable makes them durable.
        dir.sync().map_err(DirStoreError::Directory)?;
        let publish = || self.new.rename(id.as_str(), &self.volumes, id.as_str(), Rename::Exclusive);
        self.steps.make(Step::Publish, publish).map_err(DirStoreError::Directory)
    }

    /// Raises the limits of a volume that exists already, where they are lower.
    fn raise(&self, dir: &Dir, limits: Limits) -> Result<(), DirStoreError> {
        let old = self.status(dir)?.limits;
        let raised =
            Limits { bytes: larger(old.bytes, limits.bytes), inodes: larger(old.inodes, limits.inodes) };
        if raised != old { self.limit(dir, raised) } else { Ok(()) }
    }

    fn limit(&self, dir: &Dir, limits: Limits) -> Result<(), DirStoreError> {
        let set = self.quota.set(dir.as_fd(), limits.into());
        set.map(drop).map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })
    }

    fn status(&self, dir: &Dir) -> Result<Status, DirStoreError> {
        self.find_status(dir)?.ok_or_else(|| DirStoreError::Unlimited { path: dir.path().to_owned() })
    }

    fn find_status(&self, dir: &Dir) -> Result<Option<Status>, DirStoreError> {
        let status = self.quota.status(dir.as_fd());
        status.map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })
    }

    /// Renames a volume, if there is one, into a grave, and has that emptied.
    fn bury(&self, id: &VolumeId, queue: &Queue) -> Result<(), DirStoreError> {
        let Some(dir) = self.find(id)? else { return self.settle() };
        let project = self.find_status(&dir)?.map(|status| status.project);
        let dig = || Grave::dig(&self.trash, id, project);
        let grave = self.steps.make(Step::Dig, dig).map_err(DirStoreError::Directory)?;
        let bury = || grave.take(&self.volumes, id, &self.trash);
        let buried = self.steps.make(Step::Bury, bury).map_err(DirStoreError::Directory);
        // Where it was renamed, and that could not be made durable, nobody comes back for the grave.
        if buried.is_ok() || matches!(self.find(id), Ok(None)) {
            queue.erase(grave);
        }
        buried
    }

    /// Removes a volume that holds nothing, whatever the quota says: the kernel removes no other directory.
    fn remove_empty(&self, id: &VolumeId, queue: &Queue) -> Result<bool, DirStoreError> {
        let Some(dir) = self.find(id)? else { return self.settle().map(|()| true) };
        let failed = |source: io::Error| DirStoreError::RemoveEmpty { path: dir.path().to_owned(), source };
        if !is_empty(dir.as_fd()).map_err(failed)? {
            return Ok(false);
        }
        let project = self.find_status(&dir)?.map(|status| status.project);
        let dig = || Grave::dig(&self.trash, id, project);
        let grave = self.steps.make(Step::Dig, dig).map_err(DirStoreError::Directory)?;
        // Nothing comes into it; but it has the project's number, which is released after the volume.
        let remove = || rustix::fs::unlinkat(&self.volumes, id.as_str(), AtFlags::REMOVEDIR);
        let removed = self.steps.make(Step::Bury, remove);
        queue.erase(grave);
        match removed {
            Ok(()) => self.settle().map(|()| true),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    fn list(&self) -> Result<Vec<VolumeId>, DirStoreError> {
        let entries = self.volumes.list().map_err(DirStoreError::Directory)?;
        let dirs = entries.iter().filter(|entry| entry.kind == FileKind::Dir);
        // Whatever else somebody has put there is nobody's volume.
        Ok(dirs.filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
    }

    /// Removes what was being born when the last store ended.
    fn sweep_new(&self) -> Result<(), DirStoreError> {
        for entry in self.new.list().map_err(DirStoreError::Directory)? {
            match entry.name.as_os_str().to_str().and_then(|name| name.parse().ok()) {
                Some(id) => self.discard(&id)?,
                None => tracing::warn!(
                    "{} is no volume and left alone",
                    self.new.path().join(entry.name.as_os_str()).display()
                ),
            }
        }
        Ok(())
    }

    /// Removes what was being born: nobody has seen it.
    fn discard(&self, id: &VolumeId) -> Result<(), DirStoreError> {
        let name = id.as_str();
        if self.new.exists(name).map_err(DirStoreError::Directory)? {
            tracing::info!(handle = %id, claim_uid = id.claim_uid(), "removing a volume that was never whole");
        }
        match self.new.open_dir(name) {
            Ok(dir) => self
                .quota
                .clear(dir.as_fd())
                .map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })?,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) if error.is_not_a_directory() => {}
            Err(error) => return Err(DirStoreError::Directory(error)),
        }
        self.new.remove_tree(name).map(drop).map_err(DirStoreError::Directory)
    }

    /// Gives back the quota's numbers that a killed instance has left without a directory that would tell of them; those of
    /// graves are given back with them.
    fn release_unused(&self, graves: &[Grave]) {
        let kept: Vec<_> = graves.iter().filter_map(Grave::project).collect();
        match self.quota.release_unused(&kept) {
            Ok(released) if released.is_empty() => {}
            Ok(released) => tracing::info!("gave back {} unused numbers of the quota", released.len()),
            // They take nothing but numbers.
            Err(error) => tracing::warn!(
                "can't give back unused numbers of the quota, will try again at the next start: {}",
                chain(&error)
            ),
        }
    }

    fn graves(&self) -> Result<Vec<Grave>, DirStoreError> {
        let entries = self.trash.list().map_err(DirStoreError::Directory)?;
        Ok(entries.iter().filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
    }
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor until it executes its
/// program, and the lock with it.
impl Drop for Inner {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.volumes, FlockOperation::Unlock);
    }
}

/// Locks a directory for as long as it is held open; false where somebody else has it.
fn try_lock(dir: &Dir) -> Result<bool, DirStoreError> {
    match rustix::fs::flock(dir, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(DirStoreError::Lock { path: dir.path().to_owned(), source: errno.into() }),
    }
}

/// Whether nothing is in a directory. It is looked for by itself: `Dir::list` leaves some names out.
fn is_empty(dir: BorrowedFd<'_>) -> io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(dir)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

#[async_trait]
impl VolumeStore for DirStore {
    async fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        let owned = id.clone();
        let created = self.block(Some(id), move |inner| inner.create(&owned, limits)).await;
        created.map_err(|error| named(id, error, |id, source| StoreError::Create { id, source }))
    }

    async fn resize(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        let owned = id.clone();
        let resize = move |inner: &Inner| match inner.find(&owned)? {
            Some(dir) => inner.limit(&dir, limits).map(Some),
            None => Ok(None),
        };
        let resized = self.block(Some(id), resize).await;
        let resized =
            resized.map_err(|error| named(id, error, |id, source| StoreError::Resize { id, source }))?;
        resized.ok_or_else(|| StoreError::NotFound { id: id.clone() })
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, StoreError> {
        let owned = id.clone();
        let read = move |inner: &Inner| match inner.find(&owned)? {
            Some(dir) => inner.status(&dir).map(Some),
            None => Ok(None),
        };
        let status = self.block(Some(id), read).await;
        let status =
            status.map_err(|source| StoreError::Usage { id: id.clone(), source: Box::new(source) })?;
        let status = status.ok_or_else(|| StoreError::NotFound { id: id.clone() })?;
        Ok(VolumeUsage { limits: status.limits, usage: status.usage })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), StoreError> {
        let owned = id.clone();
        let queue = self.eraser.queue();
        let buried = self.block(Some(id), move |inner| inner.bury(&owned, &queue)).await;
        buried.map_err(|source| StoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, StoreError> {
        let owned = id.clone();
        let queue = self.eraser.queue();
        let removed = self.block(Some(id), move |inner| inner.remove_empty(&owned, &queue)).await;
        removed.map_err(|source| StoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn list(&self) -> Result<Vec<VolumeId>, StoreError> {
        let listed = self.block(None, Inner::list).await;
        listed.map_err(|source| StoreError::List { source: Box::new(source) })
    }
}

impl OpenVolume for DirStore {
    fn open(&self, id: &VolumeId) -> Result<OwnedFd, StoreError> {
        let failed = |source: DirError| StoreError::Open { id: id.clone(), source: Box::new(source) };
        match self.inner.volumes.open_dir(id.as_str()) {
            Ok(dir) => dir
                .as_fd()
                .try_clone_to_owned()
                .map_err(|source| StoreError::Open { id: id.clone(), source: Box::new(source) }),
            Err(error) if error.is_not_found() => Err(StoreError::NotFound { id: id.clone() }),
            Err(error) => Err(failed(error)),
        }
    }
}

impl fmt::Debug for DirStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStore").field("volumes", &self.inner.volumes.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DirStoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStoreOptions").field("mode", &self.mode).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_fsquota::testing::MemQuota;
    use nodekeel_fsquota::{Bytes, Inodes};
    use nodekeel_localstorage::testing::{Verdict, with_hook};

    use super::*;

    /// Whoever is killed between a rename and its sync leaves what a power cut takes back.
    #[test]
    fn what_a_killed_instance_has_done_is_made_durable_before_it_is_told() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
        let (inner, queue) = (&store.inner, store.eraser.queue());
        let id = VolumeId::from_uid("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f").expect("a UUID");
        let limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };
        let no_sync = |call: &'static str| match call {
            "fsync" => Verdict::Fail(Errno::IO.raw_os_error()),
            _ => Verdict::Go,
        };
        inner.create(&id, limits).expect("create");
        with_hook(no_sync, || inner.create(&id, limits)).expect_err("its rename may not be durable");
        inner.create(&id, limits).expect("create again");
        inner.bury(&id, &queue).expect("remove");
        with_hook(no_sync, || inner.bury(&id, &queue)).expect_err("its rename may not be durable");
        with_hook(no_sync, || inner.remove_empty(&id, &queue)).expect_err("its removal may not be durable");
        inner.bury(&id, &queue).expect("remove again");
    }
}
