//! What every store does, and what the one over directories does beside.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Change, Error, Inodes, Limits, ProjectId, QuotaSetter, Status};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::uid;
use nodekeel_provisioner::testing::{MemStore, conformance};
use nodekeel_provisioner::{DirStore, DirStoreError, OpenVolume, StoreError, VolumeId, VolumeStore};

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&uid(number)).expect("a UUID")
}

fn open(base: &Path, quota: &Arc<MemQuota>) -> DirStore {
    DirStore::new(Dir::open(base).expect("the base"), Arc::clone(quota) as _).expect("a store")
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn volumes_in_memory_keep_the_contract() {
    conformance(&MemStore::default()).await;
    conformance(&MemStore::with_capacity(Bytes(1 << 30))).await;
}

#[tokio::test]
async fn directories_keep_the_contract() {
    let base = tempfile::tempdir().expect("a directory");
    conformance(&open(base.path(), &Arc::default())).await;
}

#[tokio::test]
async fn a_volume_is_open_to_pods_and_what_is_around_it_to_nobody() {
    let base = tempfile::tempdir().expect("a directory");
    let store = open(base.path(), &Arc::default());
    store.create(&id(1), LIMITS).await.expect("create");
    let mode =
        |path: &str| fs::metadata(base.path().join(path)).expect("metadata").permissions().mode() & 0o7777;
    assert_eq!(mode(&format!("volumes/{}", id(1))), 0o777);
    assert_eq!([mode("volumes"), mode(".new"), mode(".trash")], [0o700; 3]);
}

#[tokio::test]
async fn what_a_volume_held_is_erased_in_the_background_and_its_name_free_at_once() {
    let base = tempfile::tempdir().expect("a directory");
    let store = open(base.path(), &Arc::default());
    for round in 0..3 {
        store.create(&id(1), LIMITS).await.expect("create");
        let dir = base.path().join("volumes").join(id(1).as_str());
        assert_eq!(names(&dir), Vec::<String>::new(), "round {round} inherits nothing");
        fs::create_dir_all(dir.join("a/b/c")).expect("a tree");
        fs::write(dir.join("volume"), "data").expect("a file");
        store.remove(&id(1)).await.expect("remove");
    }
    store.erased().await;
    assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new());
    assert_eq!((store.erasing(), store.list().await.expect("list")), (0, Vec::new()));
}

#[tokio::test]
async fn a_new_store_sweeps_births_and_goes_on_with_deaths() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::default());
    drop(open(base.path(), &quota));
    let (born, dead) = (base.path().join(".new").join(id(1).as_str()), base.path().join(".trash"));
    fs::create_dir(&born).expect("a birth");
    fs::create_dir(base.path().join(".new/somebody-elses")).expect("another directory");
    fs::create_dir_all(dead.join(format!("{}.0.0/volume/deep", id(2)))).expect("a grave");
    fs::create_dir_all(dead.join(format!("bare-{}.0.1/deep", id(2)))).expect("a bare grave");
    fs::create_dir(dead.join("somebody-elses")).expect("another directory");
    let store = open(base.path(), &quota);
    store.erased().await;
    assert_eq!(names(&base.path().join(".new")), ["somebody-elses"]);
    assert_eq!(names(&dead), ["somebody-elses"]);
}

#[tokio::test]
async fn a_directory_has_one_store_which_a_second_leaves_alone() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<MemQuota>::default());
    let dir = || Dir::open(base.path()).expect("the base");
    assert!(!DirStore::is_in_use(&dir()).expect("look"), "nobody has made one yet");
    let first = open(base.path(), &quota);
    // What the first is about to make.
    let born = base.path().join(".new").join(id(1).as_str());
    fs::create_dir(&born).expect("a birth");
    let limited = quota.set(fs::File::open(&born).expect("open").as_fd(), LIMITS.into()).expect("limits");
    let second = DirStore::new(dir(), Arc::clone(&quota) as _).map(drop);
    assert!(matches!(second, Err(DirStoreError::InUse { .. })), "{second:?}");
    assert!(DirStore::is_in_use(&dir()).expect("look"));
    assert_eq!(quota.list(), [limited], "its limits are still there");
    assert!(born.exists());
    drop(first);
    assert!(!DirStore::is_in_use(&dir()).expect("look"));
    drop(open(base.path(), &quota));
    assert!(!born.exists(), "the next one sweeps it");
}

/// Remembers which numbers it was asked to keep.
#[derive(Debug, Default)]
struct Keeping {
    quota: MemQuota,
    kept: Mutex<Vec<ProjectId>>,
}

impl QuotaSetter for Keeping {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        self.quota.set(dir, change)
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.quota.status(dir)
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.quota.clear(dir)
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        self.quota.release(project)
    }

    fn release_unused(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.kept.lock().expect("nobody panics with it").extend(kept);
        self.quota.release_unused(kept)
    }
}

#[tokio::test]
async fn a_new_store_gives_back_the_numbers_that_a_killed_one_has_left_and_leaves_those_of_graves_to_them() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<Keeping>::default());
    let open = || DirStore::new(Dir::open(base.path()).expect("the base"), Arc::clone(&quota) as _);
    drop(open().expect("a store"));
    // As whoever is killed between a directory's end and its number's leaves it.
    let [_left, buried] = ["left", "buried"].map(|name| {
        let path = base.path().join(name);
        fs::create_dir(&path).expect("a directory");
        let dir = fs::File::open(&path).expect("open");
        let limited = quota.set(dir.as_fd(), LIMITS.into()).expect("limits");
        fs::remove_dir(&path).expect("remove");
        limited.project
    });
    fs::create_dir(base.path().join(".trash").join(format!("{}.{buried}.0", id(1)))).expect("a grave");
    let store = open().expect("a store");
    assert_eq!(*quota.kept.lock().expect("nobody panics with it"), [buried]);
    store.erased().await;
    assert_eq!(quota.quota.list(), [], "the grave has given back its own");
}

#[tokio::test]
async fn what_is_not_a_volume_is_not_listed_and_not_touched() {
    let base = tempfile::tempdir().expect("a directory");
    let store = open(base.path(), &Arc::default());
    let volumes = base.path().join("volumes");
    fs::create_dir(volumes.join("lost+found")).expect("a directory");
    fs::write(volumes.join(id(1).as_str()), "a file").expect("a file");
    std::os::unix::fs::symlink("/etc", volumes.join(id(2).as_str())).expect("a link");
    assert_eq!(store.list().await.expect("list"), Vec::new());
    for id in [id(1), id(2)] {
        assert!(matches!(store.remove(&id).await, Err(StoreError::Remove { .. })));
        assert!(matches!(store.create(&id, LIMITS).await, Err(StoreError::Create { .. })));
        assert!(matches!(store.open(&id), Err(StoreError::Open { .. })));
    }
    assert!(matches!(store.open(&id(3)), Err(StoreError::NotFound { .. })));
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(names(&volumes).len(), 3);
}

#[tokio::test]
async fn a_limit_that_cannot_be_set_leaves_no_directory() {
    use nodekeel_fsquota::Call;
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<MemQuota>::default());
    let store = open(base.path(), &quota);
    quota.fail(Call::WriteLimits, std::io::ErrorKind::StorageFull);
    let error = store.create(&id(1), LIMITS).await.expect_err("no limit");
    assert!(error.is_exhausted(), "{error:?}");
    quota.fail(Call::WriteLimits, std::io::ErrorKind::PermissionDenied);
    let error = store.create(&id(1), LIMITS).await.expect_err("no limit");
    assert!(matches!(error, StoreError::Create { .. }), "{error:?}");
    assert_eq!(
        [names(&base.path().join("volumes")), names(&base.path().join(".new"))],
        [Vec::<String>::new(), vec![]]
    );
    store.create(&id(1), LIMITS).await.expect("it works again");
}

#[tokio::test]
async fn only_a_volume_without_a_single_name_in_it_is_removed_as_empty() {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::<MemQuota>::default());
    let store = open(base.path(), &quota);
    // The last is a name that a durable write of this workspace would use for a moment.
    for (number, name) in (1..).zip(["data", ".hidden", ".nodekeel-0123456789abcdef.new"]) {
        store.create(&id(number), LIMITS).await.expect("create");
        let file = base.path().join("volumes").join(id(number).as_str()).join(name);
        fs::write(&file, "").expect("a file");
        assert!(!store.remove_empty(&id(number)).await.expect("look"), "{name}");
        assert!(file.exists(), "{name}");
        fs::remove_file(&file).expect("remove");
        assert!(store.remove_empty(&id(number)).await.expect("remove"), "{name}");
    }
    store.erased().await;
    assert_eq!(store.list().await.expect("list"), Vec::new());
    assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new());
    assert!(store.remove_empty(&id(1)).await.expect("none"), "a volume that isn't there is gone");
}
