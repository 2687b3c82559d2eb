//! Snapshots and copies of the directory store.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_localstorage::{Dir, FileCloner};
use nodekeel_provisioner::csi::testing::MemMounter;
use nodekeel_provisioner::csi::{NodePlugin, PluginDeps};
use nodekeel_provisioner::testing::objects::{NODE, sample_identity};
use nodekeel_provisioner::testing::{MemStore, conformance, snapshot_conformance};
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreOptions, SnapshotStore as _, SnapshotStoreError, StepHook, StepMoment, StoredId,
    VolumeOpener as _, VolumeStep, VolumeStore as _,
};
use testbed::guest::disk::FileSystem;

use crate::fixture::{MIB, PLACES, assert_empty, id, names, new_store, open, open_on_disk, snapshot_id};
use crate::service::dir_node::deps_of;
use crate::service::harness::{RunningProvisioner, test_api};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(16 * MIB)), inodes: Some(Inodes(1024)) };

fn volume_path(base: &Path, number: u32) -> std::path::PathBuf {
    base.join("volumes").join(id(number).as_str())
}

#[tokio::test]
async fn the_mem_store_keeps_the_contract_of_snapshots() {
    snapshot_conformance(&MemStore::default()).await;
}

#[tokio::test]
async fn the_dir_store_keeps_the_contract_of_snapshots() {
    let (base, quota, store) = new_store().await;
    snapshot_conformance(&store).await;
    store.wait_until_erased().await;
    assert_eq!(quota.list_projects(), [], "no project is left");
    assert_empty(base.path(), &PLACES, "at the end");
}

#[tokio::test]
async fn a_store_that_can_not_share_blocks_refuses_by_name_and_creates_nothing() {
    let base = tempfile::tempdir().expect("a directory");
    let dir = Dir::open(base.path()).expect("the base");
    if dir.check_cloner(&nodekeel_localstorage::Reflink).is_ok() {
        return;
    }
    let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
    store.create_identity().await.expect("an identity");
    store.create(&id(1), LIMITS).await.expect("create");
    let before = names(base.path());
    let error = store.create_snapshot(&snapshot_id(1), &id(1)).await.expect_err("no reflinks");
    assert!(matches!(error, SnapshotStoreError::Unsupported { .. }), "{error:?}");
    let copied = store.create_volume_from(&id(2), &id(1).into(), LIMITS).await.expect_err("no reflinks");
    let chain = format!("{copied}: {}", std::error::Error::source(&copied).expect("a cause"));
    assert!(!copied.is_exhausted(), "{chain}");
    assert_eq!(names(base.path()), before);
    assert_eq!(names(&base.path().join(".new")), Vec::<String>::new());
}

/// Removes the snapshot next to the store that serves it, as an operator does.
fn remove_stored(base: &Path, quota: &Arc<MemQuota>, hook: Option<Arc<dyn StepHook>>) {
    let dir = Dir::open(base).expect("the base");
    DirStore::remove_stored_snapshot(dir, Arc::clone(quota) as _, &snapshot_id(1), hook).expect("removed");
}

#[tokio::test]
async fn a_snapshot_is_removed_next_to_its_store_and_is_no_longer_promised_also_after_a_kill() {
    for killed_at in 0.. {
        let (base, quota, store) = new_store().await;
        store.create(&id(1), LIMITS).await.expect("create");
        fs::write(volume_path(base.path(), 1).join("file"), "data").expect("a file");
        store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
        let passed = AtomicUsize::new(0);
        let hook = Arc::new(move |_: VolumeStep, _: StepMoment| {
            assert!(passed.fetch_add(1, Ordering::Relaxed) != killed_at, "killed");
        });
        let remove = || remove_stored(base.path(), &quota, Some(hook.clone()));
        let was_killed = std::panic::catch_unwind(AssertUnwindSafe(remove)).is_err();
        remove_stored(base.path(), &quota, None);
        assert_eq!(store.list_snapshots().await.expect("a list"), []);
        assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new(), "killed at {killed_at}");
        assert_eq!(quota.list_projects().len(), 1, "that of the volume");
        store.list().await.expect("it counts");
        let promised = store.capacity().await.expect("a capacity").expect("one").promised;
        assert_eq!(promised, Bytes(16 * MIB), "killed at {killed_at}");
        if !was_killed {
            assert!(killed_at > 6, "each step has two moments");
            break;
        }
    }
}

#[tokio::test]
async fn a_copy_and_its_source_change_independently() {
    let (base, quota, store) = new_store().await;
    store.create(&id(1), LIMITS).await.expect("create");
    fs::create_dir(volume_path(base.path(), 1).join("below")).expect("a directory");
    fs::write(volume_path(base.path(), 1).join("below/file"), "old").expect("a file");
    let info = store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    assert_eq!(info.restore_size, Bytes(16 * MIB));
    assert!(info.created.elapsed().expect("in the past").as_secs() < 600, "{info:?}");
    fs::write(volume_path(base.path(), 1).join("below/file"), "new").expect("a file");
    store.create_volume_from(&id(2), &snapshot_id(1).into(), LIMITS).await.expect("a restore");
    store.create_volume_from(&id(3), &id(1).into(), LIMITS).await.expect("a clone");
    let read =
        |number| fs::read_to_string(volume_path(base.path(), number).join("below/file")).expect("a file");
    assert_eq!([1, 2, 3].map(read), ["new", "old", "new"]);
    fs::write(volume_path(base.path(), 2).join("below/file"), "restored").expect("a file");
    store.remove(&id(1)).await.expect("remove");
    store.remove_snapshot(&snapshot_id(1)).await.expect("remove");
    store.wait_until_erased().await;
    assert_eq!([2, 3].map(read), ["restored", "new"]);
    assert_eq!(quota.list_projects().len(), 2);
}

/// Copies a file after a pod has written more into it.
#[derive(Debug)]
struct GrowthCloner(std::path::PathBuf);

impl FileCloner for GrowthCloner {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        // The check that files can be cloned has two empty ones.
        if rustix::fs::fstat(from)?.st_size > 0 {
            fs::write(&self.0, vec![7; 1 << 20])?;
        }
        DataCloner.clone_file(from, to)
    }
}

#[tokio::test]
async fn a_snapshot_of_a_growing_volume_is_promised_what_it_uses() {
    let base = tempfile::tempdir().expect("a directory");
    let file = volume_path(base.path(), 1).join("file");
    let mut options = DirStoreOptions::default();
    options.cloner = Arc::new(GrowthCloner(file.clone()));
    let dir = Dir::open(base.path()).expect("the base");
    let store = DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store");
    store.create_identity().await.expect("an identity");
    store.create(&id(1), LIMITS).await.expect("create");
    fs::write(&file, "data").expect("a file");
    store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    let promised = store.capacity().await.expect("a capacity").expect("it is limited").promised;
    assert!(promised >= Bytes(17 * MIB), "16 MiB for the volume, and 1 MiB for the snapshot: {promised}");
}

#[tokio::test]
async fn an_unpublished_copy_is_swept_and_one_that_a_pod_has_opened_is_not() {
    let (base, quota, store) = new_store().await;
    store.create(&id(1), LIMITS).await.expect("create");
    fs::write(volume_path(base.path(), 1).join("file"), "data").expect("a file");
    for number in [2, 3, 4] {
        store.create_volume_from(&id(number), &id(1).into(), LIMITS).await.expect("a copy");
    }
    drop(store);
    // Also after a restart.
    let store = open(base.path(), &quota).await;
    drop(store.open(&id(3)).expect("opened for a pod"));
    store.mark_published(&id(4)).await.expect("marked");
    let mut swept = Vec::new();
    for number in 1..=4 {
        swept.push(store.remove_empty(&id(number)).await.expect("swept"));
    }
    assert_eq!(swept, [false, true, false, false]);
    assert_eq!(names(&base.path().join(".unpublished")), Vec::<String>::new());
}

/// The plugin looks at the mounts of each volume that is swept; that publishes none.
#[tokio::test]
async fn an_unpublished_copy_is_swept_beside_the_plugin() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::default());
    let store = Arc::new(open(base.path(), &quota).await);
    store.create(&id(1), LIMITS).await.expect("create");
    fs::write(volume_path(base.path(), 1).join("file"), "data").expect("a file");
    for number in [2, 3] {
        store.create_volume_from(&id(number), &id(1).into(), LIMITS).await.expect("a copy");
    }
    store.mark_published(&id(3)).await.expect("marked");
    let (identity, api) = (sample_identity(NODE), test_api());
    let plugin = PluginDeps {
        driver: identity.driver.clone(),
        node: identity.node.clone(),
        store: store.clone(),
        volumes: store.clone(),
        mounter: Arc::new(MemMounter::default()),
    };
    let plugin = NodePlugin::new(plugin, Path::new("/var/lib/kubelet")).expect("a plugin");
    let running =
        RunningProvisioner::start(Deps { guard: Some(plugin.volume_guard()), ..deps_of(&api, &store) });
    let swept = async {
        loop {
            let seen = store.capacity().await.expect("a capacity").expect("it is limited");
            if store.list().await.expect("a list") == [id(1), id(3)] {
                return;
            }
            store.wait_for_capacity_change(&seen).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), swept).await.expect("the copy is swept");
    running.stop().await;
    assert_eq!(store.list().await.expect("a list"), [id(1), id(3)], "what may hold data is kept");
}

#[tokio::test]
async fn a_new_store_sweeps_incomplete_copies_and_stale_marks() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::default());
    drop(open(base.path(), &quota).await);
    for staged in [snapshot_id(1).as_str(), id(2).as_str()] {
        fs::create_dir_all(base.path().join(".new").join(staged).join("deep")).expect("a staged copy");
    }
    fs::create_dir(base.path().join(".unpublished")).expect("a directory");
    // The other one is of a power cut while a mark was written.
    for mark in [id(2).as_str(), ".nodekeel-0123456789abcdef.new"] {
        fs::write(base.path().join(".unpublished").join(mark), "").expect("a mark");
    }
    let store = open(base.path(), &quota).await;
    store.wait_until_erased().await;
    assert_empty(base.path(), &[".new", ".trash", ".unpublished"], "swept");
}

#[tokio::test]
async fn a_source_that_uses_more_than_the_new_limits_is_refused() {
    let (base, _, store) = new_store().await;
    store.create(&id(1), LIMITS).await.expect("create");
    for number in 0..8 {
        fs::write(volume_path(base.path(), 1).join(number.to_string()), "data").expect("a file");
    }
    let few = QuotaLimits { inodes: Some(Inodes(4)), ..LIMITS };
    let error = store.create_volume_from(&id(2), &id(1).into(), few).await.expect_err("too many files");
    let cause = std::error::Error::source(&error).expect("a cause").to_string();
    assert!(cause.contains("uses 9 inodes, and the new volume may use 4 inodes"), "{cause}");
    assert!(!error.is_exhausted(), "no other node has the source");
    assert_eq!(store.list().await.expect("list"), [id(1)]);
}

/// Fills a file until an error, and returns its size.
fn fill(path: &Path) -> u64 {
    use std::io::Write as _;
    let mut file = fs::File::create(path).expect("a file");
    while file.write_all(&[7; 64 << 10]).is_ok() {}
    let _ = file.sync_all();
    file.metadata().expect("metadata").len()
}

/// A full volume has no space left, not even for a file without a name.
#[tokio::test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_xfs_full_volumes_are_copied() {
    let (disk, store) = open_on_disk(FileSystem::Xfs).await;
    let base = disk.mount_point();
    let files = |number: u32| -> BTreeMap<String, Vec<u8>> {
        let path = volume_path(base, number);
        let read = |name: String| (name.clone(), fs::read(path.join(name)).expect("a file"));
        names(&path).into_iter().map(read).collect()
    };
    let few = QuotaLimits { inodes: Some(Inodes(64)), ..LIMITS };
    for (number, limits, size) in [(1, LIMITS, 4096), (4, few, 0)] {
        store.create(&id(number), limits).await.expect("create");
        let path = volume_path(base, number);
        if size > 0 {
            fill(&path.join("large"));
        }
        let mut more = 0;
        while fs::write(path.join(more.to_string()), vec![7; size]).is_ok() {
            more += 1;
        }
        rustix::fs::sync();
        let usage = store.usage(&id(number)).await.expect("usage");
        println!("a full volume: {usage:?}, {more} small files");
        store.create_snapshot(&snapshot_id(number), &id(number)).await.expect("a snapshot");
        let sources = [StoredId::from(snapshot_id(number)), StoredId::from(id(number))];
        for (copy, source) in (number + 1..).zip(sources) {
            store.create_volume_from(&id(copy), &source, limits).await.expect("a copy");
            assert!(files(copy) == files(number), "a copy of {source}");
            assert_eq!(store.usage(&id(copy)).await.expect("usage").limits, limits);
            fs::write(volume_path(base, copy).join("again"), vec![7; 1 << 20]).expect_err("it is full, too");
        }
    }
}

/// On XFS, a shared block counts for each project that has it; so limits bind a copy as if it shared nothing.
#[tokio::test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_xfs_copies_share_blocks_and_their_limits_bind() {
    let (disk, store) = open_on_disk(FileSystem::Xfs).await;
    let base = disk.mount_point();
    conformance(&store).await;
    snapshot_conformance(&store).await;
    store.wait_until_erased().await;

    store.create(&id(1), LIMITS).await.expect("create");
    fs::write(volume_path(base, 1).join("file"), vec![1; 8 << 20]).expect("a file");
    rustix::fs::sync();
    let free = || rustix::fs::statvfs(base).map(|stat| stat.f_bavail * stat.f_frsize).expect("a file system");
    let before = free();
    let started = std::time::Instant::now();
    store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    println!("a snapshot of 8 MiB took {:?}", started.elapsed());
    for (number, source) in [(2, StoredId::from(snapshot_id(1))), (3, StoredId::from(id(1)))] {
        store.create_volume_from(&id(number), &source, LIMITS).await.expect("a copy");
    }
    rustix::fs::sync();
    let taken = before.saturating_sub(free());
    println!("three copies of 8 MiB take {taken} bytes of the disk");
    assert!(taken < 4 * MIB, "they share their blocks: {taken}");
    for number in [1, 2, 3] {
        let used = store.usage(&id(number)).await.expect("usage").usage.bytes.0;
        assert!(
            (8 * MIB..9 * MIB).contains(&used),
            "volume {number} is charged for all of its blocks: {used}"
        );
    }
    let written = fill(&volume_path(base, 2).join("more"));
    let used = store.usage(&id(2)).await.expect("usage").usage.bytes.0;
    println!("8 MiB more fit into a copy with a limit of 16 MiB: {written}, in all {used}");
    assert!(written <= 8 * MIB && used <= 16 * MIB && written > 6 * MIB, "{written}, {used}");
    assert_eq!(fs::read(volume_path(base, 3).join("file")).expect("a file"), vec![1; 8 << 20]);

    // A source is rewritten as a whole: the snapshot keeps the old blocks.
    fs::write(volume_path(base, 1).join("file"), vec![2; 8 << 20]).expect("a file");
    store.remove(&id(1)).await.expect("remove");
    store.wait_until_erased().await;
    store.create_volume_from(&id(4), &snapshot_id(1).into(), LIMITS).await.expect("a restore");
    assert_eq!(fs::read(volume_path(base, 4).join("file")).expect("a file"), vec![1; 8 << 20]);

    // A limit below the source is refused, and leaves nothing.
    let small = QuotaLimits { bytes: Some(Bytes(4 * MIB)), ..LIMITS };
    store.create_volume_from(&id(5), &snapshot_id(1).into(), small).await.expect_err("too small");
    for number in [2, 3, 4] {
        store.remove(&id(number)).await.expect("remove");
    }
    store.remove_snapshot(&snapshot_id(1)).await.expect("remove");
    store.wait_until_erased().await;
    assert_empty(base, &PLACES, "at the end");
}

#[tokio::test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_ext4_snapshots_are_refused_by_name() {
    let (_disk, store) = open_on_disk(FileSystem::Ext4).await;
    store.create(&id(1), LIMITS).await.expect("create");
    let error = store.create_snapshot(&snapshot_id(1), &id(1)).await.expect_err("ext4");
    let cause = std::error::Error::source(&error).expect("a cause");
    let text = format!("{error}: {cause}: {}", cause.source().expect("a cause"));
    assert!(text.contains("reflink") && text.contains("use XFS"), "{text}");
}
