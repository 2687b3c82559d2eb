//! What has to be so before a containerd is started.

use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, Error, Mode, SocketState};

use crate::place::Place;

/// Why a containerd can't be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// A directory can't be made, or a file not be written.
    #[error("make what containerd needs")]
    Make(#[source] Error),
    /// Another program has the socket, or may have it: end it, or take another place. A retry helps once it has ended.
    #[error("another program answers at {path}")]
    Served {
        /// The socket.
        path: PathBuf,
    },
    /// Something else is where the socket should be: remove it.
    #[error("{path} is no socket, and in the way of one")]
    NotASocket {
        /// What is in the way.
        path: PathBuf,
    },
}

/// Makes a place's directories with their modes, writes the configurations of containerd and of gVisor's shim, and removes
/// sockets that nobody serves any more. It blocks, and can be called again at any time before the start.
///
/// # Errors
/// See [`PrepareError`].
pub fn prepare(place: &Place, config: &str, runsc: Option<&str>) -> Result<(), PrepareError> {
    place.make().map_err(PrepareError::Make)?;
    write(&place.config(), config)?;
    if let Some(runsc) = runsc {
        write(&place.runsc_config(), runsc)?;
    }
    for socket in [place.socket(), place.ttrpc()] {
        clear(&socket)?;
    }
    Ok(())
}

/// A file and the directory in which it lies.
fn split(path: &Path) -> Result<(Dir, &std::ffi::OsStr), PrepareError> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    Dir::open(directory).map(|directory| (directory, name)).map_err(PrepareError::Make)
}

fn write(path: &Path, text: &str) -> Result<(), PrepareError> {
    let (directory, name) = split(path)?;
    directory.write(name, text.as_bytes(), Mode::PRIVATE_FILE).map_err(PrepareError::Make)
}

/// Removes a socket that nobody listens at.
fn clear(path: &Path) -> Result<(), PrepareError> {
    let (directory, name) = split(path)?;
    let path = || path.to_owned();
    match directory.socket_state(name).map_err(PrepareError::Make)? {
        SocketState::Absent => Ok(()),
        SocketState::Dead => directory.remove_file(name).map(drop).map_err(PrepareError::Make),
        SocketState::Live => Err(PrepareError::Served { path: path() }),
        _ => Err(PrepareError::NotASocket { path: path() }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn place(scratch: &Path) -> Place {
        Place::new(scratch.join("data"), scratch.join("run")).expect("short")
    }

    #[test]
    fn configurations_are_their_owners_alone() {
        let scratch = tempfile::tempdir().expect("a directory");
        let place = place(scratch.path());
        prepare(&place, "version = 2\n", Some("x")).expect("prepared");
        prepare(&place, "version = 3\n", Some("y")).expect("prepared again");
        assert_eq!(fs::read_to_string(place.config()).expect("there"), "version = 3\n");
        assert_eq!(fs::read_to_string(place.runsc_config()).expect("there"), "y");
        let mode = fs::metadata(place.config()).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_stale_socket_is_removed_and_a_served_one_is_left() {
        let scratch = tempfile::tempdir().expect("a directory");
        let place = place(scratch.path());
        prepare(&place, "", None).expect("nothing is there");
        let listener = UnixListener::bind(place.socket()).expect("bound");
        let error = prepare(&place, "", None).expect_err("it is served");
        assert!(matches!(error, PrepareError::Served { path } if path == place.socket()));
        drop(listener);
        assert!(place.socket().exists());
        prepare(&place, "", None).expect("nobody serves it");
        assert!(!place.socket().exists());
    }

    #[test]
    fn something_else_in_the_place_of_the_socket_is_told_and_left() {
        let scratch = tempfile::tempdir().expect("a directory");
        let place = place(scratch.path());
        prepare(&place, "", None).expect("nothing is there");
        fs::write(place.socket(), "mine").expect("written");
        let error = prepare(&place, "", None).expect_err("a file");
        assert!(matches!(error, PrepareError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read_to_string(place.socket()).expect("there"), "mine");
    }
}
