//! A process killed at each step of creating, resizing and removing a volume: the next one finds each volume complete
//! or removed.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::{DirStore, DirStoreOptions, StepMoment, VolumeStep, VolumeStore as _};

use crate::fixture::{assert_empty, id, names, open_recorded, recorded_base};
use crate::kill_sample::{KillOrder, kill_at, run_child};

pub(crate) const LIMITS: QuotaLimits =
    QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// After an expansion.
const RESIZED: QuotaLimits = QuotaLimits { bytes: Some(Bytes(2 << 20)), inodes: Some(Inodes(2048)) };

const STEPS: [VolumeStep; 9] = [
    VolumeStep::CreateDirectory,
    VolumeStep::SetLimits,
    VolumeStep::RenameIntoPlace,
    VolumeStep::ResizeLimits,
    VolumeStep::CreateTrashEntry,
    VolumeStep::MoveToTrash,
    VolumeStep::EraseContent,
    VolumeStep::ReleaseProject,
    VolumeStep::RemoveTrashEntry,
];

async fn create_and_remove(store: &DirStore, base: &Path) {
    store.create(&id(1), LIMITS).await.expect("create");
    let data = base.join("volumes").join(id(1).as_str()).join("a/b");
    fs::create_dir_all(&data).expect("a directory");
    fs::write(data.join("file"), "data").expect("a file");
    store.resize(&id(1), RESIZED).await.expect("resize");
    store.remove(&id(1)).await.expect("remove");
    store.wait_until_erased().await;
}

/// The process that is killed.
#[tokio::test]
async fn child() {
    let Some(order) = KillOrder::of_this_process() else { return };
    let mut options = DirStoreOptions::default();
    options.hook = Some(kill_at(order.moment));
    create_and_remove(&open_recorded(&order.base, options).await, &order.base).await;
}

#[tokio::test]
async fn a_process_killed_at_any_step_leaves_a_complete_volume_or_none() {
    for step in STEPS {
        for moment in [StepMoment::Before, StepMoment::After] {
            let point = format!("{moment:?} {step:?}");
            let base = recorded_base();
            let status = run_child("kills", base.path(), &point, "");
            assert_eq!(status.signal(), Some(9), "{point}: the step happens");

            let store = open_recorded(base.path(), DirStoreOptions::default()).await;
            store.wait_until_erased().await;
            let volumes = store.list().await.expect("list");
            assert_empty(base.path(), &[".new", ".trash"], &point);
            assert_eq!(names(&base.path().join("records")).len(), volumes.len(), "{point}: no project leaks");
            for id in &volumes {
                let limits = store.usage(id).await.expect("usage").limits;
                assert!([LIMITS, RESIZED].contains(&limits), "{point}: {limits:?}");
            }
            create_and_remove(&store, base.path()).await;
            assert_empty(base.path(), &["volumes", "records"], &point);
        }
    }
}
