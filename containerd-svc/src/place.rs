//! Where a containerd keeps what it has.

use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, Error, Mode};

/// The longest path of a Unix socket.
///
/// *Source:* unix(7): `sun_path` has 108 bytes, the last one NUL.
const LONGEST_SOCKET: usize = 107;

/// What stands at the end of the path of containerd's second socket.
const TTRPC: &str = ".ttrpc";

/// The directories of a containerd: what it keeps, and what ends with the machine.
///
/// ```text
/// DATA/config.toml      0600   written at each start
/// DATA/root/            0700   images and file systems of containers
/// DATA/opt/             0711
/// RUN/containerd.sock          its API, and .ttrpc beside it
/// RUN/state/            0711   containers that run
/// RUN/tmp/              0700   its TMPDIR
/// RUN/runsc/            0700   gVisor's state, config.toml and log.fifo
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    data: PathBuf,
    run: PathBuf,
}

/// Why a place is none for a containerd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// A path is relative, or not UTF-8, which containerd's configuration must be.
    #[error("{path} is no absolute path in UTF-8")]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The socket's path would be longer than a socket's can be: choose a shorter directory.
    #[error("{path} is too long for a socket, which has {LONGEST_SOCKET} bytes at most")]
    Socket {
        /// The socket.
        path: PathBuf,
    },
}

impl Place {
    /// Below these two directories, whose parents exist.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn new(data: impl Into<PathBuf>, run: impl Into<PathBuf>) -> Result<Self, PlaceError> {
        let place = Self { data: data.into(), run: run.into() };
        for path in [&place.data, &place.run] {
            if !path.is_absolute() || path.to_str().is_none() {
                return Err(PlaceError::Path { path: path.clone() });
            }
        }
        let socket = place.socket();
        match socket.as_os_str().len() + TTRPC.len() > LONGEST_SOCKET {
            true => Err(PlaceError::Socket { path: socket }),
            false => Ok(place),
        }
    }

    /// What it keeps.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// What ends with the machine.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Where it serves its API, and the runtime interface of Kubernetes where that is on.
    pub fn socket(&self) -> PathBuf {
        self.run.join("containerd.sock")
    }

    /// Where it serves its shims.
    pub(crate) fn ttrpc(&self) -> PathBuf {
        self.run.join(format!("containerd.sock{TTRPC}"))
    }

    /// Its configuration.
    pub fn config(&self) -> PathBuf {
        self.data.join("config.toml")
    }

    /// Its images and file systems.
    pub fn root(&self) -> PathBuf {
        self.data.join("root")
    }

    pub(crate) fn opt(&self) -> PathBuf {
        self.data.join("opt")
    }

    /// The state of its containers.
    pub fn state(&self) -> PathBuf {
        self.run.join("state")
    }

    /// Its `TMPDIR`.
    pub fn tmp(&self) -> PathBuf {
        self.run.join("tmp")
    }

    /// gVisor's state.
    pub fn runsc(&self) -> PathBuf {
        self.run.join("runsc")
    }

    /// The configuration of gVisor's shim.
    pub fn runsc_config(&self) -> PathBuf {
        self.runsc().join("config.toml")
    }

    /// The FIFO into which gVisor writes its log.
    pub fn runsc_log(&self) -> PathBuf {
        self.runsc().join("log.fifo")
    }

    /// Makes the directories, with their modes, also where they were there with others.
    pub(crate) fn make(&self) -> Result<(), Error> {
        let data = ensure(&self.data)?;
        for (name, mode) in [("root", 0o700), ("opt", 0o711)] {
            data.ensure_dir(name, Mode::new(mode))?;
        }
        let run = ensure(&self.run)?;
        for (name, mode) in [("state", 0o711), ("tmp", 0o700), ("runsc", 0o700)] {
            run.ensure_dir(name, Mode::new(mode))?;
        }
        Ok(())
    }
}

/// Opens a directory of the operator's, which keeps its mode; one that is missing is made for its owner alone.
fn ensure(path: &Path) -> Result<Dir, Error> {
    match (Dir::open(path), path.parent(), path.file_name()) {
        (Err(error), Some(parent), Some(name)) if error.is_not_found() => {
            Dir::open(parent)?.ensure_dir(name, Mode::PRIVATE_DIR)
        }
        (opened, ..) => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn directories_are_made_with_their_modes_and_mended() {
        let scratch = tempfile::tempdir().expect("a directory");
        let place = Place::new(scratch.path().join("data"), scratch.path().join("run")).expect("short");
        place.make().expect("made");
        fs::set_permissions(place.state(), fs::Permissions::from_mode(0o777)).expect("set");
        place.make().expect("made again");
        let mode = |path: PathBuf| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        let modes = [place.root(), place.opt(), place.state(), place.tmp(), place.runsc()].map(mode);
        assert_eq!(modes, [0o700, 0o711, 0o711, 0o700, 0o700]);
        assert_eq!(mode(place.data().to_owned()), 0o700);
    }

    #[test]
    fn what_can_not_be_a_place_is_said() {
        assert!(matches!(Place::new("relative", "/run/x"), Err(PlaceError::Path { .. })));
        let long = format!("/{}", "x".repeat(100));
        assert!(matches!(Place::new("/data", long), Err(PlaceError::Socket { .. })));
    }
}
