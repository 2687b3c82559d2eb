//! Block volumes of a node: a claim becomes a device, which outlives noded. The test acts as the kubelet.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use nodekeel_provisioner::csi::proto::csi::node_client::NodeClient;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::proto::csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use nodekeel_provisioner::csi::proto::csi::{
    NodePublishVolumeRequest, NodeUnpublishVolumeRequest, VolumeCapability,
};
use nodekeel_provisioner::csi::testing::{FakeKubelet, connect_socket};
use serde_json::Value;
use testbed::ScratchDir;
use testbed::leftovers::find_loop_devices;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use crate::harness::{NodedProcess, wait};
use crate::volumes::{CLASS_AND_CLAIM, bind_claim, provisioner_config, start_api_server};

/// noded with the directory of a kubelet.
struct BlockNode {
    noded: NodedProcess,
    kubelet: ScratchDir,
    config: String,
    runtime: Runtime,
}

impl BlockNode {
    fn start(kubeconfig: &Path) -> Self {
        let kubelet = ScratchDir::new().unwrap();
        for name in ["pods", "plugins_registry"] {
            fs::create_dir(kubelet.path().join(name)).unwrap();
        }
        let keys = format!("kubelet = {:?}\nquota = \"none\"", kubelet.path());
        let config = provisioner_config(kubeconfig, &keys);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let this = Self { noded: NodedProcess::start(&config), kubelet, config, runtime };
        this.register_driver();
        this
    }

    /// Stops noded, and starts it again.
    fn restart(self) -> Self {
        let Self { noded, kubelet, config, runtime } = self;
        let noded = NodedProcess::start_in(noded.stop_and_keep(), &config, &[]);
        let this = Self { noded, kubelet, config, runtime };
        this.register_driver();
        this
    }

    fn register_driver(&self) {
        self.noded.wait_for_event("root.provisioner.csi", 1, "ready");
        let socket = self.kubelet.path().join("plugins_registry/volumes.nodekeel@reg.sock");
        self.runtime.block_on(async {
            let mut kubelet = FakeKubelet::discover_plugin(&socket).await.unwrap();
            kubelet.register_plugin().await.unwrap();
        });
        self.noded.wait_for_event("root.provisioner", 1, "ready");
    }

    /// The path at which the kubelet has a block volume published for a pod.
    fn create_target_parent(&self, volume: &Value) -> PathBuf {
        let parent = self.kubelet.path().join("plugins/kubernetes.io/csi/volumeDevices/publish");
        let parent = parent.join(volume["metadata"]["name"].as_str().unwrap());
        fs::create_dir_all(&parent).unwrap();
        parent.join("00000000-0000-4000-8000-000000000001")
    }

    async fn connect(&self) -> Result<NodeClient<Channel>> {
        let socket = self.kubelet.path().join("plugins/volumes.nodekeel/csi.sock");
        Ok(NodeClient::new(connect_socket(&socket).await?))
    }

    fn publish(&self, volume: &Value, target: &Path) {
        let attributes = volume["spec"]["csi"]["volumeAttributes"].as_object().unwrap();
        let request = NodePublishVolumeRequest {
            volume_id: volume_handle(volume),
            target_path: target.to_str().unwrap().to_owned(),
            volume_capability: Some(VolumeCapability {
                access_mode: Some(AccessMode { mode: Mode::SingleNodeMultiWriter.into() }),
                access_type: Some(AccessType::Block(BlockVolume {})),
            }),
            volume_context: attributes
                .iter()
                .map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned()))
                .collect(),
            ..NodePublishVolumeRequest::default()
        };
        self.runtime
            .block_on(async { self.connect().await.unwrap().node_publish_volume(request).await })
            .unwrap();
    }

    fn unpublish(&self, volume: &Value, target: &Path) -> Result<()> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume_handle(volume),
            target_path: target.to_str().unwrap().to_owned(),
        };
        self.runtime.block_on(async {
            self.connect().await?.node_unpublish_volume(request).await?;
            anyhow::Ok(())
        })
    }

    /// The loop devices of its volumes.
    fn loop_devices(&self) -> Vec<String> {
        find_loop_devices(&self.noded.data()).unwrap()
    }
}

fn volume_handle(volume: &Value) -> String {
    volume["spec"]["csi"]["volumeHandle"].as_str().unwrap().to_owned()
}

/// The number of the device at a target.
fn device_number(target: &Path) -> u64 {
    let found = fs::metadata(target).unwrap();
    assert!(found.file_type().is_block_device(), "{found:?}");
    found.rdev()
}

fn write_data(target: &Path) {
    let mut device = File::options().write(true).open(target).unwrap();
    assert_eq!(device.seek(SeekFrom::End(0)).unwrap(), 64 << 20);
    device.write_all_at(b"data", 0).unwrap();
    device.sync_all().unwrap();
}

fn read_data(target: &Path) -> [u8; 4] {
    let mut data = [0; 4];
    File::open(target).unwrap().read_exact_at(&mut data, 0).unwrap();
    data
}

#[test]
#[ignore = "needs kube and root: it attaches a loop device"]
fn a_block_volume_stays_the_same_device_when_noded_restarts_and_leaves_nothing() {
    let (kube, kubeconfig) = start_api_server();
    let node = BlockNode::start(&kubeconfig);
    let manifests = CLASS_AND_CLAIM.replace("accessModes:", "volumeMode: Block\n  accessModes:");
    let claim = bind_claim(&kube, &manifests);
    let name = claim["spec"]["volumeName"].as_str().unwrap();
    let volume = kube.get_object("pv", name).unwrap();
    assert_eq!(volume["spec"]["volumeMode"], "Block");

    let target = node.create_target_parent(&volume);
    node.publish(&volume, &target);
    write_data(&target);
    let (number, devices) = (device_number(&target), node.loop_devices());
    assert_eq!(devices.len(), 1, "{devices:?}");

    // A kubelet that has registered the driver again publishes again.
    let node = node.restart();
    node.publish(&volume, &target);
    assert_eq!((device_number(&target), node.loop_devices()), (number, devices));
    assert_eq!(&read_data(&target), b"data");

    // The kubelet repeats it, too: children that other tests start may hold the device for a moment.
    wait("the volume to be unpublished", || node.unpublish(&volume, &target));
    assert!(!target.exists());
    wait("the loop device to go", || {
        ensure!(node.loop_devices().is_empty(), "{:?}", node.loop_devices());
        Ok(())
    });
    kube.delete_object("pvc", "default/data").unwrap();
    kube.wait_until_gone("pv", name).unwrap();
    node.noded.stop();
}
