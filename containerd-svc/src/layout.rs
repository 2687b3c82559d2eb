//! The directory layout of a containerd.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::mem::MemFileStore;
use nodekeel_localstorage::tree::{EntryShape, LayoutDir, LayoutEntry, LayoutFile, LayoutTarget};
use nodekeel_localstorage::{Dir, Error, FileMode};

/// Maximum length of the path of a Unix socket.
///
/// *Source:* unix(7): `sun_path` has 108 bytes, the last one NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The suffix of containerd's second socket.
const TTRPC_SUFFIX: &str = ".ttrpc";

nodekeel_localstorage::layout! {
    /// The persistent directory of a containerd.
    pub struct ContainerdDataDir {
        /// The configuration, written at each start.
        pub config: LayoutFile = "config.toml", 0o600;
        /// Images and snapshots.
        pub root: LayoutDir = "root", 0o700;
        /// containerd's `opt` plugin installs software from images here.
        pub opt: LayoutDir = "opt", 0o711;
    }

    /// The runtime directory of a containerd, which creates its sockets in it.
    pub struct ContainerdRunDir {
        /// Running containers, whose processes access their files in it: hence 0711.
        pub state: LayoutDir = "state", 0o711;
        /// The `TMPDIR` of the daemon.
        pub tmp: LayoutDir = "tmp", 0o700;
        /// gVisor's state, `config.toml` and `log`.
        pub runsc: LayoutDir = "runsc", 0o700;
    }
}

/// The directories of a containerd: persistent data, and runtime state until the next boot. containerd itself creates
/// `containerd.sock` and `containerd.sock.ttrpc` in the latter.
#[derive(Debug, Clone)]
pub struct DirectoryLayout {
    data: ContainerdDataDir,
    run: ContainerdRunDir,
}

/// Two layouts are equal if they have the same directories.
impl PartialEq for DirectoryLayout {
    fn eq(&self, other: &Self) -> bool {
        [self.data_dir(), self.run_dir()] == [other.data_dir(), other.run_dir()]
    }
}

impl Eq for DirectoryLayout {}

/// An invalid directory layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidDirectories {
    /// A path is relative or not UTF-8, the encoding of containerd's configuration.
    #[error("invalid path {path} for containerd: use an absolute path in UTF-8")]
    InvalidPath {
        /// The path.
        path: PathBuf,
    },
    /// The socket path is too long: choose a shorter directory.
    #[error(
        "containerd's socket path {path} exceeds {MAX_SOCKET_PATH_BYTES} bytes with the suffix that \
         containerd adds: choose a shorter directory"
    )]
    SocketTooLong {
        /// The socket.
        path: PathBuf,
    },
}

impl DirectoryLayout {
    /// Below these two directories, which the start creates if they are missing.
    ///
    /// # Errors
    /// See [`InvalidDirectories`].
    pub fn new(data: impl Into<PathBuf>, run: impl Into<PathBuf>) -> Result<Self, InvalidDirectories> {
        let (data, run) = (data.into(), run.into());
        for path in [&data, &run] {
            if !path.is_absolute() || path.to_str().is_none() {
                return Err(InvalidDirectories::InvalidPath { path: path.clone() });
            }
        }
        let layout = Self { data: place_in_memory(data), run: place_in_memory(run) };
        let socket = layout.socket_path();
        if socket.as_os_str().len() + TTRPC_SUFFIX.len() > MAX_SOCKET_PATH_BYTES {
            return Err(InvalidDirectories::SocketTooLong { path: socket });
        }
        Ok(layout)
    }

    /// The paths of persistent data. A start creates them; reading or writing through these handles does not reach
    /// the disk.
    pub fn data(&self) -> &ContainerdDataDir {
        &self.data
    }

    /// The paths of runtime state, which does not survive a reboot, as [`data`](Self::data).
    pub fn run(&self) -> &ContainerdRunDir {
        &self.run
    }

    /// The directory of persistent data.
    pub fn data_dir(&self) -> &Path {
        self.data.path()
    }

    /// The directory of runtime state.
    pub fn run_dir(&self) -> &Path {
        self.run.path()
    }

    /// Images and snapshots.
    pub fn root_dir(&self) -> PathBuf {
        self.data.root.path().to_owned()
    }

    /// The socket of the API, and of the CRI if that is enabled.
    pub fn socket_path(&self) -> PathBuf {
        self.run_dir().join("containerd.sock")
    }

    /// The socket for shims.
    pub(crate) fn ttrpc_path(&self) -> PathBuf {
        self.run_dir().join(format!("containerd.sock{TTRPC_SUFFIX}"))
    }

    /// The configuration of gVisor's shim.
    pub fn runsc_config_path(&self) -> PathBuf {
        self.run.runsc.path().join("config.toml")
    }

    /// The file to which gVisor appends its log.
    pub fn runsc_log_path(&self) -> PathBuf {
        self.run.runsc.path().join("log")
    }

    /// Creates the directories and sets the modes of existing ones.
    pub(crate) fn create_dirs(&self) -> Result<(), Error> {
        create_declared::<ContainerdDataDir>(self.data_dir())?;
        create_declared::<ContainerdRunDir>(self.run_dir())
    }
}

/// Places a layout in memory, to know its paths before it is created on the disk.
fn place_in_memory<L: LayoutEntry>(path: PathBuf) -> L {
    let placed = LayoutTarget::new(Arc::new(MemFileStore::new()), path).create_layout();
    placed.expect("the names are checked when this is compiled, and memory accepts each")
}

/// Creates the directories of a layout below the operator's directory, which keeps its mode if it exists.
fn create_declared<L: LayoutEntry>(path: &Path) -> Result<(), Error> {
    let dir = Dir::open_or_create(path, FileMode::PRIVATE_DIR)?;
    for entry in L::SHAPE.child_entries() {
        if let EntryShape::Directory(_) = entry.shape {
            dir.ensure_dir(entry.name, entry.mode)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn directories_are_created_and_their_modes_repaired() {
        let scratch = tempfile::tempdir().expect("a directory");
        let layout =
            DirectoryLayout::new(scratch.path().join("data"), scratch.path().join("run")).expect("short");
        layout.create_dirs().expect("created");
        fs::set_permissions(layout.run().state.path(), fs::Permissions::from_mode(0o777)).expect("set");
        layout.create_dirs().expect("created again");
        let (data, run) = (layout.data(), layout.run());
        let modes = [&**data, &data.root, &data.opt, &run.state, &run.tmp, &run.runsc]
            .map(|dir| fs::metadata(dir.path()).expect("there").permissions().mode() & 0o7777);
        assert_eq!(modes, [0o700, 0o700, 0o711, 0o711, 0o700, 0o700]);
    }

    #[test]
    fn invalid_paths_are_rejected() {
        assert!(matches!(
            DirectoryLayout::new("relative", "/run/x"),
            Err(InvalidDirectories::InvalidPath { .. })
        ));
        let long = format!("/{}", "x".repeat(100));
        assert!(matches!(DirectoryLayout::new("/data", long), Err(InvalidDirectories::SocketTooLong { .. })));
    }
}
