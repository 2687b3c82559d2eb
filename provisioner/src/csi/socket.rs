//! A unix socket for the kubelet's calls, in a directory that is held open.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use nodekeel_localstorage::{Dir, Error as DirError, FileMode, SocketState};
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};
use tokio_stream::Stream;

/// Maximum length of a socket's path in bytes. *Source:* unix(7), `sun_path`, without its final NUL.
const MAX_PATH_BYTES: usize = 107;

/// A socket cannot be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The path is too long for a socket; shorten the kubelet's directory or the driver's name.
    #[error(
        "socket path {} exceeds {MAX_PATH_BYTES} bytes: shorten the kubelet's directory or the driver's name",
        path.display()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Another instance with the same driver name accepts connections there.
    #[error(
        "another program with the same driver name uses socket {}: stop it, or set another driver name",
        path.display()
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Another kind of file is there. It is not changed.
    #[error(
        "can't create socket {}: a file that is not a socket exists there and is not replaced; move it away",
        path.display()
    )]
    NotSocket {
        /// The file.
        path: PathBuf,
    },
    /// Opening or creating the socket's directory failed.
    #[error("can't open or create the socket directory {}", path.display())]
    Parent {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: DirError,
    },
    /// Inspecting the path, or removing a stale socket, failed.
    #[error("can't replace the socket {}", path.display())]
    Replace {
        /// The socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: DirError,
    },
    /// Listening on the socket failed.
    #[error("can't listen on {}", path.display())]
    Bind {
        /// The socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

pub(super) fn check_path_length(path: &Path) -> Result<(), SocketError> {
    if path.as_os_str().len() <= MAX_PATH_BYTES {
        Ok(())
    } else {
        Err(SocketError::PathTooLong { path: path.to_owned() })
    }
}

/// Mode of a directory created for a socket. *Source:* the kubelet, which creates its directories so.
const DIRECTORY_MODE: FileMode = FileMode::new(0o750);

/// Listens at a path, accessible to root only. Replaces the socket of a killed instance; dropping the
/// listener removes the file.
pub(super) async fn listen(path: &Path) -> Result<SocketListener, SocketError> {
    check_path_length(path)?;
    let dir = open_parent(path)?.0;
    let socket = SocketLocation { dir, path: path.to_owned() };
    socket.remove_stale()?;
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    let listener = UnixListener::bind(socket.proc_fd_path()).map_err(failed)?;
    // The identity of the file: dropping the listener must not remove the socket of a later instance.
    let file = socket.file_id().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    let socket_listener = SocketListener { listener, location: socket, file };
    // Between `bind` and this call, the mode of the directory keeps other users out.
    let location = &socket_listener.location;
    location
        .dir
        .set_mode(location.file_name(), FileMode::PRIVATE_FILE)
        .map_err(|error| failed(error.into_cause()))?;
    Ok(socket_listener)
}

/// Opens or creates the directory of a socket; returns it with its path.
pub(super) fn open_parent(path: &Path) -> Result<(Dir, PathBuf), SocketError> {
    let parent = path.parent().unwrap_or(Path::new("/")).to_owned();
    // A path chosen by the operator.
    match Dir::open_or_create(&parent, DIRECTORY_MODE) {
        Ok(dir) => Ok((dir, parent)),
        Err(source) => Err(SocketError::Parent { path: parent, source }),
    }
}

/// The directory and the path of a socket.
#[derive(Debug)]
struct SocketLocation {
    dir: Dir,
    path: PathBuf,
}

impl SocketLocation {
    fn file_name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    /// A path through the directory's descriptor, valid even if the directory is moved: sockets can only be
    /// bound by path.
    fn proc_fd_path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_fd().as_raw_fd().to_string()).join(self.file_name())
    }

    /// Device and inode of the file at the path.
    fn file_id(&self) -> Option<(u64, u64)> {
        self.dir.metadata(self.file_name()).ok().map(|file| (file.device, file.inode))
    }

    /// Removes the socket of a dead instance, and no other file.
    fn remove_stale(&self) -> Result<(), SocketError> {
        let path = || self.path.clone();
        let failed = |source| SocketError::Replace { path: path(), source };
        match self.dir.socket_state(self.file_name()).map_err(failed)? {
            SocketState::Absent => Ok(()),
            SocketState::Stale => self.dir.remove_file(self.file_name()).map(drop).map_err(failed),
            SocketState::InUse => Err(SocketError::InUse { path: path() }),
            _ => Err(SocketError::NotSocket { path: path() }),
        }
    }
}

/// Accepts connections on a socket. Removes its file when dropped.
#[derive(Debug)]
pub(super) struct SocketListener {
    listener: UnixListener,
    location: SocketLocation,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl Stream for SocketListener {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.listener.poll_accept(cx).map(|accepted| Some(accepted.map(|(connection, _)| connection)))
    }
}

impl Drop for SocketListener {
    fn drop(&mut self) {
        // If that fails, the next instance replaces the stale socket.
        if self.location.file_id() == Some(self.file) {
            let _ = self.location.dir.remove_file(self.location.file_name());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_removed_with_its_listener() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plugins/d/csi.sock");
        let first = listen(&path).await.expect("the directory is created");
        std::mem::forget(std::fs::hard_link(&path, directory.path().join("kept")));
        drop(first);
        assert!(!path.exists());
        // As SIGKILL leaves it: the file exists, and no process listens.
        fs::rename(directory.path().join("kept"), &path).expect("rename");
        let second = listen(&path).await.expect("a stale socket is replaced");
        assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o600);
        assert!(matches!(listen(&path).await, Err(SocketError::InUse { .. })));
        assert!(path.exists(), "a rejected instance removes nothing");
        drop(second);
    }

    #[tokio::test]
    async fn a_file_that_is_not_a_socket_is_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("csi.sock");
        fs::write(&path, "a file").expect("write");
        assert!(matches!(listen(&path).await, Err(SocketError::NotSocket { .. })));
        assert_eq!(fs::read_to_string(&path).expect("read"), "a file");
        let long = directory.path().join("x".repeat(120));
        assert!(matches!(listen(&long).await, Err(SocketError::PathTooLong { .. })));
    }
}
