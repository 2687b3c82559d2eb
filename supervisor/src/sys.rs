//! The crate's only unsafe code: system calls that std and rustix don't offer, and the creation of a child
//! process.
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

// The old 16-bit calls would truncate larger ids.
#[cfg(not(any(target_arch = "arm", target_arch = "x86")))]
use libc::{SYS_setgroups as SETGROUPS, SYS_setresgid as SETRESGID, SYS_setresuid as SETRESUID};
#[cfg(any(target_arch = "arm", target_arch = "x86"))]
use libc::{SYS_setgroups32 as SETGROUPS, SYS_setresgid32 as SETRESGID, SYS_setresuid32 as SETRESUID};

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
///
/// # Errors
/// The kernel's error.
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

/// Whether a process with this pid exists that this program may signal.
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

/// The sender of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DatagramSender {
    /// 0 if it is in a PID namespace that this program can't see, which rustix can't represent.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// The maximum number of descriptors in one message (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;
/// Space for those and the sender, in words, so that it is aligned.
const CONTROL: usize = 160;

/// Receives one datagram: its length, and its sender. Closes the descriptors that came with it.
///
/// # Errors
/// The kernel's error.
pub(crate) fn receive_datagram(
    socket: BorrowedFd<'_>,
    text: &mut [u8],
) -> io::Result<(usize, Option<DatagramSender>)> {
    const { assert!(CONTROL * size_of::<u64>() >= MAX_FDS * size_of::<RawFd>() + size_of::<libc::ucred>() + 64) };
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
    let mut sender = None;
    // SAFETY: the kernel has written whole headers, and their lengths, into `control`, which is still valid.
    // The data of each is read as its type specifies, unaligned; the descriptors are new and owned by this
    // function.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(found) = header.as_ref() {
            let data = libc::CMSG_DATA(header);
            match (found.cmsg_level, found.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    let libc::ucred { pid, uid, .. } = data.cast::<libc::ucred>().read_unaligned();
                    sender = Some(DatagramSender { pid, uid });
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
///
/// # Errors
/// The kernel's error.
pub(crate) fn poll_for_change(fd: BorrowedFd<'_>, within: Duration) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    let within = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX).max(1);
    // SAFETY: the array has one element, which outlives the call.
    match check_result(unsafe { libc::poll(&raw mut poll, 1, within) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        result => result,
    }
}

/// A program to run, fully prepared: nothing is computed between clone and exec.
#[derive(Debug)]
pub(crate) struct ExecImage {
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
    /// The directory of the cgroup in which it starts; this program's, if `None`.
    pub(crate) cgroup: Option<OwnedFd>,
}

/// The step in which the start of a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartStep {
    /// Creating the process.
    Fork = 1,
    /// Its process group, mark, death signal and descriptors.
    Setup,
    /// Its user and groups.
    Identity,
    /// Its working directory.
    Directory,
    /// Executing the program.
    Exec,
    /// Its cgroup.
    Cgroup,
}

/// Creates a child process in a new process group and returns once it runs the image.
///
/// The kernel kills the child when the calling *thread* exits. Until its exec, the child borrows this
/// program's memory, as in `posix_spawn`: a copy would cost a millisecond for every 20 MB of this program.
/// The calling thread is suspended meanwhile.
///
/// # Errors
/// The step that failed, with the kernel's error.
pub(crate) fn spawn_image(image: &ExecImage) -> Result<(i32, OwnedFd), (StartStep, io::Error)> {
    let mut plan = ChildPlan::from_image(image).map_err(|error| (StartStep::Setup, error))?;
    // A child that changes its user makes the borrowed memory undumpable, which keeps other programs of that
    // user out of it. This is reverted when the child has left the memory.
    let dumpable = rustix::process::dumpable_behavior();
    let created = clone_child(&mut plan);
    if let Ok(DumpableBehavior::Dumpable) = dumpable
        && (image.uid.is_some() || image.gid.is_some())
    {
        // If it fails, this program only loses the ability to dump core.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
    let (pid, pidfd) = created?;
    let Some(step) = plan.failed_step() else { return Ok((pid, pidfd)) };
    let error = io::Error::from_raw_os_error(plan.errno.load(Ordering::Acquire));
    // It did not exec, so it has exited. No other code waits for it.
    let _ = rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
    Err((step, error))
}

/// All data that the child uses.
struct ChildPlan<'a> {
    image: &'a ExecImage,
    /// Each ends with a null pointer, as exec requires.
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    stdio: [RawFd; 3],
    limit: libc::rlimit64,
    drop_groups: bool,
    parent: i32,
    /// Whether the child has to enter its cgroup itself.
    enters: bool,
    step: AtomicU8,
    errno: AtomicI32,
}

impl<'a> ChildPlan<'a> {
    fn from_image(image: &'a ExecImage) -> io::Result<Self> {
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

    fn failed_step(&self) -> Option<StartStep> {
        let step = self.step.load(Ordering::Acquire);
        [StartStep::Setup, StartStep::Identity, StartStep::Directory, StartStep::Exec, StartStep::Cgroup]
            .into_iter()
            .find(|known| *known as u8 == step)
    }
}

/// Returns when the child has executed its program or has exited.
fn clone_child(plan: &mut ChildPlan<'_>) -> Result<(i32, OwnedFd), (StartStep, io::Error)> {
    const STACK: usize = 64 * 1024;
    let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
    let stack = stack.spare_capacity_mut();
    let mut pidfd: c_int = -1;
    // No handler of this program may run in the child, which shares its memory. The child unblocks its
    // signals after it has reset its handlers.
    let mask = BlockedSignals::block_all().map_err(|error| (StartStep::Fork, error))?;
    let into = plan.image.cgroup.as_ref().map(|cgroup| {
        // SAFETY: as for `clone_vfork` below.
        unsafe { clone_into_cgroup(cgroup.as_fd(), plan, stack, &mut pidfd) }
    });
    let pid = match into {
        Some(Err(error)) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        Some(Ok(pid)) => Ok(pid),
        missing => {
            plan.enters = missing.is_some();
            // SAFETY: this thread is suspended until the child has left this memory, so `plan`, `stack` and
            // `pidfd` outlive its use of them. The child does not return.
            unsafe { clone_vfork(plan, stack, &mut pidfd) }
        }
    };
    drop(mask);
    let is_full = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM));
    let step = |error: &_| {
        if plan.image.cgroup.is_some() && !is_full(error) { StartStep::Cgroup } else { StartStep::Fork }
    };
    let pid = pid.map_err(|error| (step(&error), error))?;
    // SAFETY: CLONE_PIDFD has stored a new close-on-exec descriptor, which no other code owns.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

const CLONE_FLAGS: c_int = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;

/// Creates a child that shares this memory, on a separate stack, and returns when the child has left the
/// memory.
///
/// # Errors
/// The kernel's error.
///
/// # Safety
/// All arguments outlive the call.
unsafe fn clone_vfork(
    plan: &ChildPlan<'_>,
    stack: &mut [MaybeUninit<u128>],
    pidfd: &mut c_int,
) -> io::Result<i32> {
    let plan = ptr::from_ref(plan).cast_mut().cast();
    // SAFETY: the child's stack is aligned to 16 bytes, and `child_main` neither allocates, locks, panics nor
    // returns. errno belongs to this thread, which is suspended.
    let pid = unsafe {
        libc::clone(
            child_main,
            stack.as_mut_ptr_range().end.cast(),
            CLONE_FLAGS | libc::SIGCHLD,
            plan,
            &raw mut *pidfd,
        )
    };
    check_result(pid).map(|()| pid)
}

/// Like [`clone_vfork`], but creates the child in that cgroup. Moving it there later takes 16 ms, because the
/// kernel waits until no process forks.
///
/// # Errors
/// `ENOSYS` also on architectures without an implementation here: libc has no function for it, and the child
/// needs another stack at once.
///
/// # Safety
/// As for [`clone_vfork`].
unsafe fn clone_into_cgroup(
    cgroup: BorrowedFd<'_>,
    plan: &ChildPlan<'_>,
    stack: &mut [MaybeUninit<u128>],
    pidfd: &mut c_int,
) -> io::Result<i32> {
    /// The kernel's struct, in its third version.
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
        flags: u64::from(CLONE_FLAGS.unsigned_abs()) | CLONE_INTO_CGROUP,
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
        // SAFETY: the parent continues after the label, with its registers as the kernel has kept them. The
        // child has a separate stack, aligned to 16 bytes, and calls `child_main`, which does not return; so
        // it uses nothing of this function's frame.
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
                in("r13") child_main as extern "C" fn(*mut c_void) -> c_int,
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

extern "C" fn child_main(plan: *mut c_void) -> c_int {
    // SAFETY: `clone_child` passes its plan, which outlives the child's use of this memory. Only its atomics
    // are written.
    let plan = unsafe { &*plan.cast_const().cast::<ChildPlan<'_>>() };
    // SAFETY: this is the new child.
    let step = unsafe { exec_image(plan) };
    // SAFETY: errno's address is always valid.
    plan.errno.store(unsafe { *libc::__errno_location() }, Ordering::Release);
    plan.step.store(step as u8, Ordering::Release);
    // SAFETY: ends the child without running destructors of the borrowed memory.
    unsafe { libc::_exit(127) }
}

/// Returns only on failure, with the error in errno.
///
/// # Safety
/// Only for the new child: it changes the calling process permanently. It makes only async-signal-safe calls,
/// and sets ids by raw system calls, because libc's functions would change all threads of the parent.
unsafe fn exec_image(plan: &ChildPlan<'_>) -> StartStep {
    let image = plan.image;
    // SAFETY: every pointer is into `plan` or a local, and of the type that the call requires.
    unsafe {
        if plan.enters && !enter_cgroup(image) {
            return StartStep::Cgroup;
        }
        if libc::setpgid(0, 0) != 0 || libc::setrlimit64(libc::RLIMIT_LOCKS, &raw const plan.limit) != 0 {
            return StartStep::Setup;
        }
        if plan.drop_groups && libc::syscall(SETGROUPS, 0, ptr::null::<libc::gid_t>()) != 0 {
            return StartStep::Identity;
        }
        if let Some(gid) = image.gid
            && libc::syscall(SETRESGID, gid, gid, gid) != 0
        {
            return StartStep::Identity;
        }
        if let Some(uid) = image.uid
            && libc::syscall(SETRESUID, uid, uid, uid) != 0
        {
            return StartStep::Identity;
        }
        // After the ids, because changing them clears it. The parent may have exited before it was set.
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::getppid() != plan.parent {
            return StartStep::Setup;
        }
        if let Some(dir) = &image.dir
            && libc::chdir(dir.as_ptr()) != 0
        {
            return StartStep::Directory;
        }
        for (target, source) in (0..).zip(plan.stdio) {
            if libc::dup2(source, target) != target {
                return StartStep::Setup;
            }
        }
        // Also those with close-on-exec, because the exec may take long, and no reader should wait for it to
        // see the end of a pipe. A kernel before 5.9 lacks the call, and leaks descriptors that were
        // inherited without the flag.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
        reset_signals();
        let errno = libc::__errno_location();
        let mut denied = false;
        for program in &image.programs {
            libc::execve(program.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr());
            match *errno {
                libc::EACCES => denied = true,
                libc::ENOENT | libc::ENOTDIR => {}
                _ => return StartStep::Exec,
            }
        }
        if denied {
            *errno = libc::EACCES;
        }
    }
    StartStep::Exec
}

/// Moves the child into its cgroup. Returns whether it succeeded.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn enter_cgroup(image: &ExecImage) -> bool {
    let Some(cgroup) = &image.cgroup else { return true };
    // SAFETY: both strings outlive their calls.
    unsafe {
        let procs =
            libc::openat(cgroup.as_raw_fd(), c"cgroup.procs".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        // 0 is the calling process.
        procs >= 0 && libc::write(procs, c"0".as_ptr().cast(), 1) == 1 && libc::close(procs) == 0
    }
}

/// Resets every signal to its default action, and unblocks all.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn reset_signals() {
    // The size of the kernel's sigaction on any architecture. libc's function rejects the two signals that it
    // reserves, and a program can have inherited even those ignored.
    let default = [0_u64; 8];
    // SAFETY: all zeroes is the default action and an empty set; both outlive the calls.
    unsafe {
        for signal in 1..=64 {
            // Fails for the two signals that can't be changed.
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

/// Blocks all signals in this thread until it is dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn block_all() -> io::Result<Self> {
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
        // SAFETY: the kernel has filled in the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

fn check_result(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
