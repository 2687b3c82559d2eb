//! The socket's file, in a directory that is held open.

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

use crate::data::{self, DataError, probe_directory};

/// Why the control API can't be served where it should be.
#[derive(Debug, Error)]
pub(crate) enum BindError {
    #[error("{} is served by another program; set control.socket to another path", path.display())]
    Live { path: PathBuf },
    #[error(
        "the control socket can't be made at {}: {what} is there and will not be replaced; move it away, or set \
         control.socket to another path",
        path.display()
    )]
    NoSocket { path: PathBuf, what: &'static str },
    #[error("the control socket can't be made at {}: there is no directory {}; create it, or set control.socket", path.display(), parent.display())]
    NoParent { path: PathBuf, parent: PathBuf },
    #[error("the control socket can't be made at {}: {reason}; set control.socket to another path", path.display())]
    Parent { path: PathBuf, reason: String },
    #[error("make the control socket {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("look at the control socket {}", path.display())]
    Look {
        path: PathBuf,
        #[source]
        source: DirError,
    },
}

/// Says what would keep the socket from being made by a node with this data directory; touches nothing.
pub(crate) fn probe(path: &Path, data: &Path) -> Result<(), BindError> {
    let parent = parent(path);
    let opened = data::open(parent).and_then(|dir| probe_directory(&dir).map(|()| dir));
    let is_own = parent == data || parent == data.join("run");
    match opened {
        Ok(dir) => probe_file(&dir, path),
        // They are the data directory's matter, which makes them.
        _ if is_own => Ok(()),
        Err(error) => Err(parent_error(path, error)),
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Why there is no directory for the socket.
fn parent_error(path: &Path, error: DataError) -> BindError {
    let (path, parent) = (path.to_owned(), parent(path).to_owned());
    let reason = match error {
        _ if !parent.exists() && parent.parent().is_none_or(|above| !above.is_file()) => {
            return BindError::NoParent { path, parent };
        }
        DataError::NotADirectory { path: file } => format!("{} is no directory", file.display()),
        DataError::Unfit { path: directory, why } => format!("{} is {why}", directory.display()),
        _ => format!("no permission to write to {}", parent.display()),
    };
    BindError::Parent { path, reason }
}

/// Says whether something else is where the socket should be.
fn probe_file(dir: &Dir, path: &Path) -> Result<(), BindError> {
    let state = dir.socket_state(name(path));
    let path = path.to_owned();
    let kind = match state {
        Ok(SocketState::NotASocket(kind)) => kind,
        Ok(SocketState::Absent | SocketState::Dead) => return Ok(()),
        Ok(_) => return Err(BindError::Live { path }),
        Err(source) => return Err(BindError::Look { path, source }),
    };
    let what = match kind {
        FileKind::Dir => "a directory",
        FileKind::Symlink => "a symbolic link",
        FileKind::File => "a file",
        _ => "something that is no socket",
    };
    Err(BindError::NoSocket { path, what })
}

fn name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// The node's socket. It stays bound while what serves it is restarted: who connects meanwhile is answered then.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    bound: Mutex<Option<Arc<Bound>>>,
}

/// A socket that is listened on; its file goes with it.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    dir: Dir,
    path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl Socket {
    /// Binds it.
    pub(crate) fn new(path: &Path) -> Result<Self, BindError> {
        let bound = Mutex::new(Some(Bound::new(path)?));
        Ok(Self { path: path.to_owned(), bound })
    }

    /// The connections to it; where somebody has removed its file, to a new one.
    pub(crate) fn listen(&self) -> Result<Listening, BindError> {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let there = bound.take().filter(|bound| bound.is_there());
        let there = there.map_or_else(|| Bound::new(&self.path), Ok)?;
        *bound = Some(Arc::clone(&there));
        Ok(Listening { bound: there, pause: None })
    }

    /// Removes it, unless it is still listened on.
    pub(crate) fn close(&self) {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Bound {
    fn new(path: &Path) -> Result<Arc<Self>, BindError> {
        let dir = data::open(parent(path)).map_err(|error| parent_error(path, error))?;
        let listener = bind(&dir, path)?;
        let failed = || BindError::Bind { path: path.to_owned(), source: io::ErrorKind::NotFound.into() };
        let file = file_in(&dir, path).ok_or_else(failed)?;
        Ok(Arc::new(Self { listener, dir, path: path.to_owned(), file }))
    }

    /// Whether its file is still where clients look for it.
    fn is_there(&self) -> bool {
        let dir = Dir::open(parent(&self.path));
        dir.is_ok_and(|dir| file_in(&dir, &self.path) == Some(self.file))
    }
}

fn file_in(dir: &Dir, path: &Path) -> Option<(u64, u64)> {
    dir.metadata(name(path)).ok().map(|file| (file.device, file.inode))
}

impl Drop for Bound {
    fn drop(&mut self) {
        // If that fails, the file is one of a dead instance, which the next one replaces.
        if file_in(&self.dir, &self.path) == Some(self.file) {
            let _ = self.dir.remove_file(name(&self.path));
        }
    }
}

/// How long nobody is accepted after a failure, such as having no descriptor left: the next try would fail like it.
const PAUSE: Duration = Duration::from_millis(100);

/// The accepted connections.
#[derive(Debug)]
pub(crate) struct Listening {
    bound: Arc<Bound>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Stream for Listening {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let accepted = ready!(self.bound.listener.poll_accept(cx));
        if accepted.is_err() {
            self.pause = Some(Box::pin(sleep(PAUSE)));
        }
        Poll::Ready(Some(accepted.map(|(connection, _)| connection)))
    }
}

/// Listens. A socket on which nobody listens is what a dead instance left behind, and is replaced.
///
/// Between the file's creation and its mode another user might connect: every call's credentials are checked too.
fn bind(dir: &Dir, path: &Path) -> Result<UnixListener, BindError> {
    probe_file(dir, path)?;
    let failed = |source| BindError::Bind { path: path.to_owned(), source };
    dir.remove_file(name(path)).map_err(|source| BindError::Look { path: path.to_owned(), source })?;
    // The kernel binds by path alone.
    let listener = UnixListener::bind(path).map_err(failed)?;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    fchmodat(dir, name(path), mode, FchmodatFlags::FollowSymlink).map_err(|errno| failed(errno.into()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_nothing_else_is() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("s");
        let bind = |path: &Path| super::bind(&Dir::open(scratch.path()).expect("there"), path);
        drop(bind(&path).expect("nothing is there"));
        let live = bind(&path).expect("a dead socket is there");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path), Err(BindError::Live { .. })));
        drop(live);
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "a file").expect("written");
        assert!(matches!(bind(&path), Err(BindError::NoSocket { .. })));
        assert_eq!(fs::read(&path).expect("still there"), b"a file");
    }
}
