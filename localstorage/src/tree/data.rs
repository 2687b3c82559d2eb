//! The data partition: what lasts.

use super::{Directory, File, Socket};

crate::layout! {
    /// The data partition.
    pub struct Data {
        /// containerd's images and containers.
        pub containerd: Directory = "containerd", 0o700;
        /// The node's member of the cluster's etcd.
        pub etcd: Etcd = "etcd", 0o700;
        /// The parts of Kubernetes.
        pub kubernetes: Kubernetes = "kubernetes", 0o700;
        /// Who the node is.
        pub node: Identity = "node", 0o700;
        /// Volumes of pods. Nobody but their provisioner enters the directory itself.
        pub volumes: Directory = "volumes", 0o700;
    }

    /// The node's member of the cluster's etcd.
    pub struct Etcd {
        /// By which members know each other.
        pub peer_pki: Pki = "peer_pki", 0o700;
        /// Members no longer trusted: a list of revoked certificates, as DER.
        pub peer_crl: File = "peer_crl", 0o400;
        /// The database.
        pub data: Directory = "data", 0o700;
    }

    /// A certificate with its key and its authority.
    ///
    /// With the feature `pki` it has methods that keep the three together.
    pub struct Pki {
        /// The authority's certificate.
        pub ca: File = "ca.pem", 0o600;
        /// The certificate.
        pub certificate: File = "cert.pem", 0o600;
        /// Its private key.
        pub key: File = "cert-key.pem", 0o600;
    }

    /// Who the node is.
    pub struct Identity {
        /// Its certificate in the cluster.
        pub credentials: Pki = "credentials", 0o700;
        /// What it was last told to run, as protobuf.
        pub roles: File = "roles.pb", 0o400;
    }

    /// The parts of Kubernetes.
    pub struct Kubernetes {
        /// The network between nodes.
        pub cluster_networking: ClusterNetworking = "clusternet", 0o700;
        /// The provisioner of volumes.
        pub csi_provisioner: Credentialed = "csiprovisioner", 0o700;
        /// Services of the network.
        pub netservices: Credentialed = "netservices", 0o700;
        /// The kubelet.
        pub kubelet: Kubelet = "kubelet", 0o700;
    }

    /// The network between nodes.
    pub struct ClusterNetworking {
        /// Its private key.
        pub key: File = "private.key", 0o600;
    }

    /// A client of the API server.
    pub struct Credentialed {
        /// By which it is known there.
        pub pki: Pki = "pki", 0o700;
    }

    /// The kubelet's root directory. The names in it are the kubelet's own.
    pub struct Kubelet {
        /// By which it is known to the API server.
        pub pki: Pki = "pki", 0o700;
        /// Where plugins for devices find it.
        pub device_plugins: DevicePlugins = "device-plugins", 0o700;
        /// Logs of pods.
        pub logs: Directory = "logs", 0o700;
        /// Where it finds plugins.
        pub plugins: Plugins = "plugins", 0o700;
        /// Where it looks for new ones.
        pub plugins_registry: PluginsRegistry = "plugins_registry", 0o700;
    }

    /// Where plugins for devices find the kubelet.
    pub struct DevicePlugins {
        /// Where it listens.
        pub kubelet: Socket = "kubelet.sock", 0o600;
    }

    /// Where the kubelet finds plugins.
    pub struct Plugins {
        /// The driver that provisions volumes.
        pub volumes: Socket = "{driver}.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub kvm: Socket = "{devices}_kvm.sock", 0o600;
    }

    /// Where the kubelet looks for new plugins.
    pub struct PluginsRegistry {
        /// The driver that provisions volumes.
        pub volumes: Socket = "{driver}-reg.sock", 0o600;
        /// The device plugin for `/dev/kvm`.
        pub kvm: Socket = "{devices}_kvm-reg.sock", 0o600;
    }
}
