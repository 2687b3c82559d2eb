//! The processes that one pass signals, and waits for.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::process::procfs;
use crate::process_exit::Signal;
use crate::sys::{self, ReadableFd};

/// One process that has to exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct DescendantProcess {
    pub(super) pid: i32,
    pub(super) limit: u64,
    /// Its start time, if it is identified by its parents and not by its mark: with the pid, it identifies
    /// one process.
    pub(super) start: Option<u64>,
}

impl DescendantProcess {
    /// Opens a descriptor that can only refer to this process. It is opened first and checked afterwards, so
    /// it refers to the process with this mark or start time, or to one that has exited and ignores signals.
    pub(super) fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let same = procfs::locks_limit(self.pid)? == self.limit
            && self
                .start
                .is_none_or(|start| procfs::read_stat(self.pid).is_ok_and(|stat| stat.start == start));
        if same { Ok(fd) } else { Err(Errno::SRCH.into()) }
    }
}

/// The result of one pass over the processes.
#[derive(Default)]
pub(super) struct SignalPass {
    pub(super) watched: Vec<(DescendantProcess, Arc<OwnedFd>)>,
    /// A process got a signal for the first time, or had already exited: there may be new processes.
    pub(super) changed: bool,
    /// The exit of at least one process can't be awaited.
    pub(super) unwatchable: bool,
}

/// Opens the exit notifications of the watched processes. Returns them, and whether they cover every process.
pub(super) fn watch_exits(pass: &SignalPass) -> (Vec<(DescendantProcess, ReadableFd)>, bool) {
    let ends = pass.watched.iter().map(|(member, fd)| Ok((*member, ReadableFd::new(Arc::clone(fd))?)));
    let watched: Vec<_> = ends.filter_map(|end: io::Result<_>| end.ok()).collect();
    let all = watched.len() == pass.watched.len() && !pass.unwatchable;
    (watched, all)
}

/// Whether an error is a shortage that may be over soon.
pub(super) fn is_resource_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whether the process has exited; at most a thread has its id.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT | libc::EINVAL))
}

/// Whether the process of a pidfd has exited, even if its parent has not reaped it.
///
/// *Source:* pidfd_open(2): the descriptor becomes readable when the process terminates.
pub(in crate::process) fn has_exited(pidfd: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::new(&pidfd, PollFlags::IN)];
    matches!(poll(&mut watched, Some(&Timespec::default())), Ok(1..))
}

/// Sends a signal, then SIGCONT: a stopped process handles a signal only after it is continued.
pub(super) fn signal_and_continue(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    sys::send_signal(fd.as_fd(), signal.as_number())?;
    if signal != Signal::KILL {
        sys::send_signal(fd.as_fd(), Signal::CONT.as_number())?;
    }
    Ok(())
}
