//! The conformance of all stores, and the specifics of the directory store.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{
    AuditOptions, AuditReport, Bytes, Error, Inodes, ProjectId, QuotaChange, QuotaLimits, QuotaSetter,
    QuotaStatus,
};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::{MemStore, conformance};
use nodekeel_provisioner::{
    DirStore, DirStoreError, DirStoreOptions, StoreIdentity, VolumeOpener, VolumeStore, VolumeStoreError,
};

use crate::fixture::{id, names, new_store, open};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// The methods of a quota that are those of its field `quota`.
macro_rules! delegate_limits {
    () => {
        fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
            self.quota.set_limits(dir, change)
        }

        fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
            self.quota.read_status(dir)
        }

        fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
            self.quota.clear_limits(dir)
        }
    };
}

#[tokio::test]
async fn the_mem_store_keeps_the_contract() {
    conformance(&MemStore::default()).await;
    conformance(&MemStore::with_capacity(Bytes(1 << 30))).await;
}

#[tokio::test]
async fn the_dir_store_keeps_the_contract() {
    let (_base, _, store) = new_store().await;
    conformance(&store).await;
}

#[tokio::test]
#[ignore = "needs root: it mounts"]
async fn an_unmounted_disk_is_noticed_at_once_and_other_mounts_are_not() {
    let [base, disk, other] = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
    let mount = |from: &Path, to: &Path| {
        nix::mount::mount(Some(from), to, None::<&str>, nix::mount::MsFlags::MS_BIND, None::<&str>)
            .expect("root may mount");
    };
    let unmount = |at: &Path| {
        nix::mount::umount2(at, nix::mount::MntFlags::MNT_DETACH).expect("root may unmount");
    };
    mount(disk.path(), base.path());
    let store = open(base.path(), &Arc::default()).await;
    let mut lost = std::pin::pin!(store.wait_until_lost());
    let second = std::time::Duration::from_secs(1);
    mount(disk.path(), other.path());
    unmount(other.path());
    let early = tokio::time::timeout(second, &mut lost).await;
    unmount(base.path());
    early.expect_err("another mount has changed");
    let error = tokio::time::timeout(second, &mut lost).await.expect("noticed");
    assert!(matches!(error, VolumeStoreError::Lost { .. }), "{error:?}");
}

/// The descriptors of this process on a device.
fn open_files(device: u64) -> usize {
    let files = fs::read_dir("/proc/self/fd").expect("procfs").filter_map(Result::ok);
    files.filter(|file| fs::metadata(file.path()).is_ok_and(|file| file.dev() == device)).count()
}

#[tokio::test]
#[ignore = "needs root: it mounts"]
async fn a_lost_store_keeps_nothing_of_its_disk_open_and_opens_it_again_once_it_is_mounted() {
    let [base, disk] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let attach = |from: &Path, to: &Path| {
        let (source, flags) = (Some(from), nix::mount::MsFlags::MS_BIND);
        nix::mount::mount(source, to, None::<&str>, flags, None::<&str>).expect("root may mount");
    };
    nix::mount::mount(Some("none"), disk.path(), Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>)
        .expect("root may mount");
    let device = fs::metadata(disk.path()).expect("it is mounted").dev();
    attach(disk.path(), base.path());
    let mut options = DirStoreOptions::default();
    let path = base.path().to_owned();
    // A new quota each time: it keeps directories open.
    options.opener = Some(Arc::new(move || Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _))));
    let store = DirStore::closed(base.path(), options);
    assert!(matches!(store.list().await, Err(VolumeStoreError::List { .. })), "it is not open yet");
    store.reopen().await.expect("it is mounted");
    let identity = store.create_identity().await.expect("created");
    store.create(&id(1), LIMITS).await.expect("create");
    let file = base.path().join("volumes").join(id(1).as_str()).join("file");
    fs::write(file, "data").expect("written");
    store.remove(&id(1)).await.expect("it is being erased");
    store.create(&id(1), LIMITS).await.expect("create");

    nix::mount::umount2(base.path(), nix::mount::MntFlags::MNT_DETACH).expect("root may unmount");
    assert!(matches!(store.wait_until_lost().await, VolumeStoreError::Lost { .. }));
    let change = store.watch_changes().expect("it can be opened again");
    store.reopen().await.expect("the directory below can be opened");
    assert_eq!(store.identity().await.expect("read"), StoreIdentity::Absent);
    assert_eq!(store.list().await.expect("list"), []);
    let closed = async {
        while open_files(device) > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), closed).await.expect("the disk could be taken away");
    attach(disk.path(), base.path());
    change.await.expect("noticed");
    store.reopen().await.expect("it is mounted");
    assert_eq!(store.identity().await.expect("read"), identity);
    assert_eq!(store.list().await.expect("list"), [id(1)]);
    drop(store);
    // Its thread ends after this.
    let unmounted = async {
        for mounted in [base.path(), disk.path()] {
            while nix::mount::umount2(mounted, nix::mount::MntFlags::empty()).is_err() {
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), unmounted).await.expect("nothing is open");
}

#[tokio::test]
async fn a_volume_is_open_to_pods_and_its_parents_only_to_root() {
    let (base, _, store) = new_store().await;
    store.create(&id(1), LIMITS).await.expect("create");
    let mode =
        |path: &str| fs::metadata(base.path().join(path)).expect("metadata").permissions().mode() & 0o7777;
    assert_eq!(mode(&format!("volumes/{}", id(1))), 0o777);
    assert_eq!([mode("volumes"), mode(".new"), mode(".trash")], [0o700; 3]);
}

#[tokio::test]
async fn a_removed_volume_is_erased_in_the_background_and_its_name_is_free_at_once() {
    let (base, _, store) = new_store().await;
    for round in 0..3 {
        store.create(&id(1), LIMITS).await.expect("create");
        let dir = base.path().join("volumes").join(id(1).as_str());
        assert_eq!(names(&dir), Vec::<String>::new(), "pass {round} inherits nothing");
        fs::create_dir_all(dir.join("a/b/c")).expect("a tree");
        fs::write(dir.join("volume"), "data").expect("a file");
        store.remove(&id(1)).await.expect("remove");
    }
    store.wait_until_erased().await;
    assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new());
    assert_eq!((store.erase_backlog().entries, store.list().await.expect("list")), (0, Vec::new()));
}

#[tokio::test]
async fn a_new_store_sweeps_staging_and_resumes_erasing() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::default());
    drop(open(base.path(), &quota).await);
    let (staged, trash) = (base.path().join(".new").join(id(1).as_str()), base.path().join(".trash"));
    fs::create_dir(&staged).expect("a staged directory");
    fs::create_dir(base.path().join(".new/not-ours")).expect("another directory");
    fs::create_dir_all(trash.join(format!("{}.0.0/volume/deep", id(2)))).expect("a trash entry");
    fs::create_dir_all(trash.join(format!("bare-{}.0.1/deep", id(2)))).expect("a bare trash entry");
    fs::create_dir(trash.join("not-ours")).expect("another directory");
    let store = open(base.path(), &quota).await;
    store.wait_until_erased().await;
    assert_eq!(names(&base.path().join(".new")), ["not-ours"]);
    assert_eq!(names(&trash), ["not-ours"]);
}

#[tokio::test]
async fn a_second_store_is_rejected_and_changes_nothing() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<MemQuota>::default());
    let dir = || Dir::open(base.path()).expect("the base");
    assert!(!DirStore::is_in_use(&dir()).expect("inspect"), "no store has been opened yet");
    let first = open(base.path(), &quota).await;
    // A directory that the first store is creating.
    let staged = base.path().join(".new").join(id(1).as_str());
    fs::create_dir(&staged).expect("a staged directory");
    let limited =
        quota.set_limits(fs::File::open(&staged).expect("open").as_fd(), LIMITS.into()).expect("limits");
    let second = DirStore::new(dir(), Arc::clone(&quota) as _).map(drop);
    assert!(matches!(second, Err(DirStoreError::InUse { .. })), "{second:?}");
    assert!(DirStore::is_in_use(&dir()).expect("inspect"));
    assert_eq!(quota.list_projects(), [limited], "its limits are still there");
    assert!(staged.exists());
    drop(first);
    assert!(!DirStore::is_in_use(&dir()).expect("inspect"));
    drop(open(base.path(), &quota).await);
    assert!(!staged.exists(), "the next store sweeps it");
}

/// Records which projects it was asked to keep.
#[derive(Debug, Default)]
struct RecordingQuota {
    quota: MemQuota,
    kept: Mutex<Vec<ProjectId>>,
}

impl QuotaSetter for RecordingQuota {
    delegate_limits!();

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.quota.release_project(project)
    }

    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.kept.lock().expect("not poisoned").extend(kept);
        self.quota.release_unused_projects(kept)
    }
}

#[tokio::test]
async fn a_new_store_releases_leaked_projects_except_those_of_trash_entries() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<RecordingQuota>::default());
    let open = || DirStore::new(Dir::open(base.path()).expect("the base"), Arc::clone(&quota) as _);
    drop(open().expect("a store"));
    // As a process leaves it that is killed between removing a directory and releasing its project.
    let [_left, in_trash] = ["left", "in_trash"].map(|name| {
        let path = base.path().join(name);
        fs::create_dir(&path).expect("a directory");
        let dir = fs::File::open(&path).expect("open");
        let limited = quota.set_limits(dir.as_fd(), LIMITS.into()).expect("limits");
        fs::remove_dir(&path).expect("remove");
        limited.project
    });
    fs::create_dir(base.path().join(".trash").join(format!("{}.{in_trash}.0", id(1))))
        .expect("a trash entry");
    let store = open().expect("a store");
    assert_eq!(*quota.kept.lock().expect("not poisoned"), [], "it may be the store of another node");
    store.start_serving().await.expect("served");
    assert_eq!(*quota.kept.lock().expect("not poisoned"), [in_trash]);
    store.wait_until_erased().await;
    assert_eq!(quota.quota.list_projects(), [], "erasing the trash entry has released its project");
}

#[tokio::test]
async fn entries_that_are_not_volumes_are_not_listed_and_not_touched() {
    let (base, _, store) = new_store().await;
    let volumes = base.path().join("volumes");
    fs::create_dir(volumes.join("lost+found")).expect("a directory");
    fs::write(volumes.join(id(1).as_str()), "a file").expect("a file");
    std::os::unix::fs::symlink("/etc", volumes.join(id(2).as_str())).expect("a link");
    assert_eq!(store.list().await.expect("list"), Vec::new());
    for id in [id(1), id(2)] {
        assert!(matches!(store.remove(&id).await, Err(VolumeStoreError::Remove { .. })));
        assert!(matches!(store.create(&id, LIMITS).await, Err(VolumeStoreError::Create { .. })));
        assert!(matches!(store.open(&id), Err(VolumeStoreError::Open { .. })));
    }
    assert!(matches!(store.open(&id(3)), Err(VolumeStoreError::NotFound { .. })));
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(names(&volumes).len(), 3);
}

#[tokio::test]
async fn a_limit_that_cannot_be_set_leaves_no_directory() {
    use nodekeel_fsquota::KernelOperation;
    let (base, quota, store) = new_store().await;
    quota.fail_next_kernel_call(KernelOperation::WriteLimits, std::io::ErrorKind::StorageFull);
    let error = store.create(&id(1), LIMITS).await.expect_err("no limit");
    assert!(error.is_exhausted(), "{error:?}");
    quota.fail_next_kernel_call(KernelOperation::WriteLimits, std::io::ErrorKind::PermissionDenied);
    let error = store.create(&id(1), LIMITS).await.expect_err("no limit");
    assert!(matches!(error, VolumeStoreError::Create { .. }), "{error:?}");
    assert_eq!(
        [names(&base.path().join("volumes")), names(&base.path().join(".new"))],
        [Vec::<String>::new(), vec![]]
    );
    store.create(&id(1), LIMITS).await.expect("create again");
}

#[tokio::test]
async fn only_a_volume_without_any_entry_is_removed_as_empty() {
    let (base, _, store) = new_store().await;
    // The last is the temporary name of a durable write in localstorage.
    for (number, name) in (1..).zip(["data", ".hidden", ".nodekeel-0123456789abcdef.new"]) {
        store.create(&id(number), LIMITS).await.expect("create");
        let file = base.path().join("volumes").join(id(number).as_str()).join(name);
        fs::write(&file, "").expect("a file");
        assert!(!store.remove_empty(&id(number)).await.expect("inspect"), "{name}");
        assert!(file.exists(), "{name}");
        fs::remove_file(&file).expect("remove");
        assert!(store.remove_empty(&id(number)).await.expect("remove"), "{name}");
    }
    store.wait_until_erased().await;
    assert_eq!(store.list().await.expect("list"), Vec::new());
    assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new());
    assert!(store.remove_empty(&id(1)).await.expect("none"), "a missing volume counts as removed");
}

/// Quotas whose audit lasts until it is canceled.
#[derive(Debug, Default)]
struct EndlessAudit {
    quota: MemQuota,
    canceled: Mutex<Option<std::sync::mpsc::Sender<()>>>,
    /// How long it takes to end after that.
    ends_after: Duration,
}

impl QuotaSetter for EndlessAudit {
    delegate_limits!();

    fn audit_usage(
        &self,
        _: BorrowedFd<'_>,
        _: AuditOptions,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<Option<AuditReport>, Error> {
        while !is_canceled() {
            std::thread::yield_now();
        }
        let (_open, nothing) = std::sync::mpsc::channel::<()>();
        let _ = nothing.recv_timeout(self.ends_after);
        let _ = self.canceled.lock().expect("not poisoned").take().expect("one audit").send(());
        Err(Error::Canceled)
    }
}

#[tokio::test]
async fn an_audit_ends_when_its_future_is_dropped() {
    let base = tempfile::tempdir().expect("a directory");
    let (sender, canceled) = std::sync::mpsc::channel();
    let quota = EndlessAudit { canceled: Mutex::new(Some(sender)), ..EndlessAudit::default() };
    let store = DirStore::new(Dir::open(base.path()).expect("the base"), Arc::new(quota)).expect("a store");
    let audit = store.audit_limits(AuditOptions::default());
    tokio::time::timeout(Duration::from_millis(50), audit).await.expect_err("it lasts");
    let ended = canceled.recv_timeout(Duration::from_secs(60));
    ended.expect("its thread has ended");
}

#[tokio::test]
async fn a_store_that_is_dropped_during_an_audit_leaves_its_directory_to_the_next_one() {
    let base = tempfile::tempdir().expect("a directory");
    let (sender, _canceled) = std::sync::mpsc::channel();
    let (canceled, ends_after) = (Mutex::new(Some(sender)), Duration::from_millis(200));
    let quota = EndlessAudit { canceled, ends_after, ..EndlessAudit::default() };
    let open = |quota: Arc<dyn QuotaSetter>| DirStore::new(Dir::open(base.path()).expect("the base"), quota);
    let store = open(Arc::new(quota)).expect("a store");
    let audit = store.audit_limits(AuditOptions::default());
    tokio::time::timeout(Duration::from_millis(50), audit).await.expect_err("it lasts");
    drop(store);
    open(Arc::new(MemQuota::new())).expect("nothing has the directory");
}
