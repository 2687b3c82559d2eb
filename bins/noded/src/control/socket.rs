//! The control socket's file, in a directory that is kept open.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use nodekeel_localstorage::{Dir, Error as DirError, FileKind, SocketState};
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};
use tokio::time::{Sleep, sleep};

use crate::data::{self, DataError, check_writable};

/// Why the control socket can't be bound.
#[derive(Debug, Error)]
pub(crate) enum BindError {
    #[error("control socket {} is in use by another program: set control.socket to another path", path.display())]
    InUse { path: PathBuf },
    #[error(
        "can't create control socket {}: {what} exists there and will not be replaced; move it away, or set \
         control.socket to another path",
        path.display()
    )]
    NotASocket { path: PathBuf, what: &'static str },
    #[error("can't create control socket {}: directory {} does not exist; create it, or set control.socket", path.display(), parent.display())]
    NoParent { path: PathBuf, parent: PathBuf },
    #[error("can't create control socket {}: {reason}; set control.socket to another path", path.display())]
    UnusableParent { path: PathBuf, reason: String },
    #[error("can't create control socket {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't inspect control socket {}", path.display())]
    Inspect {
        path: PathBuf,
        #[source]
        source: DirError,
    },
}

/// Checks whether a node with this data directory could create the socket; changes nothing.
pub(crate) fn check_socket(path: &Path, data: &Path) -> Result<(), BindError> {
    let parent = parent_dir(path);
    let opened = data::open_directory(parent).and_then(|dir| check_writable(&dir).map(|()| dir));
    let is_own = parent == data || parent == data.join("run");
    match opened {
        Ok(dir) => check_socket_file(&dir, path),
        // The data directory creates them.
        _ if is_own => Ok(()),
        Err(error) => Err(parent_error(path, error)),
    }
}

fn parent_dir(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// The error of the socket's directory.
fn parent_error(path: &Path, error: DataError) -> BindError {
    let (path, parent) = (path.to_owned(), parent_dir(path).to_owned());
    let reason = match error {
        _ if !parent.exists() && parent.parent().is_none_or(|above| !above.is_file()) => {
            return BindError::NoParent { path, parent };
        }
        DataError::NotADirectory { path: file } => format!("{} is not a directory", file.display()),
        DataError::Unusable { path: directory, why } => format!("{} is {why}", directory.display()),
        DataError::Permission { .. } => format!("permission denied to write to {}", parent.display()),
        other => crate::plan::error_chain(&other),
    };
    BindError::UnusableParent { path, reason }
}

/// Checks that the socket's path is free or a stale socket.
fn check_socket_file(dir: &Dir, path: &Path) -> Result<(), BindError> {
    let state = dir.socket_state(socket_name(path));
    let path = path.to_owned();
    let kind = match state {
        Ok(SocketState::NotASocket(kind)) => kind,
        Ok(SocketState::Absent | SocketState::Stale) => return Ok(()),
        Ok(_) => return Err(BindError::InUse { path }),
        Err(source) => return Err(BindError::Inspect { path, source }),
    };
    let what = match kind {
        FileKind::Dir => "a directory",
        FileKind::Symlink => "a symbolic link",
        FileKind::File => "a file",
        _ => "a file that is not a socket",
    };
    Err(BindError::NotASocket { path, what })
}

fn socket_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// The node's socket. It stays bound while its server restarts: connections opened meanwhile are served
/// afterwards.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    path: PathBuf,
    bound: Mutex<Option<Arc<BoundSocket>>>,
}

/// A listening socket; dropping it removes its file.
#[derive(Debug)]
struct BoundSocket {
    listener: UnixListener,
    dir: Dir,
    path: PathBuf,
    /// Device and inode of the file.
    file_id: (u64, u64),
}

impl ControlSocket {
    /// Binds it.
    pub(crate) fn new(path: &Path) -> Result<Self, BindError> {
        let bound = Mutex::new(Some(BoundSocket::new(path)?));
        Ok(Self { path: path.to_owned(), bound })
    }

    /// Streams the connections; binds a new socket if the file of the old one was removed.
    pub(crate) fn listen(&self) -> Result<ConnectionStream, BindError> {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let there = bound.take().filter(|bound| bound.is_at_path());
        let there = there.map_or_else(|| BoundSocket::new(&self.path), Ok)?;
        *bound = Some(Arc::clone(&there));
        Ok(ConnectionStream { bound: there, pause: None })
    }

    /// Removes the socket, unless a stream of its connections still exists.
    pub(crate) fn close(&self) {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl BoundSocket {
    fn new(path: &Path) -> Result<Arc<Self>, BindError> {
        let dir = data::open_directory(parent_dir(path)).map_err(|error| parent_error(path, error))?;
        let listener = bind_socket(&dir, path)?;
        let failed = || BindError::Bind { path: path.to_owned(), source: io::ErrorKind::NotFound.into() };
        let file = file_identity(&dir, path).ok_or_else(failed)?;
        Ok(Arc::new(Self { listener, dir, path: path.to_owned(), file_id: file }))
    }

    /// Whether its file is still at the socket's path.
    fn is_at_path(&self) -> bool {
        let dir = Dir::open(parent_dir(&self.path));
        dir.is_ok_and(|dir| file_identity(&dir, &self.path) == Some(self.file_id))
    }
}

fn file_identity(dir: &Dir, path: &Path) -> Option<(u64, u64)> {
    dir.metadata(socket_name(path)).ok().map(|file| (file.device, file.inode))
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // If that fails, the file is a stale socket, which the next instance replaces.
        if file_identity(&self.dir, &self.path) == Some(self.file_id) {
            let _ = self.dir.remove_file(socket_name(&self.path));
        }
    }
}

/// Pause after a failed accept, for example without a free descriptor: an immediate retry would fail too.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The accepted connections.
#[derive(Debug)]
pub(crate) struct ConnectionStream {
    bound: Arc<BoundSocket>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Stream for ConnectionStream {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let accepted = ready!(self.bound.listener.poll_accept(cx));
        if accepted.is_err() {
            self.pause = Some(Box::pin(sleep(ACCEPT_BACKOFF)));
        }
        Poll::Ready(Some(accepted.map(|(connection, _)| connection)))
    }
}

/// Binds the socket and listens. Replaces a stale socket, which a killed instance left.
///
/// Between the file's creation and its mode another user might connect: every call's credentials are checked
/// too.
fn bind_socket(dir: &Dir, path: &Path) -> Result<UnixListener, BindError> {
    check_socket_file(dir, path)?;
    let failed = |source| BindError::Bind { path: path.to_owned(), source };
    dir.remove_file(socket_name(path))
        .map_err(|source| BindError::Inspect { path: path.to_owned(), source })?;
    // The kernel binds by path alone.
    let listener = UnixListener::bind(path).map_err(failed)?;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    fchmodat(dir, socket_name(path), mode, FchmodatFlags::FollowSymlink)
        .map_err(|errno| failed(errno.into()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_directory_that_cannot_be_used_is_an_error_with_its_own_reason() {
        let parent = tempfile::tempdir().expect("a directory");
        let path = parent.path().join("s");
        let text = |error| parent_error(&path, error).to_string();
        let denied = DataError::Permission { path: parent.path().to_owned() };
        assert!(text(denied).contains("permission denied to write to"));
        // A link that leads to itself: no permission helps.
        let link = parent.path().join("loop");
        std::os::unix::fs::symlink(&link, &link).expect("linked");
        let looping = DataError::Access(Dir::open(&link).expect_err("a loop"));
        let text = text(looping);
        assert!(!text.contains("permission") && text.contains("symbolic links"), "{text}");
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_nothing_else_is() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("s");
        let bind = |path: &Path| super::bind_socket(&Dir::open(scratch.path()).expect("there"), path);
        drop(bind(&path).expect("nothing is there"));
        let live = bind(&path).expect("a dead socket is there");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path), Err(BindError::InUse { .. })));
        drop(live);
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "a file").expect("written");
        assert!(matches!(bind(&path), Err(BindError::NotASocket { .. })));
        assert_eq!(fs::read(&path).expect("still there"), b"a file");
    }
}
