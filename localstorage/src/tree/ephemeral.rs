//! What lasts until the next boot.

use super::{Directory, Fifo, File, Socket};

crate::layout! {
    /// What lasts until the next boot.
    pub struct Ephemeral {
        /// etcd.
        pub consensus: Consensus = "consensus", 0o700;
        /// containerd. Containers' processes reach what is theirs in it.
        pub containerd: Containerd = "containerd", 0o755;
        /// Plugins that the kubelet looks for by an old name.
        pub flexvolume_plugins: Directory = "flexvolume_plugins", 0o700;
        /// The machine's id, which `/etc/machine-id` links to.
        pub machine_id: File = "machine-id", 0o444;
    }

    /// etcd.
    pub struct Consensus {
        /// Where it listens for the node itself.
        pub client: Socket = "client.sock", 0o600;
        /// Through which it logs.
        pub server_logs: Fifo = "server-logs.fifo", 0o600;
    }

    /// containerd.
    pub struct Containerd {
        /// Where it listens.
        pub client: Socket = "client.sock", 0o600;
        /// Through which gVisor logs.
        pub runsc_logs: Fifo = "runsc-logs.fifo", 0o600;
        /// Its scratch files, which containers' processes reach.
        pub tmp: Directory = "tmp", 0o755;
        /// State of gVisor.
        pub runsc: Directory = "runsc", 0o700;
        /// Addresses in use.
        pub ipam: Directory = "ipam", 0o700;
        /// Generated configuration of the containers' network.
        pub cni: Directory = "cni", 0o700;
        /// What was last done by it.
        pub cni_cache: Directory = "cni-cache", 0o700;
    }
}
