//! Unix sockets that programs leave behind when they are killed.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::FileKind;

/// What is where a program is about to make its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SocketState {
    /// Nothing.
    Absent,
    /// A socket that nobody has any more: it may be removed.
    Dead,
    /// A socket that somebody has, or may have.
    Live,
    /// Something that is no socket.
    NotASocket(FileKind),
}

impl Dir {
    /// Looks what is where a socket is to be made; changes nothing, and waits for nobody.
    ///
    /// That nobody has a socket, only the kernel's refusal says. One whose queue is full, that is of another kind than a stream,
    /// or that another user keeps for himself, is [`Live`](SocketState::Live).
    ///
    /// # Errors
    /// As [`metadata`](Self::metadata), but for what isn't there.
    pub fn socket_state(&self, path: impl AsRef<Path>) -> Result<SocketState, Error> {
        let path = path.as_ref();
        match self.metadata(path) {
            Ok(file) if file.kind == FileKind::Socket => {}
            Ok(file) => return Ok(SocketState::NotASocket(file.kind)),
            Err(error) if error.is_not_found() => return Ok(SocketState::Absent),
            Err(error) => return Err(error),
        }
        match self.connect(path) {
            Err(Errno::CONNREFUSED) => Ok(SocketState::Dead),
            // It has gone meanwhile.
            Err(Errno::NOENT) => Ok(SocketState::Absent),
            _ => Ok(SocketState::Live),
        }
    }

    fn connect(&self, path: &Path) -> rustix::io::Result<()> {
        // The kernel connects by path alone: this one leads into the directory, whatever became of the path to it.
        let through = Path::new("/proc/self/fd").join(self.as_fd().as_raw_fd().to_string()).join(path);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(through)?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    fn state(dir: &Path) -> SocketState {
        Dir::open(dir).expect("it opens").socket_state("s").expect("it is looked at")
    }

    #[test]
    fn a_socket_is_dead_once_nobody_has_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("s");
        assert_eq!(state(scratch.path()), SocketState::Absent);
        let stream = UnixListener::bind(&path).expect("it is bound");
        assert_eq!(state(scratch.path()), SocketState::Live);
        drop(stream);
        assert_eq!(state(scratch.path()), SocketState::Dead);
        fs::remove_file(&path).expect("it is removed");
        let datagrams = UnixDatagram::bind(&path).expect("it is bound");
        assert_eq!(state(scratch.path()), SocketState::Live, "of another kind");
        drop(datagrams);
        assert_eq!(state(scratch.path()), SocketState::Dead);
        fs::remove_file(&path).expect("it is removed");
        fs::write(&path, "a file").expect("it is written");
        assert_eq!(state(scratch.path()), SocketState::NotASocket(FileKind::File));
    }

    #[test]
    fn a_socket_whose_queue_is_full_is_live_and_not_waited_for() {
        let scratch = tempfile::tempdir().expect("a directory");
        let _listener = UnixListener::bind(scratch.path().join("s")).expect("it is bound");
        let dir = Dir::open(scratch.path()).expect("it opens");
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let address = || SocketAddrUnix::new(scratch.path().join("s")).expect("it is short");
        let mut waiting = Vec::new();
        loop {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
            // Nobody takes them, until no more fit in.
            if connect(&socket, &address()).is_err() {
                break;
            }
            waiting.push(socket);
        }
        assert_eq!(
            dir.socket_state("s").expect("it is looked at"),
            SocketState::Live,
            "{} wait",
            waiting.len()
        );
    }
}
