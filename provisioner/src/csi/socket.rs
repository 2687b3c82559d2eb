//! A unix socket at which the kubelet calls.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};
use tokio_stream::Stream;

/// Longest path of a socket. *Source:* unix(7), `sun_path`, without its final NUL.
const MAX_PATH_BYTES: usize = 107;

/// How long is waited for a connection. Where somebody listens, the kernel makes it at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a socket can't be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Its path is longer than a socket's can be; the kubelet's directory or the driver's name has to be shorter.
    #[error(
        "the path {} is longer than the {MAX_PATH_BYTES} bytes of a socket's: shorten the kubelet's directory or the \
         driver's name",
        path.display()
    )]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// Somebody answers there: another instance with the same driver's name.
    #[error("{} is served by another program with the same driver name", path.display())]
    Live {
        /// The socket.
        path: PathBuf,
    },
    /// Something that isn't a socket is there. It is left as it is.
    #[error("{} is no socket and will not be replaced: move it away", path.display())]
    NoSocket {
        /// The file.
        path: PathBuf,
    },
    /// The directory for it could not be made.
    #[error("create {}", path.display())]
    Parent {
        /// The directory.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// It could not be listened on.
    #[error("listen on {}", path.display())]
    Bind {
        /// The socket.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// Checks a path before anything is done with it.
pub(super) fn check(path: &Path) -> Result<(), SocketError> {
    match path.as_os_str().len() <= MAX_PATH_BYTES {
        true => Ok(()),
        false => Err(SocketError::TooLong { path: path.to_owned() }),
    }
}

/// Listens at a path, for root alone. The socket of a killed instance is replaced; the file goes with the listener.
pub(super) async fn listen(path: &Path) -> Result<Listening, SocketError> {
    check(path)?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    let made = fs::DirBuilder::new().recursive(true).mode(0o750).create(parent);
    made.map_err(|source| SocketError::Parent { path: parent.to_owned(), source })?;
    remove_stale(path).await?;
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    let listener = UnixListener::bind(path).map_err(failed)?;
    let file = file_at(path).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    let listening = Listening { listener, path: path.to_owned(), file };
    // Whoever may look into the directory until then is root, too.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listening)
}

async fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let Ok(file) = fs::symlink_metadata(path) else { return Ok(()) };
    let path = || path.to_owned();
    if !file.file_type().is_socket() {
        return Err(SocketError::NoSocket { path: path() });
    }
    if is_served(path()).await {
        return Err(SocketError::Live { path: path() });
    }
    match fs::remove_file(path()) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(SocketError::Bind { path: path(), source })
        }
        _ => Ok(()),
    }
}

/// Whether somebody listens at a socket. One whose queue of connections is full does, whether or not he takes them.
async fn is_served(path: PathBuf) -> bool {
    match tokio::time::timeout(PATIENCE, Connection::connect(path)).await {
        Ok(Ok(_)) | Err(_) => true,
        Ok(Err(error)) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// The connections to a socket. Its file goes when this is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl Stream for Listening {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.listener.poll_accept(cx).map(|accepted| Some(accepted.map(|(connection, _)| connection)))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // If that fails, the file is one of a dead instance, which the next one replaces.
        if file_at(&self.path) == Some(self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_goes_with_its_listener() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("plugins/d/csi.sock");
        let first = listen(&path).await.expect("the directory is made");
        std::mem::forget(std::fs::hard_link(&path, directory.path().join("kept")));
        drop(first);
        assert!(!path.exists());
        // As SIGKILL leaves it: the file is there, and nobody listens.
        fs::rename(directory.path().join("kept"), &path).expect("rename");
        let second = listen(&path).await.expect("a dead socket is replaced");
        assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o600);
        assert!(matches!(listen(&path).await, Err(SocketError::Live { .. })));
        assert!(path.exists(), "who is refused takes nothing away");
        drop(second);
    }

    #[tokio::test]
    async fn a_socket_whose_queue_is_full_is_live() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("csi.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        let mut waiting = Vec::new();
        // Nobody takes them, until no more fit in.
        while let Ok(connection) = Connection::connect(&path).await {
            waiting.push(connection);
        }
        assert!(matches!(listen(&path).await, Err(SocketError::Live { .. })), "{} wait", waiting.len());
        assert!(path.exists());
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("csi.sock");
        fs::write(&path, "a file").expect("write");
        assert!(matches!(listen(&path).await, Err(SocketError::NoSocket { .. })));
        assert_eq!(fs::read_to_string(&path).expect("read"), "a file");
        let long = directory.path().join("x".repeat(120));
        assert!(matches!(listen(&long).await, Err(SocketError::TooLong { .. })));
    }
}
