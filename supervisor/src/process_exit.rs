//! The exit of a process.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::WaitIdStatus;
use thiserror::Error;

/// A signal, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal(i32);

impl Signal {
    /// Hang-up; many daemons reload their configuration.
    pub const HUP: Self = Self(libc::SIGHUP);
    /// The signal of ctrl-C.
    pub const INT: Self = Self(libc::SIGINT);
    /// The signal of ctrl-\; often a quicker exit than by `TERM`, or one with a core dump.
    pub const QUIT: Self = Self(libc::SIGQUIT);
    /// The kill signal, which no process can block or ignore.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// The usual stop signal.
    pub const TERM: Self = Self(libc::SIGTERM);
    /// A signal with a program-defined meaning.
    pub const USR1: Self = Self(libc::SIGUSR1);
    /// A signal with a program-defined meaning.
    pub const USR2: Self = Self(libc::SIGUSR2);
    /// The signal of abort(3); by default, it leaves a core dump.
    pub const ABRT: Self = Self(libc::SIGABRT);
    /// nginx' graceful stop.
    pub const WINCH: Self = Self(libc::SIGWINCH);

    pub(crate) const CONT: Self = Self(libc::SIGCONT);

    /// The signal with this number, `1..=64`.
    pub fn from_number(number: i32) -> Option<Self> {
        (1..=64).contains(&number).then_some(Self(number))
    }

    /// The number.
    pub fn as_number(self) -> i32 {
        self.0
    }
}

/// The signals whose names are the same on all systems.
const SIGNAL_NAMES: [(i32, &str); 30] = [
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGALRM, "SIGALRM"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGCHLD, "SIGCHLD"),
    (libc::SIGCONT, "SIGCONT"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGIO, "SIGIO"),
    (libc::SIGKILL, "SIGKILL"),
    (libc::SIGPIPE, "SIGPIPE"),
    (libc::SIGPROF, "SIGPROF"),
    (libc::SIGPWR, "SIGPWR"),
    (libc::SIGQUIT, "SIGQUIT"),
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGSTOP, "SIGSTOP"),
    (libc::SIGSYS, "SIGSYS"),
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGTRAP, "SIGTRAP"),
    (libc::SIGTSTP, "SIGTSTP"),
    (libc::SIGTTIN, "SIGTTIN"),
    (libc::SIGTTOU, "SIGTTOU"),
    (libc::SIGURG, "SIGURG"),
    (libc::SIGUSR1, "SIGUSR1"),
    (libc::SIGUSR2, "SIGUSR2"),
    (libc::SIGVTALRM, "SIGVTALRM"),
    (libc::SIGWINCH, "SIGWINCH"),
    (libc::SIGXCPU, "SIGXCPU"),
    (libc::SIGXFSZ, "SIGXFSZ"),
];

impl fmt::Display for Signal {
    /// `SIGTERM`; the number where the name differs between systems, such as `signal 37`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SIGNAL_NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => f.pad(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// The text is neither the name nor the number of a signal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown signal {0:?}: use a name of signal(7), like \"SIGHUP\", or a number from 1 to 64")]
pub struct ParseSignalError(pub String);

impl FromStr for Signal {
    type Err = ParseSignalError;

    /// Accepts `SIGTERM`, `TERM` in any case, and `15`.
    fn from_str(text: &str) -> Result<Self, ParseSignalError> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let named = SIGNAL_NAMES.iter().find(|(_, known)| known.strip_prefix("SIG") == Some(name));
        let number = named.map(|(number, _)| *number).or_else(|| text.parse().ok());
        number.and_then(Self::from_number).ok_or_else(|| ParseSignalError(text.to_owned()))
    }
}

/// The exit of a child process, with its last output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessExit {
    /// The pid it had.
    pub pid: u32,
    /// The exit code, where it exited.
    pub code: Option<i32>,
    /// The signal that killed it, where one did.
    pub signal: Option<Signal>,
    /// True if it left a core dump.
    pub core_dumped: bool,
    /// The processes that the kernel killed because memory ran out: the process itself, or descendants of it.
    /// Known only where its memory is [limited](crate::process::ProcessLimits::memory_max).
    pub oom_kill: Option<OomKill>,
    /// The last lines of its standard output and error in order, at most
    /// [`MAX_TAIL_LINES`](crate::process::MAX_TAIL_LINES) lines of at most
    /// [`MAX_TAIL_LINE_BYTES`](crate::process::MAX_TAIL_LINE_BYTES)
    /// bytes, without control characters. If its watchdog aborted it, those before the abort.
    pub tail: Vec<String>,
    /// How the [`OutputSink`](crate::OutputSink) panicked: it did not get all of the output.
    pub output_problem: Option<Arc<str>>,
}

/// The kernel's report of an exit.
#[derive(Debug)]
pub(crate) enum ExitStatus {
    Known(WaitIdStatus),
    /// Only the parent of a process learns it, which an adopted process has lost.
    Unknown,
}

impl ProcessExit {
    pub(crate) fn new(pid: i32, status: &ExitStatus, oom_kill: Option<OomKill>, tail: Vec<String>) -> Self {
        let status = match status {
            ExitStatus::Known(status) => Some(status),
            ExitStatus::Unknown => None,
        };
        Self {
            pid: pid.unsigned_abs(),
            code: status.and_then(WaitIdStatus::exit_status),
            signal: status.and_then(WaitIdStatus::terminating_signal).map(Signal),
            core_dumped: status.is_some_and(WaitIdStatus::dumped),
            oom_kill,
            tail,
            output_problem: None,
        }
    }

    /// Returns whether its code or signal is known. It is not for a process that was adopted (see
    /// [`Process::keep`](crate::process::Process::keep)): the kernel reports it only to the parent.
    pub fn is_status_known(&self) -> bool {
        self.code.is_some() || self.signal.is_some()
    }

    /// Returns whether it exited with code 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for ProcessExit {
    /// `exited with code 3`, `killed by SIGSEGV (core dumped)`, `killed by SIGKILL: out of memory, its limit is 64
    /// MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (_, Some(signal)) if self.core_dumped => write!(f, "killed by {signal} (core dumped)")?,
            (_, Some(signal)) => write!(f, "killed by {signal}")?,
            (Some(code), None) => write!(f, "exited with code {code}")?,
            (None, None) => f.write_str("exited with an unknown status: it was adopted")?,
        }
        match &self.oom_kill {
            // The kernel sends SIGKILL when memory runs out. After any other end, it has killed only descendants.
            Some(oom) if self.signal == Some(Signal::KILL) => write!(f, ": {oom}")?,
            Some(oom) => write!(f, ", after the kernel had killed {} of its processes: {oom}", oom.killed)?,
            None => {}
        }
        self.output_problem.as_ref().map_or(Ok(()), |problem| write!(f, "; {problem}"))
    }
}

/// Processes that the kernel killed because memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OomKill {
    /// The number of them, descendants included.
    pub killed: u64,
    /// Their limit together, in bytes. `None` if they had none: the host's memory ran out, or that of a cgroup
    /// above.
    pub memory_max: Option<u64>,
}

impl fmt::Display for OomKill {
    /// `out of memory, its limit is 64 MiB`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        match self.memory_max {
            Some(bytes) if bytes % MIB == 0 => write!(f, "out of memory, its limit is {} MiB", bytes / MIB),
            Some(bytes) => write!(f, "out of memory, its limit is {bytes} bytes"),
            None => f.write_str("out of memory"),
        }
    }
}

/// A stop that needed SIGKILL: the stop signal was not enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForcedKill {
    /// The signal that requested the stop.
    pub stop_signal: Signal,
    /// The time that the processes had to exit after it.
    pub grace_period: Duration,
    /// True if the process itself was still running; otherwise only descendants of it were.
    pub main_process: bool,
}

impl fmt::Display for ForcedKill {
    /// `killed by SIGKILL: still running 10s after SIGTERM`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stop_signal, grace_period, main_process } = self;
        let subject = if *main_process { "" } else { "descendants " };
        write!(f, "{subject}killed by {}: still running {grace_period:?} after {stop_signal}", Signal::KILL)
    }
}

/// A process that an earlier program had started and [kept](crate::process::Process::keep).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdoptedProcess {
    /// The pid.
    pub pid: u32,
    /// When it was started. [`wall_clock_time`](crate::wall_clock_time) shows it.
    pub since: Instant,
}

impl fmt::Display for AdoptedProcess {
    /// `adopted process 4711, running for 90 s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let age = self.since.elapsed().as_secs();
        write!(f, "adopted process {}, running for {age} s", self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_printed_in_words() {
        let exit = ProcessExit {
            pid: 7,
            code: Some(3),
            signal: None,
            core_dumped: false,
            oom_kill: None,
            tail: Vec::new(),
            output_problem: None,
        };
        assert_eq!(exit.to_string(), "exited with code 3");
        let killed = ProcessExit {
            code: None,
            signal: Some(Signal(libc::SIGSEGV)),
            core_dumped: true,
            ..exit.clone()
        };
        assert_eq!(killed.to_string(), "killed by SIGSEGV (core dumped)");
        let adopted = ProcessExit { code: None, ..exit.clone() };
        assert!(!adopted.is_status_known() && !adopted.is_success() && exit.is_status_known());
        assert_eq!(adopted.to_string(), "exited with an unknown status: it was adopted");
        let realtime = ProcessExit { signal: Signal::from_number(37), core_dumped: false, ..killed };
        assert_eq!(realtime.to_string(), "killed by signal 37");
        assert_eq!((Signal::from_number(0), Signal::from_number(65)), (None, None));
        let oom = |memory_max| Some(OomKill { killed: 2, memory_max });
        let text = "exited with code 3, after the kernel had killed 2 of its processes: out of memory, its limit is 64 MiB";
        assert_eq!(ProcessExit { oom_kill: oom(Some(64 << 20)), ..exit.clone() }.to_string(), text);
        let signal = Some(Signal::KILL);
        let killed = ProcessExit { code: None, signal, oom_kill: oom(Some(4097)), ..exit };
        assert_eq!(killed.to_string(), "killed by SIGKILL: out of memory, its limit is 4097 bytes");
    }

    #[test]
    fn a_signal_is_known_by_its_name_and_by_its_number() {
        for text in ["SIGHUP", "HUP", "hup", "1"] {
            assert_eq!(text.parse(), Ok(Signal::HUP), "{text}");
        }
        for number in 1..=64 {
            let signal = Signal(number);
            let text = signal.to_string();
            assert_eq!(text.trim_start_matches("signal ").parse(), Ok(signal), "{text}");
        }
        for text in ["", "SIG", "0", "65", "TERMINATE"] {
            assert_eq!(text.parse::<Signal>(), Err(ParseSignalError(text.to_owned())));
        }
    }
}
