//! The data partition: persistent files.

use super::{LayoutDir, LayoutFile, LayoutSocket};

crate::layout! {
    /// The data partition.
    pub struct DataPartition {
        /// containerd's images and containers.
        pub containerd: LayoutDir = "containerd", 0o700;
        /// The node's member of the cluster's etcd.
        pub etcd: EtcdDir = "etcd", 0o700;
        /// Files of the Kubernetes components.
        pub kubernetes: KubernetesDir = "kubernetes", 0o700;
        /// The identity of the node.
        pub node: IdentityDir = "node", 0o700;
        /// Volumes of pods. Only the provisioner enters the directory itself.
        pub volumes: LayoutDir = "volumes", 0o700;
    }

    /// The node's member of the cluster's etcd.
    pub struct EtcdDir {
        /// The credentials by which members authenticate each other.
        pub peer_pki: PkiDir = "peer_pki", 0o700;
        /// Members that are no longer trusted: a certificate revocation list in DER.
        pub peer_crl: LayoutFile = "peer_crl", 0o400;
        /// The database.
        pub data: LayoutDir = "data", 0o700;
    }

    /// A certificate with its key and its CA certificate.
    ///
    /// With the feature `pki` it has methods that replace the three together.
    pub struct PkiDir {
        /// The CA certificate.
        pub ca: LayoutFile = "ca.pem", 0o600;
        /// The certificate.
        pub certificate: LayoutFile = "cert.pem", 0o600;
        /// Its private key.
        pub key: LayoutFile = "cert-key.pem", 0o600;
    }

    /// The identity of the node.
    pub struct IdentityDir {
        /// Its credentials in the cluster.
        pub credentials: PkiDir = "credentials", 0o700;
        /// The roles last assigned to it, as protobuf.
        pub roles: LayoutFile = "roles.pb", 0o400;
    }

    /// Files of the Kubernetes components.
    pub struct KubernetesDir {
        /// The network between nodes.
        pub cluster_networking: OverlayKeyDir = "clusternet", 0o700;
        /// The volume provisioner.
        pub csi_provisioner: ApiClientDir = "csiprovisioner", 0o700;
        /// Network services.
        pub netservices: ApiClientDir = "netservices", 0o700;
        /// The kubelet.
        pub kubelet: KubeletDir = "kubelet", 0o700;
    }

    /// The network between nodes.
    pub struct OverlayKeyDir {
        /// Its private key.
        pub key: LayoutFile = "private.key", 0o600;
    }

    /// A client of the API server.
    pub struct ApiClientDir {
        /// Its credentials there.
        pub pki: PkiDir = "pki", 0o700;
    }

    /// The kubelet's root directory. The kubelet defines the names in it.
    pub struct KubeletDir {
        /// Its credentials for the API server.
        pub pki: PkiDir = "pki", 0o700;
        /// The directory for device plugins.
        pub device_plugins: DevicePluginsDir = "device-plugins", 0o700;
        /// Logs of pods.
        pub logs: LayoutDir = "logs", 0o700;
        /// The sockets of plugins.
        pub plugins: KubeletPluginsDir = "plugins", 0o700;
        /// The registration sockets of plugins.
        pub plugins_registry: PluginsRegistryDir = "plugins_registry", 0o700;
    }

    /// The directory for device plugins.
    pub struct DevicePluginsDir {
        /// The registration socket of the kubelet.
        pub kubelet: LayoutSocket = "kubelet.sock", 0o600;
    }

    /// The sockets of kubelet plugins.
    pub struct KubeletPluginsDir {
        /// The CSI driver of the volume provisioner.
        pub volumes: LayoutSocket = "{driver}.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub kvm: LayoutSocket = "{devices}_kvm.sock", 0o600;
    }

    /// The registration sockets of kubelet plugins.
    pub struct PluginsRegistryDir {
        /// The CSI driver of the volume provisioner.
        pub volumes: LayoutSocket = "{driver}-reg.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub kvm: LayoutSocket = "{devices}_kvm-reg.sock", 0o600;
    }
}
