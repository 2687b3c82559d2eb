//! What the machine does besides the test: time that no stop can be blamed for.

use std::fs;
use std::time::Duration;

/// Time on all CPUs up to one moment. The kernel counts it in ticks of 10 ms.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Of everybody, with what a hypervisor took.
    all: Duration,
    /// Of this program, and of what it has waited for.
    own: Duration,
    /// Of a process that this program is about to wait for.
    main: Duration,
}

impl Load {
    pub(super) fn now(main: i32) -> Self {
        let stat = fs::read_to_string("/proc/stat").expect("proc is mounted");
        let fields = stat.lines().next().expect("all CPUs come first").split_whitespace().skip(1);
        // user, nice, system, idle, iowait, irq, softirq, steal
        let busy = fields.take(8).enumerate().filter(|(index, _)| !matches!(index, 3 | 4));
        Self {
            all: busy.map(|(_, ticks)| ticks_of(ticks)).sum(),
            own: used_by("self"),
            main: used_by(&main.to_string()),
        }
    }

    /// How long others have had a CPU since then, when the process has been waited for: at most so much earlier it
    /// would have been without them.
    pub(super) fn others(self) -> Duration {
        let now = Self::now(0);
        let own = now.own.saturating_sub(self.own).saturating_sub(self.main);
        now.all.saturating_sub(self.all).saturating_sub(own)
    }
}

/// What a process and those that it has waited for have used.
fn used_by(pid: &str) -> Duration {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return Duration::ZERO };
    let after_name = stat.rsplit(')').next().expect("it has a name");
    after_name.split_whitespace().skip(11).take(4).map(ticks_of).sum()
}

fn ticks_of(field: &str) -> Duration {
    Duration::from_millis(10 * field.parse::<u64>().expect("a number of ticks"))
}
