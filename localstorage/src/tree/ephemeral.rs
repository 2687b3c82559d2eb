//! Files that last until the next boot.

use super::{LayoutDir, LayoutFifo, LayoutFile, LayoutSocket};

crate::layout! {
    /// Files that last until the next boot.
    pub struct EphemeralDir {
        /// etcd.
        pub consensus: EtcdRunDir = "consensus", 0o700;
        /// containerd. The processes of containers access their files in it.
        pub containerd: ContainerdRunDir = "containerd", 0o755;
        /// FlexVolume plugins, the predecessors of CSI drivers.
        pub flexvolume_plugins: LayoutDir = "flexvolume_plugins", 0o700;
        /// The machine ID, which `/etc/machine-id` links to.
        pub machine_id: LayoutFile = "machine-id", 0o444;
    }

    /// etcd.
    pub struct EtcdRunDir {
        /// The socket for local clients.
        pub client: LayoutSocket = "client.sock", 0o600;
        /// The pipe for its log.
        pub server_logs: LayoutFifo = "server-logs.fifo", 0o600;
    }

    /// containerd.
    pub struct ContainerdRunDir {
        /// The socket it listens on.
        pub client: LayoutSocket = "client.sock", 0o600;
        /// The pipe for gVisor's log.
        pub runsc_logs: LayoutFifo = "runsc-logs.fifo", 0o600;
        /// Temporary files, which the processes of containers access.
        pub tmp: LayoutDir = "tmp", 0o755;
        /// The state of gVisor.
        pub runsc: LayoutDir = "runsc", 0o700;
        /// The IP addresses in use.
        pub ipam: LayoutDir = "ipam", 0o700;
        /// The generated configuration of the container network.
        pub cni: LayoutDir = "cni", 0o700;
        /// The cached results of CNI calls.
        pub cni_cache: LayoutDir = "cni-cache", 0o700;
    }
}
