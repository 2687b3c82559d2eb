//! The cost of a process, as the kernel counts it.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};

/// How often each thread of a process has been switched to, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeUps(BTreeMap<String, u64>);

impl WakeUps {
    /// How often the threads have been switched to since an earlier moment. A thread that has ended since
    /// counts once: it had to run to end.
    pub fn count_since(&self, earlier: &WakeUps) -> u64 {
        let counted = self.0.iter().map(|(thread, now)| now - earlier.0.get(thread).unwrap_or(&0));
        let ended = earlier.0.keys().filter(|thread| !self.0.contains_key(*thread)).count();
        counted.sum::<u64>() + ended as u64
    }
}

/// How often the process' threads have been switched to: each switch away from one, voluntary or not, follows
/// a switch to it.
///
/// *Source:* proc_pid_status(5), `voluntary_ctxt_switches` and `nonvoluntary_ctxt_switches`, of each thread.
///
/// # Errors
/// The process has ended.
pub fn count_wake_ups(pid: u32) -> Result<WakeUps> {
    let mut threads = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("list the process' threads")? {
        let task = task?;
        // It may just have ended.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        let sum = counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum();
        threads.insert(task.file_name().to_string_lossy().into_owned(), sum);
    }
    Ok(WakeUps(threads))
}

/// The memory that is resident, in KiB.
///
/// *Source:* proc_pid_status(5), `VmRSS`.
///
/// # Errors
/// The process has ended.
pub fn resident_kib(pid: u32) -> Result<u64> {
    status_kib(pid, "VmRSS:")
}

/// The part of the resident memory that does not belong to a file, in KiB: the kernel drops pages of programs and libraries when
/// memory runs out, and shares them between processes.
///
/// *Source:* proc_pid_status(5), `RssAnon`.
///
/// # Errors
/// The process has ended.
pub fn anonymous_kib(pid: u32) -> Result<u64> {
    status_kib(pid, "RssAnon:")
}

fn status_kib(pid: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("read the process' status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("the process' memory")?;
    line.trim().trim_end_matches(" kB").parse().context("the process' memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_process_has_wake_ups_and_memory() {
        let none = WakeUps(BTreeMap::new());
        assert!(count_wake_ups(std::process::id()).unwrap().count_since(&none) > 0);
        assert!(count_wake_ups(u32::MAX).is_err());
        assert!(resident_kib(std::process::id()).unwrap() > 100);
        assert!(resident_kib(u32::MAX).is_err());
    }

    #[test]
    fn an_ended_thread_counts_once() {
        let counts = |threads: &[(&str, u64)]| {
            WakeUps(threads.iter().map(|(thread, count)| ((*thread).to_owned(), *count)).collect())
        };
        let before = counts(&[("1", 10), ("2", 900)]);
        assert_eq!(counts(&[("1", 12), ("3", 5)]).count_since(&before), 2 + 5 + 1);
        assert_eq!(before.count_since(&before), 0);
    }
}
