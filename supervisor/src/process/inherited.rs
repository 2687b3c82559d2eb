//! The processes from before this program, where it runs as PID 1: the jobs of a script that has executed it.
//!
//! Nothing in this program waits for them, and nobody else can: their parent is this process, or they become its
//! children as orphans. What the program itself starts before its first supervisor looks the same afterwards, and its
//! status must not be taken. Therefore they are recorded before `main`.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::host_state::is_init;
use super::procfs;

/// The processes at the start of this program by pid, with their start times; a later process may have the pid.
static INHERITED: OnceLock<HashMap<i32, u64>> = OnceLock::new();

/// Records them, if this program is PID 1. Called before `main`, so it must not panic.
pub(crate) extern "C" fn record_inherited() {
    // Without `/proc`, the list stays empty: these stay zombies.
    if !is_init() || procfs::check_procfs().is_err() {
        return;
    }
    let pids = procfs::list_pids().unwrap_or_default().into_iter();
    let others = pids.filter(|pid| *pid != procfs::own_pid());
    let inherited = others.filter_map(|pid| Some((pid, procfs::read_stat(pid).ok()?.start)));
    // It is called once.
    let _ = INHERITED.set(inherited.collect());
}

/// Returns whether a process is from before this program.
pub(super) fn is_inherited(pid: i32) -> bool {
    let start = INHERITED.get().and_then(|inherited| inherited.get(&pid));
    start.is_some_and(|start| procfs::read_stat(pid).is_ok_and(|stat| stat.start == *start))
}
