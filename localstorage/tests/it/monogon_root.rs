//! Monogon's directory tree, declared with this crate: the largest layout that its tests create.
//!
//! *Source:* Monogon `metropolis/node/core/localstorage`, the paths and modes of its commit 8b9bf216.

use nodekeel_localstorage::layout;
use nodekeel_localstorage::tree::{
    BrandNames, EtcdDir, IdentityDir, LayoutDir, LayoutFifo, LayoutFile, LayoutSocket, MountPoint, PkiDir,
};

layout! {
    /// All files of a node, by the file system that they are mounted from.
    ///
    /// The system image has these directories, read-only. Creating the layout creates the missing ones.
    /// `MountSpec` has a constant for each of the mounts.
    pub(crate) struct NodeRoot {
        pub(crate) esp: MountPoint<EfiSystemPartition> = "esp", 0o755;
        pub(crate) data: MountPoint<DataPartition> = "data", 0o755;
        pub(crate) etc: EtcDir = "etc", 0o755;
        pub(crate) ephemeral: MountPoint<EphemeralDir> = "ephemeral", 0o755;
        pub(crate) tmp: MountPoint<TmpDir> = "tmp", 0o1777;
        pub(crate) run: MountPoint<RunDir> = "run", 0o755;
    }

    pub(crate) struct DataPartition {
        pub(crate) containerd: LayoutDir = "containerd", 0o700;
        pub(crate) etcd: EtcdDir = "etcd", 0o700;
        pub(crate) kubernetes: KubernetesDir = "kubernetes", 0o700;
        pub(crate) node: IdentityDir = "node", 0o700;
        pub(crate) volumes: LayoutDir = "volumes", 0o700;
    }

    pub(crate) struct KubernetesDir {
        pub(crate) cluster_networking: OverlayKeyDir = "clusternet", 0o700;
        pub(crate) csi_provisioner: ApiClientDir = "csiprovisioner", 0o700;
        pub(crate) netservices: ApiClientDir = "netservices", 0o700;
        pub(crate) kubelet: KubeletDir = "kubelet", 0o700;
    }

    pub(crate) struct OverlayKeyDir {
        pub(crate) key: LayoutFile = "private.key", 0o600;
    }

    pub(crate) struct ApiClientDir {
        pub(crate) pki: PkiDir = "pki", 0o700;
    }

    /// The kubelet's root directory. The kubelet defines the names in it.
    pub(crate) struct KubeletDir {
        pub(crate) pki: PkiDir = "pki", 0o700;
        pub(crate) device_plugins: DevicePluginsDir = "device-plugins", 0o700;
        pub(crate) logs: LayoutDir = "logs", 0o700;
        pub(crate) plugins: KubeletPluginsDir = "plugins", 0o700;
        pub(crate) plugins_registry: PluginsRegistryDir = "plugins_registry", 0o700;
    }

    pub(crate) struct DevicePluginsDir {
        pub(crate) kubelet: LayoutSocket = "kubelet.sock", 0o600;
    }

    pub(crate) struct KubeletPluginsDir {
        pub(crate) volumes: LayoutSocket = "{driver}.sock", 0o600;
        pub(crate) kvm: LayoutSocket = "{devices}_kvm.sock", 0o600;
    }

    /// The registration sockets of kubelet plugins.
    pub(crate) struct PluginsRegistryDir {
        pub(crate) volumes: LayoutSocket = "{driver}-reg.sock", 0o600;
        pub(crate) kvm: LayoutSocket = "{devices}_kvm-reg.sock", 0o600;
    }

    pub(crate) struct EfiSystemPartition {
        pub(crate) node: EspNodeDir = "{brand}", 0o700;
        pub(crate) efi: EfiDir = "EFI", 0o755;
    }

    /// The configuration available before the data partition is open. The caller knows the format of each
    /// file and decodes it.
    pub(crate) struct EspNodeDir {
        pub(crate) sealed_configuration: LayoutFile = "sealed_configuration.pb", 0o644;
        pub(crate) parameters: LayoutFile = "parameters.pb", 0o644;
        pub(crate) cluster_directory: LayoutFile = "cluster_directory.pb", 0o644;
        pub(crate) network_configuration: LayoutFile = "network_configuration.pb", 0o644;
    }

    pub(crate) struct EfiDir {
        pub(crate) boot: LayoutDir = "BOOT", 0o755;
        pub(crate) images: BootImages = "{brand}", 0o755;
    }

    /// Both slots of the system, one of which is running.
    pub(crate) struct BootImages {
        pub(crate) a: LayoutFile = "boot-a.efi", 0o644;
        pub(crate) b: LayoutFile = "boot-b.efi", 0o644;
    }

    /// Files that last until the next boot.
    pub(crate) struct EphemeralDir {
        pub(crate) consensus: EtcdRunDir = "consensus", 0o700;
        pub(crate) containerd: ContainerdRunDir = "containerd", 0o755;
        pub(crate) flexvolume_plugins: LayoutDir = "flexvolume_plugins", 0o700;
        pub(crate) machine_id: LayoutFile = "machine-id", 0o444;
    }

    pub(crate) struct EtcdRunDir {
        pub(crate) client: LayoutSocket = "client.sock", 0o600;
        pub(crate) server_logs: LayoutFifo = "server-logs.fifo", 0o600;
    }

    pub(crate) struct ContainerdRunDir {
        pub(crate) client: LayoutSocket = "client.sock", 0o600;
        pub(crate) runsc_logs: LayoutFifo = "runsc-logs.fifo", 0o600;
        pub(crate) tmp: LayoutDir = "tmp", 0o755;
        pub(crate) runsc: LayoutDir = "runsc", 0o700;
        pub(crate) ipam: LayoutDir = "ipam", 0o700;
        pub(crate) cni: LayoutDir = "cni", 0o700;
        pub(crate) cni_cache: LayoutDir = "cni-cache", 0o700;
    }

    pub(crate) struct RunDir {
        pub(crate) containerd: LayoutDir = "containerd", 0o700;
    }

    /// `/tmp`, without predefined entries.
    pub(crate) struct TmpDir {}

    pub(crate) struct EtcDir {
        pub(crate) machine_id: LayoutFile = "machine-id", 0o444;
    }
}

/// The brand names of Monogon.
pub(crate) fn metropolis_names() -> BrandNames {
    let names: BrandNames = "metropolis".parse().unwrap();
    names
        .with_driver_name("dev.monogon.metropolis.vfs")
        .unwrap()
        .with_device_prefix("devices.monogon.dev")
        .unwrap()
}
