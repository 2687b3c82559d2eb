//! Everything that a node creates below its data directory, by name and mode.
//!
//! ```text
//! <data>/lock                     0600
//!        run/                     0700   control.sock 0600
//!            containerd/          0700   state/ 0711, tmp/ 0700, runsc/ 0700
//!        etcd/                    0700   peer_pki/ 0700, peer_crl 0400, data/ 0700
//!        cluster/                 0700
//!            state/               0700   enrolment.pb 0600, and the step journal of the enrolment
//!            volume/              0700   etcd/ as above, and the node's identity
//!            names/               0755   hosts 0644, machine-id 0644
//!        containerd/              0700   config.toml 0600, root/ 0700, opt/ 0711
//!        volumes/                 0700
//! ```
//!
//! The part of a service is placed if the service runs. The plan places the same parts in memory, and so
//! knows their paths before anything is created.

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::MemFileStore;
use nodekeel_localstorage::tree::{
    EntryShape, EtcdDir, LayoutDir, LayoutEntry, LayoutError, LayoutFile, LayoutSocket, LayoutTarget,
};
use nodekeel_localstorage::{Dir, DirEntry, Error, FileMode, FileStore, OsFileStore};

nodekeel_localstorage::layout! {
    /// The data directory of every node.
    pub(crate) struct DataLayout {
        /// Locked while a node runs; contains its pid.
        pub(crate) lock: LayoutFile = "lock", 0o600;
        /// Files that are only used while noded runs.
        pub(crate) run: LayoutDir = "run", 0o700;
    }

    /// In `run`: the part of the control API, unless `control.socket` is set.
    pub(crate) struct ControlLayout {
        /// The control socket.
        pub(crate) socket: LayoutSocket = "control.sock", 0o600;
    }

    /// In the root: the part of etcd.
    pub(crate) struct EtcdLayout {
        /// etcd's directory, as in every nodekeel node.
        pub(crate) etcd: EtcdDir = "etcd", 0o700;
    }

    /// In the root: the part of the cluster.
    pub(crate) struct ClusterLayout {
        /// The cluster's directory.
        pub(crate) cluster: ClusterDir = "cluster", 0o700;
    }

    /// The directory of cluster membership.
    pub(crate) struct ClusterDir {
        /// The enrolment: ticket and step journal. Exists before the volume.
        pub(crate) state: LayoutDir = "state", 0o700;
        /// Its data volume.
        pub(crate) volume: LayoutDir = "volume", 0o700;
        /// Names of this machine.
        pub(crate) names: ClusterNames = "names", 0o755;
    }

    /// Names of hosts and of the machine, as targets of symbolic links.
    pub(crate) struct ClusterNames {
        /// As `/etc/hosts`.
        pub(crate) hosts: LayoutFile = "hosts", 0o644;
        /// As `/etc/machine-id`.
        pub(crate) machine_id: LayoutFile = "machine-id", 0o644;
    }

    /// In the root: the part of containerd.
    pub(crate) struct ContainerdLayout {
        /// containerd's directory.
        pub(crate) containerd: ContainerdDir = "containerd", 0o700;
    }

    /// The persistent directory of containerd.
    pub(crate) struct ContainerdDir {
        /// Its configuration, written at each start.
        pub(crate) config: LayoutFile = "config.toml", 0o600;
        /// Images and containers.
        pub(crate) root: LayoutDir = "root", 0o700;
        /// containerd's `opt` plugin installs software from images here.
        pub(crate) opt: LayoutDir = "opt", 0o711;
    }

    /// In `run`: the part of containerd.
    pub(crate) struct ContainerdRunLayout {
        /// Its sockets, which it creates itself.
        pub(crate) containerd: ContainerdRunDir = "containerd", 0o700;
    }

    /// The runtime directory of containerd.
    pub(crate) struct ContainerdRunDir {
        /// Its tasks. Processes of containers access their files in it, hence 0711.
        pub(crate) state: LayoutDir = "state", 0o711;
        /// Its `TMPDIR`.
        pub(crate) tmp: LayoutDir = "tmp", 0o700;
        /// gVisor's state and log.
        pub(crate) runsc: LayoutDir = "runsc", 0o700;
    }

    /// In the root: the part of the provisioner.
    pub(crate) struct VolumesLayout {
        /// Volumes of pods.
        pub(crate) volumes: LayoutDir = "volumes", 0o700;
    }
}

/// All directories of a layout, parents first, relative to the data directory; `prefix` is where the layout lies.
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
    LayoutTarget::new(Arc::new(DataPlacement(OsFileStore::new(data))), path).create_layout()
}

/// Places everything below the data directory. The directory itself keeps its mode, which is its owner's
/// decision.
#[derive(Debug)]
struct DataPlacement(OsFileStore);

impl FileStore for DataPlacement {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.0.read(path)
    }

    fn write(&self, path: &Path, content: &[u8], mode: FileMode) -> Result<(), Error> {
        self.0.write(path, content, mode)
    }

    fn create_dir(&self, path: &Path, mode: FileMode) -> Result<(), Error> {
        if path.as_os_str().is_empty() {
            return self.0.dir().remove_stale_files().map(drop);
        }
        self.0.create_dir(path, mode)
    }

    fn list(&self, path: &Path) -> Result<Vec<DirEntry>, Error> {
        self.0.list(path)
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.0.remove(path)
    }

    fn set_mode(&self, path: &Path, mode: FileMode) -> Result<bool, Error> {
        self.0.set_mode(path, mode)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::config::NodedConfig;

    #[test]
    fn the_planned_paths_are_the_created_ones() {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(scratch.path()).expect("there");
        let (planned, placed) =
            (layout_in_memory(scratch.path()).expect("planned"), place_layout(dir).expect("placed"));
        assert_eq!(planned.lock.path(), placed.lock.path());
        let paths = |root: &DataLayout| {
            let etcd = root.add_layout::<EtcdLayout>().expect("etcd").etcd;
            let containerd = root.add_layout::<ContainerdLayout>().expect("containerd").containerd;
            let run = root.run.add_layout::<ContainerdRunLayout>().expect("its run").containerd;
            let volumes = root.add_layout::<VolumesLayout>().expect("volumes").volumes;
            let cluster = root.add_layout::<ClusterLayout>().expect("cluster").cluster;
            let paths = [etcd.data.path(), containerd.config.path(), run.state.path(), volumes.path()];
            paths.into_iter().chain([cluster.names.hosts.path()]).map(Path::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(paths(&planned), paths(&placed));
        assert!(
            scratch.path().join("etcd/data").is_dir() && scratch.path().join("run/containerd/state").is_dir()
        );
        let all = [
            directories_of::<DataLayout>(""),
            directories_of::<EtcdLayout>(""),
            directories_of::<ClusterLayout>(""),
            directories_of::<ContainerdLayout>(""),
            directories_of::<ContainerdRunLayout>("run/"),
            directories_of::<VolumesLayout>(""),
        ]
        .concat();
        for directory in all {
            assert!(scratch.path().join(&directory).is_dir(), "{directory} is declared but not created");
        }
    }

    #[test]
    fn the_data_directory_keeps_its_mode_and_its_subdirectories_get_theirs() {
        let scratch = tempfile::tempdir().expect("a directory");
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o711)).expect("set");
        fs::create_dir(scratch.path().join("run")).expect("made");
        fs::set_permissions(scratch.path().join("run"), fs::Permissions::from_mode(0o777)).expect("set");
        place_layout(Dir::open(scratch.path()).expect("there")).expect("placed");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!((mode(scratch.path()), mode(&scratch.path().join("run"))), (0o711, 0o700));
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
