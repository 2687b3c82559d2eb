//! Child processes as runnables.
//!
//! A [`Process`] starts in a separate process group, with an empty environment and no open files except its
//! standard ones. It is ready when its [`Readiness`] is met. When its context is canceled, it gets a stop
//! signal; after its grace period, all its descendants are killed, even if they have forked twice, created a
//! session, or run as another user.
//!
//! ```no_run
//! use nodekeel_supervisor::process::{Process, Readiness};
//! use nodekeel_supervisor::{Context, Failure};
//!
//! async fn root(ctx: Context) -> Result<(), Failure> {
//!     let etcd = Process::new("/usr/bin/etcd")
//!         .args(["--data-dir", "/var/lib/etcd"])
//!         .env("ETCD_LOGGER", "zap")
//!         .ready_when(Readiness::on_notify());
//!     ctx.run_child("etcd", etcd)?;
//!     ctx.wait_ready("root.etcd").await?;
//!     ctx.signal_ready()?;
//!     Err(ctx.canceled().await.into())
//! }
//! ```
//!
//! # How descendants are identified
//! Where possible, each start gets a dedicated cgroup ([`CgroupParent`]). The kernel kills all its processes
//! at once, however fast they fork and whatever user they run as.
//!
//! In addition, each start carries a mark that all its descendants inherit: the soft limit of file locks
//! (`RLIMIT_LOCKS`), which Linux passes on but has not enforced for twenty years. `ulimit -x` shows it. Where
//! cgroups are not available, the mark alone identifies descendants. A process that changes that limit is
//! still identified while its parents are running. The program becomes the child subreaper of its
//! descendants, so that no orphan moves to another init. It reaps these orphans and no other children:
//! `std::process` and `tokio::process` work alongside, also when the program is PID 1.
//!
//! One kind of orphan stays a zombie while the program runs: the orphan of a child that the program started
//! by other means. It is indistinguishable from a child that `std::process` will wait for later, and taking
//! that child's status would be worse. Therefore, start programs that leave orphans as a [`Process`]. When
//! the last supervisor with processes has ended, the program is no longer the subreaper, unless it was
//! before.
//!
//! # When the program itself is killed
//! The kernel sends SIGKILL to the main processes, but not to what they have forked. Forked processes in a
//! cgroup are killed by the next supervisor with the same parent cgroup, before it starts anything; it waits
//! up to a second for their exit. With [`ProcessRecords`], the next supervisor with the same directory ends also
//! those that have no cgroup or have left it, by their mark. Without records these keep running. Those of
//! [`KillMode::Process`] always do.
//!
//! # Kept processes
//! A process with [`Process::keep`] survives. The next supervisor with the same [`ProcessRecords`], which must
//! [expect](ProcessRecords::expect_kept) its DN, adopts it there in place of a start, at once, whatever the runnable
//! depends on: it never runs twice. This is reported as [`RunnableChange::Adopted`](crate::RunnableChange::Adopted).
//! - It is ended and started anew if it was started with another program, arguments, environment, directory,
//!   standard input, user, privileges, limits or watchdog.
//! - Its output goes through FIFOs that it holds open itself, so no write fails while no supervisor runs. They take
//!   1 MiB each, or 64 KiB where the kernel grants no more; then a write blocks until the adoption. Nothing is lost.
//! - It is ready when its readiness is met again: a probe is repeated; a `READY=1` is remembered. Messages that it
//!   sends to its `NOTIFY_SOCKET` while no supervisor runs fail.
//! - Its exit is noticed, but its code is unknown ([`ProcessExit::is_status_known`]), which counts as a failure.
//! - Its cgroup is beside those of other processes: `nodekeel-keep-<mark>`.
//!
//! The supervisor logs once, through `tracing`, which of the two identifies descendants.

mod cgroup;
mod cgroup_limits;
mod child_setup;
mod descendants;
mod error;
mod handle;
mod host;
mod kept;
mod leftovers;
mod limits;
mod liveness;
mod mark;
mod notify;
mod output;
mod privileges;
mod probe;
mod probe_command;
mod procfs;
mod readiness;
mod reap;
mod records;
mod run;
mod running_process;
mod snapshot;
mod spawn;
mod stdin;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use crate::process_exit::{AdoptedProcess, ForcedKill, OomKill, ParseSignalError, ProcessExit, Signal};
pub use cgroup::CgroupParent;
pub use cgroup_limits::{CgroupLimitError, check_cgroup_limits};
pub use error::ProcessError;
pub use handle::{ProcessHandle, ProcessHandleError, ReloadAction};
pub(crate) use host::{HostSettings, ProcessHost};
pub use limits::{ParseRlimitError, ProcessLimits, Rlimit, RlimitResource};
pub use liveness::Liveness;
pub use output::{MAX_TAIL_LINE_BYTES, MAX_TAIL_LINES};
pub use privileges::{Capability, CapabilitySet, ParseCapabilityError, Privileges};
pub use probe::{ProbeFuture, ProcessProbe};
pub use readiness::Readiness;
#[cfg(feature = "testing")]
pub(crate) use records::rewrite_record;
pub use records::{ProcessRecords, RecordProblem};
pub use stdin::StdinSource;

/// Clocks can still add it to the current time.
const MAX_GRACE_PERIOD: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A program that runs as a child process, started by each run of its runnable. It is a
/// [`Runnable`](crate::Runnable).
///
/// An exit without a stop is a failure of the runnable. With a code other than 0, or by a signal, it is
/// [`ProcessError::Exited`]. With code 0 the result is `Ok`, which is also a failure, unless the readiness is
/// [`Readiness::on_exit`] or the policy treats `Ok` as success. Each failure is reported with the exit.
#[derive(Clone)]
pub struct Process {
    program_path: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    current_dir: Option<PathBuf>,
    stdin: StdinSource,
    uid: Option<u32>,
    gid: Option<u32>,
    privileges: Privileges,
    limits: ProcessLimits,
    readiness: Readiness,
    watchdog: Option<Duration>,
    liveness: Option<Liveness>,
    reload: Option<ReloadAction>,
    handle: Option<ProcessHandle>,
    grace_period: Duration,
    max_grace_period: Duration,
    stop_signal: Signal,
    kill_mode: KillMode,
    keep: bool,
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

    /// Its working directory. Default: the working directory of this program.
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

    /// What it may do, beside what its user may. Default: see [`Privileges`].
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

    /// How [`ProcessHandle::reload`] makes it read its configuration again. Default: it can't.
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

    /// How long it and its descendants may take to exit before they are killed. Default: ten seconds;
    /// maximum: a hundred years.
    #[must_use]
    pub fn grace_period(mut self, time: Duration) -> Self {
        self.grace_period = time.min(MAX_GRACE_PERIOD);
        self
    }

    /// How far it can extend its grace period, by `EXTEND_TIMEOUT_USEC=` to its `NOTIFY_SOCKET` while it stops.
    /// Default: not at all; maximum: a hundred years.
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

    /// Which processes stop with it. Default: [`KillMode::Descendants`].
    #[must_use]
    pub fn kill_mode(mut self, mode: KillMode) -> Self {
        self.kill_mode = mode;
        self
    }

    /// Keeps it running when this program is killed or aborts: see [Kept processes](crate::process#kept-processes). A stop or
    /// a shutdown ends it as any other. It needs [`ProcessRecords`]; probes and reload commands are never kept.
    /// Default: not kept.
    #[must_use]
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Whether it reports to a `NOTIFY_SOCKET`.
    fn needs_notify_socket(&self) -> bool {
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

/// Which processes stop together.
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
