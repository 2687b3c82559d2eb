//! Child processes as runnables.
//!
//! A [`Process`] starts in a separate session, without a terminal, with an empty environment, the umask 022 and no open
//! files except its standard ones. It is ready when its [`Readiness`] is met. When its context is canceled, it gets a stop
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
//!     ctx.wait_ready("etcd").await?;
//!     ctx.signal_ready()?;
//!     Err(ctx.canceled().await.into())
//! }
//! ```
//!
//! # How descendants are identified
//! Where possible, each start gets a dedicated cgroup ([`CgroupParent`]). The kernel kills all its processes
//! at once, however fast they fork, and under any user.
//!
//! Elsewhere, descendants are identified by their parents. The program becomes the child subreaper of its
//! descendants, so that no orphan moves to another init, and no other process becomes its descendant. To tell of which
//! start an orphan is, each start carries a mark that all its descendants inherit: the soft limit of file locks
//! (`RLIMIT_LOCKS`), which Linux passes on but has not enforced for twenty years. `ulimit -x` shows it. Every process can
//! set it, so a mark counts only among the program's own descendants; and for what a killed program has left behind,
//! whose parents have gone, only for processes of the users as which it started some. Those that have changed their
//! user are identified while a parent, or the leader of their session, is running; the log names others with the mark,
//! which run on. A process that changes that limit is still identified while its parents are running.
//!
//! The program reaps these orphans and no other children:
//! `std::process` and `tokio::process` work alongside, also when the program is PID 1. As PID 1, it also reaps the
//! processes that were there before it: the jobs of an init script that has executed it, if `/proc` was mounted by then.
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
//! those that have no cgroup or have left it, by their mark and user. Without records these keep running. Those of
//! [`KillMode::Process`] always do.
//!
//! # Kept processes
//! A process with [`Process::keep`] survives. The next supervisor with the same [`ProcessRecords`], which must
//! [expect](ProcessRecords::expect_kept) its DN, adopts it there at once, in place of a start and without waiting for
//! dependencies: it never runs twice. This is reported as [`RunnableChange::Adopted`](crate::RunnableChange::Adopted).
//! - It is ended and started anew if it was started with another program, arguments, environment, directory,
//!   standard input, user, privileges, limits or watchdog.
//! - Its output goes through FIFOs that it holds open itself, so no write fails while no supervisor runs. They take
//!   1 MiB each, or 64 KiB where the kernel grants no more; then a write blocks until the adoption. Nothing is lost.
//! - It is ready when its readiness is met again: a probe is repeated; a `READY=1` is remembered. Messages that it
//!   sends to its `NOTIFY_SOCKET` while no supervisor runs fail.
//! - If it can't be taken over, as for lack of descriptors, it runs on: its run fails, and the next one tries again.
//!   When its runnable is stopped or leaves the tree, it is killed.
//! - Its exit is noticed, but its code is unknown ([`ProcessExit::is_status_known`]), which counts as a failure.
//! - Its cgroup is next to those of other processes: `nodekeel-keep-<mark>`.
//!
//! The supervisor logs once, through `tracing`, whether cgroups identify descendants.

mod cgroup;
mod cgroup_limits;
mod child_lists;
mod child_setup;
mod descendants;
mod error;
mod handle;
mod host;
mod host_state;
mod inherited;
mod kept;
mod leftovers;
mod limits;
mod liveness;
mod mark;
mod notify;
mod notify_socket;
mod output;
mod own_memory;
mod pause;
mod private_dir;
mod privileges;
mod probe;
mod probe_command;
mod procfs;
mod readiness;
mod reap;
mod record;
mod records;
mod run;
mod running_process;
mod settings;
mod snapshot;
mod spawn;
mod stdin;

pub use crate::process_exit::{AdoptedProcess, ForcedKill, OomKill, ParseSignalError, ProcessExit, Signal};
pub use cgroup::CgroupParent;
pub use cgroup_limits::{CgroupLimitError, check_cgroup_limits};
pub use error::ProcessError;
pub use handle::{ProcessHandle, ProcessHandleError, ReloadAction};
pub(crate) use host::{HostSettings, ProcessHost};
pub(crate) use inherited::record_inherited;
pub use limits::{ParseRlimitError, ProcessLimits, Rlimit, RlimitResource};
pub use liveness::Liveness;
pub use notify_socket::longest_notify_path;
pub use output::{MAX_TAIL_LINE_BYTES, MAX_TAIL_LINES};
pub use own_memory::protect_own_memory;
pub use privileges::{Capability, CapabilitySet, ParseCapabilityError, Privileges};
pub use probe::{ProbeFuture, ProcessProbe, Unready};
pub use readiness::Readiness;
pub use records::{ProcessRecords, RecordProblem};
pub use settings::{KillMode, Process};
pub use stdin::StdinSource;
#[cfg(feature = "testing")]
pub(crate) use {notify::count_messages, procfs::parse_any, records::rewrite_record};
