//! A plugin for several stores: a publish goes to the store that the PersistentVolume names, and every other call to the one
//! that has the volume.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_provisioner::csi::proto::csi::NodePublishVolumeRequest;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::testing::MemMounter;
use nodekeel_provisioner::csi::{NodePlugin, PluginDeps, TargetPath};
use nodekeel_provisioner::testing::MemStore;
use nodekeel_provisioner::{
    DriverName, NodeName, STORE_NAME_ATTRIBUTE, StoreName, VolumeId, VolumeOpener, VolumeStore as _,
};
use tempfile::TempDir;
use tonic::Code;

use super::harness::{DRIVER, PluginServer, TestClient, VolumeDirectories, id, publish_message};

/// A store of the plugin.
struct Site {
    directory: Arc<TempDir>,
    volumes: VolumeDirectories,
    store: MemStore,
}

impl Site {
    fn new() -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a directory"));
        let volumes = VolumeDirectories::new(Arc::clone(&directory));
        Self { directory, volumes, store: MemStore::default() }
    }

    async fn create(&self, id: &VolumeId, mebibytes: u64) {
        fs::create_dir_all(self.volumes.path(id)).expect("created");
        let limits = QuotaLimits { bytes: Some(Bytes(mebibytes << 20)), inodes: None };
        self.store.create(id, limits).await.expect("created");
    }
}

/// The node, and what its pods and the kubelet see.
struct Node {
    server: PluginServer,
    kubelet: TempDir,
    mounts: MemMounter,
    fast_guard: Arc<dyn nodekeel_provisioner::VolumeGuard>,
}

impl Node {
    async fn start(first: &Site, fast: &Site) -> Self {
        let kubelet = tempfile::tempdir().expect("a directory");
        fs::create_dir(kubelet.path().join("pods")).expect("created");
        let mounts = MemMounter::default();
        let deps = PluginDeps {
            driver: DriverName::try_new(DRIVER).expect("a name"),
            node: NodeName::try_new("node-a").expect("a name"),
            store: Arc::new(first.store.clone()),
            volumes: Arc::new(first.volumes.clone()),
            mounter: Arc::new(mounts.clone()),
        };
        let opener: Arc<dyn VolumeOpener> = Arc::new(fast.volumes.clone());
        let name = StoreName::try_new("fast").expect("a name");
        let plugin = NodePlugin::new(deps, kubelet.path()).expect("valid paths");
        let plugin = plugin.with_store(name, Arc::new(fast.store.clone()), Arc::clone(&opener));
        let fast_guard = plugin.guard_of(opener);
        Self { server: PluginServer::start_plugin(plugin).await, kubelet, mounts, fast_guard }
    }

    fn pod(&self, name: &str) -> String {
        self.kubelet.path().join("pods").join(name).display().to_string()
    }

    fn depth(&self, pod: &str) -> usize {
        let target = TargetPath::try_new(self.kubelet.path(), &self.pod(pod)).expect("a target");
        self.mounts.stack_depth(&target)
    }
}

fn publish_in(store: &str, id: &VolumeId, path: &str) -> NodePublishVolumeRequest {
    let mut message = publish_message(id, path, Mode::SingleNodeMultiWriter);
    message.volume_context.insert(STORE_NAME_ATTRIBUTE.into(), store.into());
    message
}

#[tokio::test]
async fn calls_reach_the_store_that_has_the_volume_even_if_another_one_has_a_copy() {
    let (first, fast) = (Site::new(), Site::new());
    // An operator has copied the directory.
    first.create(&id(1), 8).await;
    fast.create(&id(1), 16).await;
    fast.create(&id(2), 32).await;
    let node = Node::start(&first, &fast).await;
    let mut client = TestClient::connect(&node.server.socket).await;
    for (store, pod, size) in [("", "a", 8), ("fast", "b", 16)] {
        let path = node.pod(pod);
        assert_eq!(client.send_publish(publish_in(store, &id(1), &path)).await, Ok(()), "{store}");
        let usage = client.stats(&id(1), &path).await.expect("published");
        assert_eq!(usage[0].total, size << 20, "{store}");
    }
    assert_eq!(client.send_publish(publish_in("fast", &id(2), &node.pod("c"))).await, Ok(()));
    assert!(node.fast_guard.reserve(&id(2)).is_err(), "it is mounted");
    for (number, pod) in [(1, "b"), (1, "a"), (2, "c")] {
        assert_eq!(client.unpublish(&id(number), &node.pod(pod)).await, Ok(()), "{pod}");
        assert_eq!(node.depth(pod), 0, "{pod}");
    }
    assert!(node.fast_guard.reserve(&id(2)).is_ok());
}

#[tokio::test]
async fn a_store_that_the_node_does_not_have_is_no_path_and_its_volumes_are_not_looked_for_elsewhere() {
    let (first, fast) = (Site::new(), Site::new());
    first.create(&id(1), 8).await;
    let node = Node::start(&first, &fast).await;
    let mut client = TestClient::connect(&node.server.socket).await;
    let path = node.pod("a");
    for (store, code) in [
        ("gone", Code::FailedPrecondition),
        ("fast", Code::NotFound),
        ("../volumes", Code::InvalidArgument),
        ("/", Code::InvalidArgument),
    ] {
        assert_eq!(client.send_publish(publish_in(store, &id(1), &path)).await, Err(code), "{store}");
        assert_eq!(node.depth("a"), 0, "{store}");
    }
}

#[tokio::test]
async fn a_volume_that_may_be_in_an_absent_store_is_not_said_to_be_missing() {
    let (first, fast) = (Site::new(), Site::new());
    let volumes: PathBuf = fast.directory.path().join("volumes");
    File::create(volumes).expect("in the way of the directory");
    fast.store.create(&id(1), QuotaLimits { bytes: None, inodes: None }).await.expect("created");
    let node = Node::start(&first, &fast).await;
    let mut client = TestClient::connect(&node.server.socket).await;
    // Of a volume that no store has, it is said.
    let unknown = client.stats(&id(1), &node.pod("a")).await;
    assert_eq!(unknown, Err(Code::Internal), "the store that can't tell may have it");
    // A pod terminates all the same.
    assert_eq!(client.unpublish(&id(1), &node.pod("a")).await, Ok(()));
}

/// Volumes of a disk that hangs until this is told to go on.
#[derive(Debug, Clone, Default)]
struct HungVolumes(Arc<(std::sync::Mutex<bool>, std::sync::Condvar)>);

impl HungVolumes {
    fn go_on(&self) {
        *self.0.0.lock().expect("not poisoned") = true;
        self.0.1.notify_all();
    }
}

impl VolumeOpener for HungVolumes {
    fn open(
        &self,
        id: &VolumeId,
    ) -> Result<nodekeel_provisioner::OpenVolume, nodekeel_provisioner::VolumeStoreError> {
        let released = self.0.0.lock().expect("not poisoned");
        drop(self.0.1.wait_while(released, |released| !*released));
        Err(nodekeel_provisioner::VolumeStoreError::NotFound { id: id.clone() })
    }
}

/// Lets the threads end even if the test fails.
struct GoOn(HungVolumes);

impl Drop for GoOn {
    fn drop(&mut self) {
        self.0.go_on();
    }
}

async fn start_hung(
    kubelet: &std::path::Path,
    fast: &Site,
    mounter: Arc<dyn nodekeel_provisioner::csi::VolumeMounter>,
) -> (PluginServer, GoOn) {
    fs::create_dir_all(kubelet.join("pods")).expect("created");
    let hung = HungVolumes::default();
    let deps = PluginDeps {
        driver: DriverName::try_new(DRIVER).expect("a name"),
        node: NodeName::try_new("node-a").expect("a name"),
        store: Arc::new(MemStore::default()),
        volumes: Arc::new(hung.clone()),
        mounter,
    };
    let name = StoreName::try_new("fast").expect("a name");
    let plugin = NodePlugin::new(deps, kubelet).expect("valid paths");
    let plugin = plugin.with_store(name, Arc::new(fast.store.clone()), Arc::new(fast.volumes.clone()));
    let release = GoOn(hung);
    (PluginServer::start_plugin(plugin).await, release)
}

/// Mounts in memory, and a device of a volume that an earlier process has left attached.
#[derive(Debug, Default)]
struct Attached(MemMounter);

impl nodekeel_provisioner::csi::VolumeMounter for Attached {
    fn find_mount(
        &self,
        target: &TargetPath,
    ) -> Result<Option<nodekeel_provisioner::csi::TargetMount>, nodekeel_provisioner::csi::TargetMountError>
    {
        self.0.find_mount(target)
    }
    fn mount(
        &self,
        volume: &nodekeel_provisioner::OpenVolume,
        target: &TargetPath,
        flags: nodekeel_provisioner::csi::MountRestrictions,
    ) -> Result<(), nodekeel_provisioner::csi::TargetMountError> {
        self.0.mount(volume, target, flags)
    }
    fn unmount(&self, target: &TargetPath) -> Result<(), nodekeel_provisioner::csi::TargetMountError> {
        self.0.unmount(target)
    }
    fn list_targets(
        &self,
        volume: &nodekeel_provisioner::OpenVolume,
    ) -> Result<Vec<TargetPath>, nodekeel_provisioner::csi::TargetMountError> {
        self.0.list_targets(volume)
    }
    fn list_attached(&self) -> Result<Vec<VolumeId>, nodekeel_provisioner::csi::TargetMountError> {
        Ok(vec![id(1)])
    }
}

#[tokio::test]
async fn a_start_while_one_disk_hangs_does_not_lock_the_attached_volumes_of_another() {
    let (kubelet, fast) = (tempfile::tempdir().expect("a directory"), Site::new());
    fast.create(&id(1), 8).await;
    fast.create(&id(2), 8).await;
    let (server, _release) = start_hung(kubelet.path(), &fast, Arc::new(Attached::default())).await;
    let mut client = TestClient::connect(&server.socket).await;
    let path = |name: &str| kubelet.path().join("pods").join(name).display().to_string();
    assert_eq!(client.send_publish(publish_in("fast", &id(2), &path("b"))).await, Ok(()), "not attached");
    assert_eq!(client.send_publish(publish_in("fast", &id(1), &path("a"))).await, Ok(()), "attached");
}

#[test]
fn the_stats_of_one_disk_do_not_use_up_the_threads_while_another_hangs() {
    let (kubelet, fast) = (tempfile::tempdir().expect("a directory"), Site::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(16).build();
    runtime.expect("a runtime").block_on(async {
        fast.create(&id(1), 8).await;
        let (server, _release) = start_hung(kubelet.path(), &fast, Arc::new(MemMounter::default())).await;
        let mut client = TestClient::connect(&server.socket).await;
        let path = |name: &str| kubelet.path().join("pods").join(name).display().to_string();
        let served = (id(1), path("a"));
        assert_eq!(client.send_publish(publish_in("fast", &served.0, &served.1)).await, Ok(()));
        for number in 10..42 {
            // It may be on the disk that hangs. The kubelet gives the calls up.
            let (id, path) = (id(number), path("b"));
            let unanswered = client.stats(&id, &path);
            tokio::time::timeout(Duration::from_millis(10), unanswered).await.expect_err("it hangs");
            let unanswered = client.send_publish(publish_in("", &id, &path));
            tokio::time::timeout(Duration::from_millis(10), unanswered).await.expect_err("it hangs");
            let stats =
                tokio::time::timeout(Duration::from_secs(10), client.stats(&served.0, &served.1)).await;
            assert_eq!(stats.expect("a thread is left").map(|usage| usage[0].total), Ok(8 << 20), "{number}");
        }
        assert_eq!(client.unpublish(&served.0, &served.1).await, Ok(()));
    });
}
