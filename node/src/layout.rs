//! Everything that a node creates, by name and mode: in its data directory, and on its data volume.
//!
//! ```text
//! <node.data>/lock                0600
//!             run/                0711  control.sock 0600
//!                 containerd/     0700  state/ 0711, tmp/ 0700, runsc/ 0700
//!                 storage/        0700  copies of the headers of an encrypted volume, while cryptsetup reads them
//!                 processes/      0700  records of child processes, and the output of kept ones
//!                 notify/         0711  the sockets of services for sd_notify(3), each 0600 of its service's user
//!             esp/                0700  data-volume.id 0600; with [cluster]: enrolment.pb 0600, and the step journal of
//!                                       the enrolment, and enrolment.starts 0400; with a volume on a disk: UUID.N.key 0600, data-volume.record 0600,
//!                                       and the step journal of its creation; data-volume.faults 0600 and
//!                                       data-volume.scrub 0600 once there was one
//!             api/                0700  with [api]: key 0600; with [cluster] or [worker]: peers 0600; with
//!                                       [worker]: membership 0600
//!             names/              0755  with [cluster]: hosts 0644, machine-id 0644
//!             data/               0755  the mount point of the data volume
//!             data.mounted        0600  if a file system was mounted there
//!
//! <volume>/   .data-volume-id     0600
//!             cluster/            0700  the node's identity, etcd/ as below, and peer-keys 0600
//!             etcd/               0700  client/ 0700, peer_pki/ 0700, peer_crl 0400, data/ 0700
//!             containerd/         0700  config.toml 0600, root/ 0700, opt/ 0711
//!             volumes/            0700
//! ```
//!
//! This is the only layout of a node. A crate declares the directories in which it keeps files ([`EtcdLayout`],
//! [`LocalNamesDir`], [`ContainerdDataDir`]), and this layout is composed of them. Entries outside of the volume are
//! placed before anything runs; those on it, when root.storage has opened it. The plan places the same layouts in
//! memory, and so knows their paths before anything is created.

use std::path::Path;
use std::sync::Arc;

use nodekeel_cluster::node::LocalNamesDir;
use nodekeel_containerd_svc::{ContainerdDataDir, ContainerdRunDir};
use nodekeel_localstorage::mem::MemFileStore;
use nodekeel_localstorage::tree::{
    EntryShape, LayoutDir, LayoutEntry, LayoutError, LayoutFile, LayoutSocket, LayoutTarget,
};
use nodekeel_localstorage::{Dir, FileMode, OsFileStore};

pub(crate) use nodekeel_cluster::consensus::etcd::EtcdLayout;

nodekeel_localstorage::layout! {
    /// The data directory of every node.
    pub(crate) struct DataLayout {
        /// Locked while a node runs; contains its pid.
        pub(crate) lock: LayoutFile = "lock", 0o600;
        /// Files that are only used while noded runs. Users of services pass it on the way to their sockets.
        pub(crate) run: LayoutDir = "run", 0o711;
    }

    /// In the data directory: the part of storage.
    pub(crate) struct StorageLayout {
        /// The files that the node needs before its volume is open, as on the EFI system partition.
        pub(crate) esp: LayoutDir = "esp", 0o700;
        /// The mount point of the data volume.
        pub(crate) data: LayoutDir = "data", 0o755;
        /// Exists once a file system was mounted there: without it, the volume is not there.
        pub(crate) mounted: LayoutFile = "data.mounted", 0o600;
    }

    /// In `run`: the part of storage.
    pub(crate) struct StorageRunLayout {
        /// Copies of the headers of encrypted volumes, while cryptsetup reads them, and the record of the open volume.
        pub(crate) storage: LayoutDir = "storage", 0o700;
    }

    /// In the data directory: the part of the API for other machines.
    pub(crate) struct ApiLayout {
        /// The identity of the node in its API: not on the volume, which an operator may have to unlock by it.
        pub(crate) api: ApiDir = "api", 0o700;
    }

    /// The directory of the API's identity.
    pub(crate) struct ApiDir {
        /// The private key of the node, in PEM.
        pub(crate) key: LayoutFile = "key", 0o600;
        /// The other nodes of the cluster, which it may ask for its half of the volume's key.
        pub(crate) peers: LayoutFile = "peers", 0o600;
        /// Of a worker: its name in its cluster, and what the cluster has told it.
        pub(crate) membership: LayoutFile = "membership", 0o600;
    }

    /// In the data directory: the part of the cluster.
    pub(crate) struct NamesLayout {
        /// Names of this machine: links to them work before the volume is open.
        pub(crate) names: LocalNamesDir = "names", 0o755;
    }

    /// In `run`: the part of the control API, unless `control.socket` is set.
    pub(crate) struct ControlLayout {
        /// The control socket.
        pub(crate) socket: LayoutSocket = "control.sock", 0o600;
    }

    /// In `run`: what outlives noded when it is killed.
    pub(crate) struct ProcessesLayout {
        /// The records of its child processes.
        pub(crate) processes: LayoutDir = "processes", 0o700;
        /// The sockets to which they report by sd_notify(3).
        pub(crate) notify: LayoutDir = "notify", 0o711;
    }

    /// On the volume: the part of the cluster.
    pub(crate) struct ClusterLayout {
        /// The cluster's volume: the node's identity, and its etcd.
        pub(crate) cluster: LayoutDir = "cluster", 0o700;
    }

    /// In `run`: the part of a cluster in memory.
    pub(crate) struct MemoryClusterLayout {
        /// The cluster's directory.
        pub(crate) cluster: MemoryClusterDir = "cluster", 0o700;
    }

    /// The directory of a cluster in memory.
    pub(crate) struct MemoryClusterDir {
        /// The enrolment: ticket and step journal.
        pub(crate) state: LayoutDir = "state", 0o700;
        /// The data volume of the cluster.
        pub(crate) volume: LayoutDir = "volume", 0o700;
        /// Names of this machine.
        pub(crate) names: LocalNamesDir = "names", 0o755;
    }

    /// On the volume: the part of containerd.
    pub(crate) struct ContainerdLayout {
        /// containerd's directory.
        pub(crate) containerd: ContainerdDataDir = "containerd", 0o700;
    }

    /// In `run`: the part of containerd.
    pub(crate) struct ContainerdRunLayout {
        /// containerd's runtime directory.
        pub(crate) containerd: ContainerdRunDir = "containerd", 0o700;
    }

    /// On the volume: the part of the provisioner.
    pub(crate) struct VolumesLayout {
        /// Volumes of pods.
        pub(crate) volumes: LayoutDir = "volumes", 0o700;
    }
}

/// The name of the directory with the files that the node needs before its volume is open, as the layout declares it.
pub(crate) const ESP_DIR: &str = "esp";

/// The path of what a worker keeps of its cluster, as the layout declares it.
pub(crate) const MEMBERSHIP: &str = "api/membership";

/// The name of the data volume's mount point, as the layout declares it.
pub(crate) const VOLUME_DIR: &str = "data";

/// The name of the cluster's directory on it, as the layout declares it.
pub(crate) const CLUSTER_DIR: &str = "cluster";

/// Next to it: the decrypted snapshot from which the cluster is restored, until it is.
pub(crate) const RESTORE_FILE: &str = "cluster.restore";

/// The name of the directory of volumes on it, as the layout declares it.
pub(crate) const VOLUMES_DIR: &str = "volumes";

/// The mode of the mount point, as the layout declares it.
pub(crate) const VOLUME_MODE: FileMode = FileMode::new(0o755);

/// The reason why a part can be placed in memory: nothing conflicts there, and a part without a socket has no path that
/// is too long.
pub(crate) const PLACED_IN_MEMORY: &str = "a part without sockets can be placed in memory";

/// The start of the paths of a volume that the program provides: its mount point is known once it is open.
const PROVIDED_VOLUME: &str = "/<volume>";

nodekeel_localstorage::layout! {
    /// The data volume, for the layouts on it.
    pub(crate) struct VolumeLayout {}
}

/// Places the data volume in memory, to know the paths that it would have below this data directory.
pub(crate) fn volume_in_memory(data: &Path, is_provided: bool) -> Result<VolumeLayout, LayoutError> {
    let path = if is_provided { PROVIDED_VOLUME.into() } else { data.join(VOLUME_DIR) };
    // Nothing is created: the memory store only checks names and computes paths.
    LayoutTarget::new(Arc::new(MemFileStore::new()), path).create_layout()
}

/// All directories of a layout, parents first, relative to the data directory; `prefix` is where the layout is.
pub(crate) fn directories_of<L: LayoutEntry>(prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    collect_directories(L::SHAPE, prefix, &mut found);
    found
}

fn collect_directories(shape: EntryShape, prefix: &str, found: &mut Vec<String>) {
    for declared in shape.child_entries() {
        if let EntryShape::Directory(_) = declared.shape {
            let path = format!("{prefix}{}", declared.name);
            found.push(path.clone());
            collect_directories(declared.shape, &format!("{path}/"), found);
        }
    }
}

/// Places the root in memory, to know the paths that it would have in this directory.
pub(crate) fn layout_in_memory(data: &Path) -> Result<DataLayout, LayoutError> {
    LayoutTarget::new(Arc::new(MemFileStore::new()), data).create_layout()
}

/// Places the root in an existing directory.
pub(crate) fn place_layout(data: Dir) -> Result<DataLayout, LayoutError> {
    let path = data.path().to_owned();
    // The mode of the data directory itself is its owner's decision.
    LayoutTarget::new(Arc::new(OsFileStore::new(data).keep_root_mode()), path).create_layout()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use nodekeel_localstorage::tree::BrandNames;

    use super::*;
    use crate::config::NodedConfig;

    #[test]
    fn the_planned_paths_are_the_created_ones() {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(scratch.path()).expect("there");
        let (planned, placed) =
            (layout_in_memory(scratch.path()).expect("planned"), place_layout(dir).expect("placed"));
        assert_eq!(planned.lock.path(), placed.lock.path());
        let storage: StorageLayout = placed.add_layout().expect("storage");
        assert_eq!(storage.data.path(), scratch.path().join(VOLUME_DIR));
        let volume = volume_in_memory(scratch.path(), false).expect("planned");
        let paths = |root: &DataLayout, volume: &LayoutDir| {
            let etcd = volume.add_layout::<EtcdLayout>().expect("etcd").etcd;
            let containerd = volume.add_layout::<ContainerdLayout>().expect("containerd").containerd;
            let run = root.run.add_layout::<ContainerdRunLayout>().expect("its run").containerd;
            let volumes = volume.add_layout::<VolumesLayout>().expect("volumes").volumes;
            let names = root.add_layout::<NamesLayout>().expect("names").names;
            let paths = [etcd.data.path(), containerd.config.path(), run.state.path(), volumes.path()];
            paths.into_iter().chain([names.hosts.path()]).map(Path::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(paths(&planned, &volume), paths(&placed, &storage.data));
        let all = [
            directories_of::<DataLayout>(""),
            directories_of::<StorageLayout>(""),
            directories_of::<NamesLayout>(""),
            directories_of::<EtcdLayout>("data/"),
            directories_of::<ContainerdLayout>("data/"),
            directories_of::<ContainerdRunLayout>("run/"),
            directories_of::<VolumesLayout>("data/"),
        ]
        .concat();
        for directory in all {
            assert!(scratch.path().join(&directory).is_dir(), "{directory} is declared but not created");
        }
        let provided = volume_in_memory(scratch.path(), true).expect("planned");
        assert!(provided.path().starts_with("/<volume>"), "{provided:?}");
    }

    /// Names and modes that are on disks. A change would need a migration.
    #[test]
    fn every_name_and_mode_is_that_of_the_first_release() {
        fn outline<L: LayoutEntry>() -> String {
            L::SHAPE.render_outline(&BrandNames::default())
        }
        assert_eq!(outline::<ApiLayout>(), "0700 api/\n0600   key\n0600   peers\n0600   membership\n");
        let data = [outline::<DataLayout>(), outline::<StorageLayout>(), outline::<NamesLayout>()].concat();
        let names = "0755 names/\n0644   hosts\n0644   machine-id\n";
        assert_eq!(data, format!("0600 lock\n0711 run/\n0700 esp/\n0755 data/\n0600 data.mounted\n{names}"));
        let run =
            [outline::<ControlLayout>(), outline::<ProcessesLayout>(), outline::<ContainerdRunLayout>()];
        let containerd = "0700 containerd/\n0711   state/\n0700   tmp/\n0700   runsc/\n";
        assert_eq!(run.concat(), format!("0600 control.sock=\n0700 processes/\n0711 notify/\n{containerd}"));
        let volume = [outline::<ClusterLayout>(), outline::<ContainerdLayout>(), outline::<VolumesLayout>()];
        let containerd = "0700 containerd/\n0600   config.toml\n0700   root/\n0711   opt/\n";
        assert_eq!(volume.concat(), format!("0700 cluster/\n{containerd}0700 volumes/\n"));
        let pki = "0700   peer_pki/\n0600     ca.pem\n0600     cert.pem\n0600     cert-key.pem\n";
        assert_eq!(outline::<EtcdLayout>(), format!("0700 etcd/\n{pki}0400   peer_crl\n0700   data/\n"));
        let memory = "0700 cluster/\n0700   state/\n0700   volume/\n0755   names/\n0644     hosts\n0644     machine-id\n";
        assert_eq!(outline::<MemoryClusterLayout>(), memory);
    }

    #[test]
    fn the_mode_of_the_volume_is_the_declared_one() {
        let declared = StorageLayout::SHAPE.child_entries().iter().find(|entry| entry.name == VOLUME_DIR);
        assert_eq!(declared.expect("declared").mode, VOLUME_MODE);
    }

    #[test]
    fn the_data_directory_keeps_its_mode_and_its_subdirectories_get_theirs() {
        let scratch = tempfile::tempdir().expect("a directory");
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o711)).expect("set");
        fs::create_dir(scratch.path().join("run")).expect("made");
        fs::set_permissions(scratch.path().join("run"), fs::Permissions::from_mode(0o777)).expect("set");
        place_layout(Dir::open(scratch.path()).expect("there")).expect("placed");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!((mode(scratch.path()), mode(&scratch.path().join("run"))), (0o711, 0o711));
    }

    #[test]
    fn the_declared_control_socket_is_the_default_of_the_configuration() {
        let config = NodedConfig::default();
        let control: ControlLayout =
            layout_in_memory(&config.node.data).expect("planned").run.add_layout().expect("short");
        assert_eq!(control.socket.path(), config.control_socket());
        assert_eq!(control.socket.path().to_str(), Some(crate::client::DEFAULT_SOCKET));
    }
}
