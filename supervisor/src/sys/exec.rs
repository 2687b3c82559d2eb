//! The work of a new child between its creation and its exec.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::AsRawFd as _;
use std::ptr;

use super::spawn::{ChildPlan, ExecImage, StartStep};

// The old 16-bit calls would truncate larger ids.
#[cfg(not(any(target_arch = "arm", target_arch = "x86")))]
use libc::{SYS_setgroups as SETGROUPS, SYS_setresgid as SETRESGID, SYS_setresuid as SETRESUID};
#[cfg(any(target_arch = "arm", target_arch = "x86"))]
use libc::{SYS_setgroups32 as SETGROUPS, SYS_setresgid32 as SETRESGID, SYS_setresuid32 as SETRESUID};

/// Arguments of prctl(2), which reads whole words.
const ON: libc::c_ulong = 1;
const OFF: libc::c_ulong = 0;

/// Settings of a child other than its identity, all of them optional.
#[derive(Debug, Default)]
pub(crate) struct ChildSetup {
    /// The text for `/proc/self/oom_score_adj`.
    pub(crate) oom_score_adj: Option<CString>,
    pub(crate) umask: libc::mode_t,
    pub(crate) resource_limits: Vec<ResourceLimit>,
    /// The supplementary groups; `None` keeps this program's, unless the user changes.
    pub(crate) groups: Option<Vec<libc::gid_t>>,
    /// The bits of the capabilities that it keeps; `None` changes none.
    pub(crate) capabilities: Option<u64>,
    pub(crate) no_new_privs: bool,
    pub(crate) read_only_paths: Vec<CString>,
}

/// A limit for setrlimit(2).
pub(crate) struct ResourceLimit {
    pub(crate) resource: RlimitNumber,
    pub(crate) values: libc::rlimit64,
}

/// The type of the number of a resource, which differs between C libraries.
#[cfg(target_env = "gnu")]
pub(crate) type RlimitNumber = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
pub(crate) type RlimitNumber = c_int;

impl std::fmt::Debug for ResourceLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let values = (self.values.rlim_cur, self.values.rlim_max);
        f.debug_struct("ResourceLimit").field("resource", &self.resource).field("values", &values).finish()
    }
}

/// The child, from its creation to its exec or exit.
pub(super) extern "C" fn child_main(plan: *mut c_void) -> c_int {
    // SAFETY: `clone_child` passes its plan, which outlives the child's use of this memory. Only its cell is
    // written, while the parent is suspended.
    let plan = unsafe { &*plan.cast_const().cast::<ChildPlan<'_>>() };
    // SAFETY: this is the new child.
    let step = unsafe { exec_image(plan) };
    // SAFETY: errno's address is always valid.
    plan.failure.set(Some((step, unsafe { *libc::__errno_location() })));
    // SAFETY: ends the child without running destructors of the borrowed memory.
    unsafe { libc::_exit(127) }
}

/// Returns only on failure, with the error in errno.
///
/// # Safety
/// Only for the new child: it changes the calling process permanently. It makes only async-signal-safe calls,
/// and sets ids by raw system calls, because libc's functions would change all threads of the parent.
unsafe fn exec_image(plan: &ChildPlan<'_>) -> StartStep {
    // SAFETY: as the caller guarantees.
    unsafe { prepare_child(plan).map_or_else(|step| step, |()| exec_program(plan)) }
}

/// Gives the child each property that it would inherit otherwise: cgroup, session, mark, limits, mounts, umask, ids,
/// capabilities, directory, descriptors and signals. In an order in which none takes away what a later one needs: what needs root comes before
/// the user, the limits come after the last file is opened.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn prepare_child(plan: &ChildPlan<'_>) -> Result<(), StartStep> {
    let (image, setup) = (plan.image, &plan.image.setup);
    // SAFETY: every pointer is into `plan` or a local, and of the type that the call requires.
    unsafe {
        if plan.borrows_files {
            leave_files(plan)?;
        }
        if plan.enters && !enter_cgroup(image) {
            return Err(StartStep::Cgroup);
        }
        // It can't reach this program's terminal, nor signals from there.
        check(libc::setsid().min(0), StartStep::Setup)?;
        check(libc::setrlimit64(libc::RLIMIT_LOCKS, &raw const plan.limit), StartStep::Setup)?;
        if let Some(score) = &setup.oom_score_adj
            && !write_oom_score_adj(score)
        {
            return Err(StartStep::OomScoreAdj);
        }
        protect_paths(&setup.read_only_paths)?;
        libc::umask(setup.umask);
        for (index, limit) in setup.resource_limits.iter().enumerate() {
            let set = libc::setrlimit64(limit.resource, &raw const limit.values);
            check(set, StartStep::ResourceLimit(index))?;
        }
        change_identity(plan)?;
        // After the ids, because changing them clears it. The parent may have exited before it was set.
        if image.dies_with_parent {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), StartStep::Setup)?;
        }
        if libc::getppid() != plan.parent {
            return Err(StartStep::Setup);
        }
        if setup.no_new_privs {
            let set = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, ON, OFF, OFF, OFF);
            check(set, StartStep::NoNewPrivs)?;
        }
        if let Some(dir) = &image.dir {
            check(libc::chdir(dir.as_ptr()), StartStep::Directory)?;
        }
        for (target, source) in (0..).zip(plan.stdio) {
            if libc::dup2(source, target) != target {
                return Err(StartStep::Setup);
            }
        }
        // Also those with close-on-exec, because the exec may take long, and no reader should wait for it to
        // see the end of a pipe. A kernel before 5.9 lacks the call, and leaks descriptors that were
        // inherited without the flag.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
        reset_signals();
    }
    Ok(())
}

/// Executes the first of the candidates that exists. Returns only on failure.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn exec_program(plan: &ChildPlan<'_>) -> StartStep {
    // SAFETY: the strings and the arrays of pointers to them outlive the calls; the arrays end with null.
    unsafe {
        let errno = libc::__errno_location();
        let mut denied = false;
        for program in &plan.image.programs {
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

/// The step, where a call has failed.
fn check(result: impl Into<i64>, step: StartStep) -> Result<(), StartStep> {
    if result.into() == 0 { Ok(()) } else { Err(step) }
}

/// Gives the child its own table of descriptors, before it opens or closes any.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn leave_files(plan: &ChildPlan<'_>) -> Result<(), StartStep> {
    let first = plan.stdio.into_iter().max().map_or(0, |last| last.unsigned_abs() + 1);
    // Without the higher ones, which therefore need not be copied.
    let flags = libc::CLOSE_RANGE_UNSHARE;
    // SAFETY: no memory is passed.
    let left = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, flags) };
    check(left, StartStep::Setup)
}

/// Writes the text to the child's own file, which belongs to root once the user has changed.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn write_oom_score_adj(score: &CStr) -> bool {
    // SAFETY: both strings outlive their calls.
    unsafe {
        let open = || libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        let mut file = open();
        if file < 0 && libc::prctl(libc::PR_GET_DUMPABLE) == 0 {
            // The file of a process that is not dumpable belongs to root. Until its exec, the child shares this attribute with
            // the parent, which is dumpable for the time of an open.
            libc::prctl(libc::PR_SET_DUMPABLE, ON, OFF, OFF, OFF);
            file = open();
            libc::prctl(libc::PR_SET_DUMPABLE, OFF, OFF, OFF, OFF);
        }
        let length = score.count_bytes();
        file >= 0
            && libc::write(file, score.as_ptr().cast(), length) == length.cast_signed()
            && libc::close(file) == 0
    }
}

/// Makes paths read-only, with everything mounted below them, in a mount namespace of the child's. Mounts of
/// the host still appear in it; its own do not appear on the host.
///
/// *Source:* mount_namespaces(7), mount_setattr(2), Linux 5.12.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn protect_paths(paths: &[CString]) -> Result<(), StartStep> {
    /// The kernel's struct, in its first version.
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    const READ_ONLY: u64 = 1;
    const RECURSIVE: c_int = 0x8000;
    if paths.is_empty() {
        return Ok(());
    }
    let attributes = MountAttributes { set: READ_ONLY, clear: 0, propagation: 0, user_namespace: 0 };
    let none = ptr::null::<c_char>();
    // SAFETY: the strings and the attributes outlive the calls.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS), StartStep::MountNamespace)?;
        let slave = libc::MS_REC | libc::MS_SLAVE;
        let set = libc::mount(none, c"/".as_ptr(), none, slave, ptr::null());
        check(set, StartStep::MountNamespace)?;
        for (index, path) in paths.iter().enumerate() {
            let step = StartStep::ReadOnlyPath(index);
            let bind = libc::MS_BIND | libc::MS_REC;
            check(libc::mount(path.as_ptr(), path.as_ptr(), none, bind, ptr::null()), step)?;
            let set = libc::syscall(
                libc::SYS_mount_setattr,
                libc::AT_FDCWD,
                path.as_ptr(),
                RECURSIVE,
                &raw const attributes,
                size_of::<MountAttributes>(),
            );
            check(set, step)?;
        }
    }
    Ok(())
}

/// Sets groups, group, user and capabilities.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn change_identity(plan: &ChildPlan<'_>) -> Result<(), StartStep> {
    let (image, setup) = (plan.image, &plan.image.setup);
    // SAFETY: every pointer is into `plan`, and of the type that the call requires.
    unsafe {
        if let Some(kept) = setup.capabilities {
            drop_bounding_set(kept)?;
            // Otherwise a change of the user clears them.
            check(libc::prctl(libc::PR_SET_KEEPCAPS, ON, OFF, OFF, OFF), StartStep::Capabilities)?;
        }
        match &setup.groups {
            Some(groups) => {
                let set = libc::syscall(SETGROUPS, groups.len(), groups.as_ptr());
                check(set, StartStep::Groups)?;
            }
            None if plan.drop_groups => {
                check(libc::syscall(SETGROUPS, 0, ptr::null::<libc::gid_t>()), StartStep::Groups)?;
            }
            None => {}
        }
        if let Some(gid) = image.gid {
            check(libc::syscall(SETRESGID, gid, gid, gid), StartStep::Identity)?;
        }
        if let Some(uid) = image.uid {
            check(libc::syscall(SETRESUID, uid, uid, uid), StartStep::Identity)?;
        }
        match setup.capabilities {
            Some(kept) => keep_capabilities(kept),
            None => Ok(()),
        }
    }
}

/// Drops all other capabilities from the bounding set: no program that the child executes can gain them.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn drop_bounding_set(kept: u64) -> Result<(), StartStep> {
    for number in 0..u64::BITS {
        let number = libc::c_ulong::from(number);
        // SAFETY: no memory is passed.
        unsafe {
            match libc::prctl(libc::PR_CAPBSET_READ, number, OFF, OFF, OFF) {
                1 if kept >> number & 1 == 0 => {
                    let dropped = libc::prctl(libc::PR_CAPBSET_DROP, number, OFF, OFF, OFF);
                    check(dropped, StartStep::Capabilities)?;
                }
                0 | 1 => {}
                // The kernel knows no further ones.
                _ => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Keeps exactly these capabilities, also across the exec of a user that is not root.
///
/// *Source:* capabilities(7), "Transformation of capabilities during execve()"; linux/capability.h.
///
/// # Safety
/// As for [`exec_image`].
unsafe fn keep_capabilities(kept: u64) -> Result<(), StartStep> {
    #[repr(C)]
    struct CapabilityHeader {
        version: u32,
        pid: c_int,
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct CapabilityWords {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    /// `_LINUX_CAPABILITY_VERSION_3`: two words of each set.
    const VERSION: u32 = 0x2008_0522;
    let header = CapabilityHeader { version: VERSION, pid: 0 };
    let words = [kept as u32, (kept >> 32) as u32].map(|word| CapabilityWords {
        effective: word,
        permitted: word,
        inheritable: word,
    });
    // SAFETY: both structs outlive the call.
    unsafe {
        let set = libc::syscall(libc::SYS_capset, &raw const header, words.as_ptr());
        check(set, StartStep::Capabilities)?;
        let ambient = libc::PR_CAP_AMBIENT;
        let clear = libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong;
        check(libc::prctl(ambient, clear, OFF, OFF, OFF), StartStep::Capabilities)?;
        for number in (0..u64::BITS).filter(|number| kept >> number & 1 == 1) {
            let raise = libc::PR_CAP_AMBIENT_RAISE as libc::c_ulong;
            let set = libc::prctl(ambient, raise, libc::c_ulong::from(number), OFF, OFF);
            check(set, StartStep::Capabilities)?;
        }
    }
    Ok(())
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
