//! Everything that a node makes below its data directory, by name and mode.
//!
//! ```text
//! <data>/lock                     0600
//!        run/                     0700   control.sock 0600
//!            containerd/          0700   state/ 0711, tmp/ 0700, runsc/ 0700
//!        etcd/                    0700   peer_pki/ 0700, peer_crl 0400, data/ 0700
//!        cluster/                 0700
//!            state/               0700   enrolment.pb 0600, and the journal of the way into the cluster
//!            volume/              0700   etcd/ as above, and who the node is
//!            names/               0755   hosts 0644, machine-id 0644
//!        containerd/              0700   config.toml 0600, root/ 0700, opt/ 0711
//!        volumes/                 0700
//! ```
//!
//! A service's part is placed where the service runs. The plan has the same parts placed in memory, and so knows their
//! paths before anything is made.

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::MemPlacement;
use nodekeel_localstorage::tree::{Directory, Etcd, File, Node, PlaceError, Shape, Site, Socket};
use nodekeel_localstorage::{Dir, Entry, Error, Mode, OsPlacement, Placement};

nodekeel_localstorage::layout! {
    /// The data directory of every node.
    pub(crate) struct Root {
        /// Locked while a node runs; holds its pid.
        pub(crate) lock: File = "lock", 0o600;
        /// What is of no use to the next run.
        pub(crate) run: Directory = "run", 0o700;
    }

    /// In `run`: the control API's part, unless it is served elsewhere.
    pub(crate) struct Control {
        /// Where it is served.
        pub(crate) socket: Socket = "control.sock", 0o600;
    }

    /// In the root: etcd's part.
    pub(crate) struct OfEtcd {
        /// What etcd keeps, as in any node of nodekeel's.
        pub(crate) etcd: Etcd = "etcd", 0o700;
    }

    /// In the root: the cluster's part.
    pub(crate) struct OfCluster {
        /// What the node is there.
        pub(crate) cluster: ClusterPart = "cluster", 0o700;
    }

    /// What a node in a cluster keeps.
    pub(crate) struct ClusterPart {
        /// What is there before its data is: how it got into the cluster.
        pub(crate) state: Directory = "state", 0o700;
        /// Its data.
        pub(crate) volume: Directory = "volume", 0o700;
        /// What this system would be told about itself.
        pub(crate) names: ClusterNames = "names", 0o755;
    }

    /// Names of hosts and of the machine, for whoever links to them.
    pub(crate) struct ClusterNames {
        /// As `/etc/hosts`.
        pub(crate) hosts: File = "hosts", 0o644;
        /// As `/etc/machine-id`.
        pub(crate) machine_id: File = "machine-id", 0o644;
    }

    /// In the root: containerd's part.
    pub(crate) struct OfContainerd {
        /// What it keeps.
        pub(crate) containerd: Containerd = "containerd", 0o700;
    }

    /// What containerd keeps.
    pub(crate) struct Containerd {
        /// Its configuration, written at each start.
        pub(crate) config: File = "config.toml", 0o600;
        /// Images and containers.
        pub(crate) root: Directory = "root", 0o700;
        /// Where it would install what images bring.
        pub(crate) opt: Directory = "opt", 0o711;
    }

    /// In `run`: containerd's part.
    pub(crate) struct RunOfContainerd {
        /// Its sockets, which it makes itself.
        pub(crate) containerd: ContainerdRun = "containerd", 0o700;
    }

    /// What containerd has while it runs.
    pub(crate) struct ContainerdRun {
        /// Its tasks. The processes of containers reach what is theirs in it.
        pub(crate) state: Directory = "state", 0o711;
        /// Its `TMPDIR`.
        pub(crate) tmp: Directory = "tmp", 0o700;
        /// gVisor's state and log.
        pub(crate) runsc: Directory = "runsc", 0o700;
    }

    /// In the root: the provisioner's part.
    pub(crate) struct OfVolumes {
        /// Volumes of pods.
        pub(crate) volumes: Directory = "volumes", 0o700;
    }
}

/// A part of the layout, and what it is placed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Root,
    Etcd,
    Cluster,
    Containerd,
    Volumes,
}

impl Part {
    /// Every directory of the part, from the outermost on, relative to the data directory.
    pub(crate) fn directories(self) -> Vec<String> {
        let mut found = Vec::new();
        match self {
            Self::Root => below(Root::SHAPE, "", &mut found),
            Self::Etcd => below(OfEtcd::SHAPE, "", &mut found),
            Self::Cluster => below(OfCluster::SHAPE, "", &mut found),
            Self::Containerd => {
                below(OfContainerd::SHAPE, "", &mut found);
                below(RunOfContainerd::SHAPE, "run/", &mut found);
            }
            Self::Volumes => below(OfVolumes::SHAPE, "", &mut found),
        }
        found
    }
}

fn below(shape: Shape, prefix: &str, found: &mut Vec<String>) {
    for declared in shape.children() {
        if let Shape::Directory(_) = declared.shape {
            let path = format!("{prefix}{}", declared.name);
            found.push(path.clone());
            below(declared.shape, &format!("{path}/"), found);
        }
    }
}

/// The root as it would be placed in this directory, in memory: for its paths.
pub(crate) fn planned(data: &Path) -> Result<Root, PlaceError> {
    Site::new(Arc::new(MemPlacement::new()), data).place()
}

/// Places the root in a directory that is there.
pub(crate) fn place(data: Dir) -> Result<Root, PlaceError> {
    let path = data.path().to_owned();
    Site::new(Arc::new(Below(OsPlacement::new(data))), path).place()
}

/// All below the data directory. The directory itself is its owner's, and keeps the mode that it has.
#[derive(Debug)]
struct Below(OsPlacement);

impl Placement for Below {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.0.read(path)
    }

    fn write(&self, path: &Path, content: &[u8], mode: Mode) -> Result<(), Error> {
        self.0.write(path, content, mode)
    }

    fn create_dir(&self, path: &Path, mode: Mode) -> Result<(), Error> {
        if path.as_os_str().is_empty() {
            return self.0.dir().sweep().map(drop);
        }
        self.0.create_dir(path, mode)
    }

    fn list(&self, path: &Path) -> Result<Vec<Entry>, Error> {
        self.0.list(path)
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.0.remove(path)
    }

    fn set_mode(&self, path: &Path, mode: Mode) -> Result<bool, Error> {
        self.0.set_mode(path, mode)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::config::Config;

    #[test]
    fn the_plan_knows_the_paths_that_are_placed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(scratch.path()).expect("there");
        let (planned, placed) = (planned(scratch.path()).expect("planned"), place(dir).expect("placed"));
        assert_eq!(planned.lock.path(), placed.lock.path());
        let paths = |root: &Root| {
            let etcd = root.extend::<OfEtcd>().expect("etcd").etcd;
            let containerd = root.extend::<OfContainerd>().expect("containerd").containerd;
            let run = root.run.extend::<RunOfContainerd>().expect("its run").containerd;
            let volumes = root.extend::<OfVolumes>().expect("volumes").volumes;
            let cluster = root.extend::<OfCluster>().expect("cluster").cluster;
            let paths = [etcd.data.path(), containerd.config.path(), run.state.path(), volumes.path()];
            paths.into_iter().chain([cluster.names.hosts.path()]).map(Path::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(paths(&planned), paths(&placed));
        assert!(
            scratch.path().join("etcd/data").is_dir() && scratch.path().join("run/containerd/state").is_dir()
        );
        let all = [Part::Root, Part::Etcd, Part::Cluster, Part::Containerd, Part::Volumes]
            .map(Part::directories)
            .concat();
        for directory in all {
            assert!(scratch.path().join(&directory).is_dir(), "{directory} is declared and not placed");
        }
    }

    #[test]
    fn the_data_directory_keeps_its_mode_and_what_is_below_gets_its_own() {
        let scratch = tempfile::tempdir().expect("a directory");
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o711)).expect("set");
        fs::create_dir(scratch.path().join("run")).expect("made");
        fs::set_permissions(scratch.path().join("run"), fs::Permissions::from_mode(0o777)).expect("set");
        place(Dir::open(scratch.path()).expect("there")).expect("placed");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!((mode(scratch.path()), mode(&scratch.path().join("run"))), (0o711, 0o700));
    }

    #[test]
    fn the_declared_control_socket_is_the_configurations_default() {
        let config = Config::default();
        let control: Control = planned(&config.node.data).expect("planned").run.extend().expect("short");
        assert_eq!(control.socket.path(), config.socket());
        assert_eq!(control.socket.path().to_str(), Some(crate::client::DEFAULT_SOCKET));
    }
}
