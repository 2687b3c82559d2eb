//! The settings of a child process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::handle::{ProcessHandle, ReloadAction};
use super::limits::ProcessLimits;
use super::liveness::Liveness;
use super::privileges::Privileges;
use super::readiness::Readiness;
use super::stdin::StdinSource;
use crate::output::OutputSink;
use crate::process_exit::Signal;

/// Clocks can still add it to the current time.
const MAX_GRACE_PERIOD: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A program that runs as a child process, started by each run of its runnable. It is a
/// [`Runnable`](crate::Runnable).
///
/// An exit without a stop is a failure of the runnable. With a code other than 0, or by a signal, it is
/// [`ProcessError::Exited`](super::ProcessError::Exited). With code 0 the result is `Ok`, which is also a failure,
/// unless the readiness is [`Readiness::on_exit`] or the policy treats `Ok` as success. Each failure is reported with
/// the exit.
#[derive(Clone)]
pub struct Process {
    pub(super) program_path: PathBuf,
    pub(super) args: Vec<OsString>,
    pub(super) env: BTreeMap<OsString, OsString>,
    pub(super) current_dir: Option<PathBuf>,
    pub(super) stdin: StdinSource,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) privileges: Privileges,
    pub(super) limits: ProcessLimits,
    pub(super) readiness: Readiness,
    pub(super) watchdog: Option<Duration>,
    pub(super) liveness: Option<Liveness>,
    pub(super) reload: Option<ReloadAction>,
    pub(super) handle: Option<ProcessHandle>,
    pub(super) output_copy: Option<Arc<dyn OutputSink>>,
    pub(super) grace_period: Duration,
    pub(super) max_grace_period: Duration,
    pub(super) stop_signal: Signal,
    pub(super) kill_mode: KillMode,
    pub(super) keep: bool,
}

impl Process {
    /// A program by its path. A name without a slash is looked up in the `PATH` of the process, or else in
    /// `/bin` and `/usr/bin`.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program_path: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            current_dir: None,
            stdin: StdinSource::Null,
            uid: None,
            gid: None,
            privileges: Privileges::default(),
            limits: ProcessLimits::default(),
            readiness: Readiness::on_start(),
            watchdog: None,
            liveness: None,
            reload: None,
            handle: None,
            output_copy: None,
            grace_period: Duration::from_secs(10),
            max_grace_period: Duration::ZERO,
            stop_signal: Signal::TERM,
            kill_mode: KillMode::Descendants,
            keep: false,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of its environment. The environment has no other variables, except `NOTIFY_SOCKET` if
    /// requested.
    #[must_use]
    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.insert(key.into(), value.into());
        self
    }

    /// Sets variables of its environment.
    #[must_use]
    pub fn envs<K: Into<OsString>, V: Into<OsString>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        self.env.extend(variables.into_iter().map(|(key, value)| (key.into(), value.into())));
        self
    }

    /// The working directory. Default: the working directory of this program.
    #[must_use]
    pub fn current_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.current_dir = Some(dir.into());
        self
    }

    /// The source of its standard input. Default: empty.
    #[must_use]
    pub fn stdin(mut self, stdin: StdinSource) -> Self {
        self.stdin = stdin;
        self
    }

    /// Runs it as another user, without supplementary groups, unless its [privileges](Self::privileges) name some.
    /// Only root may. It needs a [`gid`](Self::gid) too: otherwise the start fails, because the process would keep
    /// this program's group, which is root's.
    #[must_use]
    pub fn uid(mut self, uid: u32) -> Self {
        self.uid = Some(uid);
        self
    }

    /// Runs it as another group. Only root may.
    #[must_use]
    pub fn gid(mut self, gid: u32) -> Self {
        self.gid = Some(gid);
        self
    }

    /// Permissions in addition to those of its user. Default: see [`Privileges`].
    #[must_use]
    pub fn privileges(mut self, privileges: Privileges) -> Self {
        self.privileges = privileges;
        self
    }

    /// Limits of its resources. Default: none.
    #[must_use]
    pub fn limits(mut self, limits: ProcessLimits) -> Self {
        self.limits = limits;
        self
    }

    /// When it is ready. Default: [`Readiness::on_start`].
    #[must_use]
    pub fn ready_when(mut self, readiness: Readiness) -> Self {
        self.readiness = readiness;
        self
    }

    /// Once it is ready, it must send `WATCHDOG=1` to its `NOTIFY_SOCKET` within each interval, which it finds in
    /// `WATCHDOG_USEC`: see sd_watchdog_enabled(3), which recommends to report twice in each. If it does not, it is
    /// stopped by [`Signal::ABRT`], and its run has failed. Default: no watchdog; maximum: a hundred years.
    #[must_use]
    pub fn watchdog(mut self, interval: Duration) -> Self {
        self.watchdog = Some(interval.min(MAX_GRACE_PERIOD));
        self
    }

    /// Probes it while it is ready. Default: no probes.
    #[must_use]
    pub fn liveness(mut self, liveness: Liveness) -> Self {
        self.liveness = Some(liveness);
        self
    }

    /// The way in which [`ProcessHandle::reload`] makes it read its configuration again. Default: it can't.
    #[must_use]
    pub fn reload(mut self, action: ReloadAction) -> Self {
        self.reload = Some(action);
        self
    }

    /// Lets this handle act on it while it is running. Of several running processes with one handle, it acts on the
    /// one that started last.
    #[must_use]
    pub fn handle(mut self, handle: &ProcessHandle) -> Self {
        self.handle = Some(handle.clone());
        self
    }

    /// Also gives its output to this sink, in addition to that of the supervisor, for a caller that reads the output of
    /// its own process. Default: only the one of the supervisor.
    #[must_use]
    pub fn copy_output(mut self, sink: impl OutputSink) -> Self {
        self.output_copy = Some(Arc::new(sink));
        self
    }

    /// The time that it and its descendants may take to exit before they are killed. Default: ten seconds;
    /// maximum: a hundred years.
    #[must_use]
    pub fn grace_period(mut self, time: Duration) -> Self {
        self.grace_period = time.min(MAX_GRACE_PERIOD);
        self
    }

    /// The maximum to which it can extend its grace period, by `EXTEND_TIMEOUT_USEC=` to its `NOTIFY_SOCKET` while
    /// it stops. Default: not at all; maximum: a hundred years.
    #[must_use]
    pub fn max_grace_period(mut self, time: Duration) -> Self {
        self.max_grace_period = time.min(MAX_GRACE_PERIOD);
        self
    }

    /// The signal that asks it to stop. Default: [`Signal::TERM`].
    #[must_use]
    pub fn stop_signal(mut self, signal: Signal) -> Self {
        self.stop_signal = signal;
        self
    }

    /// The processes that stop with it. Default: [`KillMode::Descendants`].
    #[must_use]
    pub fn kill_mode(mut self, mode: KillMode) -> Self {
        self.kill_mode = mode;
        self
    }

    /// Keeps it running when this program is killed or aborts: see [Kept processes](crate::process#kept-processes). A
    /// stop or a shutdown ends it as any other. It needs [`ProcessRecords`](super::ProcessRecords); probes and reload
    /// commands are never kept. Default: not kept.
    #[must_use]
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Returns whether it reports to a `NOTIFY_SOCKET`.
    pub(super) fn needs_notify_socket(&self) -> bool {
        self.readiness.on_notify || self.watchdog.is_some() || !self.max_grace_period.is_zero()
    }

    /// The path of its program.
    pub fn program_path(&self) -> &Path {
        &self.program_path
    }
}

impl fmt::Debug for Process {
    /// Without the values of its environment, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("program", &self.program_path)
            .field("args", &self.args)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .field("current_dir", &self.current_dir)
            .field("privileges", &self.privileges)
            .field("limits", &self.limits)
            .field("readiness", &self.readiness)
            .field("watchdog", &self.watchdog)
            .field("liveness", &self.liveness)
            .field("grace_period", &self.grace_period)
            .field("stop_signal", &self.stop_signal)
            .field("kill_mode", &self.kill_mode)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

/// The processes that stop together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KillMode {
    /// The process and all its descendants. All of them get the stop signal, the process first and each once.
    /// The rest is killed after the grace period.
    #[default]
    Descendants,
    /// Only the process itself. For a program whose children must survive it, such as containerd's shims.
    Process,
}
