//! A process killed at moments in the life of a block and of a strict volume: the next one finds each volume and
//! snapshot complete, with its mark, or not at all.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_provisioner::{
    DirStore, DirStoreOptions, ImageFormat, SnapshotStore as _, VolumeKind, VolumeOpener as _,
    VolumeStore as _,
};
use testbed::{KillPlace, KillTally};

use crate::fixture::{MIB, PLACES, assert_empty, id, names, open_recorded, recorded_base, snapshot_id};
use crate::kill_sample::{KillOrder, choose_moments, killing_options, recording_options, run_child};

/// Where a pod writes: in a part of the file that every format has.
const PLACE: u64 = 7 * MIB;

/// The size of a volume, of one that was expanded, and of the copy of its snapshot.
fn sizes(format: ImageFormat) -> [u64; 3] {
    let first = format.min_size().0.max(8 * MIB);
    [first, first + 4 * MIB, first + 8 * MIB]
}

fn image_path(base: &Path, place: &str, name: &str) -> PathBuf {
    base.join(place).join(name).join("image")
}

fn data_of(base: &Path, place: &str, name: &str) -> Vec<u8> {
    let mut found = vec![0; 4];
    let file = fs::File::open(image_path(base, place, name)).expect("a file");
    file.read_exact_at(&mut found, PLACE).expect("read");
    found
}

fn length_of(base: &Path, place: &str, name: &str) -> u64 {
    fs::metadata(image_path(base, place, name)).expect("metadata").len()
}

/// Creates a volume, writes into it, expands it, takes a snapshot, restores that, and removes all.
async fn live_through(store: &DirStore, base: &Path, format: ImageFormat) {
    let [new, expanded, copied] = sizes(format).map(Bytes);
    let snapshot = snapshot_id(1);
    store.create_image(&id(1), format, new).await.expect("create");
    drop(store.open(&id(1)).expect("opened for a pod"));
    let file = fs::File::options().write(true).open(image_path(base, "volumes", id(1).as_str()));
    file.expect("a file").write_all_at(b"data", PLACE).expect("written");
    let grown = QuotaLimits { bytes: Some(expanded), inodes: None };
    store.resize(&id(1), grown).await.expect("resize");
    store.create_snapshot(&snapshot, &id(1)).await.expect("a snapshot");
    store.create_image_from(&id(2), &snapshot.clone().into(), format, copied).await.expect("a restore");
    store.mark_published(&id(2)).await.expect("marked");
    store.remove_snapshot(&snapshot).await.expect("remove");
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
    let store = open_recorded(&order.base, options).await;
    live_through(&store, &order.base, order.life.parse().expect("a format")).await;
}

/// Checks what a killed process has left, once the next one serves it.
async fn check_rest(store: &DirStore, base: &Path, format: ImageFormat, point: &str) {
    assert_empty(base, &[".new", ".trash"], point);
    let (volumes, snapshots) =
        (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
    let left = volumes.len() + snapshots.len();
    assert_eq!(names(&base.join("records")).len(), left, "{point}: no project leaks");
    let marks = names(&base.join("kinds"));
    assert_eq!(marks.len(), left, "{point}: each has its mark, and no mark leaks: {marks:?}");
    let sizes = sizes(format);
    for snapshot in &snapshots {
        assert_eq!(data_of(base, "snapshots", snapshot.as_str()), b"data", "{point}: a snapshot is complete");
        assert_eq!(length_of(base, "snapshots", snapshot.as_str()), sizes[1], "{point}");
    }
    for volume in &volumes {
        let opened = store.inspect(volume).expect("opened").kind();
        assert_eq!(opened, VolumeKind::Image(format), "{point}");
        let (limits, length) =
            (store.usage(volume).await.expect("usage").limits, length_of(base, "volumes", volume.as_str()));
        assert_eq!(limits, QuotaLimits { bytes: Some(Bytes(length)), inodes: None }, "{point}");
        let sizes = if *volume == id(1) { &sizes[..2] } else { &sizes[2..] };
        assert!(sizes.contains(&length), "{point}: {volume} has {length} bytes");
        if *volume == id(2) {
            assert_eq!(data_of(base, "volumes", volume.as_str()), b"data", "{point}: a copy is complete");
        }
    }
}

/// The names of all moments of a life, in their order.
async fn list_moments(format: ImageFormat) -> Vec<String> {
    let (base, (options, moments)) = (recorded_base(), recording_options());
    live_through(&open_recorded(base.path(), options).await, base.path(), format).await;
    let moments = moments.lock().expect("not poisoned");
    moments.clone()
}

async fn kill_at_moments(format: ImageFormat) {
    let (all, mut tally) = (list_moments(format).await, KillTally::default());
    assert!(all.len() > 80, "{} moments", all.len());
    for moment in choose_moments(format.as_str(), all.len()) {
        let (base, name) = (recorded_base(), &all[moment]);
        let (base, point) = (base.path(), format!("{format}, moment {moment}, {name}"));
        assert_eq!(
            run_child("image_kills", base, &moment.to_string(), format.as_str()).signal(),
            Some(9),
            "{point}"
        );
        tally.record(KillPlace::Host, name);
        let store = open_recorded(base, DirStoreOptions::default()).await;
        store.wait_until_erased().await;
        check_rest(&store, base, format, &point).await;
        live_through(&store, base, format).await;
        assert_empty(base, &[&PLACES[..], &["records"]].concat(), &point);
    }
    tally.print_lines();
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_block_volume_leaves_it_complete_or_nothing_of_it() {
    kill_at_moments(ImageFormat::Block).await;
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_strict_volume_on_ext4_leaves_it_complete_or_nothing_of_it() {
    kill_at_moments(ImageFormat::Ext4).await;
}

#[tokio::test]
#[ignore = "needs xfsprogs"]
async fn a_process_killed_at_any_moment_of_a_strict_volume_on_xfs_leaves_it_complete_or_nothing_of_it() {
    kill_at_moments(ImageFormat::Xfs).await;
}
