//! The crate's only unsafe code: system calls that std and rustix don't offer, and the birth of a child process.
#![allow(unsafe_code, reason = "signals by number, and a child that shares memory until it execs")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::Duration;

use rustix::process::{DumpableBehavior, WaitId, WaitIdOptions};
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

// The 16-bit calls of old would cut larger ids.
#[cfg(not(any(target_arch = "arm", target_arch = "x86")))]
use libc::{SYS_setgroups as SETGROUPS, SYS_setresgid as SETRESGID, SYS_setresuid as SETRESUID};
#[cfg(any(target_arch = "arm", target_arch = "x86"))]
use libc::{SYS_setgroups32 as SETGROUPS, SYS_setresgid32 as SETRESGID, SYS_setresuid32 as SETRESUID};

/// The soft limit of file locks of a process, which Linux has not enforced since 2.4.
///
/// # Errors
/// `EPERM` where the process is another user's, `ESRCH` where there is none.
pub(crate) fn locks_limit(pid: i32) -> io::Result<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no new limit is given, and the old one is written to a place that outlives the call.
    check(unsafe { libc::prlimit64(pid, libc::RLIMIT_LOCKS, ptr::null(), &raw mut limit) })?;
    Ok(limit.rlim_cur)
}

/// Some child of this program that has ended and that nobody has waited for; it stays as it is.
pub(crate) fn dead_child() -> io::Result<Option<i32>> {
    // SAFETY: all zeroes is a siginfo.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` outlives the call.
    check(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) })?;
    // SAFETY: waitid has filled in a SIGCHLD's fields, or left the zeroes.
    let pid = unsafe { info.si_pid() };
    Ok((pid != 0).then_some(pid))
}

/// Sends a signal to the one process that the descriptor stands for.
pub(crate) fn send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let info = ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open while it is borrowed; without an info the kernel makes one.
    check(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0) })
}

/// Who the parent of a process is, from Linux 6.13 on.
pub(crate) fn parent(pidfd: BorrowedFd<'_>) -> io::Result<i32> {
    /// The first version of the kernel's, whose size is part of the request.
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
    // SAFETY: the kernel writes no more than the size in the request, which is that of `info`.
    check(unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) })?;
    i32::try_from(info.ppid).map_err(io::Error::other)
}

/// Sends a signal to whatever process has this pid now.
pub(crate) fn send_signal_to_pid(pid: i32, signal: i32) -> io::Result<()> {
    assert!(pid > 1, "the others would mean process groups, and init");
    // SAFETY: no memory is passed.
    check(unsafe { libc::kill(pid, signal) })
}

/// Whether there is a process of this pid that this program may signal.
pub(crate) fn may_signal(pid: i32) -> bool {
    // SAFETY: no memory is passed, and no signal sent.
    pid > 0 && unsafe { libc::kill(pid, 0) } == 0
}

/// The session of a process, 0 where that is of another PID namespace; rustix takes no 0.
pub(crate) fn session(pid: i32) -> io::Result<i32> {
    // SAFETY: no memory is passed.
    let session = unsafe { libc::getsid(pid) };
    check(session).map(|()| session)
}

/// Who sent a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sender {
    /// 0 where it is of a PID namespace that this program can't see, which rustix has no word for.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// As many descriptors as one message can carry (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;
/// Room for those and the sender, in words, so that it is aligned.
const CONTROL: usize = 160;

/// Receives one datagram: its length, and who sent it. Descriptors that came with it are closed.
pub(crate) fn receive(socket: BorrowedFd<'_>, text: &mut [u8]) -> io::Result<(usize, Option<Sender>)> {
    const { assert!(CONTROL * size_of::<u64>() >= MAX_FDS * size_of::<RawFd>() + size_of::<libc::ucred>() + 64) };
    let mut control = [0_u64; CONTROL];
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    // SAFETY: all zeroes is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` points to buffers of the lengths that it tells, which outlive the call.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let mut sender = None;
    // SAFETY: the kernel has written whole headers, and their lengths, into `control`, which still lives. The data of
    // each is read as what its type says, wherever it lies; the descriptors are new, and nobody else's.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(found) = header.as_ref() {
            let data = libc::CMSG_DATA(header);
            match (found.cmsg_level, found.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    let libc::ucred { pid, uid, .. } = data.cast::<libc::ucred>().read_unaligned();
                    sender = Some(Sender { pid, uid });
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
    Ok((length, sender))
}

/// A descriptor whose readability is awaited.
#[derive(Debug)]
pub(crate) struct Readable(AsyncFd<Arc<OwnedFd>>);

impl Readable {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>) -> io::Result<Self> {
        register(fd, Interest::READABLE).map(Self)
    }

    /// Resolves when it is readable, as a pidfd is when its process has ended.
    pub(crate) async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, Arc<OwnedFd>>> {
        self.0.readable().await
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// A file of the kernel's that tells when its content has changed since it was read.
#[derive(Debug)]
pub(crate) struct Changing(AsyncFd<Arc<OwnedFd>>);

impl Changing {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>) -> io::Result<Self> {
        register(fd, Interest::PRIORITY).map(Self)
    }

    /// Resolves when there may be something new to read.
    pub(crate) async fn changed(&self) -> io::Result<()> {
        self.0.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }
}

fn register(fd: Arc<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the descriptor is owned, so it stays open while this lives; nobody here can put another in its place.
    let fd = unsafe { AsyncFd::register_with_interest(fd, interest) };
    fd.map_err(|error| error.into_parts().1)
}

/// Waits for the same without a runtime, no longer than that.
pub(crate) fn wait_for_change(fd: BorrowedFd<'_>, within: Duration) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    let within = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX).max(1);
    // SAFETY: it is one, and outlives the call.
    match check(unsafe { libc::poll(&raw mut poll, 1, within) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        result => result,
    }
}

/// A program to run, complete to the last byte: nothing is computed between birth and exec.
#[derive(Debug)]
pub(crate) struct Image {
    /// The paths to try, in order.
    pub(crate) programs: Vec<CString>,
    pub(crate) args: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) dir: Option<CString>,
    /// None of them is 0, 1 or 2.
    pub(crate) stdio: [OwnedFd; 3],
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    /// The soft limit of file locks that marks it and its descendants.
    pub(crate) locks: u64,
    /// The directory of the cgroup into which it is born; this program's, if there is none.
    pub(crate) cgroup: Option<OwnedFd>,
}

/// What a newborn child was at when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Making the process.
    Fork = 1,
    /// Its process group, its mark, its death signal, its descriptors.
    Setup,
    /// Its user and groups.
    Identity,
    /// Its working directory.
    Directory,
    /// The program itself.
    Exec,
    /// Its cgroup.
    Cgroup,
}

/// Makes a child process in a process group of its own and returns once it runs the image.
///
/// The child dies by SIGKILL when the calling *thread* ends. It borrows this program's memory until it execs, as in
/// `posix_spawn`: a copy costs a millisecond for every 20 MB that the program uses. The calling thread stands still
/// meanwhile.
pub(crate) fn spawn(image: &Image) -> Result<(i32, OwnedFd), (Step, io::Error)> {
    let mut plan = Plan::of(image).map_err(|error| (Step::Setup, error))?;
    // A child that changes its user makes the memory that it borrows undumpable: this keeps other programs of that user
    // out of it, and is taken back when it is over.
    let dumpable = rustix::process::dumpable_behavior();
    let born = born(&mut plan);
    if let Ok(DumpableBehavior::Dumpable) = dumpable
        && (image.uid.is_some() || image.gid.is_some())
    {
        // Only a core dump of this program is lost if it fails.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
    let (pid, pidfd) = born?;
    let Some(step) = plan.failed_step() else { return Ok((pid, pidfd)) };
    let error = io::Error::from_raw_os_error(plan.errno.load(Ordering::Acquire));
    // It has ended, since it did not exec. Nobody else waits for it.
    let _ = rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
    Err((step, error))
}

/// All that the child looks at.
struct Plan<'a> {
    image: &'a Image,
    /// Each ends in a null, as exec wants it.
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    stdio: [RawFd; 3],
    limit: libc::rlimit64,
    drop_groups: bool,
    parent: i32,
    /// Whether the child has to enter its cgroup by itself.
    enters: bool,
    step: AtomicU8,
    errno: AtomicI32,
}

impl<'a> Plan<'a> {
    fn of(image: &'a Image) -> io::Result<Self> {
        let pointers = |strings: &[CString]| {
            strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
        };
        let hard = rustix::process::getrlimit(rustix::process::Resource::Locks)
            .maximum
            .unwrap_or(libc::RLIM64_INFINITY);
        if hard < image.locks {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Self {
            image,
            argv: pointers(&image.args),
            envp: pointers(&image.env),
            stdio: image.stdio.each_ref().map(std::os::fd::AsRawFd::as_raw_fd),
            limit: libc::rlimit64 { rlim_cur: image.locks, rlim_max: hard },
            drop_groups: image.uid.is_some() && rustix::process::geteuid().is_root(),
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            enters: false,
            step: AtomicU8::new(0),
            errno: AtomicI32::new(0),
        })
    }

    fn failed_step(&self) -> Option<Step> {
        let step = self.step.load(Ordering::Acquire);
        [Step::Setup, Step::Identity, Step::Directory, Step::Exec, Step::Cgroup]
            .into_iter()
            .find(|known| *known as u8 == step)
    }
}

/// Returns when the child has become its program or has ended.
fn born(plan: &mut Plan<'_>) -> Result<(i32, OwnedFd), (Step, io::Error)> {
    const STACK: usize = 64 * 1024;
    let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
    let stack = stack.spare_capacity_mut();
    let mut pidfd: c_int = -1;
    // No handler of this program may run in the child, which shares its memory: the child unblocks its signals when it
    // has none any more.
    let mask = BlockedSignals::all().map_err(|error| (Step::Fork, error))?;
    let into = plan.image.cgroup.as_ref().map(|cgroup| {
        // SAFETY: as for `clone` below.
        unsafe { clone_into(cgroup.as_fd(), plan, stack, &mut pidfd) }
    });
    let pid = match into {
        Some(Err(error)) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        Some(Ok(pid)) => Ok(pid),
        missing => {
            plan.enters = missing.is_some();
            // SAFETY: the child suspends this thread until it has left this memory, so `plan`, `stack` and `pidfd` outlive
            // its use of them. It does not return.
            unsafe { clone(plan, stack, &mut pidfd) }
        }
    };
    drop(mask);
    let is_full = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM));
    let step =
        |error: &_| if plan.image.cgroup.is_some() && !is_full(error) { Step::Cgroup } else { Step::Fork };
    let pid = pid.map_err(|error| (step(&error), error))?;
    // SAFETY: CLONE_PIDFD has stored a new descriptor, close-on-exec, that nobody else knows.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

const BIRTH: c_int = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;

/// Makes a child that shares this memory, on a stack of its own, and stands still until it doesn't any more.
///
/// # Safety
/// All that is given outlives the call.
unsafe fn clone(plan: &Plan<'_>, stack: &mut [MaybeUninit<u128>], pidfd: &mut c_int) -> io::Result<i32> {
    let plan = ptr::from_ref(plan).cast_mut().cast();
    // SAFETY: the child's stack is aligned to 16 bytes, and `child` neither allocates, locks, panics nor returns. errno
    // is this thread's, which stands still.
    let pid = unsafe {
        libc::clone(child, stack.as_mut_ptr_range().end.cast(), BIRTH | libc::SIGCHLD, plan, &raw mut *pidfd)
    };
    check(pid).map(|()| pid)
}

/// The same, of a child that is in that cgroup from its birth. To move it there later costs 16 ms, for which the kernel
/// waits until nobody forks.
///
/// # Errors
/// `ENOSYS` also where it is not written down for this machine: libc has no function for it, and the child needs another
/// stack at once.
///
/// # Safety
/// As for [`clone`].
unsafe fn clone_into(
    cgroup: BorrowedFd<'_>,
    plan: &Plan<'_>,
    stack: &mut [MaybeUninit<u128>],
    pidfd: &mut c_int,
) -> io::Result<i32> {
    /// The kernel's, in its third version.
    #[repr(C)]
    #[derive(Default)]
    struct CloneArgs {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
        cgroup: u64,
    }
    const CLONE_INTO_CGROUP: u64 = 1 << 33;
    let args = CloneArgs {
        flags: u64::from(BIRTH.unsigned_abs()) | CLONE_INTO_CGROUP,
        pidfd: ptr::from_mut(pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack) as u64,
        cgroup: cgroup.as_raw_fd() as u64,
        ..CloneArgs::default()
    };
    #[cfg(not(all(target_arch = "x86_64", target_pointer_width = "64")))]
    {
        let _ = (args, plan);
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
    #[cfg(all(target_arch = "x86_64", target_pointer_width = "64"))]
    {
        let result: i64;
        // SAFETY: the parent goes on behind the label, with its registers as the kernel has kept them. The child has a
        // stack of its own, aligned to 16 bytes, and goes into `child`, which does not return; so it touches nothing of
        // this function's.
        unsafe {
            std::arch::asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r12",
                "call r13",
                "ud2",
                "2:",
                inlateout("rax") libc::SYS_clone3 => result,
                in("rdi") &raw const args,
                in("rsi") size_of::<CloneArgs>(),
                in("r12") ptr::from_ref(plan),
                in("r13") child as extern "C" fn(*mut c_void) -> c_int,
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        i32::try_from(result)
            .ok()
            .filter(|pid| *pid > 0)
            .ok_or_else(|| io::Error::from_raw_os_error(-result as i32))
    }
}

extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `born` passes its plan, which outlives the child's stay in this memory. It is only read, but for atomics.
    let plan = unsafe { &*plan.cast_const().cast::<Plan<'_>>() };
    // SAFETY: this is the newborn child.
    let step = unsafe { become_image(plan) };
    // SAFETY: errno's address is always valid.
    plan.errno.store(unsafe { *libc::__errno_location() }, Ordering::Release);
    plan.step.store(step as u8, Ordering::Release);
    // SAFETY: ends the child, and no destructor of the memory that it borrows runs.
    unsafe { libc::_exit(127) }
}

/// Returns only where it failed, with the reason in errno.
///
/// # Safety
/// Only for the newborn child: it changes the calling process for good. It makes async-signal-safe calls only, and those
/// that set ids are bare system calls, because libc's would change all threads of the parent.
unsafe fn become_image(plan: &Plan<'_>) -> Step {
    let image = plan.image;
    // SAFETY: every pointer is into `plan` or a local, and of the type that the call wants.
    unsafe {
        if plan.enters && !enter(image) {
            return Step::Cgroup;
        }
        if libc::setpgid(0, 0) != 0 || libc::setrlimit64(libc::RLIMIT_LOCKS, &raw const plan.limit) != 0 {
            return Step::Setup;
        }
        if plan.drop_groups && libc::syscall(SETGROUPS, 0, ptr::null::<libc::gid_t>()) != 0 {
            return Step::Identity;
        }
        if let Some(gid) = image.gid
            && libc::syscall(SETRESGID, gid, gid, gid) != 0
        {
            return Step::Identity;
        }
        if let Some(uid) = image.uid
            && libc::syscall(SETRESUID, uid, uid, uid) != 0
        {
            return Step::Identity;
        }
        // After the ids, because a change of them clears it. The parent may have died before it was set.
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::getppid() != plan.parent {
            return Step::Setup;
        }
        if let Some(dir) = &image.dir
            && libc::chdir(dir.as_ptr()) != 0
        {
            return Step::Directory;
        }
        for (target, source) in (0..).zip(plan.stdio) {
            if libc::dup2(source, target) != target {
                return Step::Setup;
            }
        }
        // Also those with the flag, because the exec may take long: nobody is to wait for the end of a pipe till then. A
        // kernel before 5.9 can't, and leaks those that this program inherited without the flag.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
        default_signals();
        let errno = libc::__errno_location();
        let mut denied = false;
        for program in &image.programs {
            libc::execve(program.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr());
            match *errno {
                libc::EACCES => denied = true,
                libc::ENOENT | libc::ENOTDIR => {}
                _ => return Step::Exec,
            }
        }
        if denied {
            *errno = libc::EACCES;
        }
    }
    Step::Exec
}

/// Moves the child into its cgroup. Whether that went well.
///
/// # Safety
/// As for [`become_image`].
unsafe fn enter(image: &Image) -> bool {
    let Some(cgroup) = &image.cgroup else { return true };
    // SAFETY: both strings outlive their calls.
    unsafe {
        let procs =
            libc::openat(cgroup.as_raw_fd(), c"cgroup.procs".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        // 0 is who writes.
        procs >= 0 && libc::write(procs, c"0".as_ptr().cast(), 1) == 1 && libc::close(procs) == 0
    }
}

/// Every signal does what it does by default, and none is blocked.
///
/// # Safety
/// As for [`become_image`].
unsafe fn default_signals() {
    // As long as the kernel's sigaction is anywhere. libc's function refuses the two signals that it keeps for itself,
    // and a program can have inherited even those ignored.
    let default = [0_u64; 8];
    // SAFETY: all zeroes is the default action and an empty set; both outlive the calls.
    unsafe {
        for signal in 1..=64 {
            // Two can't be changed: those fail.
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                ptr::null_mut::<c_void>(),
                size_of::<u64>(),
            );
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Keeps signals from this thread until it is dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn all() -> io::Result<Self> {
        // SAFETY: all zeroes is a signal set, and both sets outlive the calls.
        let (failed, before) = unsafe {
            let (mut all, mut before) = std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>();
            libc::sigfillset(&raw mut all);
            (libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before), before)
        };
        if failed == 0 { Ok(Self { before }) } else { Err(io::Error::from_raw_os_error(failed)) }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is one that the kernel gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

fn check(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
