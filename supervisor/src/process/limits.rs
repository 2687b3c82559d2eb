//! Limits of the resources of a process.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::sys;

/// Limits of the resources of a process. Default: none.
///
/// The first four limit the process and all its descendants together, by their cgroup: see [`CgroupParent`].
/// They need [`KillMode::Descendants`]. Where they can't be enforced, the start fails with
/// [`ProcessError::Limit`]; [`check_cgroup_limits`](super::check_cgroup_limits) tells it before.
///
/// *Source:* the kernel's `Documentation/admin-guide/cgroup-v2.rst`, setrlimit(2), proc_pid_oom_score_adj(5).
///
/// [`CgroupParent`]: super::CgroupParent
/// [`KillMode::Descendants`]: super::KillMode::Descendants
/// [`ProcessError::Limit`]: super::ProcessError::Limit
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessLimits {
    /// Bytes of memory, page cache included. A process that needs more is killed, and its exit names it:
    /// [`ProcessExit::oom_kill`](super::ProcessExit::oom_kill).
    pub memory_max: Option<u64>,
    /// CPU time, in thousandths of one CPU: 1500 is one CPU and a half.
    pub cpu_max_millis: Option<u32>,
    /// Processes and threads.
    pub pids_max: Option<u64>,
    /// Share of disk time in competition with other cgroups, `[1, 10000]`; the kernel's default is 100. Needs a
    /// kernel and a disk with blk-iocost or BFQ.
    pub io_weight: Option<u16>,
    /// Limits of each process by itself.
    pub rlimits: Vec<Rlimit>,
    /// The order in which the kernel kills when memory runs out, `[-1000, 1000]`: 1000 first, -1000 never. A value
    /// below this program's needs root.
    pub oom_score_adj: Option<i16>,
}

/// One limit of a cgroup: a file of its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CgroupSetting {
    pub(super) controller: &'static str,
    pub(super) file: &'static str,
    pub(super) value: String,
}

impl ProcessLimits {
    /// Limits the [memory](Self::memory_max), in bytes.
    #[must_use]
    pub fn with_memory_max(mut self, bytes: u64) -> Self {
        self.memory_max = Some(bytes);
        self
    }

    /// Limits the [CPU time](Self::cpu_max_millis), in thousandths of one CPU.
    #[must_use]
    pub fn with_cpu_max_millis(mut self, millis: u32) -> Self {
        self.cpu_max_millis = Some(millis);
        self
    }

    /// Limits the number of [processes and threads](Self::pids_max).
    #[must_use]
    pub fn with_pids_max(mut self, count: u64) -> Self {
        self.pids_max = Some(count);
        self
    }

    /// Sets the [share of disk time](Self::io_weight), `[1, 10000]`.
    #[must_use]
    pub fn with_io_weight(mut self, weight: u16) -> Self {
        self.io_weight = Some(weight);
        self
    }

    /// Adds a limit of [each process by itself](Self::rlimits).
    #[must_use]
    pub fn with_rlimit(mut self, limit: Rlimit) -> Self {
        self.rlimits.push(limit);
        self
    }

    /// Sets the [order of kills](Self::oom_score_adj) when memory runs out, `[-1000, 1000]`.
    #[must_use]
    pub fn with_oom_score_adj(mut self, score: i16) -> Self {
        self.oom_score_adj = Some(score);
        self
    }

    /// The limits that a cgroup enforces.
    pub(super) fn cgroup_settings(&self) -> Vec<CgroupSetting> {
        /// Microseconds in which the CPU time is used: the kernel's default.
        const PERIOD: u64 = 100_000;
        let cpu = self.cpu_max_millis.map(|millis| format!("{} {PERIOD}", u64::from(millis) * PERIOD / 1000));
        let settings = [
            ("memory", "memory.max", self.memory_max.map(|bytes| bytes.to_string())),
            ("cpu", "cpu.max", cpu),
            ("pids", "pids.max", self.pids_max.map(|count| count.to_string())),
            ("io", "io.weight", self.io_weight.map(|weight| weight.to_string())),
        ];
        let given = settings
            .into_iter()
            .filter_map(|(controller, file, value)| Some(CgroupSetting { controller, file, value: value? }));
        given.collect()
    }
}

/// A limit of each process by itself; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rlimit {
    /// The resource that it limits.
    pub resource: RlimitResource,
    /// The limit in force, which the process may raise up to `hard`.
    pub soft: Option<u64>,
    /// The highest soft limit. Only root may raise it.
    pub hard: Option<u64>,
}

impl Rlimit {
    /// A limit. A soft limit above the hard one fails the start.
    pub fn new(resource: RlimitResource, soft: Option<u64>, hard: Option<u64>) -> Self {
        Self { resource, soft, hard }
    }

    pub(super) fn to_kernel(self) -> sys::ResourceLimit {
        let value = |limit: Option<u64>| limit.unwrap_or(libc::RLIM64_INFINITY);
        let values = libc::rlimit64 { rlim_cur: value(self.soft), rlim_max: value(self.hard) };
        sys::ResourceLimit { resource: self.resource.number(), values }
    }
}

impl fmt::Display for Rlimit {
    /// `nofile=1024:unlimited`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
        write!(f, "{}={}:{}", self.resource, text(self.soft), text(self.hard))
    }
}

/// A resource that the kernel limits for each process. The soft limit of file locks is missing: it
/// [identifies](super#how-descendants-are-identified) descendants.
///
/// *Source:* setrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RlimitResource {
    /// Bytes of address space.
    As,
    /// Bytes of a core dump.
    Core,
    /// Seconds of CPU time.
    Cpu,
    /// Bytes of data, heap included.
    Data,
    /// Bytes of a file that it writes.
    Fsize,
    /// Bytes of locked memory.
    Memlock,
    /// Bytes in POSIX message queues of its user.
    Msgqueue,
    /// 20 minus the lowest nice value that it may set.
    Nice,
    /// Open files.
    Nofile,
    /// Processes of its user; not enforced for root.
    Nproc,
    /// The highest real-time priority that it may set.
    Rtprio,
    /// Microseconds of real-time CPU time without a system call that blocks.
    Rttime,
    /// Signals that wait for its user.
    Sigpending,
    /// Bytes of its stack.
    Stack,
}

const RLIMIT_RESOURCES: [(RlimitResource, &str, sys::RlimitNumber); 14] = [
    (RlimitResource::As, "as", libc::RLIMIT_AS),
    (RlimitResource::Core, "core", libc::RLIMIT_CORE),
    (RlimitResource::Cpu, "cpu", libc::RLIMIT_CPU),
    (RlimitResource::Data, "data", libc::RLIMIT_DATA),
    (RlimitResource::Fsize, "fsize", libc::RLIMIT_FSIZE),
    (RlimitResource::Memlock, "memlock", libc::RLIMIT_MEMLOCK),
    (RlimitResource::Msgqueue, "msgqueue", libc::RLIMIT_MSGQUEUE),
    (RlimitResource::Nice, "nice", libc::RLIMIT_NICE),
    (RlimitResource::Nofile, "nofile", libc::RLIMIT_NOFILE),
    (RlimitResource::Nproc, "nproc", libc::RLIMIT_NPROC),
    (RlimitResource::Rtprio, "rtprio", libc::RLIMIT_RTPRIO),
    (RlimitResource::Rttime, "rttime", libc::RLIMIT_RTTIME),
    (RlimitResource::Sigpending, "sigpending", libc::RLIMIT_SIGPENDING),
    (RlimitResource::Stack, "stack", libc::RLIMIT_STACK),
];

impl RlimitResource {
    fn row(self) -> (&'static str, sys::RlimitNumber) {
        let row = RLIMIT_RESOURCES.iter().find(|row| row.0 == self);
        row.map(|&(_, name, number)| (name, number)).expect("every resource has a row")
    }

    fn number(self) -> sys::RlimitNumber {
        self.row().1
    }
}

impl fmt::Display for RlimitResource {
    /// `nofile`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().0)
    }
}

/// The text is not the name of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown resource limit {0:?}; known: {known}", known = RLIMIT_RESOURCES.map(|row| row.1).join(", "))]
pub struct ParseRlimitError(pub String);

impl FromStr for RlimitResource {
    type Err = ParseRlimitError;

    /// Accepts the name of setrlimit(2) without its prefix, in lower case: `nofile`.
    fn from_str(text: &str) -> Result<Self, ParseRlimitError> {
        let row = RLIMIT_RESOURCES.iter().find(|row| row.1 == text);
        row.map(|row| row.0).ok_or_else(|| ParseRlimitError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_limit_has_its_name_and_number() {
        for (resource, name, number) in RLIMIT_RESOURCES {
            assert_eq!((name.parse(), resource.number()), (Ok(resource), number));
        }
        let unknown = "locks".parse::<RlimitResource>().expect_err("it marks descendants").to_string();
        assert!(unknown.starts_with("unknown resource limit \"locks\"; known: as, core, cpu, "), "{unknown}");
        let limit = Rlimit::new(RlimitResource::Nofile, Some(1024), None);
        assert_eq!(limit.to_string(), "nofile=1024:unlimited");
        assert_eq!(limit.to_kernel().values.rlim_max, u64::MAX);
    }

    #[test]
    fn each_limit_of_a_cgroup_is_one_file() {
        let limits = ProcessLimits::default()
            .with_memory_max(64 << 20)
            .with_cpu_max_millis(1500)
            .with_pids_max(10)
            .with_io_weight(50);
        let settings = limits.cgroup_settings();
        let files: Vec<_> =
            settings.iter().map(|setting| format!("{}={}", setting.file, setting.value)).collect();
        assert_eq!(files, ["memory.max=67108864", "cpu.max=150000 100000", "pids.max=10", "io.weight=50"]);
        assert!(settings.iter().all(|setting| setting.file.starts_with(setting.controller)));
        assert_eq!(ProcessLimits::default().cgroup_settings(), []);
    }
}
