//! How a process exited.

use std::fmt;
use std::time::Duration;

use rustix::process::WaitIdStatus;

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
    /// nginx' graceful stop.
    pub const WINCH: Self = Self(libc::SIGWINCH);

    pub(super) const CONT: Self = Self(libc::SIGCONT);

    /// The signal with this number, `1..=64`.
    pub fn from_number(number: i32) -> Option<Self> {
        (1..=64).contains(&number).then_some(Self(number))
    }

    /// Its number.
    pub fn as_number(self) -> i32 {
        self.0
    }
}

impl fmt::Display for Signal {
    /// `SIGTERM`; the number where the name differs between systems, such as `signal 37`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            libc::SIGABRT => "SIGABRT",
            libc::SIGALRM => "SIGALRM",
            libc::SIGBUS => "SIGBUS",
            libc::SIGCHLD => "SIGCHLD",
            libc::SIGCONT => "SIGCONT",
            libc::SIGFPE => "SIGFPE",
            libc::SIGHUP => "SIGHUP",
            libc::SIGILL => "SIGILL",
            libc::SIGINT => "SIGINT",
            libc::SIGIO => "SIGIO",
            libc::SIGKILL => "SIGKILL",
            libc::SIGPIPE => "SIGPIPE",
            libc::SIGPROF => "SIGPROF",
            libc::SIGPWR => "SIGPWR",
            libc::SIGQUIT => "SIGQUIT",
            libc::SIGSEGV => "SIGSEGV",
            libc::SIGSTOP => "SIGSTOP",
            libc::SIGSYS => "SIGSYS",
            libc::SIGTERM => "SIGTERM",
            libc::SIGTRAP => "SIGTRAP",
            libc::SIGTSTP => "SIGTSTP",
            libc::SIGTTIN => "SIGTTIN",
            libc::SIGTTOU => "SIGTTOU",
            libc::SIGURG => "SIGURG",
            libc::SIGUSR1 => "SIGUSR1",
            libc::SIGUSR2 => "SIGUSR2",
            libc::SIGVTALRM => "SIGVTALRM",
            libc::SIGWINCH => "SIGWINCH",
            libc::SIGXCPU => "SIGXCPU",
            libc::SIGXFSZ => "SIGXFSZ",
            number => return write!(f, "signal {number}"),
        };
        f.pad(name)
    }
}

/// How a child process exited, with its last output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessExit {
    /// The pid it had.
    pub pid: u32,
    /// Its exit code, where it exited.
    pub code: Option<i32>,
    /// The signal that killed it, where one did.
    pub signal: Option<Signal>,
    /// Whether it left a core dump.
    pub core_dumped: bool,
    /// The last lines of its standard output and error in order, at most
    /// [`MAX_TAIL_LINES`](super::MAX_TAIL_LINES) lines of at most [`MAX_TAIL_LINE_BYTES`](super::MAX_TAIL_LINE_BYTES)
    /// bytes, without control characters.
    pub tail: Vec<String>,
}

impl ProcessExit {
    pub(super) fn new(pid: i32, status: &WaitIdStatus, tail: Vec<String>) -> Self {
        Self {
            pid: pid.unsigned_abs(),
            code: status.exit_status(),
            signal: status.terminating_signal().map(Signal),
            core_dumped: status.dumped(),
            tail,
        }
    }

    /// Whether it exited with code 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for ProcessExit {
    /// `exited with code 3`, `killed by SIGSEGV (core dumped)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (_, Some(signal)) if self.core_dumped => write!(f, "killed by {signal} (core dumped)"),
            (_, Some(signal)) => write!(f, "killed by {signal}"),
            (Some(code), None) => write!(f, "exited with code {code}"),
            (None, None) => f.write_str("ended"),
        }
    }
}

/// A stop that needed SIGKILL: the stop signal was not enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForcedKill {
    /// The signal that requested the stop.
    pub stop_signal: Signal,
    /// How long the processes had to exit after it.
    pub grace_period: Duration,
    /// Whether the process itself was still running; otherwise only descendants of it were.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_printed_in_words() {
        let exit = ProcessExit { pid: 7, code: Some(3), signal: None, core_dumped: false, tail: Vec::new() };
        assert_eq!(exit.to_string(), "exited with code 3");
        let killed =
            ProcessExit { code: None, signal: Some(Signal(libc::SIGSEGV)), core_dumped: true, ..exit };
        assert_eq!(killed.to_string(), "killed by SIGSEGV (core dumped)");
        let realtime = ProcessExit { signal: Signal::from_number(37), core_dumped: false, ..killed };
        assert_eq!(realtime.to_string(), "killed by signal 37");
        assert_eq!((Signal::from_number(0), Signal::from_number(65)), (None, None));
    }
}
