//! Reaps orphans: descendants whose parent has exited, and that the kernel has reparented to this program.
//!
//! It reaps no other process. A run waits for its main process itself: one comes here only if its start was
//! abandoned, so that it was killed and nothing waits for it. Other code in this program (std,
//! tokio, another supervisor) waits for the children that it has started.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use super::host_state::HostState;
use super::inherited::is_inherited;
use super::mark::ProcessMark;
use super::procfs;
use crate::sys;

/// The number of orphans that are reaped in a row before the task yields: they may keep coming.
const MAX_REAPS_IN_A_ROW: usize = 64;

/// Reaps until the future is dropped.
pub(super) async fn run_reaper(shared: Arc<HostState>, mut child_exited: tokio::signal::unix::Signal) {
    loop {
        // One SIGCHLD can stand for several exits: standard signals do not queue, see signal(7).
        reap_orphans(&shared);
        tokio::task::yield_now().await;
        tokio::select! {
            _ = child_exited.recv() => {}
            () = shared.reap_again.notified() => {}
        }
    }
}

/// Looks only at the first exited child, which takes one system call. If that child is not to be reaped here,
/// it may hide others, so this scans all processes.
fn reap_orphans(shared: &HostState) {
    for _ in 0..MAX_REAPS_IN_A_ROW {
        let Ok(Some(pid)) = sys::exited_child() else { return };
        // The run that waits for it triggers the next reap.
        if shared.is_main_process(pid) {
            return;
        }
        if !reap_orphan(shared, pid) {
            return scan_for_orphans(shared);
        }
    }
    shared.reap_again.notify_one();
}

fn scan_for_orphans(shared: &HostState) {
    for pid in procfs::list_pids().unwrap_or_default() {
        reap_orphan(shared, pid);
    }
}

/// Reaps a process if it is an orphan that has exited, and returns whether it was. The descriptor is opened
/// between two checks: if the pid is reused in between, the second check covers the new process, or nothing is
/// reaped.
fn reap_orphan(shared: &HostState, pid: i32) -> bool {
    if !is_orphan(shared, pid).unwrap_or(false) {
        return false;
    }
    let Some(Ok(fd)) = Pid::from_raw(pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
    else {
        return false;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    is_orphan(shared, pid).unwrap_or(false)
        && matches!(
            shared
                .snapshots
                .reap_between_snapshots(|| rustix::process::waitid(WaitId::PidFd(fd.as_fd()), options)),
            Ok(Some(_))
        )
}

/// Returns whether no code in this program waits for the process, should it be a child of it.
fn is_orphan(shared: &HostState, pid: i32) -> io::Result<bool> {
    if shared.is_main_process(pid) {
        return Ok(false);
    }
    if is_inherited(pid) {
        return Ok(true);
    }
    let limit = procfs::locks_limit(pid)?;
    // It has inherited this program's own limit, so no host has started it: other code may wait for it.
    if limit == shared.own_lock_limit {
        return Ok(false);
    }
    Ok(match ProcessMark::from_limit(limit) {
        // While a start is in progress, its mark does not tell the main process from its descendants.
        Some(mark) if shared.marks.has_allocated(mark) => !shared.is_starting(mark),
        // Of a nested supervisor, unless it belongs to another host of this program.
        Some(mark) => mark.program_id() != shared.program,
        None => shared.came_from_outside(pid),
    })
}
