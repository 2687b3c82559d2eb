//! A plugin that runs, over mounts in memory or real ones, with the kubelet's part played by the test.

use std::fmt;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, Inodes, Limits};
use nodekeel_provisioner::csi::proto::csi::identity_client::IdentityClient;
use nodekeel_provisioner::csi::proto::csi::node_client::NodeClient;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::csi::testing::{Kubelet, MemMounts, connect};
use nodekeel_provisioner::csi::{Mounts, Plugin, PluginDeps, Target};
use nodekeel_provisioner::testing::MemStore;
use nodekeel_provisioner::{DriverName, NodeName, OpenVolume, StoreError, VolumeId, VolumeStore};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tempfile::TempDir;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub(crate) const DRIVER: &str = "volumes.example.org";

/// A plugin under a supervisor.
pub(crate) struct Running {
    pub(crate) supervisor: Supervisor,
    pub(crate) known: watch::Receiver<bool>,
    pub(crate) registration: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) store: MemStore,
    pub(crate) volumes: Volumes,
    pub(crate) directory: Arc<TempDir>,
}

/// A plugin that listens, whatever it stands on.
pub(crate) struct Served {
    pub(crate) supervisor: Supervisor,
    pub(crate) known: watch::Receiver<bool>,
    pub(crate) registration: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Served {
    pub(crate) async fn start(deps: PluginDeps, kubelet: &Path) -> Self {
        let plugin = Plugin::new(deps, kubelet).expect("short paths");
        let known = plugin.known();
        let (registration, socket) = (plugin.registration_socket().to_owned(), plugin.socket().to_owned());
        let plugin = std::sync::Mutex::new(Some(plugin));
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let plugin = plugin.lock().expect("unpoisoned").take();
            async move {
                ctx.run("csi", plugin.expect("the root runs once"))?;
                ctx.wait_ready("root.csi").await?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        let served = Self { supervisor, known, registration, socket };
        served.ready().await;
        served
    }

    async fn ready(&self) {
        let mut changes = self.supervisor.watch();
        let is_ready = || {
            let tree = self.supervisor.snapshot();
            tree.iter().any(|node| {
                node.dn.as_ref() == "root" && matches!(node.state, nodekeel_supervisor::State::Ready)
            })
        };
        while !is_ready() {
            changes.changed().await.expect("the tree lives");
        }
    }
}

/// Volumes with a directory each, and their limits in memory.
#[derive(Clone)]
pub(crate) struct Volumes {
    directory: Arc<TempDir>,
}

impl fmt::Debug for Volumes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Volumes")
    }
}

impl Volumes {
    pub(crate) fn path(&self, id: &VolumeId) -> PathBuf {
        self.directory.path().join("volumes").join(id.as_str())
    }
}

impl OpenVolume for Volumes {
    fn open(&self, id: &VolumeId) -> Result<OwnedFd, StoreError> {
        match File::open(self.path(id)) {
            Ok(file) => Ok(file.into()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(StoreError::NotFound { id: id.clone() })
            }
            Err(error) => Err(StoreError::Open { id: id.clone(), source: error.into() }),
        }
    }
}

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&format!("00000000-0000-4000-8000-{number:012x}")).expect("a UUID")
}

impl Running {
    pub(crate) async fn start(mounts: impl FnOnce(&Path) -> Arc<dyn Mounts>) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a directory"));
        Self::start_in(directory, MemStore::default(), mounts).await
    }

    pub(crate) async fn with_memory() -> (Self, MemMounts) {
        let mounts = MemMounts::default();
        let shared = mounts.clone();
        (Self::start(move |_| Arc::new(shared)).await, mounts)
    }

    pub(crate) async fn start_in(
        directory: Arc<TempDir>,
        store: MemStore,
        mounts: impl FnOnce(&Path) -> Arc<dyn Mounts>,
    ) -> Self {
        let kubelet = directory.path().join("kubelet");
        fs::create_dir_all(kubelet.join("pods")).expect("create");
        let volumes = Volumes { directory: Arc::clone(&directory) };
        let deps = PluginDeps {
            driver: DriverName::try_new(DRIVER).expect("a name"),
            node: NodeName::try_new("node-a").expect("a name"),
            store: Arc::new(store.clone()),
            volumes: Arc::new(volumes.clone()),
            mounts: mounts(&kubelet),
        };
        let Served { supervisor, known, registration, socket } = Served::start(deps, &kubelet).await;
        Self { supervisor, known, registration, socket, store, volumes, directory }
    }

    pub(crate) fn kubelet(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) fn path(&self, pod: &str) -> String {
        self.kubelet().join("pods").join(pod).display().to_string()
    }

    pub(crate) fn target(&self, pod: &str) -> Target {
        Target::try_new(&self.kubelet(), &self.path(pod)).expect("a target")
    }

    /// Makes a volume of 8 MiB and 4,096 inodes.
    pub(crate) async fn volume(&self, number: u32) -> VolumeId {
        let id = id(number);
        fs::create_dir_all(self.volumes.path(&id)).expect("create");
        let limits = Limits { bytes: Some(Bytes(8 << 20)), inodes: Some(Inodes(4096)) };
        self.store.create(&id, limits).await.expect("create");
        id
    }

    pub(crate) async fn find(&self) -> Kubelet {
        Kubelet::find(&self.registration).await.expect("a plugin")
    }

    pub(crate) async fn node(&self) -> Client {
        Client(NodeClient::new(connect(&self.socket).await.expect("a plugin")))
    }

    pub(crate) async fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(connect(&self.socket).await.expect("a plugin"))
    }
}

/// The node service, called.
#[derive(Clone)]
pub(crate) struct Client(pub(crate) NodeClient<Channel>);

pub(crate) fn capability(mode: Mode, flags: &[&str]) -> VolumeCapability {
    let mount_flags = flags.iter().map(ToString::to_string).collect();
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume { mount_flags, ..Default::default() })),
    }
}

pub(crate) fn request(id: &VolumeId, path: &str, mode: Mode) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: id.to_string(),
        target_path: path.into(),
        volume_capability: Some(capability(mode, &[])),
        ..Default::default()
    }
}

impl Client {
    pub(crate) async fn send(&mut self, request: NodePublishVolumeRequest) -> Result<(), Code> {
        self.0.node_publish_volume(request).await.map(|_| ()).map_err(code)
    }

    pub(crate) async fn publish(&mut self, id: &VolumeId, path: &str) -> Result<(), Code> {
        self.send(request(id, path, Mode::SingleNodeMultiWriter)).await
    }

    pub(crate) async fn unpublish(&mut self, id: &VolumeId, path: &str) -> Result<(), Code> {
        let request = NodeUnpublishVolumeRequest { volume_id: id.to_string(), target_path: path.into() };
        self.0.node_unpublish_volume(request).await.map(|_| ()).map_err(code)
    }

    pub(crate) async fn stats(&mut self, id: &VolumeId, path: &str) -> Result<Vec<VolumeUsage>, Code> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_string(),
            volume_path: path.into(),
            ..Default::default()
        };
        self.0.node_get_volume_stats(request).await.map(|answer| answer.into_inner().usage).map_err(code)
    }
}

/// The code; the details must always be empty.
fn code(status: Status) -> Code {
    assert!(status.details().is_empty());
    assert!(!status.message().is_empty(), "{status:?}");
    status.code()
}
