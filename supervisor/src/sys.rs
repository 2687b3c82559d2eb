//! The crate's only unsafe code: system calls that std and rustix don't offer, and the creation of a child
//! process.
#![allow(unsafe_code, reason = "signals by number, and a child that shares memory until it execs")]

mod exec;
mod spawn;
mod stdio_slots;

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

pub(crate) use exec::{ChildSetup, ResourceLimit, RlimitNumber};
pub(crate) use spawn::{ExecImage, StartError, StartStep, StartedChild, spawn_image};
pub(crate) use stdio_slots::StdioSlots;

/// Called by the loader before `main`, when this program has started nothing yet.
///
/// *Source:* the System V ABI, "Initialization and Termination Functions".
#[used]
// SAFETY: the section is an array of such functions. This one relies on nothing that `main` would set up first.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = crate::process::record_inherited;

/// The soft limit of file locks of a process, which Linux has not enforced since 2.4.
///
/// # Errors
/// `EPERM` if the process belongs to another user, `ESRCH` if it does not exist.
pub(crate) fn locks_limit(pid: i32) -> io::Result<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no new limit is given, and the old one is written to a place that outlives the call.
    check_result(unsafe { libc::prlimit64(pid, libc::RLIMIT_LOCKS, ptr::null(), &raw mut limit) })?;
    Ok(limit.rlim_cur)
}

/// A child of this program that has exited and was not reaped. It stays a zombie.
pub(crate) fn exited_child() -> io::Result<Option<i32>> {
    // SAFETY: all zeroes is a siginfo.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` outlives the call.
    check_result(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) })?;
    // SAFETY: waitid has filled in a SIGCHLD's fields, or left the zeroes.
    let pid = unsafe { info.si_pid() };
    Ok((pid != 0).then_some(pid))
}

/// Sends a signal to exactly the process of the descriptor.
///
/// # Errors
/// `EPERM` without permission, `ESRCH` if it has exited.
pub(crate) fn send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let info = ptr::null::<libc::siginfo_t>();
    // SAFETY: the borrowed descriptor is open; with a null info the kernel creates one.
    check_result(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0) })
}

/// The parent of a process, from Linux 6.13 on.
///
/// # Errors
/// Also on older kernels.
pub(crate) fn parent_pid(pidfd: BorrowedFd<'_>) -> io::Result<i32> {
    /// The first version of the kernel's struct, whose size is part of the request.
    #[repr(C)]
    #[derive(Default)]
    struct PidfdInfo {
        mask: u64,
        cgroup: u64,
        pid: u32,
        tgid: u32,
        ppid: u32,
        ids: [u32; 8],
        exit_code: i32,
    }
    /// `_IOWR(0xFF, 11, struct pidfd_info)`
    const PIDFD_GET_INFO: u32 = 0xC040_FF0B;
    const { assert!(size_of::<PidfdInfo>() == 64) };
    let mut info = PidfdInfo { mask: 1, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the size in the request, which is that of `info`.
    check_result(unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) })?;
    i32::try_from(info.ppid).map_err(io::Error::other)
}

/// Sends a signal to the process that has this pid now.
///
/// # Errors
/// `EPERM` without permission, `ESRCH` if it does not exist.
pub(crate) fn send_signal_to_pid(pid: i32, signal: i32) -> io::Result<()> {
    assert!(pid > 1, "the others would mean process groups, and init");
    // SAFETY: no memory is passed.
    check_result(unsafe { libc::kill(pid, signal) })
}

/// Returns whether a process with this pid exists that this program may signal.
pub(crate) fn can_signal(pid: i32) -> bool {
    // SAFETY: no memory is passed, and no signal sent.
    pid > 0 && unsafe { libc::kill(pid, 0) } == 0
}

/// The session of a process, 0 if it is in another PID namespace; rustix rejects 0.
///
/// # Errors
/// `ESRCH` if it does not exist.
pub(crate) fn session_id(pid: i32) -> io::Result<i32> {
    // SAFETY: no memory is passed.
    let session = unsafe { libc::getsid(pid) };
    check_result(session).map(|()| session)
}

/// The sender of a datagram, as the kernel names it.
#[derive(Debug)]
pub(crate) struct DatagramSender {
    /// 0 if it is in a PID namespace that this program can't see, which rustix can't represent.
    pub(crate) pid: i32,
    /// `None` on a kernel before 6.5, or where the process has gone.
    pub(crate) pidfd: Option<OwnedFd>,
}

/// Lets the kernel attach a pidfd of the sender to each datagram, from Linux 6.5 on. Older kernels reject it.
///
/// *Source:* the kernel's `include/uapi/asm-generic/socket.h`.
pub(crate) fn pass_sender_pidfd(socket: BorrowedFd<'_>) -> io::Result<()> {
    const SO_PASSPIDFD: c_int = 76;
    let on: c_int = 1;
    let length = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the option's value is an int, which outlives the call.
    check_result(unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSPIDFD, (&raw const on).cast(), length)
    })
}

/// The maximum number of descriptors in one message (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;
/// Space for those and the sender, in words, so that it is aligned.
const CONTROL: usize = 160;

/// Receives one datagram: its length, and its sender. Closes the other descriptors that came with it.
pub(crate) fn receive_datagram(
    socket: BorrowedFd<'_>,
    text: &mut [u8],
) -> io::Result<(usize, Option<DatagramSender>)> {
    const {
        assert!(
            CONTROL * size_of::<u64>()
                >= MAX_FDS * size_of::<RawFd>() + size_of::<libc::ucred>() + size_of::<RawFd>() + 96
        )
    };
    let mut control = [0_u64; CONTROL];
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    // SAFETY: all zeroes is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` points to buffers with the lengths in it, which outlive the call.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    /// *Source:* the kernel's `include/linux/socket.h`.
    const SCM_PIDFD: c_int = 4;
    let (mut sender, mut pidfd) = (None, None);
    // SAFETY: the kernel has written whole headers, and their lengths, into `control`, which is still valid.
    // The data of each is read as its type specifies, unaligned; the descriptors are new and owned by this
    // function.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(found) = header.as_ref() {
            let data = libc::CMSG_DATA(header);
            match (found.cmsg_level, found.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    sender = Some(data.cast::<libc::ucred>().read_unaligned().pid);
                }
                (libc::SOL_SOCKET, SCM_PIDFD) => {
                    let fd = data.cast::<RawFd>().read_unaligned();
                    // A negative one is the reason why there is none.
                    pidfd = (fd >= 0).then(|| OwnedFd::from_raw_fd(fd));
                }
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    #[allow(clippy::unnecessary_cast, reason = "musl counts it in 32 bits")]
                    let bytes = found.cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    for index in 0..bytes / size_of::<RawFd>() {
                        let fd = data.cast::<RawFd>().add(index).read_unaligned();
                        drop(OwnedFd::from_raw_fd(fd));
                    }
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((length, sender.map(|pid| DatagramSender { pid, pidfd })))
}

/// A descriptor that can be awaited to become readable.
#[derive(Debug)]
pub(crate) struct ReadableFd(AsyncFd<Arc<OwnedFd>>);

impl ReadableFd {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>) -> io::Result<Self> {
        register_fd(fd, Interest::READABLE).map(Self)
    }

    /// Resolves when it is readable, as a pidfd is when its process has ended.
    pub(crate) async fn wait_readable(&self) -> io::Result<AsyncFdReadyGuard<'_, Arc<OwnedFd>>> {
        self.0.readable().await
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// A kernel file that reports when its content has changed since the last read.
#[derive(Debug)]
pub(crate) struct WatchedFile(AsyncFd<Arc<OwnedFd>>);

impl WatchedFile {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>) -> io::Result<Self> {
        register_fd(fd, Interest::PRIORITY).map(Self)
    }

    /// Resolves when there may be something new to read.
    pub(crate) async fn wait_changed(&self) -> io::Result<()> {
        self.0.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }
}

fn register_fd(fd: Arc<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the descriptor is owned, so it stays open as long as this; no code here can replace it.
    let fd = unsafe { AsyncFd::register_with_interest(fd, interest) };
    fd.map_err(|error| error.into_parts().1)
}

/// Waits for a change of a kernel file without a runtime, at most as long as `within`.
pub(crate) fn poll_for_change(fd: BorrowedFd<'_>, within: Duration) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    let within = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX).max(1);
    // SAFETY: the array has one element, which outlives the call.
    match check_result(unsafe { libc::poll(&raw mut poll, 1, within) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        result => result,
    }
}

fn check_result(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
