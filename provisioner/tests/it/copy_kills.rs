//! A process killed at moments of taking, restoring and removing a snapshot: the next one finds each volume and
//! snapshot complete or not at all.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use nodekeel_provisioner::{DirStore, DirStoreOptions, SnapshotStore as _, VolumeStore as _};
use testbed::{KillPlace, KillTally};

use crate::fixture::{PLACES, assert_empty, id, names, open_recorded, recorded_base, snapshot_id};
use crate::kill_sample::{KillOrder, choose_moments, killing_options, recording_options, run_child};
use crate::kills::LIMITS;

fn data_of(base: &Path, place: &str, name: &str) -> Option<String> {
    fs::read_to_string(base.join(place).join(name).join("a/b/file")).ok()
}

/// Takes a snapshot of a volume, restores it, and removes all.
async fn live_through(store: &DirStore, base: &Path) {
    store.create(&id(1), LIMITS).await.expect("create");
    let data = base.join("volumes").join(id(1).as_str()).join("a/b");
    fs::create_dir_all(&data).expect("a directory");
    fs::write(data.join("file"), "data").expect("a file");
    store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    store.create_volume_from(&id(2), &snapshot_id(1).into(), LIMITS).await.expect("a restore");
    store.mark_published(&id(2)).await.expect("marked");
    store.remove_snapshot(&snapshot_id(1)).await.expect("remove");
    store.wait_until_erased().await;
    for number in [1, 2] {
        store.remove(&id(number)).await.expect("remove");
        store.wait_until_erased().await;
    }
}

/// The process that is killed.
#[tokio::test]
async fn child() {
    let Some(order) = KillOrder::of_this_process() else { return };
    let options = killing_options(order.moment.parse().expect("a number"));
    live_through(&open_recorded(&order.base, options).await, &order.base).await;
}

/// Checks what a killed process has left, once the next one serves it.
async fn check_rest(store: &DirStore, base: &Path, point: &str) {
    assert_empty(base, &[".new", ".trash"], point);
    let (volumes, snapshots) =
        (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
    let records = names(&base.join("records")).len();
    assert_eq!(records, volumes.len() + snapshots.len(), "{point}: no project leaks");
    for snapshot in &snapshots {
        let data = data_of(base, "snapshots", snapshot.as_str());
        assert_eq!(data.as_deref(), Some("data"), "{point}: a snapshot is complete");
    }
    for volume in &volumes {
        assert_eq!(store.usage(volume).await.expect("usage").limits, LIMITS, "{point}");
        if *volume == id(2) {
            let data = data_of(base, "volumes", volume.as_str());
            assert_eq!(data.as_deref(), Some("data"), "{point}: a copy is complete");
        }
    }
    let marks = names(&base.join(".unpublished"));
    assert!(marks.is_empty() || volumes.contains(&id(2)), "{point}: {marks:?} is of a volume");
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_copy_leaves_it_complete_or_nothing_of_it() {
    let (base, (options, moments)) = (recorded_base(), recording_options());
    live_through(&open_recorded(base.path(), options).await, base.path()).await;
    let (moments, mut tally) = (moments.lock().expect("not poisoned").clone(), KillTally::default());
    assert!(moments.len() > 50, "{} moments", moments.len());
    for moment in choose_moments("copy", moments.len()) {
        let (base, name) = (recorded_base(), &moments[moment]);
        let (base, point) = (base.path(), format!("moment {moment}, {name}"));
        assert_eq!(run_child("copy_kills", base, &moment.to_string(), "").signal(), Some(9), "{point}");
        tally.record(KillPlace::Host, name);
        let store = open_recorded(base, DirStoreOptions::default()).await;
        store.wait_until_erased().await;
        check_rest(&store, base, &point).await;
        live_through(&store, base).await;
        assert_empty(base, &[&PLACES[..], &["records"]].concat(), &point);
    }
    tally.print_lines();
}
