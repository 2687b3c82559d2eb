//! The socket's file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::Stream;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};

use crate::data::{DataError, probe_directory};

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
}

/// Says what would keep the socket from being made by a node with this data directory; touches nothing.
pub(crate) fn probe(path: &Path, data: &Path) -> Result<(), BindError> {
    probe_file(path)?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    if parent == data || parent == data.join("run") {
        // They are the data directory's matter, which makes them.
        return Ok(());
    }
    let (path, parent) = (path.to_owned(), parent.to_owned());
    match probe_directory(&parent) {
        Ok(()) => Ok(()),
        _ if !parent.exists() => Err(BindError::NoParent { path, parent }),
        Err(DataError::NotADirectory { path: file }) => {
            Err(BindError::Parent { path, reason: format!("{} is no directory", file.display()) })
        }
        Err(DataError::Unfit { path: directory, why }) => {
            Err(BindError::Parent { path, reason: format!("{} is {why}", directory.display()) })
        }
        Err(_) => {
            Err(BindError::Parent { path, reason: format!("no permission to write to {}", parent.display()) })
        }
    }
}

/// Says whether something else is where the socket should be.
fn probe_file(path: &Path) -> Result<(), BindError> {
    let Ok(file) = fs::symlink_metadata(path) else { return Ok(()) };
    let (path, kind) = (path.to_owned(), file.file_type());
    let what = match () {
        () if kind.is_socket() && UnixStream::connect(&path).is_ok() => return Err(BindError::Live { path }),
        () if kind.is_socket() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_file() => "a file",
        () => "something that is no socket",
    };
    Err(BindError::NoSocket { path, what })
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
        let there = bound.take().filter(|bound| file_at(&self.path) == Some(bound.file));
        let there = there.map_or_else(|| Bound::new(&self.path), Ok)?;
        *bound = Some(Arc::clone(&there));
        Ok(Listening(there))
    }

    /// Removes it, unless it is still listened on.
    pub(crate) fn close(&self) {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Bound {
    fn new(path: &Path) -> Result<Arc<Self>, BindError> {
        let listener = bind(path)?;
        let failed = || BindError::Bind { path: path.to_owned(), source: io::ErrorKind::NotFound.into() };
        let file = file_at(path).ok_or_else(failed)?;
        Ok(Arc::new(Self { listener, path: path.to_owned(), file }))
    }
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

impl Drop for Bound {
    fn drop(&mut self) {
        // If that fails, the file is one of a dead instance, which the next one replaces.
        if file_at(&self.path) == Some(self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The accepted connections.
#[derive(Debug)]
pub(crate) struct Listening(Arc<Bound>);

impl Stream for Listening {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.listener.poll_accept(cx).map(|accepted| Some(accepted.map(|(connection, _)| connection)))
    }
}

/// Listens. A socket on which nobody listens is what a dead instance left behind, and is replaced.
///
/// Between the file's creation and its mode another user might connect: every call's credentials are checked too.
fn bind(path: &Path) -> Result<UnixListener, BindError> {
    probe_file(path)?;
    let failed = |source| BindError::Bind { path: path.to_owned(), source };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_nothing_else_is() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("s");
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
