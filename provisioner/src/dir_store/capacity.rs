//! The promises of a directory store to its volumes: counted once when it opens, and kept up to date. The space of
//! other data is counted again when the use of the disk has changed much.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::Dir;
use tokio::sync::watch;

use crate::capacity::policy::{CapacityPolicy, DiskSpace, StoreCapacity};
use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::image_size;
use crate::dir_store::parts::StoreParts;
use crate::dir_store::trash::{Trash, TrashEntry};
use crate::id::VolumeId;
use crate::image::{VolumeKind, promised_bytes};
use crate::snapshot::StoredId;
use crate::store::larger_limit;

/// The promises of a store. A volume without a byte limit counts as nothing until it is known what was promised to it; a
/// removed one counts with the bytes that it used when it was removed, until it is erased.
pub(super) struct CapacityLedger {
    policy: CapacityPolicy,
    parts: StoreParts,
    trash: Arc<Trash>,
    promises: Mutex<Promises>,
    /// Locked while other data are counted.
    counting: Mutex<()>,
    /// Their sum, and the reserved bytes.
    totals: watch::Sender<LedgerTotals>,
}

/// The figures of the ledger that limit new volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct LedgerTotals {
    promised: Bytes,
    reserved: Bytes,
}

impl LedgerTotals {
    /// Returns whether a capacity has these totals.
    pub(super) fn are_in(&self, capacity: &StoreCapacity) -> bool {
        (self.promised, self.reserved.min(capacity.total)) == (capacity.promised, capacity.reserved)
    }
}

/// Other data are counted again when the use of the disk has changed by this part of it.
const RECOUNT_PART: u64 = 128;

#[derive(Debug, Default)]
struct Promises {
    /// The limit of each volume.
    limits: Amounts,
    /// The bytes of each trash entry.
    erasing: Amounts,
    /// The bytes that data other than volumes occupied when they were counted last, and those that were used in all.
    other: Bytes,
    used: Bytes,
}

impl Promises {
    fn sum(&self) -> Bytes {
        Bytes(u64::try_from(self.limits.sum + self.erasing.sum).unwrap_or(u64::MAX))
    }
}

/// Amounts by name, and their sum.
#[derive(Debug, Default)]
struct Amounts {
    by_name: HashMap<String, Bytes>,
    sum: u128,
}

impl Amounts {
    /// Replaces an amount; `None` removes it. Returns the old one.
    fn replace(&mut self, name: String, new: Option<Bytes>) -> Option<Bytes> {
        let old = match new {
            Some(bytes) => self.by_name.insert(name, bytes),
            None => self.by_name.remove(&name),
        };
        let amount = |bytes: Option<Bytes>| bytes.map_or(0, |bytes| u128::from(bytes.0));
        self.sum = self.sum + amount(new) - amount(old);
        old
    }
}

impl CapacityLedger {
    /// A ledger that counts nothing until [`count`](Self::count) is called.
    pub(super) fn new(policy: CapacityPolicy, parts: StoreParts, trash: Arc<Trash>) -> Self {
        Self {
            policy,
            parts,
            trash,
            promises: Mutex::default(),
            counting: Mutex::default(),
            totals: watch::Sender::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Promises> {
        self.promises.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update<T>(&self, change: impl FnOnce(&mut Promises) -> T) -> T {
        let mut promises = self.lock();
        let result = change(&mut promises);
        let reserved = self.policy.reserved(promises.other);
        let totals = LedgerTotals { promised: promises.sum(), reserved };
        // With the lock held, so that waiters see the totals in the order of the changes.
        self.totals.send_if_modified(|old| std::mem::replace(old, totals) != totals);
        result
    }

    /// Records the limit of an existing volume; `None` if it does not exist. Returns the old one.
    pub(super) fn set_limit(&self, name: &str, limit: Option<Bytes>) -> Option<Bytes> {
        self.update(|all| all.limits.replace(name.to_owned(), limit))
    }

    /// The bytes that are promised to a volume.
    pub(super) fn promise_of(&self, name: &str) -> Option<Bytes> {
        self.lock().limits.by_name.get(name).copied()
    }

    /// Records that a volume is a trash entry now: its promise ends, and the bytes that it still uses count until
    /// [`mark_erased`](Self::mark_erased).
    pub(super) fn move_to_trash(&self, name: &str, entry: &TrashEntry, used: Bytes) {
        self.update(|all| {
            all.limits.replace(name.to_owned(), None);
            all.erasing.replace(entry.to_string(), Some(used));
        });
    }

    pub(super) fn mark_erased(&self, entry: &TrashEntry) {
        self.update(|all| all.erasing.replace(entry.to_string(), None));
    }

    pub(super) fn watch_totals(&self) -> watch::Receiver<LedgerTotals> {
        self.totals.subscribe()
    }

    /// Counts the promises of all volumes, and what other data occupy.
    pub(super) fn count(&self, trash_entries: &[TrashEntry]) -> Result<(), DirStoreError> {
        let mut promises = Promises::default();
        for id in self.parts.dirs.list_volumes()? {
            let Some(dir) = self.parts.dirs.find_volume(&id)? else { continue };
            let (limits, _) = self.parts.limits.status_or_nothing(&dir);
            promises.limits.replace(id.to_string(), self.promised_to(&id, &dir, limits));
        }
        // A snapshot can't grow: it needs what it uses, once its volume has changed all its blocks.
        for id in self.parts.dirs.list_snapshots()? {
            let Some(dir) = self.parts.dirs.find(&id.clone().into())? else { continue };
            let (_, usage) = self.parts.limits.status_or_nothing(&dir);
            promises.limits.replace(id.to_string(), Some(usage));
        }
        for entry in trash_entries {
            let Ok(dir) = self.trash.open_content(entry) else { continue };
            let (_, usage) = self.parts.limits.status_or_nothing(&dir);
            promises.erasing.replace(entry.to_string(), Some(usage));
        }
        self.update(|all| *all = promises);
        self.count_other()
    }

    /// Counts what data other than volumes and trash occupy. Blocks that a snapshot shares with its volume count for
    /// the volume; the others are data that no removal of a volume frees. Copies count as volumes, though they share
    /// blocks.
    fn count_other(&self) -> Result<(), DirStoreError> {
        let used = used(self.disk_space()?);
        let volumes = self
            .parts
            .dirs
            .list_volumes()?
            .into_iter()
            .map(|id| self.parts.dirs.volumes.open_dir(id.as_str()));
        let trash = self.trash.list()?.into_iter().map(|entry| self.trash.open_content(&entry));
        // One is open at a time: there may be more of them than files that the process may open. One that can't
        // be opened counts as nothing.
        let used_bytes = |dir: &Dir| u128::from(self.parts.limits.status_or_nothing(dir).1.0);
        let of_volumes: u128 = volumes.chain(trash).map(|dir| dir.as_ref().map_or(0, used_bytes)).sum();
        let other = u128::from(used.0).saturating_sub(of_volumes);
        let other = Bytes(u64::try_from(other).unwrap_or(u64::MAX));
        self.update(|all| (all.other, all.used) = (other, used));
        Ok(())
    }

    /// The space of the file system; other data are counted again if its use has changed much.
    fn counted_space(&self) -> Result<DiskSpace, DirStoreError> {
        let space = self.disk_space()?;
        if used(space).0.abs_diff(self.lock().used.0) > space.total.0 / RECOUNT_PART {
            // While another call counts, the last count holds.
            let counting = self.counting.try_lock();
            if !matches!(counting, Err(TryLockError::WouldBlock)) {
                self.count_other()?;
            }
        }
        Ok(space)
    }

    /// Counts volumes without a limit with the bytes that were promised to them.
    pub(super) fn count_promised(&self, volumes: &[(VolumeId, Bytes)]) {
        self.update(|all| {
            for (id, bytes) in volumes {
                if !all.limits.by_name.contains_key(id.as_str()) {
                    all.limits.replace(id.to_string(), Some(*bytes));
                }
            }
        });
    }

    /// Lists the volumes, and counts the promises of those that another process has imported since the last count, and no
    /// longer those of volumes and snapshots that one has removed.
    pub(super) fn list_and_count(&self) -> Result<Vec<VolumeId>, DirStoreError> {
        let volumes = self.parts.dirs.list_volumes()?;
        for id in &volumes {
            // With the lock of the volume: a creation in progress has then recorded its promise itself.
            let _held = self.parts.locks.lock(id.as_str());
            let is_counted = self.lock().limits.by_name.contains_key(id.as_str());
            let imported = if is_counted { None } else { self.parts.dirs.find_volume(id)? };
            if let Some(dir) = imported {
                let limits = self.parts.limits.status_or_nothing(&dir).0;
                self.set_limit(id.as_str(), self.promised_to(id, &dir, limits));
            }
        }
        let present: HashSet<&str> = volumes.iter().map(VolumeId::as_str).collect();
        let absent: Vec<StoredId> = {
            let promises = self.lock();
            let names = promises.limits.by_name.keys().filter(|name| !present.contains(name.as_str()));
            names.filter_map(|name| name.parse().ok()).collect()
        };
        for stored in absent {
            // Without its locks, it is being made: then it is promised before it is there.
            let lock = self.parts.locks.try_lock_copy(&stored);
            let _held = self.parts.locks.lock(stored.as_str());
            if lock.is_some() && self.parts.dirs.find(&stored)?.is_none() {
                self.set_limit(stored.as_str(), None);
            }
        }
        Ok(volumes)
    }

    /// The bytes that are promised to a volume: its limit, or what its image may occupy.
    fn promised_to(&self, id: &VolumeId, dir: &Dir, limits: QuotaLimits) -> Option<Bytes> {
        match self.parts.kinds.read(&id.clone().into(), dir) {
            Ok(VolumeKind::Image(_)) => image_size(dir).map(promised_bytes).ok().or(limits.bytes),
            // Also if the mark can't be read: the limit of an image's directory is more than its promise.
            _ => limits.bytes,
        }
    }

    /// Promises a limit to a volume, and then sets it. Records the limit that is in force afterwards: the old one if
    /// setting it failed, or none where the quota enforces none.
    pub(super) fn with_promise<T>(
        &self,
        name: &str,
        limit: Option<Bytes>,
        set: impl FnOnce() -> Result<T, DirStoreError>,
    ) -> Result<T, DirStoreError> {
        let (space, new) = (self.counted_space()?, limit.unwrap_or_default());
        // The promise comes first: two calls together can't exceed the ceiling.
        let old = self.update(|all| {
            let old = all.limits.by_name.get(name).copied();
            let capacity = self.capacity_of(space, all.other, all.sum());
            capacity.check_limit(old.unwrap_or_default(), new).map_err(DirStoreError::Capacity)?;
            all.limits.replace(name.to_owned(), limit);
            Ok(old)
        })?;
        let done = set();
        // Read back, and not assumed: a failed call may have set the limit, and a limit in force must be promised.
        let expected = if done.is_ok() { limit } else { old };
        self.set_limit(name, self.limit_in_force(name, expected, old.max(limit)));
        done
    }

    /// The limit of a volume after a change that may have failed: then it may have been set, and not be durable. The
    /// usage of a snapshot is not limited so; the expected amount holds.
    fn limit_in_force(&self, name: &str, expected: Option<Bytes>, most: Option<Bytes>) -> Option<Bytes> {
        let Ok(id) = name.parse::<VolumeId>() else { return expected };
        let status = |dir: Dir| {
            let status = self.parts.limits.read_status(&dir);
            status.map(|status| self.promised_to(&id, &dir, status.limits))
        };
        match self.parts.dirs.find_volume(&id).map(|dir| dir.map(status)) {
            Ok(Some(Ok(promised))) => promised,
            Ok(None) => None,
            // It can't be read. The larger of both amounts never promises more than there is.
            _ => most,
        }
    }

    /// Sets the limits of an existing volume that is a directory, within the capacity.
    pub(super) fn resize(&self, id: &VolumeId, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.with_promise(id.as_str(), limits.bytes, || self.parts.limits.resize(dir, limits))
    }

    /// Raises those limits of an existing volume that are lower.
    pub(super) fn raise_limits(
        &self,
        id: &VolumeId,
        dir: &Dir,
        limits: QuotaLimits,
    ) -> Result<(), DirStoreError> {
        let old = self.parts.limits.read_status(dir)?.limits;
        let raised = QuotaLimits {
            bytes: larger_limit(old.bytes, limits.bytes),
            inodes: larger_limit(old.inodes, limits.inodes),
        };
        // Another process may have imported the volume since the last count. A limit in force counts, also
        // above the ceiling.
        self.set_limit(id.as_str(), old.bytes);
        if raised == old { Ok(()) } else { self.resize(id, dir, raised) }
    }

    /// The space of the file system, and what is promised of it.
    pub(super) fn capacity(&self) -> Result<StoreCapacity, DirStoreError> {
        self.capacity_without(Bytes(0))
    }

    /// The capacity once so many bytes of other data belong to a volume.
    pub(super) fn capacity_without(&self, moved: Bytes) -> Result<StoreCapacity, DirStoreError> {
        let space = self.counted_space()?;
        let promises = self.lock();
        let other = Bytes(promises.other.0.saturating_sub(moved.0));
        Ok(self.capacity_of(space, other, promises.sum()))
    }

    fn capacity_of(&self, space: DiskSpace, other: Bytes, promised: Bytes) -> StoreCapacity {
        self.policy.store_capacity(space, other, promised)
    }

    fn disk_space(&self) -> Result<DiskSpace, DirStoreError> {
        let base = &self.parts.dirs.base;
        let failed = |error: rustix::io::Errno| DirStoreError::FileSystemSpace {
            path: base.path().to_owned(),
            source: error.into(),
        };
        let stat = rustix::fs::fstatvfs(base.as_fd()).map_err(failed)?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(stat.f_frsize));
        // `f_bavail`, without the blocks that are reserved for root: statvfs(3).
        Ok(DiskSpace { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail) })
    }
}

fn used(space: DiskSpace) -> Bytes {
    Bytes(space.total.0.saturating_sub(space.free.0))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nodekeel_fsquota::testing::MemQuota;
    use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
    use nodekeel_localstorage::Dir;
    use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
    use rustix::io::Errno;

    use crate::testing::objects::sample_uid;
    use crate::{CapacityPolicy, DirStore, DirStoreOptions, StoreCapacity, VolumeId, VolumeStore as _};

    const MIB: u64 = 1 << 20;

    /// A store in a directory, which promises `mebibytes`.
    async fn open_store(base: &std::path::Path, quota: &Arc<MemQuota>, mebibytes: u64) -> DirStore {
        let stat = rustix::fs::statvfs(base).expect("a file system");
        let reserve = (stat.f_blocks * stat.f_frsize).saturating_sub(mebibytes * MIB);
        let capacity = CapacityPolicy::try_new(1.0, Bytes(reserve)).expect("a ratio");
        let options = DirStoreOptions { capacity, ..DirStoreOptions::default() };
        let dir = Dir::open(base).expect("the base");
        let store = DirStore::with_options(dir, Arc::clone(quota) as _, options).expect("a store");
        store.create_identity().await.expect("an identity");
        store
    }

    fn id(number: u32) -> VolumeId {
        VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
    }

    fn limits(mebibytes: u64) -> QuotaLimits {
        QuotaLimits { bytes: Some(Bytes(mebibytes * MIB)), inodes: Some(Inodes(1024)) }
    }

    async fn capacity(store: &DirStore) -> StoreCapacity {
        store.capacity().await.expect("a capacity").expect("it is limited")
    }

    async fn promised(store: &DirStore) -> u64 {
        capacity(store).await.promised.0 / MIB
    }

    #[tokio::test]
    async fn limits_above_the_ceiling_are_refused_and_smaller_ones_are_not() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, 8).await;
        let refused = store.create(&id(1), limits(100 << 20)).await.expect_err("too large");
        assert!(refused.is_exhausted(), "{refused}");
        let text = crate::error_chain::format_chain(&refused);
        assert!(text.contains("100Ti never fits on this node, which promises 8Mi at most"), "{text}");
        store.create(&id(1), limits(6)).await.expect("it fits");
        let refused = store.create(&id(2), limits(3)).await.expect_err("6 and 3 are more than 8");
        assert!(refused.is_exhausted() && store.list().await.expect("a list") == [id(1)], "{refused}");
        store.create(&id(2), limits(2)).await.expect("it fits");
        assert!(store.resize(&id(2), limits(3)).await.expect_err("it is full").is_exhausted());
        store.resize(&id(1), limits(5)).await.expect("lowered");
        store.resize(&id(2), limits(3)).await.expect("it fits now");
        store.create(&id(2), limits(3)).await.expect("it exists");
        assert_eq!((promised(&store).await, capacity(&store).await.available()), (8, Bytes(0)));
        store.remove(&id(1)).await.expect("removed");
        store.wait_until_erased().await;
        store
            .wait_for_capacity_change(&StoreCapacity { promised: Bytes(8 * MIB), ..capacity(&store).await })
            .await;
        store.create(&id(3), limits(5)).await.expect("it fits");
    }

    #[tokio::test]
    async fn a_store_counts_its_volumes_when_it_opens_and_serves_those_above_the_ceiling() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, 8).await;
        for number in 1..=4 {
            store.create(&id(number), limits(2)).await.expect("it fits");
        }
        drop(store);
        let store = open_store(base.path(), &quota, 4).await;
        assert_eq!((promised(&store).await, capacity(&store).await.available()), (8, Bytes(0)));
        store.create(&id(1), limits(2)).await.expect("it exists");
        store.resize(&id(1), limits(1)).await.expect("lowered");
        assert!(store.resize(&id(1), limits(2)).await.expect_err("raised").is_exhausted());
        assert!(store.create(&id(5), limits(1)).await.expect_err("new").is_exhausted());
        assert_eq!(promised(&store).await, 7);
    }

    #[tokio::test]
    async fn a_limit_that_is_in_force_is_promised_although_it_may_not_be_durable() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, 8).await;
        store.create(&id(1), limits(2)).await.expect("it fits");
        let inner = store.slot.store().expect("it is open");
        let dir = inner.parts.dirs.find_volume(&id(1)).expect("readable").expect("the volume");
        let no_sync = |call: &'static str| match call {
            "fsync" => SyscallAction::Fail(Errno::IO.raw_os_error()),
            _ => SyscallAction::Proceed,
        };
        let resize = || inner.ledger.resize(&id(1), &dir, limits(6));
        with_failpoint_hook(no_sync, resize).expect_err("it may not be durable");
        assert_eq!(promised(&store).await, 6);
        assert!(store.create(&id(2), limits(4)).await.expect_err("6 and 4 are more than 8").is_exhausted());
    }

    #[tokio::test]
    async fn other_data_that_become_a_volume_are_no_longer_reserved() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, u64::MAX / MIB).await;
        let inner = store.slot.store().expect("it is open");
        let [before, after] =
            [0, 5].map(|moved| inner.ledger.capacity_without(Bytes(moved)).expect("a capacity"));
        assert_eq!(after.reserved.0, before.reserved.0.saturating_sub(5));
    }

    #[tokio::test]
    async fn a_volume_that_was_not_created_is_not_promised() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, 8).await;
        std::fs::remove_dir(base.path().join(".new")).expect("removed");
        store.create(&id(1), limits(2)).await.expect_err("nowhere to create it");
        assert_eq!(promised(&store).await, 0);
    }
}
