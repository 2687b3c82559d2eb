//! Directories and PersistentVolumes of release 0.1.0 are read by this one; `testdata/golden/README.md` lists them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeStatus};
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, sample_identity};
use nodekeel_provisioner::{DirStore, VolumeAction, VolumeIgnoreReason, VolumeStore as _, plan_volume};

use crate::fixture::{id, names};

fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(name)
}

/// The entries below the store's directory after a kill, by the step that was completed last.
fn golden_directories() -> BTreeMap<String, Vec<String>> {
    let table = fs::read_to_string(golden_path("directories.tsv")).expect("read");
    let mut trees: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (step, path) in table.lines().filter_map(|line| line.split_once('\t')) {
        trees.entry(step.to_owned()).or_default().push(path.to_owned());
    }
    trees
}

#[tokio::test]
async fn directories_that_a_killed_process_of_the_first_release_has_left_are_continued() {
    let trees = golden_directories();
    assert_eq!(trees.len(), 7);
    for (step, paths) in trees {
        let base = tempfile::tempdir().expect("a directory");
        for path in &paths {
            let target = base.path().join(path);
            if path.ends_with('/') {
                fs::create_dir_all(&target).expect("a directory")
            } else {
                fs::write(&target, "data").expect("a file")
            }
        }
        let store = DirStore::new(Dir::open(base.path()).expect("the base"), Arc::<MemQuota>::default());
        let store = store.expect("a store");
        store.start_serving().await.expect("served");
        store.wait_until_erased().await;
        let volumes = store.list().await.expect("list");
        let is_published = matches!(&*step, "Publish" | "Dig");
        assert_eq!(volumes, if is_published { vec![id(1)] } else { vec![] }, "{step}");
        if step == "Dig" {
            let file = base.path().join("volumes").join(id(1).as_str()).join("a/b/file");
            assert!(file.exists(), "{step}: the data of the volume are lost");
        }
        for dir in [".new", ".trash"] {
            assert_eq!(names(&base.path().join(dir)), Vec::<String>::new(), "{step}: {dir}");
        }
    }
}

#[test]
fn persistent_volumes_of_the_first_release_are_recognized_and_deleted() {
    let files = names(&golden_path("volumes"));
    assert_eq!(files.len(), 10);
    for file in files {
        let manifest = fs::read_to_string(golden_path("volumes").join(&file)).expect("read");
        let mut volume: PersistentVolume = serde_json::from_str(&manifest).expect("a PersistentVolume");
        let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.clone());
        let has_finalizer = volume.metadata.finalizers.is_some();
        let mut plan_in = |phase: &str| {
            volume.status =
                Some(PersistentVolumeStatus { phase: Some(phase.to_owned()), ..Default::default() });
            let identity = sample_identity(NODE);
            plan_volume(&identity, &volume)
        };
        let (released, bound) = match policy.as_deref() {
            Some("Retain") => (
                VolumeAction::Ignore(VolumeIgnoreReason::Retained),
                VolumeAction::Ignore(VolumeIgnoreReason::Retained),
            ),
            _ if has_finalizer => {
                (VolumeAction::Delete(id(1)), VolumeAction::Ignore(VolumeIgnoreReason::InUse))
            }
            _ => (VolumeAction::Delete(id(1)), VolumeAction::AddFinalizer),
        };
        assert_eq!(plan_in("Released"), released, "{file}");
        assert_eq!(plan_in("Bound"), bound, "{file}");
    }
}
