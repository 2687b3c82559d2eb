//! Waits for orphans: descendants whose parent has ended, and that the kernel has given to this program.
//!
//! Never for anybody else. A main process is waited for by its own run, and what the program starts by other means
//! (std, tokio, another supervisor in it) by whoever started it.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use super::host::Shared;
use super::procfs;
use super::tag::Tag;
use crate::sys;

/// How many orphans in a row are waited for before others get the thread: they may come without end.
const AT_ONCE: usize = 64;

/// Reaps for as long as it is polled.
pub(super) async fn run(shared: Arc<Shared>, mut child_ended: tokio::signal::unix::Signal) {
    loop {
        reap(&shared);
        tokio::task::yield_now().await;
        tokio::select! {
            _ = child_ended.recv() => {}
            () = shared.reap_again.notified() => {}
        }
    }
}

/// Looks at the first child that has ended only, which costs one system call; at all processes where that child is
/// somebody else's to wait for and may hide others.
fn reap(shared: &Shared) {
    for _ in 0..AT_ONCE {
        let Ok(Some(pid)) = sys::dead_child() else { return };
        // The run that waits for its main process tells when it has.
        if shared.is_main(pid) {
            return;
        }
        if !reap_orphan(shared, pid) {
            return reap_all(shared);
        }
    }
    shared.reap_again.notify_one();
}

fn reap_all(shared: &Shared) {
    for pid in procfs::pids().unwrap_or_default() {
        reap_orphan(shared, pid);
    }
}

/// Whether the process was an orphan that had ended. The descriptor is opened before the process is looked at: if the
/// pid means another one by then, it is the one that is looked at, or nobody is reaped.
fn reap_orphan(shared: &Shared, pid: i32) -> bool {
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
            shared.snapshots.reap(|| rustix::process::waitid(WaitId::PidFd(fd.as_fd()), options)),
            Ok(Some(_))
        )
}

/// Whether nobody in this program waits for the process, should it be a child of it.
fn is_orphan(shared: &Shared, pid: i32) -> io::Result<bool> {
    let limit = procfs::locks_limit(pid)?;
    if limit == shared.own_limit {
        return Ok(false);
    }
    Ok(match Tag::from_limit(limit) {
        Some(tag) if shared.tags.gave(tag) => !shared.is_main(pid) && !shared.is_starting(tag),
        // A nested supervisor's, unless it is of another host of this program.
        Some(tag) => tag.program() != shared.program,
        None => shared.is_strangers(pid),
    })
}
