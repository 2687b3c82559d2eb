//! The exit of a child process, waited for by its pidfd.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Waits for the child's exit, at most as long as `deadline`; `None` if it still runs then.
///
/// # Errors
/// The child can't be watched or reaped.
pub fn wait_exit(child: &mut Child, deadline: Duration) -> Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait().context("reap child")? {
        return Ok(Some(status));
    }
    // Not reaped yet, so the pid still is this child's.
    let pidfd = pidfd_open(process_id(child), PidfdFlags::empty()).context("open pidfd of child")?;
    let end = Instant::now() + deadline;
    loop {
        let left =
            Timespec::try_from(end.saturating_duration_since(Instant::now())).context("convert deadline")?;
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(None),
            Ok(_) => return child.wait().map(Some).context("reap child"),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("poll pidfd of child"),
        }
    }
}

/// Kills the process group that the child leads and reaps the child, which must not have been reaped before:
/// its number may belong to another process then.
///
/// # Errors
/// A system call fails.
pub fn end_group(child: &mut Child) -> Result<()> {
    let group = process_id(child);
    // Until the leader is reaped, the kernel doesn't reuse its group's number.
    match kill_process_group(group, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(error).context("kill process group"),
    }
    child.wait().context("reap child").map(drop)
}

fn process_id(child: &Child) -> Pid {
    Pid::from_child(child)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    #[test]
    fn the_exit_of_a_child_is_reported() {
        let mut child = Command::new("true").spawn().unwrap();
        let status = wait_exit(&mut child, Duration::from_secs(10)).unwrap();
        assert!(status.unwrap().success());
    }

    #[test]
    fn a_running_child_is_not_an_error() {
        let mut child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        assert!(wait_exit(&mut child, Duration::from_millis(5)).unwrap().is_none());
        end_group(&mut child).unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
