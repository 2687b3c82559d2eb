//! The CPU time of other programs, which a stop is not responsible for.

use std::fs;
use std::time::Duration;

/// CPU time on all CPUs up to one moment. The kernel counts it in ticks of 10 ms.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuLoad {
    /// Of all programs, including time stolen by a hypervisor.
    all: Duration,
    /// Of this program, and of the children that it has reaped.
    own: Duration,
    /// Of a process that this program is about to reap.
    main: Duration,
}

impl CpuLoad {
    pub(super) fn measure(main: i32) -> Self {
        let stat = fs::read_to_string("/proc/stat").expect("proc is mounted");
        let fields = stat.lines().next().expect("all CPUs come first").split_whitespace().skip(1);
        // user, nice, system, idle, iowait, irq, softirq, steal
        let busy = fields.take(8).enumerate().filter(|(index, _)| !matches!(index, 3 | 4));
        Self {
            all: busy.map(|(_, ticks)| parse_ticks(ticks)).sum(),
            own: cpu_time_of("self"),
            main: cpu_time_of(&main.to_string()),
        }
    }

    /// The CPU time of other programs since then, after the process has been reaped. Without them the stop
    /// would have ended earlier by at most this time.
    pub(super) fn others_since(self) -> Duration {
        let now = Self::measure(0);
        let own = now.own.saturating_sub(self.own).saturating_sub(self.main);
        now.all.saturating_sub(self.all).saturating_sub(own)
    }
}

/// The CPU time of a process and the children that it has reaped.
fn cpu_time_of(pid: &str) -> Duration {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return Duration::ZERO };
    let after_name = stat.rsplit(')').next().expect("it has a name");
    after_name.split_whitespace().skip(11).take(4).map(parse_ticks).sum()
}

fn parse_ticks(field: &str) -> Duration {
    Duration::from_millis(10 * field.parse::<u64>().expect("a number of ticks"))
}
