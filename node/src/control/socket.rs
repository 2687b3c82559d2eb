//! The files of the control socket and the metrics socket, in directories that are kept open.

use std::ffi::OsStr;
use std::fmt;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{Stream, stream};
use nodekeel_localstorage::{Dir, Error as DirError, FileKind, FileMode, SocketState};
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream as Connection};
use tokio::sync::Notify;

use crate::data::{self, DataError, check_writable};
use crate::directory_watch::{DirectoryWatch, nearest_directory};
use crate::dn::CONTROL as DN;
use crate::error_chain::error_chain;
use crate::health::HealthCondition;

/// The directory of sockets in the data directory, as the layout declares it.
const RUN_DIR: &str = "run";
const RUN_MODE: FileMode = FileMode::new(0o711);

/// The path of a socket of the node, and its purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SocketPath {
    path: PathBuf,
    name: &'static str,
    /// The key of the configuration that sets it.
    key: Arc<str>,
    /// The data directory, if the socket is in its `run`, which belongs to the node.
    data: Option<Arc<Path>>,
}

impl SocketPath {
    /// The socket of the control API.
    pub(crate) fn control(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), name: "control socket", key: "control.socket".into(), data: None }
    }

    /// The same for the node with this data directory: a `run` in it that is gone is made again.
    #[must_use]
    pub(crate) fn of_node(self, data: &Path) -> Self {
        let data = Some(data).filter(|data| self.parent() == data.join(RUN_DIR));
        Self { data: data.map(Arc::from), ..self }
    }

    /// The socket of the metrics.
    pub(crate) fn metrics(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), name: "metrics socket", key: "metrics.address".into(), data: None }
    }

    /// A socket of a part, which this key sets.
    pub(crate) fn of_key(path: impl Into<PathBuf>, key: &str) -> Self {
        Self { path: path.into(), name: "socket", key: key.into(), data: None }
    }

    fn parent(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Watches the directory, or the nearest one above it that is there.
    fn watch(&self) -> Option<DirectoryWatch> {
        DirectoryWatch::new(nearest_directory(&self.path)).ok().flatten()
    }

    /// Makes the node's own directory again. An error is one of the bind that follows.
    fn make_own_parent(&self) {
        if let Some(data) = &self.data
            && let Ok(data) = Dir::open(data)
        {
            let _ = data.ensure_dir(RUN_DIR, RUN_MODE);
        }
    }

    fn file_name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

impl fmt::Display for SocketPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.path.display())
    }
}

/// The reason why a socket of the node can't be bound.
#[derive(Debug, Error)]
pub(crate) enum BindError {
    #[error("{socket} is in use by another program: set {} to another path", socket.key)]
    InUse { socket: SocketPath },
    #[error(
        "can't create {socket}: {what} exists there and will not be replaced; move it away, or set {} to another path",
        socket.key
    )]
    NotASocket { socket: SocketPath, what: &'static str },
    #[error("can't create {socket}: directory {} does not exist; create it, or set {}", socket.parent().display(), socket.key)]
    NoParent { socket: SocketPath },
    #[error("can't create {socket}: {reason}; set {} to another path", socket.key)]
    UnusableParent { socket: SocketPath, reason: String },
    #[error("can't create {socket}")]
    Bind {
        socket: SocketPath,
        #[source]
        source: io::Error,
    },
    #[error("can't inspect {socket}")]
    Inspect {
        socket: SocketPath,
        #[source]
        source: DirError,
    },
}

/// Checks whether a node with this data directory could create the socket; changes nothing.
pub(crate) fn check_socket(socket: &SocketPath, data: &Path) -> Result<(), BindError> {
    let parent = socket.parent();
    // The directory is opened once, and both checks use its descriptor: its path may change between them.
    let opened = data::open_directory(parent).and_then(|dir| check_writable(&dir).map(|()| dir));
    let is_own = parent == data || parent == data.join("run");
    match opened {
        Ok(dir) => check_socket_file(&dir, socket),
        // The data directory does not exist yet. Acquiring it creates these two.
        _ if is_own => Ok(()),
        Err(error) => Err(parent_error(socket, error)),
    }
}

/// The error of the socket's directory.
fn parent_error(socket: &SocketPath, error: DataError) -> BindError {
    let (socket, parent) = (socket.clone(), socket.parent());
    let reason = match error {
        // A missing directory gets its own message. If a file stands above it, the reason is that file.
        _ if !parent.exists() && parent.parent().is_none_or(|above| !above.is_file()) => {
            return BindError::NoParent { socket };
        }
        DataError::NotADirectory { path: file } => format!("{} is not a directory", file.display()),
        DataError::Unusable { path: directory, why } => format!("{} is {why}", directory.display()),
        DataError::Permission { .. } => format!("permission denied to write to {}", parent.display()),
        other => error_chain(&other),
    };
    BindError::UnusableParent { socket, reason }
}

/// Checks whether the socket could be bound at its path now.
fn check_socket_file_at(socket: &SocketPath) -> Result<(), BindError> {
    let dir = data::open_directory(socket.parent()).map_err(|error| parent_error(socket, error))?;
    check_socket_file(&dir, socket)
}

/// Checks that the socket's path is free or a stale socket.
fn check_socket_file(dir: &Dir, socket: &SocketPath) -> Result<(), BindError> {
    let state = dir.socket_state(socket.file_name());
    let socket = socket.clone();
    let kind = match state {
        Ok(SocketState::NotASocket(kind)) => kind,
        // A stale socket is one on which no process listens: the kernel left its file when noded was killed.
        Ok(SocketState::Absent | SocketState::Stale) => return Ok(()),
        Ok(_) => return Err(BindError::InUse { socket }),
        Err(source) => return Err(BindError::Inspect { socket, source }),
    };
    // The name of the kind is for the operator, who decides what to do with the file.
    let what = match kind {
        FileKind::Dir => "a directory",
        FileKind::Symlink => "a symbolic link",
        FileKind::File => "a file",
        _ => "a file that is not a socket",
    };
    Err(BindError::NotASocket { socket, what })
}

/// A socket of the node. It stays bound while its server restarts: connections opened until then are served
/// afterwards. If its file or directory is removed or moved away, or covered by a mount, it is bound again.
#[derive(Debug)]
pub(crate) struct NodeSocket {
    socket: SocketPath,
    /// `None` when it is closed.
    bound: Mutex<Option<Arc<BoundSocket>>>,
    /// Someone asks the server to look whether the file is there.
    recheck: Notify,
}

/// A listening socket; dropping it removes its file.
#[derive(Debug)]
struct BoundSocket {
    listener: UnixListener,
    dir: Dir,
    socket: SocketPath,
    /// Device and inode of the file.
    file_id: (u64, u64),
}

impl NodeSocket {
    /// Binds the socket.
    pub(crate) fn new(socket: SocketPath) -> Result<Self, BindError> {
        let bound = Mutex::new(Some(BoundSocket::new(&socket)?));
        Ok(Self { socket, bound, recheck: Notify::new() })
    }

    /// Streams the connections; binds a new socket if the file of the old one was removed.
    pub(crate) fn listen(self: &Arc<Self>) -> Result<ConnectionStream, BindError> {
        let bound = self.bind_again()?;
        let watch = self.socket.watch();
        // The file may have gone before the watch began.
        self.recheck.notify_one();
        let accepting = Accepting { socket: Arc::clone(self), bound, watch };
        Ok(Box::pin(stream::unfold(accepting, |mut accepting| async move {
            // An error does not end the stream: a later accept can succeed.
            Some((accepting.next_connection().await, accepting))
        })))
    }

    /// The socket at its path: the one that is bound, or a new one if its file is not there.
    fn bind_again(&self) -> Result<Arc<BoundSocket>, BindError> {
        // The lock is held over the bind, so that two restarts of the server do not replace each other's file.
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        // An operator may have removed the file, or the directory with it: then no client would reach the old
        // socket.
        if let Some(there) = bound.as_ref().filter(|bound| bound.is_at_path()) {
            return Ok(Arc::clone(there));
        }
        self.socket.make_own_parent();
        // The slot keeps one reference, so that the socket stays bound while its server restarts.
        let new = BoundSocket::new(&self.socket)?;
        Ok(Arc::clone(bound.insert(new)))
    }

    /// Makes the server look now whether the file is there; for a change that nothing notifies of.
    pub(crate) fn check_path(&self) {
        self.recheck.notify_one();
    }

    /// The warning about a socket that no client can reach.
    pub(crate) fn condition(&self) -> Option<HealthCondition> {
        let bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        if bound.as_ref().is_none_or(|bound| bound.is_at_path()) {
            return None;
        }
        let Err(error) = check_socket_file_at(&self.socket) else {
            let problem = "is gone, and is about to be made again";
            return Some(HealthCondition::warning(self.socket.to_string(), problem));
        };
        let problem = format!("is gone, so no client reaches the node: {}", error_chain(&error));
        let parent = self.socket.parent().display();
        let hint = format!(
            "make {parent} usable: it is bound again at once, or by `kill -HUP {}`",
            std::process::id()
        );
        Some(HealthCondition::warning(self.socket.to_string(), problem).hint(hint))
    }

    /// Removes the socket, unless a stream of its connections still exists.
    pub(crate) fn close(&self) {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl BoundSocket {
    fn new(socket: &SocketPath) -> Result<Arc<Self>, BindError> {
        let dir = data::open_directory(socket.parent()).map_err(|error| parent_error(socket, error))?;
        let listener = bind_socket(&dir, socket)?;
        let failed = || BindError::Bind { socket: socket.clone(), source: io::ErrorKind::NotFound.into() };
        // Device and inode identify the file later: another instance may replace it at the same path.
        let file = file_identity(&dir, socket).ok_or_else(failed)?;
        Ok(Arc::new(Self { listener, dir, socket: socket.clone(), file_id: file }))
    }

    /// Returns whether its file is still at the socket's path.
    fn is_at_path(&self) -> bool {
        // The directory is opened by its path again: the one that the socket holds may have been moved away.
        let dir = Dir::open(self.socket.parent());
        dir.is_ok_and(|dir| file_identity(&dir, &self.socket) == Some(self.file_id))
    }
}

fn file_identity(dir: &Dir, socket: &SocketPath) -> Option<(u64, u64)> {
    dir.metadata(socket.file_name()).ok().map(|file| (file.device, file.inode))
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // If that fails, the file is a stale socket, which the next instance replaces.
        // Only the own file is removed: another instance may have bound the path since.
        if file_identity(&self.dir, &self.socket) == Some(self.file_id) {
            let _ = self.dir.remove_file(self.socket.file_name());
        }
    }
}

/// The accepted connections.
pub(crate) type ConnectionStream = Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>;

/// A server's hold of the socket.
struct Accepting {
    socket: Arc<NodeSocket>,
    bound: Arc<BoundSocket>,
    /// `None` if the directory can't be watched: then SIGHUP alone makes the server look.
    watch: Option<DirectoryWatch>,
}

impl Accepting {
    async fn next_connection(&mut self) -> io::Result<Connection> {
        loop {
            let changed = async {
                match &self.watch {
                    Some(watch) => watch.wait().await.is_ok(),
                    None => pending().await,
                }
            };
            tokio::select! {
                // First: who has connected to the file that is gone is served.
                biased;
                accepted = self.bound.listener.accept() => return accepted.map(|(connection, _)| connection),
                () = self.socket.recheck.notified() => {}
                _ = changed => {}
            }
            self.follow_path();
        }
    }

    /// Moves to the socket at the path.
    fn follow_path(&mut self) {
        // Before the look: what changes after it ends the next wait.
        self.watch = self.socket.socket.watch();
        match self.socket.bind_again() {
            Ok(bound) if Arc::ptr_eq(&bound, &self.bound) => {}
            Ok(bound) => {
                tracing::warn!(dn = DN, "the {} was gone: it was bound again", self.socket.socket);
                self.bound = bound;
                // The watch was that of a directory above, if this one was gone.
                self.watch = self.socket.socket.watch();
            }
            // Health has the reason.
            Err(error) => {
                tracing::debug!(dn = DN, "bind the {} again: {}", self.socket.socket, error_chain(&error))
            }
        }
    }
}

/// Binds the socket and listens. Replaces a stale socket, which a killed instance left.
///
/// Between the file's creation and its mode another user might connect: the servers check the credentials of each
/// call or connection too.
fn bind_socket(dir: &Dir, socket: &SocketPath) -> Result<UnixListener, BindError> {
    // The check comes first: a file that is not a stale socket is not removed.
    check_socket_file(dir, socket)?;
    let failed = |source| BindError::Bind { socket: socket.clone(), source };
    // bind(2) fails with EADDRINUSE while a file exists at the path, even if it is stale.
    dir.remove_file(socket.file_name())
        .map_err(|source| BindError::Inspect { socket: socket.clone(), source })?;
    // The kernel binds by path alone.
    let listener = UnixListener::bind(&socket.path).map_err(failed)?;
    // bind(2) creates the file with the umask of the process. The mode is set at once afterwards.
    dir.set_mode(socket.file_name(), FileMode::PRIVATE_FILE).map_err(|error| failed(error.into_cause()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use futures_util::StreamExt as _;

    use super::*;

    #[test]
    fn a_directory_that_cannot_be_used_is_an_error_with_its_own_reason() {
        let parent = tempfile::tempdir().expect("a directory");
        let path = parent.path().join("s");
        let text = |error| parent_error(&SocketPath::control(&path), error).to_string();
        let denied = DataError::Permission { path: parent.path().to_owned() };
        assert!(text(denied).contains("permission denied to write to"));
        // A link that leads to itself: no permission helps.
        let link = parent.path().join("loop");
        std::os::unix::fs::symlink(&link, &link).expect("linked");
        let looping = DataError::Access(Dir::open(&link).expect_err("a loop"));
        let text = text(looping);
        assert!(!text.contains("permission") && text.contains("symbolic links"), "{text}");
    }

    /// Who connects to the path is served.
    async fn assert_serves(stream: &mut ConnectionStream, path: &Path) {
        let connect = async {
            // Until the server has bound it again, the path has no socket.
            loop {
                match Connection::connect(path).await {
                    Ok(connection) => return connection,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let (accepted, _connection) = tokio::join!(stream.next(), connect);
        accepted.expect("the stream does not end").expect("accepted");
    }

    #[tokio::test]
    async fn a_socket_whose_file_or_directory_is_gone_is_bound_again() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path().join("data");
        let run = data.join("run");
        fs::create_dir_all(&run).expect("created");
        let path = run.join("s");
        let socket = SocketPath::control(&path).of_node(&data);
        let socket = Arc::new(NodeSocket::new(socket).expect("bound"));
        let mut stream = socket.listen().expect("bound");
        assert_serves(&mut stream, &path).await;
        let aside = data.join("aside");
        type Loss<'a> = &'a dyn Fn() -> io::Result<()>;
        let losses: [Loss<'_>; 4] = [
            &|| fs::remove_file(&path),
            &|| fs::rename(&path, &aside),
            &|| fs::remove_dir_all(&run),
            &|| fs::rename(&run, data.join("moved")),
        ];
        for loss in losses {
            loss().expect("lost");
            assert!(socket.condition().is_some());
            assert_serves(&mut stream, &path).await;
            assert_eq!(socket.condition(), None);
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(&run).expect("there").permissions().mode() & 0o777, 0o711);
        // What is in its place is not replaced; the condition says what it is.
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "").expect("written");
        let poll = tokio::time::timeout(std::time::Duration::from_millis(10), stream.next());
        assert!(poll.await.is_err(), "no connection");
        let condition = socket.condition().expect("a condition");
        assert!(condition.to_string().contains("a file exists there"), "{condition}");
        fs::remove_file(&path).expect("removed");
        assert_serves(&mut stream, &path).await;
        drop(stream);
        socket.close();
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_nothing_else_is() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("s");
        let bind = |path: &Path| {
            super::bind_socket(&Dir::open(scratch.path()).expect("there"), &SocketPath::control(path))
        };
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
