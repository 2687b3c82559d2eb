//! Unix sockets that killed programs leave behind.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::FileKind;

/// The state of a path where a program wants to bind a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SocketState {
    /// Nothing exists.
    Absent,
    /// A socket without an owner: it can be removed.
    Stale,
    /// A socket that a process has open, or may have.
    InUse,
    /// Something other than a socket.
    NotASocket(FileKind),
}

impl Dir {
    /// Checks a path where a socket is to be bound. It changes nothing and does not block.
    ///
    /// A socket counts as [`Stale`](SocketState::Stale) only if the kernel returns ECONNREFUSED. A socket
    /// with a full queue, of another type than stream, or that only another user may access is
    /// [`InUse`](SocketState::InUse).
    ///
    /// # Errors
    /// Those of [`metadata`](Self::metadata), except for a missing path.
    pub fn socket_state(&self, path: impl AsRef<Path>) -> Result<SocketState, Error> {
        let path = path.as_ref();
        match self.metadata(path) {
            Ok(file) if file.kind == FileKind::Socket => {}
            Ok(file) => return Ok(SocketState::NotASocket(file.kind)),
            Err(error) if error.is_not_found() => return Ok(SocketState::Absent),
            Err(error) => return Err(error),
        }
        // The kernel refuses a connection to a socket on which no process listens. *Source:* unix(7), ECONNREFUSED.
        match self.connect_socket(path) {
            Err(Errno::CONNREFUSED) => Ok(SocketState::Stale),
            // Another process has removed it.
            Err(Errno::NOENT) => Ok(SocketState::Absent),
            _ => Ok(SocketState::InUse),
        }
    }

    fn connect_socket(&self, path: &Path) -> rustix::io::Result<()> {
        // The kernel connects only by path. This path leads into the open directory, even if it was renamed.
        let proc_path = Path::new("/proc/self/fd").join(self.as_fd().as_raw_fd().to_string()).join(path);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(proc_path)?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    fn socket_state(dir: &Path) -> SocketState {
        Dir::open(dir).expect("the directory opens").socket_state("s").expect("the path is checked")
    }

    #[test]
    fn a_socket_is_stale_once_its_owner_is_gone() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let path = scratch.path().join("s");
        assert_eq!(socket_state(scratch.path()), SocketState::Absent);
        let stream = UnixListener::bind(&path).expect("the socket is bound");
        assert_eq!(socket_state(scratch.path()), SocketState::InUse);
        drop(stream);
        assert_eq!(socket_state(scratch.path()), SocketState::Stale);
        fs::remove_file(&path).expect("the socket is removed");
        let datagrams = UnixDatagram::bind(&path).expect("the socket is bound");
        assert_eq!(socket_state(scratch.path()), SocketState::InUse, "a datagram socket");
        drop(datagrams);
        assert_eq!(socket_state(scratch.path()), SocketState::Stale);
        fs::remove_file(&path).expect("the socket is removed");
        fs::write(&path, "a file").expect("the file is written");
        assert_eq!(socket_state(scratch.path()), SocketState::NotASocket(FileKind::File));
    }

    #[test]
    fn a_socket_with_a_full_queue_is_in_use_and_not_waited_for() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let _listener = UnixListener::bind(scratch.path().join("s")).expect("the socket is bound");
        let dir = Dir::open(scratch.path()).expect("the directory opens");
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let address = || SocketAddrUnix::new(scratch.path().join("s")).expect("the path is short");
        let mut waiting = Vec::new();
        loop {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
            // The listener accepts none, so the queue fills up.
            if connect(&socket, &address()).is_err() {
                break;
            }
            waiting.push(socket);
        }
        assert_eq!(
            dir.socket_state("s").expect("the path is checked"),
            SocketState::InUse,
            "{} wait",
            waiting.len()
        );
    }
}
