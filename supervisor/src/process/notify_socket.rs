//! The sockets to which processes send sd_notify(3) messages: a file for each start of a process.
//!
//! The file belongs to the user of the process, with mode 0600: no other user can send to it. Who sends is judged for
//! each message besides: see [`MessageSenders`](super::notify::MessageSenders). systemd's socket is open to all users,
//! and so is its queue, which has room for few messages (`net.unix.max_dgram_qlen`, 10 by default): a stranger who
//! keeps it full would delay the `WATCHDOG=1` of a healthy process, and have it aborted. So a process that changes its
//! user by itself can't report afterwards; it has to be started as that user.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::private_dir;
use super::settings::Process;
use crate::sys;

/// The longest path of a socket: `sun_path` of unix(7), without its NUL byte.
const MAX_SOCKET_PATH: usize = 107;
/// The end of the name of a socket that has not its owner yet.
const NEW_SUFFIX: &str = ".new";

/// The longest path that a notification socket has in a
/// [directory](crate::SupervisorBuilder::notify_directory). Beyond the 107 bytes of unix(7), the processes that need
/// one may not start.
#[must_use]
pub fn longest_notify_path(dir: &Path) -> PathBuf {
    dir.join(socket_name(u64::MAX))
}

/// The name of the socket of a start, by its mark.
pub(super) fn socket_name(mark: u64) -> String {
    format!("{mark:x}")
}

/// The directory of the sockets.
#[derive(Debug)]
pub(super) struct NotifyDir {
    fd: OwnedFd,
    path: PathBuf,
}

impl NotifyDir {
    /// Opens it, and removes the sockets that a killed program has left in it.
    ///
    /// # Errors
    /// It does not exist, or others can change it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let dir = Self { fd: private_dir::open(path)?, path: path.to_owned() };
        for entry in rustix::fs::Dir::read_from(&dir.fd)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            // Only a socket that nothing receives from refuses the connection.
            if entry.file_type() == rustix::fs::FileType::Socket
                && dir.connect(name).is_err_and(|error| error == Errno::CONNREFUSED)
            {
                dir.remove(name);
            }
        }
        Ok(dir)
    }

    /// Binds the socket of this name for a process: also in the place of a former one, so that a process that is kept
    /// finds it again.
    ///
    /// # Errors
    /// The failed system call, or that the path is too long, or can't be reached by the process' user.
    pub(super) fn bind(self: &Arc<Self>, name: &str, process: &Process) -> io::Result<NotifySocket> {
        let path = self.path.join(name);
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            let length = path.as_os_str().len();
            return Err(io::Error::other(format!(
                "the path of its notification socket, {}, has {length} bytes: choose a directory with which it has at most {MAX_SOCKET_PATH}",
                path.display()
            )));
        }
        if let Some(uid) = process.uid {
            check_reachable(&self.path, uid, process)?;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // With it, the kernel attaches the pid and uid of the sender to each message: see unix(7), SO_PASSCRED.
        set_socket_passcred(&fd, true)?;
        // A kernel before 6.5 has no pidfds of senders.
        let has_pidfds = sys::pass_sender_pidfd(fd.as_fd()).is_ok();
        // The file gets the mode of the socket, so that it never has another one.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        let new = format!("{name}{NEW_SUFFIX}");
        self.remove(&new);
        rustix::net::bind(&fd, &self.address(&new)?)?;
        let owned = match (process.uid, process.gid) {
            (None, None) => Ok(()),
            (uid, gid) => rustix::fs::chownat(
                &self.fd,
                &*new,
                uid.map(Uid::from_raw),
                gid.map(Gid::from_raw),
                AtFlags::SYMLINK_NOFOLLOW,
            ),
        };
        owned
            .and_then(|()| rustix::fs::renameat(&self.fd, &*new, &self.fd, name))
            .inspect_err(|_| self.remove(&new))?;
        Ok(NotifySocket {
            fd,
            has_pidfds,
            path,
            file: SocketFile { dir: Arc::clone(self), name: name.to_owned() },
        })
    }

    fn connect(&self, name: &str) -> Result<(), Errno> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &self.address(name)?)
    }

    /// The address of a name: relative to the descriptor, whatever the path leads to now, and however long it is.
    fn address(&self, name: &str) -> Result<SocketAddrUnix, Errno> {
        SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", self.fd.as_raw_fd()))
    }

    fn remove(&self, name: &str) {
        if let Err(error) = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())
            && error != Errno::NOENT
        {
            tracing::warn!(dn = "supervisor", %error, "can't remove {name} in {}", self.path.display());
        }
    }
}

/// Checks that a user can search a directory and those above it.
fn check_reachable(dir: &Path, uid: u32, process: &Process) -> io::Result<()> {
    let groups = process.gid.iter().chain(process.privileges.groups.iter().flatten());
    let groups: Vec<u32> = groups.copied().collect();
    for above in dir.ancestors().filter(|above| !above.as_os_str().is_empty()) {
        let found = above.metadata()?;
        let needed = if found.uid() == uid {
            0o100
        } else if groups.contains(&found.gid()) {
            0o010
        } else {
            0o001
        };
        if uid != 0 && found.mode() & needed == 0 {
            let above = above.display();
            return Err(io::Error::new(
                ErrorKind::PermissionDenied,
                format!("user {uid} can't reach its notification socket below {above}: `chmod a+x {above}`"),
            ));
        }
    }
    Ok(())
}

/// A socket that is bound before its process starts.
#[derive(Debug)]
pub(super) struct NotifySocket {
    pub(super) fd: OwnedFd,
    /// The kernel attaches a pidfd of the sender to each message.
    pub(super) has_pidfds: bool,
    path: PathBuf,
    pub(super) file: SocketFile,
}

/// The file of a socket. Dropping it removes the file.
#[derive(Debug)]
pub(super) struct SocketFile {
    dir: Arc<NotifyDir>,
    name: String,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.dir.remove(&self.name);
    }
}

impl NotifySocket {
    /// The variables that the process needs: `NOTIFY_SOCKET`, and `WATCHDOG_USEC` for a watchdog. Without
    /// `WATCHDOG_PID`, sd_watchdog_enabled(3) means every process; the pid is not known before the start.
    pub(super) fn environment(&self, watchdog: Option<Duration>) -> Vec<(OsString, OsString)> {
        let micros =
            watchdog.map(|interval| ("WATCHDOG_USEC".into(), interval.as_micros().to_string().into()));
        [("NOTIFY_SOCKET".into(), self.path.clone().into())].into_iter().chain(micros).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
    use std::os::unix::net::UnixDatagram;

    fn open(dir: &Path) -> Arc<NotifyDir> {
        Arc::new(NotifyDir::open(dir).expect("it is private"))
    }

    #[test]
    fn a_socket_is_a_file_of_its_user_alone_and_goes_with_its_listener() {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = open(scratch.path());
        let socket = dir.bind("1", &Process::new("/bin/true")).expect("it is bound");
        let file = std::fs::symlink_metadata(scratch.path().join("1")).expect("it is there");
        assert!(file.file_type().is_socket());
        assert_eq!(file.mode() & 0o7777 & !0o600, 0, "nobody else can send to it");
        assert_eq!(socket.environment(None), [("NOTIFY_SOCKET".into(), scratch.path().join("1").into())]);
        // Another one takes its place.
        let second = dir.bind("1", &Process::new("/bin/true")).expect("it is bound");
        UnixDatagram::unbound()
            .expect("a socket")
            .send_to(b"x", scratch.path().join("1"))
            .expect("it is there");
        assert_eq!(rustix::io::read(&second.fd, &mut [0; 2]), Ok(1));
        drop((socket, second));
        assert_eq!(scratch.path().read_dir().expect("it is there").count(), 0);
    }

    #[test]
    fn only_sockets_that_nothing_receives_from_are_removed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let _living = UnixDatagram::bind(scratch.path().join("living")).expect("it is bound");
        drop(UnixDatagram::bind(scratch.path().join("dead")).expect("it is bound"));
        std::fs::write(scratch.path().join("file"), "").expect("it is written");
        drop(open(scratch.path()));
        let mut left: Vec<_> = scratch
            .path()
            .read_dir()
            .expect("it is there")
            .map(|entry| entry.expect("there").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["file", "living"]);
    }

    #[test]
    fn a_directory_that_others_can_change_is_refused() {
        let scratch = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o777)).expect("it is mine");
        let error = NotifyDir::open(scratch.path()).expect_err("others can write to it").to_string();
        assert!(error.contains("mode 0777") && error.contains("`chmod go-w /"), "{error}");
    }

    #[test]
    fn a_socket_that_its_process_could_not_use_is_refused_with_what_to_do() {
        let scratch = tempfile::tempdir().expect("a directory");
        let only_mine = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(scratch.path(), only_mine).expect("it is mine");
        let dir = open(scratch.path());
        let other = Process::new("/bin/true").uid(4_000_000).gid(4_000_000);
        let error = dir.bind("1", &other).expect_err("mode 0700").to_string();
        assert_eq!(
            error,
            format!(
                "user 4000000 can't reach its notification socket below {0}: `chmod a+x {0}`",
                scratch.path().display()
            )
        );
        let error = dir.bind(&"x".repeat(100), &Process::new("/bin/true")).expect_err("too long").to_string();
        assert!(error.contains("at most 107"), "{error}");
    }
}
