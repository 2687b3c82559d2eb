//! The processes that the kernel has killed because memory ran out, as its log names them.
//!
//! The cgroup of a service knows of a kill only where noded limits its memory, and with cgroup v2. The kernel logs each one,
//! whoever has set the limit.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nodekeel_logtree::{EntryBody, LogEntry};
use nodekeel_supervisor::process::{ProcessExit, Signal};
use nodekeel_supervisor::wall_clock_time;

/// The kills that are kept: a runnable keeps its last eight exits.
const KEPT: usize = 256;

/// The longest time between the exit and the line of the kernel: memory is freed before a process has exited, and the line may be
/// read late. A pid is used again later than that.
const WINDOW: Duration = Duration::from_secs(60);

/// The kills of the kernel. Cheap to clone; all clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct KernelKills(Arc<Mutex<VecDeque<KernelKill>>>);

/// A process that the kernel has killed because memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelKill {
    pid: u32,
    /// True if the memory of a cgroup ran out, and not that of the machine.
    pub(crate) in_cgroup: bool,
    at: Instant,
}

impl fmt::Display for KernelKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.in_cgroup {
            "out of memory, by the limit of a cgroup"
        } else {
            "out of memory, since the machine has no more"
        })
    }
}

impl KernelKills {
    /// Records the kill that an entry of the kernel's log names, if it names one.
    pub(crate) fn record(&self, entry: &LogEntry) {
        // What the kernel had logged long before this program read it concerns none of its processes.
        let recent = kernel_message(entry).filter(|(_, age)| *age < WINDOW);
        if let Some((pid, in_cgroup)) = recent.and_then(|(message, _)| parse_kill(message)) {
            self.push(KernelKill { pid, in_cgroup, at: Instant::now() });
        }
    }

    fn push(&self, kill: KernelKill) {
        let mut kills = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kills.len() == KEPT {
            kills.pop_front();
        }
        kills.push_back(kill);
    }

    /// The kill that has ended this process, whose own report does not say so.
    pub(crate) fn find(&self, exit: &ProcessExit, at: SystemTime) -> Option<KernelKill> {
        if exit.signal != Some(Signal::KILL) || exit.oom_kill.is_some() {
            return None;
        }
        let kills = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_near = |kill: &&KernelKill| {
            let killed = wall_clock_time(kill.at);
            at.duration_since(killed).unwrap_or_else(|error| error.duration()) < WINDOW
        };
        kills.iter().rev().filter(|kill| kill.pid == exit.pid).find(is_near).copied()
    }
}

/// The kernel's own line in an entry of its log, and how long ago it was logged.
pub(crate) fn kernel_message(entry: &LogEntry) -> Option<(&str, Duration)> {
    let EntryBody::Leveled(leveled) = &entry.body else { return None };
    // A program that writes to /dev/kmsg has a facility; the kernel has none.
    if leveled.fields.iter().any(|field| field.name == "facility") {
        return None;
    }
    let age = leveled.claimed_time.and_then(|time| SystemTime::now().duration_since(time).ok());
    Some((&*leveled.message, age.unwrap_or_default()))
}

/// The pid that a line of the kernel names as killed, and whether a cgroup's memory ran out.
///
/// *Source:* Linux `mm/oom_kill.c`, `__oom_kill_process`: `Memory cgroup out of memory: Killed process 4711 (tail) total-vm:…`, with
/// `Out of memory` for the machine. The name, which the process chooses, comes after the pid.
fn parse_kill(line: &str) -> Option<(u32, bool)> {
    let (cause, rest) = line.split_once(": Killed process ")?;
    let in_cgroup = cause.starts_with("Memory cgroup out of memory");
    if !in_cgroup && !cause.starts_with("Out of memory") {
        return None;
    }
    let (pid, _) = rest.split_once(" (")?;
    Some((pid.parse().ok()?, in_cgroup))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_names_the_process_and_whose_memory_ran_out() {
        for (line, kill) in [
            (
                "Memory cgroup out of memory: Killed process 4711 (tail) total-vm:38404kB, anon-rss:29000kB",
                Some((4711, true)),
            ),
            ("Out of memory: Killed process 7 (a (b) c) total-vm:1kB", Some((7, false))),
            ("Out of memory (oom_kill_allocating_task): Killed process 8 (x) total-vm:1kB", Some((8, false))),
            ("Memory cgroup out of memory: Kill process 4711 (tail) score 1000 or sacrifice child", None),
            ("oom_reaper: reaped process 4711 (tail), now anon-rss:0kB", None),
            ("x[1]: Out of memory: Killed process 9 (y)", None),
            ("Out of memory: Killed process -1 (y)", None),
        ] {
            assert_eq!(parse_kill(line), kill, "{line}");
        }
    }
}
