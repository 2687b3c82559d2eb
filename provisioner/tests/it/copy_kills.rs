//! A process killed at each moment of taking, restoring and removing a snapshot: the next one finds each volume and
//! snapshot complete or not at all.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{
    DirStore, DirStoreOptions, SnapshotId, SnapshotStore as _, StepMoment, VolumeId, VolumeStep,
    VolumeStore as _,
};
use rustix::process::{Signal, getpid, kill_process};

use crate::kills::{FileQuota, LIMITS, names};

/// Environment variables of the child: its directory, and the number of the moment at which it is killed.
const BASE: &str = "NODEKEEL_COPY_KILLS_BASE";
const MOMENT: &str = "NODEKEEL_COPY_KILLS_MOMENT";

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
}

pub(crate) fn snapshot_id() -> SnapshotId {
    SnapshotId::from_uid(&sample_uid(1)).expect("a UUID")
}

pub(crate) async fn open(base: &Path, mut options: DirStoreOptions) -> DirStore {
    options.cloner = Arc::new(DataCloner);
    let quota = Arc::new(FileQuota(base.join("records")));
    let store = DirStore::with_options(Dir::open(base).expect("the base"), quota, options).expect("a store");
    store.create_identity().await.expect("an identity");
    store
}

fn data_of(base: &Path, place: &str, name: &str) -> Option<String> {
    fs::read_to_string(base.join(place).join(name).join("a/b/file")).ok()
}

/// Takes a snapshot of a volume, restores it, and removes all.
async fn live_through(store: &DirStore, base: &Path) {
    store.create(&id(1), LIMITS).await.expect("create");
    let data = base.join("volumes").join(id(1).as_str()).join("a/b");
    fs::create_dir_all(&data).expect("a directory");
    fs::write(data.join("file"), "data").expect("a file");
    store.create_snapshot(&snapshot_id(), &id(1)).await.expect("a snapshot");
    store.create_volume_from(&id(2), &snapshot_id().into(), LIMITS).await.expect("a restore");
    store.mark_published(&id(2)).await.expect("marked");
    store.remove_snapshot(&snapshot_id()).await.expect("remove");
    store.wait_until_erased().await;
    for number in [1, 2] {
        store.remove(&id(number)).await.expect("remove");
        store.wait_until_erased().await;
    }
}

/// The child process; without its environment variables this test does nothing.
#[tokio::test]
async fn child() {
    let (Some(base), Ok(moment)) = (std::env::var_os(BASE).map(PathBuf::from), std::env::var(MOMENT)) else {
        return;
    };
    let (moment, passed) = (moment.parse::<u32>().expect("a number"), AtomicU32::new(0));
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |_: VolumeStep, _: StepMoment| {
        if passed.fetch_add(1, Ordering::Relaxed) == moment {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }));
    live_through(&open(&base, options).await, &base).await;
}

fn run_child(base: &Path, moment: u32) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "copy_kills::child"]).env(BASE, base).env(MOMENT, moment.to_string());
    child.output().expect("a child").status
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_copy_leaves_it_complete_or_nothing_of_it() {
    let mut kills = 0;
    for moment in 0.. {
        let base = tempfile::tempdir().expect("a directory");
        let base = base.path();
        fs::create_dir(base.join("records")).expect("a directory");
        let status = run_child(base, moment);
        if status.success() {
            break;
        }
        assert_eq!(status.signal(), Some(9), "moment {moment}");
        kills += 1;
        let store = open(base, DirStoreOptions::default()).await;
        store.wait_until_erased().await;
        for place in [".new", ".trash"] {
            assert_eq!(names(&base.join(place)), Vec::<String>::new(), "moment {moment}: {place}");
        }
        let (volumes, snapshots) =
            (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
        let records = names(&base.join("records")).len();
        assert_eq!(records, volumes.len() + snapshots.len(), "moment {moment}: no project leaks");
        for snapshot in &snapshots {
            let data = data_of(base, "snapshots", snapshot.as_str());
            assert_eq!(data.as_deref(), Some("data"), "moment {moment}: a snapshot is complete");
        }
        for volume in &volumes {
            assert_eq!(store.usage(volume).await.expect("usage").limits, LIMITS, "moment {moment}");
            if *volume == id(2) {
                let data = data_of(base, "volumes", volume.as_str());
                assert_eq!(data.as_deref(), Some("data"), "moment {moment}: a copy is complete");
            }
        }
        let unpublished = base.join(".unpublished");
        let marks = if unpublished.exists() { names(&unpublished) } else { Vec::new() };
        assert!(marks.is_empty() || volumes.contains(&id(2)), "moment {moment}: {marks:?} is of a volume");
        live_through(&store, base).await;
        assert_eq!(names(&base.join("records")), Vec::<String>::new(), "moment {moment}");
        for place in ["volumes", "snapshots", ".new", ".trash", ".unpublished"] {
            assert_eq!(names(&base.join(place)), Vec::<String>::new(), "moment {moment}: {place}");
        }
    }
    assert!(kills > 50, "{kills} kills");
}
