//! Damage of a disk below containerd, whose database knows nothing of it: repaired, or named.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::{
    ContainerdImages, DamagedImage, DiskReserve, ImageProof, ImageStage, ImageStore as _, Preseed, ProofKind,
    ReadPace,
};
use rstest::rstest;

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, TestDaemon, busybox_layer, namespace, noise_layer};

const BUSYBOX: &str = "localhost/busybox:1";
const LARGE: &str = "localhost/large:1";

#[derive(Debug, Clone, Copy)]
enum Damage {
    Deleted,
    Truncated,
    Emptied,
    Flipped,
    SnapshotEmptied,
    SnapshotFileZeroed,
    DatabaseOfYesterday,
}

const DAMAGES: [Damage; 7] = [
    Damage::Deleted,
    Damage::Truncated,
    Damage::Emptied,
    Damage::Flipped,
    Damage::SnapshotEmptied,
    Damage::SnapshotFileZeroed,
    Damage::DatabaseOfYesterday,
];

fn put_images(setup: &Setup) {
    setup.put_image("busybox.tar", BUSYBOX, &busybox_layer());
    setup.put_image("large.tar", LARGE, &noise_layer(5_000_000));
}

fn blobs_of(setup: &Setup) -> PathBuf {
    setup.layout.root_dir().join("io.containerd.content.v1.content/blobs/sha256")
}

/// The files below a directory, with their bytes, in order. containerd may be removing others.
fn read_files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut files, mut pending) = (BTreeMap::new(), vec![directory.to_owned()]);
    while let Some(path) = pending.pop() {
        for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => pending.push(entry.path()),
                _ => drop(fs::read(entry.path()).map(|bytes| files.insert(entry.path(), bytes))),
            }
        }
    }
    files
}

fn snapshots_of(setup: &Setup) -> PathBuf {
    setup.layout.root_dir().join("io.containerd.snapshotter.v1.overlayfs/snapshots")
}

fn replace_file(path: &Path, content: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, content).unwrap();
}

/// Damages one file, chosen by a number.
fn damage_file(setup: &Setup, damage: Damage, choice: usize) {
    let is_snapshot = matches!(damage, Damage::SnapshotEmptied | Damage::SnapshotFileZeroed);
    let files = read_files(&if is_snapshot { snapshots_of(setup) } else { blobs_of(setup) });
    let (path, content) = files.iter().nth(choice % files.len()).unwrap();
    let mut changed = content.clone();
    match damage {
        Damage::Deleted | Damage::SnapshotEmptied => fs::remove_file(path).unwrap(),
        Damage::Truncated => replace_file(path, &content[..choice % content.len()]),
        Damage::Emptied => replace_file(path, b""),
        Damage::Flipped => {
            changed[choice % content.len()] ^= 1;
            replace_file(path, &changed);
        }
        Damage::SnapshotFileZeroed => {
            changed.fill(0);
            fs::write(path, changed).unwrap();
        }
        Damage::DatabaseOfYesterday => {}
    }
}

/// Compares all images with their digests; returns those that are damaged.
async fn prove(store: &ContainerdImages, preseed: &Preseed, kind: ProofKind) -> Vec<DamagedImage> {
    let images = store.list_images(&namespace()).await.unwrap();
    let images: Vec<_> = images.into_iter().map(|image| (namespace(), image)).collect();
    let mut proof = ImageProof::new(store, preseed, &images, kind).await.unwrap();
    proof.run(store, preseed, &ReadPace::new(None), |_| {}).await.unwrap();
    proof.damaged().to_vec()
}

fn stages(preseed: &Preseed) -> Vec<ImageStage> {
    preseed.image_states().into_iter().map(|state| state.stage).collect()
}

async fn start(release: Release, scratch: Arc<testbed::ScratchDir>) -> TestDaemon {
    Setup::in_directory(release, scratch).start().await
}

/// `NODEKEEL_DAMAGES` random ones; by default one of each kind.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn random_damages_are_repaired_or_named(#[values(Debian, Newest)] release: Release) {
    let count = std::env::var("NODEKEEL_DAMAGES").map_or(DAMAGES.len(), |count| count.parse().unwrap());
    let seed = std::env::var("NODEKEEL_SEED").map_or(1, |seed| seed.parse::<u64>().unwrap());
    let setup = Setup::new(release);
    let database = setup.layout.root_dir().join("io.containerd.metadata.v1.bolt/meta.db");
    let yesterday = setup.path("yesterday.db");
    setup.put_image("busybox.tar", BUSYBOX, &busybox_layer());
    let mut daemon = setup.start().await;
    daemon.preseed().with_unpacking(true).run(&daemon.images().await).await.unwrap();
    let scratch = daemon.stop().await;
    fs::copy(&database, &yesterday).unwrap();
    daemon = start(release, scratch).await;
    put_images(&daemon);
    for number in 0..count {
        let preseed = daemon.preseed().with_unpacking(true);
        let mut store = preseed.set_up_store(daemon.images().await);
        preseed.run(&store).await.unwrap();
        let content = read_files(&blobs_of(&daemon));
        let mut hasher = DefaultHasher::new();
        (seed, number).hash(&mut hasher);
        let choice = usize::try_from(hasher.finish() >> 8).unwrap();
        let damage = DAMAGES[if count <= DAMAGES.len() { number } else { choice % DAMAGES.len() }];
        let what = format!("{damage:?}, number {number} of seed {seed}");
        match damage {
            Damage::DatabaseOfYesterday => {
                let scratch = daemon.stop().await;
                fs::copy(&yesterday, &database).unwrap();
                daemon = start(release, scratch).await;
                store = preseed.set_up_store(daemon.images().await);
            }
            damage => damage_file(&daemon, damage, choice / DAMAGES.len()),
        }
        // The next pass repairs what it sees; what it does not see is found by a comparison, and repaired by the pass after it.
        preseed.run(&store).await.unwrap();
        let damaged = prove(&store, &preseed, ProofKind::Repair).await;
        let is_unseen =
            matches!(damage, Damage::Flipped | Damage::SnapshotEmptied | Damage::SnapshotFileZeroed);
        assert!(is_unseen || damaged.is_empty(), "{what}: {damaged:?}");
        assert_eq!(stages(&preseed).contains(&ImageStage::Damaged), !damaged.is_empty(), "{what}");
        let report = preseed.run(&store).await.unwrap();
        assert_eq!(report.failures(), <[String; 0]>::default(), "{what}");
        assert_eq!(prove(&store, &preseed, ProofKind::Repair).await, [], "{what}");
        assert_eq!(stages(&preseed), [ImageStage::Listed; 2], "{what}");
        assert!(read_files(&blobs_of(&daemon)) == content, "{what}: the content is as before");
        assert_eq!(daemon.run_echo(BUSYBOX, "running"), "running\n", "{what}");
        assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "{what}: no lease remains");
    }
    daemon.stop().await;
}

/// Waits until a file has this text; `None` stands for no file.
async fn wait_mark(path: PathBuf, text: Option<String>) {
    let wait = move || {
        testbed::wait_until(Duration::from_secs(60), "the mark", || {
            let found = fs::read_to_string(&path).ok();
            anyhow::ensure!(found == text, "{found:?} instead of {text:?}");
            Ok(())
        })
    };
    tokio::task::spawn_blocking(wait).await.unwrap().unwrap();
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn after_a_power_cut_images_are_compared_and_repaired_and_after_an_ordered_stop_they_are_not(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    put_images(&setup);
    setup.containerd.preseed = Some(setup.preseed().with_unpacking(true));
    let (mark, boot) = (setup.layout.data_dir().join("running"), "/proc/sys/kernel/random/boot_id");
    let boot = fs::read_to_string(boot).unwrap();
    let mut daemon = setup.start().await;
    daemon.wait_ready(crate::harness::PRESEED, 1).await;
    for is_power_cut in [false, true] {
        wait_mark(mark.clone(), Some(boot.clone())).await;
        let content = read_files(&blobs_of(&daemon));
        let scratch = daemon.stop().await;
        assert!(!mark.exists(), "an ordered stop removes it");
        let mut setup = Setup::in_directory(release, scratch);
        let (layer, bytes) = content.iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
        let mut flipped = bytes.clone();
        flipped[100_000] ^= 1;
        replace_file(layer, &flipped);
        damage_file(&setup, Damage::SnapshotEmptied, 0);
        if is_power_cut {
            fs::write(&mark, "the boot before\n").unwrap();
        }
        let preseed = setup.preseed().with_unpacking(true);
        setup.containerd.preseed = Some(preseed.clone());
        daemon = setup.start().await;
        daemon.wait_ready(crate::harness::PRESEED, 1).await;
        wait_mark(mark.clone(), Some(boot.clone())).await;
        let is_repaired = read_files(&blobs_of(&daemon)) == content;
        assert_eq!(is_repaired, is_power_cut, "{}", daemon.log("root"));
        if is_power_cut {
            assert_eq!((stages(&preseed), preseed.problem()), (vec![ImageStage::Listed; 2], None));
            assert_eq!(daemon.run_echo(BUSYBOX, "running"), "running\n");
        } else {
            // For the next round.
            replace_file(layer, bytes);
        }
    }
    daemon.stop().await;
}

/// Flips a bit of the largest layer, which an import does not compare; returns the content before that.
fn flip_layer(setup: &Setup) -> BTreeMap<PathBuf, Vec<u8>> {
    let content = read_files(&blobs_of(setup));
    let (layer, bytes) = content.iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
    let mut flipped = bytes.clone();
    flipped[100_000] ^= 1;
    replace_file(layer, &flipped);
    content
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn damage_is_known_after_kills_of_containerd_and_of_the_program_that_found_it(
    #[values(Debian, Newest)] release: Release,
) {
    let setup = Setup::new(release);
    put_images(&setup);
    let daemon = setup.start().await;
    let preseed = daemon.preseed();
    let store = daemon.images().await;
    preseed.run(&store).await.unwrap();
    let content = flip_layer(&daemon);
    assert_eq!(prove(&store, &preseed, ProofKind::Verify).await.len(), 1);
    daemon.kill();
    daemon.wait_ready("root.containerd", 2).await;
    // Another value knows what a new process does.
    let (preseed, store) = (daemon.preseed(), daemon.images().await);
    assert_eq!(preseed.run(&store).await.unwrap().failures(), <[String; 0]>::default());
    assert!(read_files(&blobs_of(&daemon)) == content, "written again");
    assert_eq!(prove(&store, &preseed, ProofKind::Verify).await, []);
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_layer_that_is_damaged_before_it_is_unpacked_is_written_again_and_its_bundle_is_not_blamed(
    #[values(Debian, Newest)] release: Release,
) {
    let setup = Setup::new(release);
    put_images(&setup);
    let daemon = setup.start().await;
    let store = daemon.images().await;
    daemon.preseed().run(&store).await.unwrap();
    let content = flip_layer(&daemon);
    let preseed = daemon.preseed().with_unpacking(true);
    let report = preseed.run(&store).await.unwrap();
    assert_eq!(report.failures(), <[String; 0]>::default());
    assert_eq!(stages(&preseed), [ImageStage::Listed; 2]);
    assert!(read_files(&blobs_of(&daemon)) == content, "written again");
    assert_eq!(prove(&store, &preseed, ProofKind::Repair).await, []);
    daemon.stop().await;
}

/// A store for which the reserve takes all of the disk.
fn without_room(store: &ContainerdImages, setup: &Setup) -> ContainerdImages {
    store.clone().with_disk(setup.layout.root_dir(), DiskReserve::from_bytes(u64::MAX))
}

/// What is wrong with the one is seen without room, and the other can't be compared byte by byte.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_full_disk_ends_no_comparison_and_what_it_could_not_compare_is_named(
    #[values(Debian, Newest)] release: Release,
) {
    let setup = Setup::new(release);
    put_images(&setup);
    let daemon = setup.start().await;
    let preseed = daemon.preseed().with_unpacking(true);
    let store = preseed.set_up_store(daemon.images().await);
    preseed.run(&store).await.unwrap();
    damage_file(&daemon, Damage::SnapshotEmptied, 0);
    let images = store.list_images(&namespace()).await.unwrap();
    let images: Vec<_> = images.into_iter().map(|image| (namespace(), image)).collect();
    let full = without_room(&store, &daemon);
    let mut proof = ImageProof::new(&full, &preseed, &images, ProofKind::Repair).await.unwrap();
    proof.run(&full, &preseed, &ReadPace::new(None), |_| {}).await.unwrap();
    let (damaged, rest) = (proof.damaged(), proof.not_compared());
    assert!(damaged.len() == 1 && rest.len() == 1 && damaged[0].name != rest[0].name, "{proof:?}");
    assert!(rest[0].reason.contains("no space left"), "{rest:?}");
    preseed.run(&store).await.unwrap();
    assert_eq!(prove(&store, &preseed, ProofKind::Repair).await, []);
    daemon.stop().await;
}

/// A snapshot with children can't be removed: the image stays damaged until its containers are gone, and says so.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_damaged_layer_that_a_container_uses_is_named_until_it_can_be_unpacked_again(
    #[values(Debian, Newest)] release: Release,
) {
    let setup = Setup::new(release);
    setup.put_image("busybox.tar", BUSYBOX, &busybox_layer());
    let daemon = setup.start().await;
    let preseed = daemon.preseed().with_unpacking(true);
    let store = preseed.set_up_store(daemon.images().await);
    preseed.run(&store).await.unwrap();
    let name = crate::harness::unique_name();
    daemon.ctr(&["containers", "create", BUSYBOX, &name, "/bin/busybox"]);
    // A layer whose file is damaged, and whose snapshot is not: it is compared once the file is written again.
    flip_layer(&daemon);
    let found = prove(&store, &preseed, ProofKind::Repair).await;
    assert!(found[0].reason.contains("is in use"), "{found:?}");
    preseed.run(&store).await.unwrap();
    assert_eq!(stages(&preseed), [ImageStage::Damaged]);
    assert_eq!(prove(&store, &preseed, ProofKind::Repair).await, []);
    assert_eq!(stages(&preseed), [ImageStage::Listed]);
    damage_file(&daemon, Damage::SnapshotFileZeroed, 0);
    for _ in 0..2 {
        let found = prove(&store, &preseed, ProofKind::Repair).await;
        assert!(found[0].reason.contains("delete the pods that use it"), "{found:?}");
        preseed.run(&store).await.unwrap();
        assert_eq!(stages(&preseed), [ImageStage::Damaged]);
    }
    // Neither a new process nor a comparison that has no room to see it takes that back.
    let next = daemon.preseed().with_unpacking(true);
    next.run(&store).await.unwrap();
    assert_eq!(stages(&next), [ImageStage::Damaged]);
    assert_eq!(prove(&without_room(&store, &daemon), &preseed, ProofKind::Repair).await, []);
    assert_eq!(stages(&preseed), [ImageStage::Damaged]);
    daemon.ctr(&["containers", "rm", &name]);
    prove(&store, &preseed, ProofKind::Repair).await;
    preseed.run(&store).await.unwrap();
    assert_eq!(prove(&store, &preseed, ProofKind::Repair).await, []);
    assert_eq!(stages(&preseed), [ImageStage::Listed]);
    let next = daemon.preseed().with_unpacking(true);
    next.run(&store).await.unwrap();
    assert_eq!(stages(&next), [ImageStage::Listed]);
    assert_eq!(daemon.run_echo(BUSYBOX, "running"), "running\n");
    daemon.stop().await;
}

/// A directory whose disk is mounted late is no reason to believe what a power cut has left: its images were not looked at.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn after_a_power_cut_images_are_compared_once_their_bundles_are_there(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    let mark = setup.layout.data_dir().join("running");
    setup.put_image("busybox.tar", BUSYBOX, &busybox_layer());
    setup.containerd.preseed = Some(setup.preseed());
    let daemon = setup.start().await;
    daemon.wait_ready(crate::harness::PRESEED, 1).await;
    let scratch = daemon.stop().await;
    let mut setup = Setup::in_directory(release, scratch);
    fs::write(&mark, "the boot before\n").unwrap();
    let preseed = setup.preseed();
    let away = setup.path("away");
    let bundles = preseed.directories()[0].join(namespace().as_str());
    fs::rename(&bundles, &away).unwrap();
    setup.containerd.preseed = Some(preseed.clone());
    let daemon = setup.start().await;
    daemon.wait_ready(crate::harness::PRESEED, 1).await;
    // Ends once a pass over the empty directory has been followed by another one.
    preseed.request_pass().await;
    preseed.request_pass().await;
    assert_eq!(fs::read_to_string(&mark).unwrap(), "the boot before\n", "nothing was compared");
    fs::rename(&away, &bundles).unwrap();
    preseed.request_pass().await;
    wait_mark(mark, Some(fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap())).await;
    daemon.stop().await;
}
