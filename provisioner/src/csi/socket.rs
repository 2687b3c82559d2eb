//! A unix socket at which the kubelet calls, in a directory that is held open.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use nodekeel_localstorage::{Dir, Error as DirError, Mode, SocketState};
use rustix::fs::AtFlags;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};
use tokio_stream::Stream;

/// Longest path of a socket. *Source:* unix(7), `sun_path`, without its final NUL.
const MAX_PATH_BYTES: usize = 107;

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
    /// The directory for it could not be opened or made.
    #[error("take the directory {} for a socket", path.display())]
    Parent {
        /// The directory.
        path: PathBuf,
        /// Why not.
        #[source]
        source: DirError,
    },
    /// It could not be told what is there, or a dead socket could not be removed.
    #[error("replace what is at {}", path.display())]
    Replace {
        /// The socket.
        path: PathBuf,
        /// Why not.
        #[source]
        source: DirError,
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

/// A directory for a socket that has to be made. *Source:* the kubelet, which makes its own so.
const DIRECTORY: Mode = Mode::new(0o750);

/// Listens at a path, for root alone. The socket of a killed instance is replaced; the file goes with the listener.
pub(super) async fn listen(path: &Path) -> Result<Listening, SocketError> {
    check(path)?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    let dir = directory(parent).map_err(|source| SocketError::Parent { path: parent.to_owned(), source })?;
    let socket = Place { dir, path: path.to_owned() };
    socket.clear()?;
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    let listener = UnixListener::bind(socket.through_descriptor()).map_err(failed)?;
    let file = socket.file().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    let listening = Listening { listener, socket, file };
    // Whoever may look into the directory until then is root, too.
    let only_root = rustix::fs::Mode::from_raw_mode(Mode::PRIVATE_FILE.bits());
    let place = &listening.socket;
    rustix::fs::chmodat(&place.dir, place.name(), only_root, AtFlags::empty())
        .map_err(|errno| failed(errno.into()))?;
    Ok(listening)
}

/// Opens a directory, whose path the operator has chosen, and makes what is missing of it.
fn directory(path: &Path) -> Result<Dir, DirError> {
    let missing = |error: &DirError| error.is_not_found();
    for existing in path.ancestors() {
        match Dir::open(existing) {
            Err(error) if missing(&error) && existing.parent().is_some() => {}
            Ok(dir) => match path.strip_prefix(existing) {
                Ok(rest) if !rest.as_os_str().is_empty() => return dir.ensure_dir(rest, DIRECTORY),
                _ => return Ok(dir),
            },
            Err(error) => return Err(error),
        }
    }
    Dir::open(path)
}

/// Where a socket is, or will be.
#[derive(Debug)]
struct Place {
    dir: Dir,
    path: PathBuf,
}

impl Place {
    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    /// A path that leads into the directory itself, whatever becomes of the path to it: sockets are bound by path alone.
    fn through_descriptor(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_fd().as_raw_fd().to_string()).join(self.name())
    }

    /// Device and inode of what is there.
    fn file(&self) -> Option<(u64, u64)> {
        self.dir.metadata(self.name()).ok().map(|file| (file.device, file.inode))
    }

    /// Removes the socket of a dead instance, and nothing else.
    fn clear(&self) -> Result<(), SocketError> {
        let path = || self.path.clone();
        let failed = |source| SocketError::Replace { path: path(), source };
        match self.dir.socket_state(self.name()).map_err(failed)? {
            SocketState::Absent => Ok(()),
            SocketState::Dead => self.dir.remove_file(self.name()).map(drop).map_err(failed),
            SocketState::Live => Err(SocketError::Live { path: path() }),
            _ => Err(SocketError::NoSocket { path: path() }),
        }
    }
}

/// The connections to a socket. Its file goes when this is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    listener: UnixListener,
    socket: Place,
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
        if self.socket.file() == Some(self.file) {
            let _ = self.socket.dir.remove_file(self.socket.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

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
