//! What a directory store has promised to its volumes: counted once when it opens, and kept up to date. What other data
//! occupy is counted again when the use of the disk has changed much.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::Dir;
use tokio::sync::watch;

use super::trash::TrashEntry;
use crate::dir_store::{DirStoreError, StoreInner};
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::plan::{CapacityPolicy, StoreCapacity};

/// The promises of a store. A volume without a byte limit counts as nothing; a removed one counts with what it
/// used when it was removed, until it is erased.
#[derive(Debug)]
pub(super) struct CapacityLedger {
    policy: CapacityPolicy,
    promises: Mutex<Promises>,
    /// Locked while other data are counted.
    counting: Mutex<()>,
    /// Their sum, and what is reserved.
    totals: watch::Sender<LedgerTotals>,
}

/// What a change of the ledger changes for new volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct LedgerTotals {
    promised: Bytes,
    reserved: Bytes,
}

impl LedgerTotals {
    /// Whether a capacity has these totals.
    pub(super) fn are_in(&self, capacity: &StoreCapacity) -> bool {
        (self.promised, self.reserved.min(capacity.total)) == (capacity.promised, capacity.reserved)
    }
}

/// Other data are counted again when the use of the disk has changed by this part of it.
const RECOUNT_PART: u64 = 128;

#[derive(Debug, Default)]
struct Promises {
    /// The limit of each volume, by its name.
    limits: HashMap<String, Bytes>,
    /// The bytes of each trash entry, by its name.
    erasing: HashMap<String, Bytes>,
    /// What data other than volumes occupied when they were counted last, and what was used in all.
    other: Bytes,
    used: Bytes,
    sum: u128,
}

impl Promises {
    fn sum_bytes(&self) -> Bytes {
        Bytes(u64::try_from(self.sum).unwrap_or(u64::MAX))
    }
}

/// Replaces an amount in a map and in the sum; returns the old one.
fn replace(
    (sum, map): (&mut u128, &mut HashMap<String, Bytes>),
    name: String,
    new: Option<Bytes>,
) -> Option<Bytes> {
    let old = match new {
        Some(bytes) => map.insert(name, bytes),
        None => map.remove(&name),
    };
    let amount = |bytes: Option<Bytes>| bytes.map_or(0, |bytes| u128::from(bytes.0));
    *sum = *sum + amount(new) - amount(old);
    old
}

impl CapacityLedger {
    pub(super) fn new(policy: CapacityPolicy) -> Self {
        Self {
            policy,
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
        let totals = LedgerTotals { promised: promises.sum_bytes(), reserved };
        self.totals.send_if_modified(|old| std::mem::replace(old, totals) != totals);
        result
    }

    /// Records the limit of an existing volume; `None` if it does not exist. Returns the old one.
    pub(super) fn set_limit(&self, name: &str, limit: Option<Bytes>) -> Option<Bytes> {
        self.update(|all| replace((&mut all.sum, &mut all.limits), name.to_owned(), limit))
    }

    /// Records that a volume is a trash entry now, of so many bytes.
    pub(super) fn move_to_trash(&self, name: &str, entry: &TrashEntry, used: Bytes) {
        self.update(|all| {
            replace((&mut all.sum, &mut all.limits), name.to_owned(), None);
            replace((&mut all.sum, &mut all.erasing), entry.to_string(), Some(used));
        });
    }

    /// Records that a trash entry is erased.
    pub(super) fn mark_erased(&self, entry: &TrashEntry) {
        self.update(|all| replace((&mut all.sum, &mut all.erasing), entry.to_string(), None));
    }

    /// Receives the totals when they change.
    pub(super) fn watch_totals(&self) -> watch::Receiver<LedgerTotals> {
        self.totals.subscribe()
    }
}

impl StoreInner {
    /// Counts the promises of all volumes, and what other data occupy.
    pub(super) fn count_promises(&self, trash_entries: &[TrashEntry]) -> Result<(), DirStoreError> {
        let mut promises = Promises::default();
        for id in self.list_volumes()? {
            let Some(dir) = self.find_volume(&id)? else { continue };
            let (limits, _) = self.status_or_nothing(&dir);
            let promised = self.promised_to(&id, &dir, limits);
            replace((&mut promises.sum, &mut promises.limits), id.to_string(), promised);
        }
        // A snapshot can't grow: it needs what it uses, once its volume has changed all its blocks.
        for id in self.list_snapshots()? {
            let Some(dir) = self.find_stored(&id.clone().into())? else { continue };
            let (_, usage) = self.status_or_nothing(&dir);
            replace((&mut promises.sum, &mut promises.limits), id.to_string(), Some(usage));
        }
        for entry in trash_entries {
            let Ok(dir) = self.trash.open_dir(entry.content_path()) else { continue };
            let (_, usage) = self.status_or_nothing(&dir);
            replace((&mut promises.sum, &mut promises.erasing), entry.to_string(), Some(usage));
        }
        self.ledger.update(|all| *all = promises);
        self.count_other()
    }

    /// Counts what data other than volumes and trash occupy. Blocks that a snapshot shares with its volume count for the
    /// volume; the others are data that no removal of a volume frees. Copies count as volumes, though they share blocks.
    fn count_other(&self) -> Result<(), DirStoreError> {
        let (total, free) = self.file_system_space()?;
        let used = Bytes(total.0.saturating_sub(free.0));
        let volumes = self.list_volumes()?.into_iter().map(|id| self.volumes.open_dir(id.as_str()));
        let trash = self.list_trash()?.into_iter().map(|entry| self.trash.open_dir(entry.content_path()));
        // One is open at a time: there may be more of them than files that the process may open. What can't be opened
        // counts as nothing.
        let used_bytes = |dir: &Dir| u128::from(self.status_or_nothing(dir).1.0);
        let of_volumes: u128 = volumes.chain(trash).map(|dir| dir.as_ref().map_or(0, used_bytes)).sum();
        let other = u128::from(used.0).saturating_sub(of_volumes);
        let other = Bytes(u64::try_from(other).unwrap_or(u64::MAX));
        self.ledger.update(|all| (all.other, all.used) = (other, used));
        Ok(())
    }

    /// The space of the file system; other data are counted again if its use has changed much.
    fn counted_space(&self) -> Result<(Bytes, Bytes), DirStoreError> {
        let (total, free) = self.file_system_space()?;
        let used = total.0.saturating_sub(free.0);
        if used.abs_diff(self.ledger.lock().used.0) > total.0 / RECOUNT_PART {
            // While another call counts, the last count holds.
            let counting = self.ledger.counting.try_lock();
            if !matches!(counting, Err(TryLockError::WouldBlock)) {
                self.count_other()?;
            }
        }
        Ok((total, free))
    }

    /// Lists the volumes, and counts the promises of those that another process has imported meanwhile.
    pub(super) fn list_and_count(&self) -> Result<Vec<VolumeId>, DirStoreError> {
        let volumes = self.list_volumes()?;
        for id in &volumes {
            let _held = self.lock_volume(id);
            let is_counted = self.ledger.lock().limits.contains_key(id.as_str());
            let imported = if is_counted { None } else { self.find_volume(id)? };
            if let Some(dir) = imported {
                let limits = self.status_or_nothing(&dir).0;
                self.ledger.set_limit(id.as_str(), self.promised_to(id, &dir, limits));
            }
        }
        Ok(volumes)
    }

    /// The limits and the used bytes of a directory. What can't be read counts as nothing: the volume is served
    /// all the same.
    fn status_or_nothing(&self, dir: &Dir) -> (QuotaLimits, Bytes) {
        match self.quota.read_status(dir.as_fd()) {
            Ok(status) => status.map(|status| (status.limits, status.usage.bytes)).unwrap_or_default(),
            Err(error) => {
                let path = dir.path().display();
                tracing::warn!("{path} is not counted in the capacity: {}", format_chain(&error));
                Default::default()
            }
        }
    }

    /// Promises a limit to a volume, and then sets it. What is in force afterwards holds: the old limit if that failed, or
    /// none where the quota enforces none.
    pub(super) fn with_promise<T>(
        &self,
        name: &str,
        limit: Option<Bytes>,
        set: impl FnOnce() -> Result<T, DirStoreError>,
    ) -> Result<T, DirStoreError> {
        let (space, new) = (self.counted_space()?, limit.unwrap_or_default());
        let old = self.ledger.update(|all| {
            let old = all.limits.get(name).copied();
            let capacity = self.ledger.policy.store_capacity(space, all.other, all.sum_bytes());
            capacity.check_limit(old.unwrap_or_default(), new).map_err(DirStoreError::Capacity)?;
            replace((&mut all.sum, &mut all.limits), name.to_owned(), limit);
            Ok(old)
        })?;
        let done = set();
        let expected = if done.is_ok() { limit } else { old };
        self.ledger.set_limit(name, self.limit_in_force(name, expected, old.max(limit)));
        done
    }

    /// The limit of a volume after a change that may have failed: then it may have been set, and not be durable. What a
    /// snapshot may use is not limited so; the expected amount holds.
    fn limit_in_force(&self, name: &str, expected: Option<Bytes>, most: Option<Bytes>) -> Option<Bytes> {
        let Ok(id) = name.parse::<VolumeId>() else { return expected };
        let status =
            |dir: Dir| self.read_status(&dir).map(|status| self.promised_to(&id, &dir, status.limits));
        match self.find_volume(&id).map(|dir| dir.map(status)) {
            Ok(Some(Ok(promised))) => promised,
            Ok(None) => None,
            _ => most,
        }
    }

    /// The space of the file system, and what is promised of it.
    pub(super) fn capacity(&self) -> Result<StoreCapacity, DirStoreError> {
        self.capacity_without(Bytes(0))
    }

    /// The capacity once so many bytes of other data belong to a volume.
    pub(super) fn capacity_without(&self, moved: Bytes) -> Result<StoreCapacity, DirStoreError> {
        let space = self.counted_space()?;
        let promises = self.ledger.lock();
        let other = Bytes(promises.other.0.saturating_sub(moved.0));
        Ok(self.ledger.policy.store_capacity(space, other, promises.sum_bytes()))
    }

    /// The size of the file system, and what is free for processes without privileges.
    fn file_system_space(&self) -> Result<(Bytes, Bytes), DirStoreError> {
        let failed = |error: rustix::io::Errno| DirStoreError::FileSystemSpace {
            path: self.base.path().to_owned(),
            source: error.into(),
        };
        let stat = rustix::fs::fstatvfs(self.base.as_fd()).map_err(failed)?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(stat.f_frsize));
        Ok((bytes(stat.f_blocks), bytes(stat.f_bavail)))
    }
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
        let inner = store.slot.inner().expect("it is open");
        let dir = inner.find_volume(&id(1)).expect("readable").expect("the volume");
        let no_sync = |call: &'static str| match call {
            "fsync" => SyscallAction::Fail(Errno::IO.raw_os_error()),
            _ => SyscallAction::Proceed,
        };
        let resize = || {
            let set = || inner.resize_limits(&dir, limits(6));
            inner.with_promise(id(1).as_str(), limits(6).bytes, set)
        };
        with_failpoint_hook(no_sync, resize).expect_err("it may not be durable");
        assert_eq!(promised(&store).await, 6);
        assert!(store.create(&id(2), limits(4)).await.expect_err("6 and 4 are more than 8").is_exhausted());
    }

    #[tokio::test]
    async fn other_data_that_become_a_volume_are_no_longer_reserved() {
        let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::new(MemQuota::new()));
        let store = open_store(base.path(), &quota, u64::MAX / MIB).await;
        let inner = store.slot.inner().expect("it is open");
        let [before, after] = [0, 5].map(|moved| inner.capacity_without(Bytes(moved)).expect("a capacity"));
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
