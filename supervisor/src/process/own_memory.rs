//! The memory of this program, which holds keys: it is neither dumped nor swapped.

use std::io;

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit as KernelRlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

use super::limits::{Rlimit, RlimitResource};

/// Keeps the memory of this program out of core dumps, of other processes of its user, and of the swap space. To be called at the start of a program
/// that holds keys.
///
/// - It is not dumpable: the kernel writes no core, also to none of the programs of `core_pattern`, and only root may trace it or
///   read its memory. Its files in `/proc` belong to root.
/// - Its soft limit of cores is 0.
/// - All of its memory is locked, page by page as it is used, where it may have an unlimited `RLIMIT_MEMLOCK`: with
///   `CAP_SYS_RESOURCE`, or where it has it. `VmLck` in `/proc/PID/status` tells.
///
/// Returns the limits that it has changed, as they were:
/// [`SupervisorBuilder::child_limits`](crate::SupervisorBuilder::child_limits) gives them to child processes.
///
/// *Source:* PR_SET_DUMPABLE(2const), core(5), mlockall(2).
///
/// # Errors
/// The kernel, or a sandbox, has refused what keeps cores away.
pub fn protect_own_memory() -> io::Result<Vec<Rlimit>> {
    let [core, memlock] = [Resource::Core, Resource::Memlock].map(getrlimit);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setrlimit(Resource::Core, KernelRlimit { current: Some(0), maximum: core.maximum })?;
    let mut changed = vec![Rlimit::new(RlimitResource::Core, core.current, core.maximum)];
    // With a limit, later allocations would fail beyond it.
    if setrlimit(Resource::Memlock, KernelRlimit { current: None, maximum: None }).is_ok() {
        changed.push(Rlimit::new(RlimitResource::Memlock, memlock.current, memlock.maximum));
        // An error is like a missing permission: then keys may reach the swap space.
        let _ = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    }
    Ok(changed)
}
