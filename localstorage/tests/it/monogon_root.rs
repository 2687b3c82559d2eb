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
        /// The EFI system partition, unencrypted: everything a node needs before it can open another
        /// partition.
        pub(crate) esp: MountPoint<EfiSystemPartition> = "esp", 0o755;
        /// Persistent files.
        pub(crate) data: MountPoint<DataPartition> = "data", 0o755;
        /// Files that other programs read from `/etc`.
        pub(crate) etc: EtcDir = "etc", 0o755;
        /// Files that last until the next boot: sockets, generated configuration.
        pub(crate) ephemeral: MountPoint<EphemeralDir> = "ephemeral", 0o755;
        /// Temporary files of any program.
        pub(crate) tmp: MountPoint<TmpDir> = "tmp", 0o1777;
        /// Files of other programs until the next boot.
        pub(crate) run: MountPoint<RunDir> = "run", 0o755;
    }

    /// The data partition.
    pub(crate) struct DataPartition {
        /// containerd's images and containers.
        pub(crate) containerd: LayoutDir = "containerd", 0o700;
        /// The node's member of the cluster's etcd.
        pub(crate) etcd: EtcdDir = "etcd", 0o700;
        /// Files of the Kubernetes components.
        pub(crate) kubernetes: KubernetesDir = "kubernetes", 0o700;
        /// The identity of the node.
        pub(crate) node: IdentityDir = "node", 0o700;
        /// Volumes of pods. Only the provisioner enters the directory itself.
        pub(crate) volumes: LayoutDir = "volumes", 0o700;
    }

    /// Files of the Kubernetes components.
    pub(crate) struct KubernetesDir {
        /// The network between nodes.
        pub(crate) cluster_networking: OverlayKeyDir = "clusternet", 0o700;
        /// The volume provisioner.
        pub(crate) csi_provisioner: ApiClientDir = "csiprovisioner", 0o700;
        /// Network services.
        pub(crate) netservices: ApiClientDir = "netservices", 0o700;
        /// The kubelet.
        pub(crate) kubelet: KubeletDir = "kubelet", 0o700;
    }

    /// The network between nodes.
    pub(crate) struct OverlayKeyDir {
        /// Its private key.
        pub(crate) key: LayoutFile = "private.key", 0o600;
    }

    /// A client of the API server.
    pub(crate) struct ApiClientDir {
        /// Its credentials there.
        pub(crate) pki: PkiDir = "pki", 0o700;
    }

    /// The kubelet's root directory. The kubelet defines the names in it.
    pub(crate) struct KubeletDir {
        /// Its credentials for the API server.
        pub(crate) pki: PkiDir = "pki", 0o700;
        /// The directory for device plugins.
        pub(crate) device_plugins: DevicePluginsDir = "device-plugins", 0o700;
        /// Logs of pods.
        pub(crate) logs: LayoutDir = "logs", 0o700;
        /// The sockets of plugins.
        pub(crate) plugins: KubeletPluginsDir = "plugins", 0o700;
        /// The registration sockets of plugins.
        pub(crate) plugins_registry: PluginsRegistryDir = "plugins_registry", 0o700;
    }

    /// The directory for device plugins.
    pub(crate) struct DevicePluginsDir {
        /// The registration socket of the kubelet.
        pub(crate) kubelet: LayoutSocket = "kubelet.sock", 0o600;
    }

    /// The sockets of kubelet plugins.
    pub(crate) struct KubeletPluginsDir {
        /// The CSI driver of the volume provisioner.
        pub(crate) volumes: LayoutSocket = "{driver}.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub(crate) kvm: LayoutSocket = "{devices}_kvm.sock", 0o600;
    }

    /// The registration sockets of kubelet plugins.
    pub(crate) struct PluginsRegistryDir {
        /// The CSI driver of the volume provisioner.
        pub(crate) volumes: LayoutSocket = "{driver}-reg.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub(crate) kvm: LayoutSocket = "{devices}_kvm-reg.sock", 0o600;
    }

    /// The EFI system partition.
    pub(crate) struct EfiSystemPartition {
        /// The configuration available before the data partition is open.
        pub(crate) node: EspNodeDir = "{brand}", 0o700;
        /// The boot images of the firmware.
        pub(crate) efi: EfiDir = "EFI", 0o755;
    }

    /// The configuration available before the data partition is open. The caller knows the format of each
    /// file and decodes it.
    pub(crate) struct EspNodeDir {
        /// How to open the data partition, sealed to the TPM if the host has one.
        pub(crate) sealed_configuration: LayoutFile = "sealed_configuration.pb", 0o644;
        /// The parameters to bootstrap a cluster or to join one.
        pub(crate) parameters: LayoutFile = "parameters.pb", 0o644;
        /// The last known addresses of the other nodes of the cluster.
        pub(crate) cluster_directory: LayoutFile = "cluster_directory.pb", 0o644;
        /// The network configuration, if it is not discovered; may be absent.
        pub(crate) network_configuration: LayoutFile = "network_configuration.pb", 0o644;
    }

    /// The boot images of the firmware.
    pub(crate) struct EfiDir {
        /// The default boot path of the firmware.
        pub(crate) boot: LayoutDir = "BOOT", 0o755;
        /// Both slots of the system.
        pub(crate) images: BootImages = "{brand}", 0o755;
    }

    /// Both slots of the system, one of which is running.
    pub(crate) struct BootImages {
        /// Slot A.
        pub(crate) a: LayoutFile = "boot-a.efi", 0o644;
        /// Slot B.
        pub(crate) b: LayoutFile = "boot-b.efi", 0o644;
    }

    /// Files that last until the next boot.
    pub(crate) struct EphemeralDir {
        /// etcd.
        pub(crate) consensus: EtcdRunDir = "consensus", 0o700;
        /// containerd. The processes of containers access their files in it.
        pub(crate) containerd: ContainerdRunDir = "containerd", 0o755;
        /// FlexVolume plugins, the predecessors of CSI drivers.
        pub(crate) flexvolume_plugins: LayoutDir = "flexvolume_plugins", 0o700;
        /// The machine ID, which `/etc/machine-id` links to.
        pub(crate) machine_id: LayoutFile = "machine-id", 0o444;
    }

    /// etcd.
    pub(crate) struct EtcdRunDir {
        /// The socket for local clients.
        pub(crate) client: LayoutSocket = "client.sock", 0o600;
        /// The pipe for its log.
        pub(crate) server_logs: LayoutFifo = "server-logs.fifo", 0o600;
    }

    /// containerd.
    pub(crate) struct ContainerdRunDir {
        /// The socket it listens on.
        pub(crate) client: LayoutSocket = "client.sock", 0o600;
        /// The pipe for gVisor's log.
        pub(crate) runsc_logs: LayoutFifo = "runsc-logs.fifo", 0o600;
        /// Temporary files, which the processes of containers access.
        pub(crate) tmp: LayoutDir = "tmp", 0o755;
        /// The state of gVisor.
        pub(crate) runsc: LayoutDir = "runsc", 0o700;
        /// The IP addresses in use.
        pub(crate) ipam: LayoutDir = "ipam", 0o700;
        /// The generated configuration of the container network.
        pub(crate) cni: LayoutDir = "cni", 0o700;
        /// The cached results of CNI calls.
        pub(crate) cni_cache: LayoutDir = "cni-cache", 0o700;
    }

    /// `/run`.
    pub(crate) struct RunDir {
        /// Sockets of containerd and its shims, which define their paths.
        pub(crate) containerd: LayoutDir = "containerd", 0o700;
    }

    /// `/tmp`, without predefined entries.
    pub(crate) struct TmpDir {}

    /// Files that other programs read from `/etc`.
    pub(crate) struct EtcDir {
        /// A link to `EphemeralDir::machine_id`, which the image contains: write there, not here.
        pub(crate) machine_id: LayoutFile = "machine-id", 0o444;
    }
}

/// Every path and mode of Monogon, with its brand names expanded.
pub(crate) const MONOGON_OUTLINE: &str = "\
0755 esp/ (mount point)
0700   metropolis/
0644     sealed_configuration.pb
0644     parameters.pb
0644     cluster_directory.pb
0644     network_configuration.pb
0755   EFI/
0755     BOOT/
0755     metropolis/
0644       boot-a.efi
0644       boot-b.efi
0755 data/ (mount point)
0700   containerd/
0700   etcd/
0700     peer_pki/
0600       ca.pem
0600       cert.pem
0600       cert-key.pem
0400     peer_crl
0700     data/
0700   kubernetes/
0700     clusternet/
0600       private.key
0700     csiprovisioner/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700     netservices/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700     kubelet/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700       device-plugins/
0600         kubelet.sock=
0700       logs/
0700       plugins/
0600         dev.monogon.metropolis.vfs.sock=
0600         devices.monogon.dev_kvm.sock=
0700       plugins_registry/
0600         dev.monogon.metropolis.vfs-reg.sock=
0600         devices.monogon.dev_kvm-reg.sock=
0700   node/
0700     credentials/
0600       ca.pem
0600       cert.pem
0600       cert-key.pem
0400     roles.pb
0700   volumes/
0755 etc/
0444   machine-id
0755 ephemeral/ (mount point)
0700   consensus/
0600     client.sock=
0600     server-logs.fifo|
0755   containerd/
0600     client.sock=
0600     runsc-logs.fifo|
0755     tmp/
0700     runsc/
0700     ipam/
0700     cni/
0700     cni-cache/
0700   flexvolume_plugins/
0444   machine-id
1777 tmp/ (mount point)
0755 run/ (mount point)
0700   containerd/
";

/// The brand names of Monogon.
pub(crate) fn metropolis_names() -> BrandNames {
    let names: BrandNames = "metropolis".parse().unwrap();
    names
        .with_driver_name("dev.monogon.metropolis.vfs")
        .unwrap()
        .with_device_prefix("devices.monogon.dev")
        .unwrap()
}
