//! A process killed at each moment in the life of a block and of a strict volume: the next one finds each volume and
//! snapshot complete, with its mark, or not at all.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_provisioner::{
    DirStore, DirStoreOptions, ImageFormat, SnapshotStore as _, StepMoment, VolumeKind, VolumeOpener as _,
    VolumeStep, VolumeStore as _,
};
use rustix::process::{Signal, getpid, kill_process};

use crate::copy_kills::{id, open, snapshot_id};
use crate::kills::names;

/// Environment variables of the child: its directory, the format, and the number of the moment at which it is killed.
const BASE: &str = "NODEKEEL_IMAGE_KILLS_BASE";
const FORMAT: &str = "NODEKEEL_IMAGE_KILLS_FORMAT";
const MOMENT: &str = "NODEKEEL_IMAGE_KILLS_MOMENT";

/// The size of a volume, of one that was expanded, and of the copy of its snapshot.
const SIZES: [u64; 3] = [8 << 20, 12 << 20, 16 << 20];

/// Where a pod writes: in a part of the file that every format has.
const PLACE: u64 = 7 << 20;

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
    store.create_image(&id(1), format, Bytes(SIZES[0])).await.expect("create");
    drop(store.open(&id(1)).expect("opened for a pod"));
    let file = fs::File::options().write(true).open(image_path(base, "volumes", id(1).as_str()));
    file.expect("a file").write_all_at(b"data", PLACE).expect("written");
    let grown = QuotaLimits { bytes: Some(Bytes(SIZES[1])), inodes: None };
    store.resize(&id(1), grown).await.expect("resize");
    store.create_snapshot(&snapshot_id(), &id(1)).await.expect("a snapshot");
    store.create_image_from(&id(2), &snapshot_id().into(), format, Bytes(SIZES[2])).await.expect("a restore");
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
    let variable = |name| std::env::var(name).ok();
    let (Some(base), Some(format), Some(moment)) = (variable(BASE), variable(FORMAT), variable(MOMENT))
    else {
        return;
    };
    let (moment, passed) = (moment.parse::<u32>().expect("a number"), AtomicU32::new(0));
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |_: VolumeStep, _: StepMoment| {
        if passed.fetch_add(1, Ordering::Relaxed) == moment {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }));
    let base = Path::new(&base);
    live_through(&open(base, options).await, base, format.parse().expect("a format")).await;
}

fn run_child(base: &Path, format: ImageFormat, moment: u32) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "image_kills::child"]).env(BASE, base);
    child.env(FORMAT, format.as_str()).env(MOMENT, moment.to_string());
    child.output().expect("a child").status
}

/// Checks what a killed process has left, once the next one serves it.
async fn check_rest(store: &DirStore, base: &Path, (format, point): (ImageFormat, &str)) {
    for place in [".new", ".trash"] {
        assert_eq!(names(&base.join(place)), Vec::<String>::new(), "{point}: {place}");
    }
    let (volumes, snapshots) =
        (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
    let left = volumes.len() + snapshots.len();
    assert_eq!(names(&base.join("records")).len(), left, "{point}: no project leaks");
    let kinds = base.join("kinds");
    let marks = if kinds.exists() { names(&kinds) } else { Vec::new() };
    assert_eq!(marks.len(), left, "{point}: each has its mark, and no mark leaks: {marks:?}");
    for snapshot in &snapshots {
        assert_eq!(data_of(base, "snapshots", snapshot.as_str()), b"data", "{point}: a snapshot is complete");
        assert_eq!(length_of(base, "snapshots", snapshot.as_str()), SIZES[1], "{point}");
    }
    for volume in &volumes {
        let opened = store.inspect(volume).expect("opened").kind();
        assert_eq!(opened, VolumeKind::Image(format), "{point}");
        let (limits, length) =
            (store.usage(volume).await.expect("usage").limits, length_of(base, "volumes", volume.as_str()));
        assert_eq!(limits, QuotaLimits { bytes: Some(Bytes(length)), inodes: None }, "{point}");
        let sizes = if *volume == id(1) { &SIZES[..2] } else { &SIZES[2..] };
        assert!(sizes.contains(&length), "{point}: {volume} has {length} bytes");
        if *volume == id(2) {
            assert_eq!(data_of(base, "volumes", volume.as_str()), b"data", "{point}: a copy is complete");
        }
    }
}

async fn kill_at_each_moment(format: ImageFormat) -> u32 {
    for moment in 0.. {
        let base = tempfile::tempdir().expect("a directory");
        let base = base.path();
        fs::create_dir(base.join("records")).expect("a directory");
        let (status, point) = (run_child(base, format, moment), format!("{format}, moment {moment}"));
        if status.success() {
            return moment;
        }
        assert_eq!(status.signal(), Some(9), "{point}");
        let store = open(base, DirStoreOptions::default()).await;
        store.wait_until_erased().await;
        check_rest(&store, base, (format, &point)).await;
        live_through(&store, base, format).await;
        for place in ["records", "volumes", "snapshots", "kinds", ".new", ".trash", ".unpublished"] {
            assert_eq!(names(&base.join(place)), Vec::<String>::new(), "{point}: {place}");
        }
    }
    unreachable!("the child survives at last")
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_block_volume_leaves_it_complete_or_nothing_of_it() {
    let kills = kill_at_each_moment(ImageFormat::Block).await;
    assert!(kills > 80, "{kills} kills");
}

#[tokio::test]
async fn a_process_killed_at_any_moment_of_a_strict_volume_leaves_it_complete_or_nothing_of_it() {
    let kills = kill_at_each_moment(ImageFormat::Ext4).await;
    assert!(kills > 80, "{kills} kills");
}
