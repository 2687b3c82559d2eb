//! Prepares directories, files and sockets before containerd starts.

use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, Error, FileMode, SocketState};

use crate::layout::DirectoryLayout;

/// Failure to prepare the start of containerd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// Creating a directory or writing a file failed.
    #[error("can't create containerd's directories and files")]
    CreateFiles(#[source] Error),
    /// Another process listens, or may listen, on the socket: stop it, or use another directory. A retry
    /// helps once it has exited.
    #[error("another containerd uses socket {path}: stop it, or use another directory")]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// A file that is not a socket is at the path of the socket: remove it.
    #[error("{path}, the path of containerd's socket, exists and is not a socket: remove it")]
    NotASocket {
        /// The conflicting file.
        path: PathBuf,
    },
}

/// Creates the directories with their modes, writes the configurations of containerd and of gVisor's shim,
/// and removes stale sockets. It blocks, and may be called repeatedly before the start.
///
/// # Errors
/// See [`PrepareError`].
pub fn prepare_layout(
    layout: &DirectoryLayout,
    config: &str,
    runsc: Option<&str>,
) -> Result<(), PrepareError> {
    layout.create_dirs().map_err(PrepareError::CreateFiles)?;
    write_config(layout.data().config.path(), config)?;
    if let Some(runsc) = runsc {
        write_config(&layout.runsc_config_path(), runsc)?;
    }
    // A socket's file outlives its process, and bind(2) fails as long as it exists.
    for socket in [layout.socket_path(), layout.ttrpc_path()] {
        remove_stale_socket(&socket)?;
    }
    Ok(())
}

/// Opens the parent directory of a file; returns it with the file name.
fn open_parent(path: &Path) -> Result<(Dir, &std::ffi::OsStr), PrepareError> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    Dir::open(directory).map(|directory| (directory, name)).map_err(PrepareError::CreateFiles)
}

fn write_config(path: &Path, text: &str) -> Result<(), PrepareError> {
    let (directory, name) = open_parent(path)?;
    directory.write(name, text.as_bytes(), FileMode::PRIVATE_FILE).map_err(PrepareError::CreateFiles)
}

/// Removes a socket that no process listens on.
fn remove_stale_socket(path: &Path) -> Result<(), PrepareError> {
    let (directory, name) = open_parent(path)?;
    let path = || path.to_owned();
    match directory.socket_state(name).map_err(PrepareError::CreateFiles)? {
        SocketState::Absent => Ok(()),
        SocketState::Stale => directory.remove_file(name).map(drop).map_err(PrepareError::CreateFiles),
        SocketState::InUse => Err(PrepareError::SocketInUse { path: path() }),
        _ => Err(PrepareError::NotASocket { path: path() }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn test_layout(scratch: &Path) -> DirectoryLayout {
        DirectoryLayout::new(scratch.join("data"), scratch.join("run")).expect("short")
    }

    #[test]
    fn config_files_are_private_to_their_owner() {
        let scratch = tempfile::tempdir().expect("a directory");
        let layout = test_layout(scratch.path());
        prepare_layout(&layout, "version = 2\n", Some("x")).expect("prepared");
        prepare_layout(&layout, "version = 3\n", Some("y")).expect("prepared again");
        assert_eq!(fs::read_to_string(layout.data().config.path()).expect("there"), "version = 3\n");
        assert_eq!(fs::read_to_string(layout.runsc_config_path()).expect("there"), "y");
        let mode = fs::metadata(layout.data().config.path()).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_stale_socket_is_removed_and_a_live_one_is_kept() {
        let scratch = tempfile::tempdir().expect("a directory");
        let layout = test_layout(scratch.path());
        prepare_layout(&layout, "", None).expect("nothing is there");
        let listener = UnixListener::bind(layout.socket_path()).expect("bound");
        let error = prepare_layout(&layout, "", None).expect_err("in use");
        assert!(matches!(error, PrepareError::SocketInUse { path } if path == layout.socket_path()));
        drop(listener);
        assert!(layout.socket_path().exists());
        prepare_layout(&layout, "", None).expect("stale");
        assert!(!layout.socket_path().exists());
    }

    #[test]
    fn a_file_at_the_socket_path_is_reported_and_kept() {
        let scratch = tempfile::tempdir().expect("a directory");
        let layout = test_layout(scratch.path());
        prepare_layout(&layout, "", None).expect("nothing is there");
        fs::write(layout.socket_path(), "mine").expect("written");
        let error = prepare_layout(&layout, "", None).expect_err("a file");
        assert!(matches!(error, PrepareError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read_to_string(layout.socket_path()).expect("there"), "mine");
    }
}
