//! The creation of a child process, which borrows this program's memory until its exec.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use rustix::process::{DumpableBehavior, WaitId, WaitIdOptions};

use super::check_result;
use super::exec::{ChildSetup, child_main};
use super::stdio_slots::StdioSlots;

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
    pub(crate) setup: ChildSetup,
    /// The soft limit of file locks that marks it and its descendants.
    pub(crate) locks: u64,
    /// The directory of the cgroup in which it starts; this program's, if `None`.
    pub(crate) cgroup: Option<OwnedFd>,
    /// True if the kernel kills it when the thread that creates it exits.
    pub(crate) dies_with_parent: bool,
}

/// The step in which the start of a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartStep {
    /// Creating the process.
    Fork,
    /// The session, mark, death signal and descriptors.
    Setup,
    Cgroup,
    /// The preference for the kernel's out-of-memory killer.
    OomScoreAdj,
    MountNamespace,
    /// This one of its read-only paths.
    ReadOnlyPath(usize),
    /// This one of its resource limits.
    ResourceLimit(usize),
    /// The supplementary groups.
    Groups,
    /// The user and group.
    Identity,
    Capabilities,
    /// The renunciation of new privileges.
    NoNewPrivs,
    /// The working directory.
    Directory,
    /// Executing the program.
    Exec,
}

/// A child process whose start has succeeded so far.
#[derive(Debug)]
pub(crate) struct StartedChild {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
}

/// The step of a start that failed, with the kernel's error.
#[derive(Debug)]
pub(crate) struct StartError {
    pub(crate) step: StartStep,
    pub(crate) source: io::Error,
}

/// Creates a child process in a new session and returns once it runs the image.
///
/// The kernel kills the child when the calling *thread* exits, unless the image is of a child that survives it. Until
/// its exec, the child borrows this program's memory, as in `posix_spawn`: a copy would cost a millisecond for every
/// 20 MB of this program. Until then, the calling thread is suspended. With slots, which only that thread uses, it also
/// borrows the table of descriptors. Slots that can't be emptied are dropped.
pub(crate) fn spawn_image(
    image: &ExecImage,
    slots: &mut Option<StdioSlots>,
) -> Result<StartedChild, StartError> {
    let setup_error = |source| StartError { step: StartStep::Setup, source };
    let mut plan = ChildPlan::from_image(image).map_err(setup_error)?;
    if let Some(numbers) = slots.as_mut().and_then(|slots| slots.fill(&image.stdio).ok()) {
        (plan.stdio, plan.borrows_files) = (numbers, true);
    }
    let borrows_memory = (image.uid.is_some() || image.gid.is_some()).then(UndumpableGuard::new);
    let created = clone_child(&mut plan);
    drop(borrows_memory);
    drop(slots.take_if(|slots| slots.clear().is_err()));
    let child = created?;
    let Some((step, errno)) = plan.failure.get() else { return Ok(child) };
    // It did not exec, so it has exited. No other code waits for it.
    let _ = rustix::process::waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
    Err(StartError { step, source: io::Error::from_raw_os_error(errno) })
}

/// A child that changes its user makes the borrowed memory undumpable, which keeps other programs of that user out
/// of it. This is reverted when the last of such children has left the memory.
#[derive(Debug)]
struct UndumpableGuard;

static BORROWED_MEMORY: Mutex<BorrowedMemory> =
    Mutex::new(BorrowedMemory { children: 0, was_dumpable: false });

/// The children that borrow this program's memory and change their user.
#[derive(Debug)]
struct BorrowedMemory {
    children: usize,
    /// Before the first of them.
    was_dumpable: bool,
}

impl BorrowedMemory {
    fn add_child(&mut self, is_dumpable: impl FnOnce() -> bool) {
        if self.children == 0 {
            self.was_dumpable = is_dumpable();
        }
        self.children += 1;
    }

    /// Returns whether the memory is to be dumpable again.
    fn remove_child(&mut self) -> bool {
        self.children -= 1;
        self.children == 0 && self.was_dumpable
    }
}

impl UndumpableGuard {
    fn new() -> Self {
        let is_dumpable = || matches!(rustix::process::dumpable_behavior(), Ok(DumpableBehavior::Dumpable));
        BORROWED_MEMORY.lock().unwrap_or_else(PoisonError::into_inner).add_child(is_dumpable);
        Self
    }
}

impl Drop for UndumpableGuard {
    fn drop(&mut self) {
        let mut memory = BORROWED_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.remove_child() {
            // If it fails, this program only loses the ability to dump core.
            let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
        }
    }
}

/// All data that the child uses.
pub(super) struct ChildPlan<'a> {
    pub(super) image: &'a ExecImage,
    /// Each ends with a null pointer, as exec requires.
    pub(super) argv: Vec<*const c_char>,
    pub(super) envp: Vec<*const c_char>,
    pub(super) stdio: [RawFd; 3],
    /// True if the child borrows this program's descriptors until it has its own.
    pub(super) borrows_files: bool,
    pub(super) limit: libc::rlimit64,
    pub(super) drop_groups: bool,
    pub(super) parent: i32,
    /// True if the child has to enter its cgroup itself.
    pub(super) enters: bool,
    /// The step that failed in the child, and its errno. Only the child writes it, while the parent is
    /// suspended.
    pub(super) failure: Cell<Option<(StartStep, c_int)>>,
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
            borrows_files: false,
            limit: libc::rlimit64 { rlim_cur: image.locks, rlim_max: hard },
            drop_groups: image.uid.is_some() && rustix::process::geteuid().is_root(),
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            enters: false,
            failure: Cell::new(None),
        })
    }
}

/// Returns when the child has executed its program or has exited.
fn clone_child(plan: &mut ChildPlan<'_>) -> Result<StartedChild, StartError> {
    const STACK: usize = 64 * 1024;
    let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
    let stack = stack.spare_capacity_mut();
    let mut pidfd: c_int = -1;
    // No handler of this program may run in the child, which shares its memory. The child unblocks its
    // signals after it has reset its handlers.
    let mask = BlockedSignals::block_all().map_err(|source| StartError { step: StartStep::Fork, source })?;
    let into = plan.image.cgroup.as_ref().map(|cgroup| {
        // SAFETY: as for `clone_vfork` below.
        unsafe { clone_into_cgroup(cgroup.as_fd(), plan, stack, &mut pidfd) }
    });
    let pid = match into {
        Some(Err(error)) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        Some(Ok(pid)) => Ok(pid),
        missing => {
            plan.enters = missing.is_some();
            // It finds the cgroup by a descriptor of any number.
            plan.borrows_files &= !plan.enters;
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
    let pid = pid.map_err(|source| StartError { step: step(&source), source })?;
    // SAFETY: CLONE_PIDFD has stored a new close-on-exec descriptor, which no other code owns.
    Ok(StartedChild { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

fn clone_flags(plan: &ChildPlan<'_>) -> c_int {
    let files = if plan.borrows_files { libc::CLONE_FILES } else { 0 };
    libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | files
}

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
    let flags = clone_flags(plan) | libc::SIGCHLD;
    let plan = ptr::from_ref(plan).cast_mut().cast();
    // SAFETY: the child's stack is aligned to 16 bytes, and `child_main` neither allocates, locks, panics nor
    // returns. errno belongs to this thread, which is suspended.
    let pid =
        unsafe { libc::clone(child_main, stack.as_mut_ptr_range().end.cast(), flags, plan, &raw mut *pidfd) };
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
        flags: u64::from(clone_flags(plan).unsigned_abs()) | CLONE_INTO_CGROUP,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_dumpable_again_after_the_last_of_children_that_overlap() {
        for was_dumpable in [true, false] {
            let mut memory = BorrowedMemory { children: 0, was_dumpable: false };
            memory.add_child(|| was_dumpable);
            // By now the first child has made it undumpable.
            memory.add_child(|| false);
            assert!(!memory.remove_child(), "the second child still borrows it");
            assert_eq!(memory.remove_child(), was_dumpable);
        }
    }
}
