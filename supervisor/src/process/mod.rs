//! Child processes as runnables.
//!
//! A [`Process`] is started in a process group of its own, with an empty environment and no open files but its standard
//! ones. It is ready when its [`Readiness`] says so. When its context is cancelled it is asked to end, and after its
//! grace everything that descends from it is killed, however it has tried to get away: by forking twice, by a session
//! of its own, or as another user.
//!
//! ```no_run
//! use nodekeel_supervisor::process::{Process, Readiness};
//! use nodekeel_supervisor::{Context, Failure};
//!
//! async fn root(ctx: Context) -> Result<(), Failure> {
//!     let etcd = Process::new("/usr/bin/etcd")
//!         .args(["--data-dir", "/var/lib/etcd"])
//!         .env("ETCD_LOGGER", "zap")
//!         .ready(Readiness::notify());
//!     ctx.run("etcd", etcd)?;
//!     ctx.wait_ready("root.etcd").await?;
//!     ctx.ready()?;
//!     Err(ctx.cancelled().await.into())
//! }
//! ```
//!
//! # How descendants are known
//! Each start is born into a cgroup of its own where that can be had ([`Cgroups`]): the kernel kills all in it at once,
//! however fast they fork, and whoever they have become.
//!
//! Also, and where there are no cgroups only, each start carries a mark that all its descendants inherit: the soft limit of file locks (`RLIMIT_LOCKS`), which
//! Linux hands down but has not enforced for twenty years. `ulimit -x` shows it. A process that sets that limit is
//! still known as long as its parents live. The program itself becomes the subreaper of its descendants, so none ends
//! up below another init; it waits for those orphans, and for nobody else's children: `std::process` and
//! `tokio::process` work beside it, also when the program is PID 1.
//!
//! One kind of orphan stays a zombie for as long as the program runs: that of a child which the program itself has
//! started by other means, and which has left it behind. Nothing tells it from a child that `std::process` has yet to
//! wait for, and a status that is taken from that would be worse. So start what leaves orphans as a [`Process`]. Once
//! the last supervisor that ran one has ended, the program is the subreaper no more, unless it was before.
//!
//! # When the program itself dies
//! The main processes get SIGKILL from the kernel. What they have forked is not reached by that. Where it is in a cgroup,
//! the next supervisor with the same parent cgroup kills it before it starts anything, and waits up to a second for its
//! end; else it lives on. What has left its cgroup lives on too, and so does what [`KillMode::Process`] leaves: such a
//! process gets no cgroup.
//!
//! Which of the two is in use is told once, through `tracing`.

mod cgroup;
mod command;
mod descendants;
mod error;
mod host;
mod notify;
mod output;
mod procfs;
mod readiness;
mod reap;
mod run;
mod running;
mod snapshot;
mod spawn;
mod status;
mod tag;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use cgroup::Cgroups;
pub use error::ProcessError;
pub(crate) use host::Host;
pub use output::{MAX_TAIL_LINE, MAX_TAIL_LINES};
pub use readiness::{Probe, ProbeFuture, Readiness};
pub use status::{ProcessExit, Signal};

/// Clocks can add it to what they show.
const LONGEST_GRACE: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A program to run as a child process, anew for each start. It is a [`Runnable`](crate::Runnable).
///
/// An exit by itself is a failure of the runnable: of another code than 0, or by a signal, it is
/// [`ProcessError::Exited`]. With code 0 it is `Ok`, which is a failure too unless it is to be ready by
/// [`Readiness::exit`] or its policy takes that for the end of its work. Each failure is told with the exit.
#[derive(Clone)]
pub struct Process {
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    current_dir: Option<PathBuf>,
    stdin: Stdin,
    uid: Option<u32>,
    gid: Option<u32>,
    readiness: Readiness,
    grace: Duration,
    stop_signal: Signal,
    kill: KillMode,
}

impl Process {
    /// A program by its path. One without a slash is looked for in the `PATH` that the process is given, or else in
    /// `/bin` and `/usr/bin`.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            current_dir: None,
            stdin: Stdin::Null,
            uid: None,
            gid: None,
            readiness: Readiness::started(),
            grace: Duration::from_secs(10),
            stop_signal: Signal::TERM,
            kill: KillMode::Descendants,
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

    /// Sets a variable of its environment, which has nothing else but `NOTIFY_SOCKET` where that is asked for.
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

    /// Its working directory. Default: this program's.
    #[must_use]
    pub fn current_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.current_dir = Some(dir.into());
        self
    }

    /// What it reads from its standard input. Default: nothing.
    #[must_use]
    pub fn stdin(mut self, stdin: Stdin) -> Self {
        self.stdin = stdin;
        self
    }

    /// Runs it as another user, without supplementary groups. Only root may. It does not start without a
    /// [`gid`](Self::gid) too: it would keep this program's group, which is root's.
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

    /// When it is ready. Default: [`Readiness::started`].
    #[must_use]
    pub fn ready(mut self, readiness: Readiness) -> Self {
        self.readiness = readiness;
        self
    }

    /// How long it, and what it leaves behind, may take to end before it is killed. Default: ten seconds. More than a
    /// hundred years are a hundred.
    #[must_use]
    pub fn grace(mut self, time: Duration) -> Self {
        self.grace = time.min(LONGEST_GRACE);
        self
    }

    /// What asks it to end. Default: [`Signal::TERM`].
    #[must_use]
    pub fn stop_signal(mut self, signal: Signal) -> Self {
        self.stop_signal = signal;
        self
    }

    /// What ends with it. Default: [`KillMode::Descendants`].
    #[must_use]
    pub fn kill(mut self, mode: KillMode) -> Self {
        self.kill = mode;
        self
    }

    /// The program that it runs.
    pub fn program(&self) -> &Path {
        &self.program
    }
}

impl fmt::Debug for Process {
    /// Without the values of its environment, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .field("current_dir", &self.current_dir)
            .field("readiness", &self.readiness)
            .field("grace", &self.grace)
            .field("stop_signal", &self.stop_signal)
            .field("kill", &self.kill)
            .finish_non_exhaustive()
    }
}

/// What a process reads from its standard input.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Stdin {
    /// Nothing: `/dev/null`.
    #[default]
    Null,
    /// These bytes, from the start at each start. It sees a file, not a pipe.
    Bytes(Arc<[u8]>),
    /// An open file. All starts share its position.
    File(Arc<OwnedFd>),
}

impl From<Vec<u8>> for Stdin {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<File> for Stdin {
    fn from(file: File) -> Self {
        Self::File(Arc::new(file.into()))
    }
}

impl From<OwnedFd> for Stdin {
    fn from(fd: OwnedFd) -> Self {
        Self::File(Arc::new(fd))
    }
}

impl fmt::Debug for Stdin {
    /// Without the bytes, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("Null"),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::File(file) => f.debug_tuple("File").field(file).finish(),
        }
    }
}

/// What ends with a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KillMode {
    /// It and all that descends from it. All of them are asked to end, it first and each once; what is left is killed
    /// after the grace.
    #[default]
    Descendants,
    /// Only it. For a program whose children are to outlive it, as containerd's shims are.
    Process,
}
