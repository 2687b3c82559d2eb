//! What a process costs, as the kernel counts it.

use std::fs;

use anyhow::{Context as _, Result};

/// How often the process' threads have been switched to: each switch away from one, by itself or not, follows one to it.
///
/// *Source:* proc_pid_status(5), `voluntary_ctxt_switches` and `nonvoluntary_ctxt_switches`, of each thread.
///
/// # Errors
/// When the process is gone.
pub fn wake_ups(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("list the process' threads")? {
        let status = fs::read_to_string(task?.path().join("status")).context("read a thread's status")?;
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        sum += counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>();
    }
    Ok(sum)
}

/// The memory that is resident, in KiB.
///
/// *Source:* proc_pid_status(5), `VmRSS`.
///
/// # Errors
/// When the process is gone.
pub fn resident_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("read the process' status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the process' memory")?;
    line.trim().trim_end_matches(" kB").parse().context("the process' memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_woken_up_and_takes_memory() {
        assert!(wake_ups(std::process::id()).unwrap() > 0);
        assert!(resident_kib(std::process::id()).unwrap() > 100);
        assert!(resident_kib(u32::MAX).is_err());
    }
}
