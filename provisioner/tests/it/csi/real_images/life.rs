//! The life of block and strict volumes on a file system with project quotas.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, ProjectQuota, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::{BindMounter, NodePlugin, PluginDeps};
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{
    DirStore, DriverName, GuardError, ImageFormat, NodeName, SnapshotId, SnapshotStore as _, StoredId,
    VolumeGuard, VolumeId, VolumeKind, VolumeStore as _,
};
use testbed::guest::disk::{FileSystem, GuestDisk, MountedDisk};
use tokio::runtime::Runtime;
use tonic::Code;

use super::writer::{Writer, read_mark, size_of, write_mark};
use super::{MIB, devices_below, wait_detached};
use crate::csi::harness::{DRIVER, PluginServer, TestClient, id, publish_message_of};
use crate::csi::real_mounts::run_in_mount_namespace;

/// A store, its plugin and the kubelet's directory.
struct TestNode {
    runtime: Runtime,
    kubelet: tempfile::TempDir,
    disk: MountedDisk,
    store: Arc<DirStore>,
    plugin: Option<PluginServer>,
}

impl TestNode {
    fn start(disk: MountedDisk) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let kubelet = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(kubelet.path().join("pods")).expect("create");
        let runtime = runtime.expect("a runtime");
        let store = runtime.block_on(open_store(disk.mount_point()));
        let mut node = Self { runtime, kubelet, disk, store, plugin: None };
        node.restart();
        node
    }

    fn deps(&self) -> PluginDeps {
        PluginDeps {
            driver: DriverName::try_new(DRIVER).expect("a name"),
            node: NodeName::try_new("node-a").expect("a name"),
            store: self.store.clone(),
            volumes: self.store.clone(),
            mounter: Arc::new(BindMounter::new(self.kubelet.path())),
        }
    }

    /// Stops what runs, and starts it again: nothing of it is kept in memory.
    fn restart(&mut self) {
        if let Some(plugin) = self.plugin.take() {
            self.runtime.block_on(plugin.supervisor.shutdown());
            self.runtime.block_on(self.store.close());
            self.store = self.runtime.block_on(open_store(self.disk.mount_point()));
        }
        let plugin = self.runtime.block_on(PluginServer::start(self.deps(), self.kubelet.path()));
        self.plugin = Some(plugin);
    }

    fn path(&self, pod: &str) -> PathBuf {
        self.kubelet.path().join("pods").join(pod)
    }

    fn client(&self) -> TestClient {
        let socket = &self.plugin.as_ref().expect("started").socket;
        self.runtime.block_on(TestClient::connect(socket))
    }

    fn publish(&self, id: &VolumeId, pod: &str, format: ImageFormat) {
        let path = self.path(pod).display().to_string();
        let message = publish_message_of(id, &path, VolumeKind::Image(format));
        assert_eq!(self.runtime.block_on(self.client().send_publish(message)), Ok(()), "{format}");
    }

    fn unpublish(&self, id: &VolumeId, pod: &str) {
        let path = self.path(pod).display().to_string();
        let mut unpublished = Err(Code::Unavailable);
        // Children that other tests start hold what is open here until they execute their programs.
        while unpublished == Err(Code::Unavailable) {
            unpublished = self.runtime.block_on(self.client().unpublish(id, &path));
        }
        assert_eq!(unpublished, Ok(()));
        assert!(!self.path(pod).exists());
    }

    /// The size that the kubelet reads.
    fn reported_size(&self, id: &VolumeId, pod: &str) -> u64 {
        let path = self.path(pod).display().to_string();
        let rows = self.runtime.block_on(self.client().stats(id, &path)).expect("stats");
        u64::try_from(rows[0].total).expect("a size")
    }

    fn devices(&self) -> Vec<String> {
        devices_below(self.disk.mount_point())
    }

    /// Removes volumes; then nothing is left.
    fn remove_all(&self, ids: &[VolumeId]) {
        self.runtime.block_on(async {
            for id in ids {
                self.store.remove(id).await.expect("remove");
            }
            self.store.wait_until_erased().await;
            assert_eq!(self.store.list().await.expect("list"), []);
        });
        wait_detached(self.disk.mount_point());
        for place in ["volumes", "snapshots", "kinds", ".new", ".trash", ".unpublished"] {
            let entries = fs::read_dir(self.disk.mount_point().join(place)).into_iter().flatten();
            assert_eq!(entries.count(), 0, "{place}");
        }
    }

    fn stop(mut self) {
        let plugin = self.plugin.take().expect("started");
        self.runtime.block_on(plugin.supervisor.shutdown());
        self.runtime.block_on(self.store.close());
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
        assert!(!mounts.contains(&self.kubelet.path().display().to_string()), "nothing stays mounted");
        drop(self.store);
        self.disk.unmount().expect("nothing uses the disk");
    }
}

async fn open_store(base: &Path) -> Arc<DirStore> {
    let quota = ProjectQuota::open(base).expect("project quotas");
    let store = DirStore::new(Dir::open(base).expect("open"), Arc::new(quota)).expect("a store");
    store.create_identity().await.expect("an identity");
    store.start_serving().await.expect("served");
    Arc::new(store)
}

fn smallest_size(format: ImageFormat) -> u64 {
    if format == ImageFormat::Xfs { 300 * MIB } else { 16 * MIB }
}

fn live_through_all(format: ImageFormat) {
    let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
    let mut node = TestNode::start(disk.expect("a disk"));
    let (one, two) = (id(1), id(2));
    let snapshot = SnapshotId::from_uid(&sample_uid(1)).expect("a UUID");
    let (small, large) = (smallest_size(format), 2 * smallest_size(format));
    node.runtime.block_on(node.store.create_image(&one, format, Bytes(small))).expect("create");
    node.publish(&one, "a", format);
    let before = size_of(&node.path("a"), format);
    write_mark(&node.path("a"), format, "before");
    let writer = Writer::start(&node.path("a"), format);
    writer.wait_progress();
    expand(&node, &writer, (&one, format, large));
    copy_snapshot(&node, &writer, ((&one, &snapshot, &two), format, large));
    restart_all(&mut node, &writer, (&one, &two, format));
    writer.stop();
    node.unpublish(&one, "a");
    node.unpublish(&two, "b");
    wait_detached(node.disk.mount_point());
    drop(guard(&node).reserve(&one).expect("nothing uses it"));

    // What was written is there, in a volume that is grown while nothing uses it.
    let larger = QuotaLimits { bytes: Some(Bytes(large + 16 * MIB)), inodes: None };
    node.runtime.block_on(node.store.resize(&one, larger)).expect("resize");
    node.publish(&one, "a", format);
    assert_eq!(read_mark(&node.path("a"), format, 6), "after!");
    assert!(size_of(&node.path("a"), format) >= before + (large + 16 * MIB - small) * 9 / 10);
    node.unpublish(&one, "a");
    node.runtime.block_on(node.store.remove_snapshot(&snapshot)).expect("remove");
    node.remove_all(&[one, two]);
    node.stop();
}

fn guard(node: &TestNode) -> Arc<dyn VolumeGuard> {
    NodePlugin::new(node.deps(), node.kubelet.path()).expect("paths").volume_guard()
}

/// Expands a volume to twice its size under its writer.
fn expand(node: &TestNode, writer: &Writer, (id, format, large): (&VolumeId, ImageFormat, u64)) {
    let before = size_of(&node.path("a"), format);
    let limits = QuotaLimits { bytes: Some(Bytes(large)), inodes: None };
    for _ in 0..2 {
        node.runtime.block_on(node.store.resize(id, limits)).expect("resize");
        assert!(size_of(&node.path("a"), format) >= before + large / 2 * 9 / 10, "{format}");
        writer.wait_progress();
    }
    assert_eq!(node.reported_size(id, "a"), size_of(&node.path("a"), format));
}

/// Takes a snapshot under the writer, and publishes a copy of it next to the original.
fn copy_snapshot(
    node: &TestNode,
    writer: &Writer,
    ((from, snapshot, to), format, size): ((&VolumeId, &SnapshotId, &VolumeId), ImageFormat, u64),
) {
    node.runtime.block_on(node.store.create_snapshot(snapshot, from)).expect("snapshot");
    writer.wait_progress();
    write_mark(&node.path("a"), format, "after!");
    let source = StoredId::from(snapshot.clone());
    node.runtime.block_on(node.store.create_image_from(to, &source, format, Bytes(size))).expect("a copy");
    node.publish(to, "b", format);
    assert_eq!(node.devices().len(), 2);
    assert_eq!(read_mark(&node.path("b"), format, 6), "before");
    assert_eq!(read_mark(&node.path("a"), format, 6), "after!");
    let copy = Writer::start(&node.path("b"), format);
    copy.wait_progress();
    copy.stop();
}

/// All is found again after a restart, under the writer.
fn restart_all(
    node: &mut TestNode,
    writer: &Writer,
    (one, two, format): (&VolumeId, &VolumeId, ImageFormat),
) {
    node.restart();
    node.publish(one, "a", format);
    node.publish(two, "b", format);
    assert_eq!(node.devices().len(), 2);
    let reserved = guard(node).reserve(one);
    assert!(matches!(reserved, Err(GuardError::InUse { .. })), "{reserved:?}");
    writer.wait_progress();
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB"]
fn a_block_volume_lives_through_expansion_snapshots_and_restarts() {
    run_in_mount_namespace(|| live_through_all(ImageFormat::Block));
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB"]
fn a_strict_volume_on_ext4_lives_through_expansion_snapshots_and_restarts() {
    run_in_mount_namespace(|| live_through_all(ImageFormat::Ext4));
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB"]
fn a_strict_volume_on_xfs_lives_through_expansion_snapshots_and_restarts() {
    run_in_mount_namespace(|| live_through_all(ImageFormat::Xfs));
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB"]
fn a_full_block_volume_can_be_overwritten_while_a_snapshot_shares_its_blocks() {
    run_in_mount_namespace(|| {
        let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
        let node = TestNode::start(disk.expect("a disk"));
        let one = id(1);
        node.runtime
            .block_on(node.store.create_image(&one, ImageFormat::Block, Bytes(32 * MIB)))
            .expect("create");
        node.publish(&one, "a", ImageFormat::Block);
        let fill = |byte: u8| {
            let mut device = File::options().write(true).open(node.path("a")).expect("open");
            for _ in 0..32 {
                device.write_all(&vec![byte; 1 << 20]).expect("write");
            }
            device.sync_all().expect("all is written");
        };
        fill(1);
        for number in 1..=3 {
            let snapshot = SnapshotId::from_uid(&sample_uid(number)).expect("a UUID");
            node.runtime.block_on(node.store.create_snapshot(&snapshot, &one)).expect("snapshot");
            fill(u8::try_from(number).expect("small") + 1);
        }
        node.unpublish(&one, "a");
        for number in 1..=3 {
            let snapshot = SnapshotId::from_uid(&sample_uid(number)).expect("a UUID");
            node.runtime.block_on(node.store.remove_snapshot(&snapshot)).expect("remove");
        }
        node.remove_all(&[one]);
        node.stop();
    });
}

/// An attribute of a loop device.
fn device_attribute(name: &str, attribute: &str) -> String {
    let path = Path::new("/sys/block").join(name).join(attribute);
    fs::read_to_string(path).expect("sysfs").trim().to_owned()
}

/// Checks that volumes on this disk have direct IO, and block volumes its sectors.
fn check_direct_io(disk: MountedDisk, sector: &str) {
    let node = TestNode::start(disk);
    for (format, block_size) in [(ImageFormat::Block, sector), (ImageFormat::Ext4, "4096")] {
        let one = id(1);
        node.runtime.block_on(node.store.create_image(&one, format, Bytes(16 * MIB))).expect("create");
        node.publish(&one, "a", format);
        let devices = node.devices();
        assert_eq!(device_attribute(&devices[0], "loop/dio"), "1", "{format}");
        assert_eq!(device_attribute(&devices[0], "queue/logical_block_size"), block_size, "{format}");
        write_mark(&node.path("a"), format, "data");
        node.unpublish(&one, "a");
        node.publish(&one, "a", format);
        assert_eq!(read_mark(&node.path("a"), format, 4), "data");
        node.unpublish(&one, "a");
        node.remove_all(&[one]);
    }
    node.stop();
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn volumes_on_a_disk_with_small_sectors_have_direct_io() {
    run_in_mount_namespace(|| {
        let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
        check_direct_io(disk.expect("a disk"), "512");
    });
}

#[test]
#[ignore = "sampled: needs kernel with a 4Kn disk of 1 GiB"]
fn volumes_on_a_disk_with_large_sectors_have_direct_io() {
    run_in_mount_namespace(|| {
        let disk =
            GuestDisk::acquire_4kn().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
        check_direct_io(disk.expect("a disk"), "4096");
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_device_that_a_killed_process_left_is_released_by_the_next_start() {
    run_in_mount_namespace(|| {
        let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
        let mut node = TestNode::start(disk.expect("a disk"));
        let one = id(1);
        node.runtime
            .block_on(node.store.create_image(&one, ImageFormat::Block, Bytes(16 * MIB)))
            .expect("create");
        node.publish(&one, "a", ImageFormat::Block);
        // As if the process had been killed before it mounted the device, and the kubelet never came back to it.
        nix::mount::umount(&node.path("a")).expect("unmount");
        fs::remove_file(node.path("a")).expect("remove");
        assert_eq!(node.devices().len(), 1);
        node.restart();
        wait_detached(node.disk.mount_point());
        let path = node.path("a").display().to_string();
        assert_eq!(node.runtime.block_on(node.client().stats(&one, &path)), Err(Code::NotFound));
        node.remove_all(&[one]);
        node.stop();
    });
}
