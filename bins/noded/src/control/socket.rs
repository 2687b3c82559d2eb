//! The socket's file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};

/// Why the control API can't be served where it should be.
#[derive(Debug, Error)]
pub(crate) enum BindError {
    #[error("{} is served by another program; set control.socket to another path", path.display())]
    Live { path: PathBuf },
    #[error("{} is no socket and will not be replaced; move it away, or set control.socket", path.display())]
    NoSocket { path: PathBuf },
    #[error("serve on {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Says whether something is in the way of the socket; touches nothing.
pub(crate) fn probe(path: &Path) -> Result<(), BindError> {
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => Err(BindError::NoSocket { path: path.to_owned() }),
        Ok(_) if UnixStream::connect(path).is_ok() => Err(BindError::Live { path: path.to_owned() }),
        _ => Ok(()),
    }
}

/// The accepted connections; the socket's file goes with it.
#[derive(Debug)]
pub(crate) struct Listening {
    listener: UnixListener,
    path: PathBuf,
}

impl Listening {
    pub(crate) fn new(path: &Path) -> Result<Self, BindError> {
        Ok(Self { listener: bind(path)?, path: path.to_owned() })
    }
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
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens. A socket on which nobody listens is what a dead instance left behind, and is replaced.
///
/// Between the file's creation and its mode another user might connect: every call's credentials are checked too.
fn bind(path: &Path) -> Result<UnixListener, BindError> {
    probe(path)?;
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
