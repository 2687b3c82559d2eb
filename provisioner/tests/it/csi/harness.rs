//! A running plugin with mounts in memory or real ones; the test acts as the kubelet.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::csi::proto::csi::identity_client::IdentityClient;
use nodekeel_provisioner::csi::proto::csi::node_client::NodeClient;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::proto::csi::volume_capability::{
    AccessMode, AccessType, BlockVolume, MountVolume,
};
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::csi::testing::{FakeKubelet, MemMounter, connect_socket};
use nodekeel_provisioner::csi::{
    BindMounter, MountRestrictions, NodePlugin, PluginDeps, TargetMountError, TargetPath, VolumeMounter,
};
use nodekeel_provisioner::testing::MemStore;
use nodekeel_provisioner::{
    DriverName, ImageFormat, KIND_ATTRIBUTE, NodeName, OpenVolume, VolumeId, VolumeKind, VolumeOpener,
    VolumeStore, VolumeStoreError,
};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tempfile::TempDir;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::real_images::{devices_below, wait_detached};

pub(crate) const DRIVER: &str = "volumes.example.org";

/// A plugin under a supervisor.
pub(crate) struct TestPlugin {
    pub(crate) supervisor: Supervisor,
    pub(crate) registered: watch::Receiver<bool>,
    pub(crate) registration: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) store: MemStore,
    pub(crate) volumes: VolumeDirectories,
    pub(crate) directory: Arc<TempDir>,
}

/// A plugin, a volume that is not published, and a place for it in a pod.
pub(crate) struct PublishSite {
    pub(crate) plugin: TestPlugin,
    pub(crate) mounts: MemMounter,
    pub(crate) volume: VolumeId,
    pub(crate) path: String,
    pub(crate) target: TargetPath,
    pub(crate) node: TestClient,
}

/// A plugin that listens, with any dependencies.
pub(crate) struct PluginServer {
    pub(crate) supervisor: Supervisor,
    pub(crate) registered: watch::Receiver<bool>,
    pub(crate) registration: PathBuf,
    pub(crate) socket: PathBuf,
}

impl PluginServer {
    pub(crate) async fn start(deps: PluginDeps, kubelet: &Path) -> Self {
        Self::start_plugin(NodePlugin::new(deps, kubelet).expect("valid paths")).await
    }

    pub(crate) async fn start_plugin(plugin: NodePlugin) -> Self {
        let registered = plugin.registration_state();
        let (registration, socket) =
            (plugin.registration_socket().to_owned(), plugin.csi_socket().to_owned());
        let plugin = std::sync::Mutex::new(Some(plugin));
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let plugin = plugin.lock().expect("not poisoned").take();
            async move {
                ctx.run_child("csi", plugin.expect("the root runs once"))?;
                ctx.wait_ready("root.csi").await?;
                ctx.signal_ready()?;
                Err::<(), Failure>(ctx.canceled().await.into())
            }
        });
        let served = Self { supervisor, registered, registration, socket };
        served.wait_ready().await;
        served
    }

    async fn wait_ready(&self) {
        let mut changes = self.supervisor.watch_changes();
        let is_ready = || {
            let tree = self.supervisor.snapshot();
            tree.iter().any(|node| {
                node.dn.as_ref() == "root" && matches!(node.state, nodekeel_supervisor::RunnableState::Ready)
            })
        };
        while !is_ready() {
            changes.changed().await.expect("the tree is running");
        }
    }
}

/// Volumes as directories or files, with their limits in memory.
#[derive(Clone)]
pub(crate) struct VolumeDirectories {
    directory: Arc<TempDir>,
    /// The formats of those that are files.
    formats: Arc<Mutex<BTreeMap<VolumeId, ImageFormat>>>,
}

impl fmt::Debug for VolumeDirectories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeDirectories")
    }
}

impl VolumeDirectories {
    pub(crate) fn new(directory: Arc<TempDir>) -> Self {
        Self { directory, formats: Arc::default() }
    }

    pub(crate) fn path(&self, id: &VolumeId) -> PathBuf {
        self.directory.path().join("volumes").join(id.as_str())
    }
}

impl VolumeOpener for VolumeDirectories {
    fn open(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        let format = self.formats.lock().expect("not poisoned").get(id).copied();
        let opened = match format {
            None => File::open(self.path(id)).map(|dir| OpenVolume::Directory(dir.into())),
            Some(format) => open_image(&self.path(id), format),
        };
        match opened {
            Ok(volume) => Ok(volume),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(VolumeStoreError::NotFound { id: id.clone() })
            }
            Err(error) => Err(VolumeStoreError::Open { id: id.clone(), source: error.into() }),
        }
    }
}

/// Opens a volume that is a file.
pub(crate) fn open_image(path: &Path, format: ImageFormat) -> std::io::Result<OpenVolume> {
    let file = File::options().read(true).write(true).open(path)?;
    Ok(OpenVolume::Image { file: file.into(), format })
}

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&format!("00000000-0000-4000-8000-{number:012x}")).expect("a UUID")
}

impl TestPlugin {
    pub(crate) async fn start(mounts: impl FnOnce(&Path) -> Arc<dyn VolumeMounter>) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a directory"));
        Self::start_in(directory, MemStore::default(), mounts).await
    }

    pub(crate) async fn start_in_memory() -> (Self, MemMounter) {
        let mounts = MemMounter::default();
        let shared = mounts.clone();
        (Self::start(move |_| Arc::new(shared)).await, mounts)
    }

    /// A plugin with mounts in memory and a volume, as [`PublishSite`] has them.
    pub(crate) async fn start_with_volume() -> PublishSite {
        let (plugin, mounts) = Self::start_in_memory().await;
        let (volume, node) = (plugin.create_volume(1).await, plugin.node_client().await);
        let (path, target) = (plugin.pod_path("a"), plugin.target_path("a"));
        PublishSite { plugin, mounts, volume, path, target, node }
    }

    pub(crate) async fn start_in(
        directory: Arc<TempDir>,
        store: MemStore,
        mounts: impl FnOnce(&Path) -> Arc<dyn VolumeMounter>,
    ) -> Self {
        let kubelet = directory.path().join("kubelet");
        fs::create_dir_all(kubelet.join("pods")).expect("create");
        let volumes = VolumeDirectories::new(Arc::clone(&directory));
        let deps = PluginDeps {
            driver: DriverName::try_new(DRIVER).expect("a name"),
            node: NodeName::try_new("node-a").expect("a name"),
            store: Arc::new(store.clone()),
            volumes: Arc::new(volumes.clone()),
            mounter: mounts(&kubelet),
        };
        let PluginServer { supervisor, registered, registration, socket } =
            PluginServer::start(deps, &kubelet).await;
        Self { supervisor, registered, registration, socket, store, volumes, directory }
    }

    pub(crate) fn kubelet_dir(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) fn pod_path(&self, pod: &str) -> String {
        self.kubelet_dir().join("pods").join(pod).display().to_string()
    }

    pub(crate) fn target_path(&self, pod: &str) -> TargetPath {
        TargetPath::try_new(&self.kubelet_dir(), &self.pod_path(pod)).expect("a target")
    }

    /// Creates a volume of 8 MiB and 4,096 inodes.
    pub(crate) async fn create_volume(&self, number: u32) -> VolumeId {
        let id = id(number);
        fs::create_dir_all(self.volumes.path(&id)).expect("create");
        let limits = QuotaLimits { bytes: Some(Bytes(8 << 20)), inodes: Some(Inodes(4096)) };
        self.store.create(&id, limits).await.expect("create");
        id
    }

    /// Creates a volume that is an empty file of 8 MiB.
    pub(crate) async fn create_image(&self, number: u32, format: ImageFormat) -> VolumeId {
        let id = id(number);
        let path = self.volumes.path(&id);
        fs::create_dir_all(path.parent().expect("a parent")).expect("create");
        File::create(path).and_then(|file| file.set_len(8 << 20)).expect("create");
        self.volumes.formats.lock().expect("not poisoned").insert(id.clone(), format);
        self.store.create_image(&id, format, Bytes(8 << 20)).await.expect("create");
        id
    }

    pub(crate) async fn discover_plugin(&self) -> FakeKubelet {
        FakeKubelet::discover_plugin(&self.registration).await.expect("a plugin")
    }

    pub(crate) async fn node_client(&self) -> TestClient {
        TestClient::connect(&self.socket).await
    }

    pub(crate) async fn identity_client(&self) -> IdentityClient<Channel> {
        IdentityClient::new(connect_socket(&self.socket).await.expect("a plugin"))
    }
}

/// A client of the node service.
#[derive(Clone)]
pub(crate) struct TestClient(pub(crate) NodeClient<Channel>);

pub(crate) fn mount_capability(mode: Mode, flags: &[&str]) -> VolumeCapability {
    let mount_flags = flags.iter().map(ToString::to_string).collect();
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume { mount_flags, ..Default::default() })),
    }
}

pub(crate) fn publish_message(id: &VolumeId, path: &str, mode: Mode) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: id.to_string(),
        target_path: path.into(),
        volume_capability: Some(mount_capability(mode, &[])),
        ..Default::default()
    }
}

/// A publish of a volume of this kind, which its PersistentVolume says.
pub(crate) fn publish_message_of(id: &VolumeId, path: &str, kind: VolumeKind) -> NodePublishVolumeRequest {
    let mut message = publish_message(id, path, Mode::SingleNodeMultiWriter);
    message.volume_context.insert(KIND_ATTRIBUTE.into(), kind.as_str().into());
    if kind.volume_mode() == "Block" {
        let capability = message.volume_capability.as_mut().expect("a capability");
        capability.access_type = Some(AccessType::Block(BlockVolume {}));
    }
    message
}

impl TestClient {
    pub(crate) async fn connect(socket: &Path) -> Self {
        Self(NodeClient::new(connect_socket(socket).await.expect("a plugin")))
    }

    pub(crate) async fn send_publish(&mut self, request: NodePublishVolumeRequest) -> Result<(), Code> {
        self.0.node_publish_volume(request).await.map(|_| ()).map_err(status_code)
    }

    pub(crate) async fn publish(&mut self, id: &VolumeId, path: &str) -> Result<(), Code> {
        self.send_publish(publish_message(id, path, Mode::SingleNodeMultiWriter)).await
    }

    pub(crate) async fn unpublish(&mut self, id: &VolumeId, path: &str) -> Result<(), Code> {
        let request = NodeUnpublishVolumeRequest { volume_id: id.to_string(), target_path: path.into() };
        self.0.node_unpublish_volume(request).await.map(|_| ()).map_err(status_code)
    }

    /// The condition of a published volume.
    pub(crate) async fn condition(&mut self, id: &VolumeId, path: &str) -> Result<VolumeCondition, Code> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_string(),
            volume_path: path.into(),
            ..Default::default()
        };
        let answer = self.0.node_get_volume_stats(request).await.map_err(status_code)?.into_inner();
        let condition = answer.volume_condition.clone().expect("always reported");
        assert_eq!(condition.abnormal, answer.usage.is_empty(), "{answer:?}");
        Ok(condition)
    }

    pub(crate) async fn stats(&mut self, id: &VolumeId, path: &str) -> Result<Vec<VolumeUsage>, Code> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_string(),
            volume_path: path.into(),
            ..Default::default()
        };
        self.0
            .node_get_volume_stats(request)
            .await
            .map(|answer| answer.into_inner().usage)
            .map_err(status_code)
    }
}

/// The code of a status, whose details must be empty.
fn status_code(status: Status) -> Code {
    assert!(status.details().is_empty());
    assert!(!status.message().is_empty(), "{status:?}");
    status.code()
}

/// Volumes in the layout of a store, and a kubelet's directory with a mounter.
pub(crate) struct MountSite {
    directory: tempfile::TempDir,
    pub(crate) mounts: BindMounter,
}

impl MountSite {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(directory.path().join("kubelet/pods")).expect("create");
        let mounts = BindMounter::new(directory.path().join("kubelet"));
        Self { directory, mounts }
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    pub(crate) fn image_path(&self, number: u32) -> PathBuf {
        self.path("volumes").join(id(number).as_str()).join("image")
    }

    /// Creates a directory for a volume.
    pub(crate) fn create_directory(&self, name: &str) -> OpenVolume {
        let path = self.path("volumes").join(name);
        fs::create_dir_all(&path).expect("create");
        OpenVolume::Directory(File::open(path).expect("open").into())
    }

    /// Creates an empty volume of the smallest size that the format can have, or 16 MiB.
    pub(crate) fn create(&self, number: u32, format: ImageFormat) -> OpenVolume {
        let path = self.image_path(number);
        fs::create_dir_all(path.parent().expect("a parent")).expect("create");
        let size = if format == ImageFormat::Xfs { 300 << 20 } else { 16 << 20 };
        File::create_new(&path).and_then(|file| file.set_len(size)).expect("create");
        let mkfs: Option<(&str, &[&str])> = match format {
            ImageFormat::Ext4 => Some(("mkfs.ext4", &["-q", "-F", "-b", "4096"])),
            ImageFormat::Xfs => Some(("mkfs.xfs", &["-q", "-s", "size=4096"])),
            _ => None,
        };
        if let Some((program, arguments)) = mkfs {
            let made = Command::new(program).args(arguments).arg(&path).status().expect("a mkfs");
            assert!(made.success());
        }
        self.open(number, format)
    }

    pub(crate) fn open(&self, number: u32, format: ImageFormat) -> OpenVolume {
        open_image(&self.image_path(number), format).expect("open")
    }

    /// Mounts a volume.
    pub(crate) fn mount(&self, volume: &OpenVolume, below: &str, flags: MountRestrictions) {
        self.try_mount(volume, below, flags).expect("mount");
    }

    pub(crate) fn try_mount(
        &self,
        volume: &OpenVolume,
        below: &str,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError> {
        self.mounts.mount(volume, &self.target(below), flags)
    }

    /// Unmounts a target once it is free: children that other tests start hold what is open here until they execute their
    /// programs.
    pub(crate) fn unmount(&self, below: &str) {
        let target = self.target(below);
        testbed::wait_until(Duration::from_secs(10), "the target to be free", || {
            Ok(self.mounts.unmount(&target)?)
        })
        .expect("unmount");
    }

    pub(crate) fn target(&self, below: &str) -> TargetPath {
        let kubelet = self.path("kubelet");
        TargetPath::try_new(&kubelet, kubelet.join(below).to_str().expect("UTF-8")).expect("a target")
    }

    pub(crate) fn target_path(&self, below: &str) -> PathBuf {
        self.path("kubelet").join(below)
    }

    pub(crate) fn wait_detached(&self) {
        wait_detached(self.directory.path());
    }

    /// The loop devices of files in this directory.
    pub(crate) fn devices(&self) -> Vec<String> {
        devices_below(self.directory.path())
    }
}
