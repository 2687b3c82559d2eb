//! What all child processes of one supervisor share.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit};
use tokio::signal::unix::SignalKind;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::cgroup::{Cgroups, Home};
use super::procfs;
use super::reap;
use super::snapshot::Snapshots;
use super::spawn::Spawner;
use super::tag::{Giver, Program, Tag, Tags};
use crate::sys;

/// How long what has been killed may take to end before a shutdown no longer waits for it.
const BURIED_WITHIN: Duration = Duration::from_secs(1);

/// Starts child processes and takes in their orphans. It lives as long as any process that it started has a run.
#[derive(Debug)]
pub(crate) struct Host {
    pub(super) shared: Arc<Shared>,
    pub(super) spawner: Spawner,
    /// Where starts get cgroups of their own.
    pub(super) home: Option<Home>,
    /// What sees processes to their ends that nobody else waits for, or may no longer.
    pub(super) burials: TaskTracker,
    _reaper: AbortOnDropHandle<()>,
    _subreaper: Subreaper,
}

/// How many hosts need this program to be the one that orphans go to, and whether it was before the first of them. It
/// is a property of the whole program, so they count together.
static SUBREAPERS: Mutex<(usize, bool)> = Mutex::new((0, false));

/// As long as it lives, orphans come to this program. After the last of them they go where they went before: nobody
/// here would wait for them.
#[derive(Debug)]
struct Subreaper;

impl Subreaper {
    fn new() -> io::Result<Self> {
        let mut subreapers = SUBREAPERS.lock().unwrap_or_else(PoisonError::into_inner);
        if subreapers.0 == 0 {
            let before = rustix::process::child_subreaper()?.is_some();
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
            subreapers.1 = before;
        }
        subreapers.0 += 1;
        Ok(Self)
    }
}

impl Drop for Subreaper {
    fn drop(&mut self) {
        let mut subreapers = SUBREAPERS.lock().unwrap_or_else(PoisonError::into_inner);
        subreapers.0 -= 1;
        if *subreapers == (0, false) {
            // A kernel that has set it takes it back.
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}

impl Host {
    /// Makes this program the one that its children's orphans go to, for as long as it lives. Must be called within a
    /// tokio runtime that has its IO enabled.
    pub(crate) fn new(cgroups: &Cgroups) -> io::Result<Self> {
        procfs::check()?;
        let program = Program::current()?;
        let subreaper = Subreaper::new()?;
        let child_ended = tokio::signal::unix::signal(SignalKind::child())?;
        let children_before = if is_init() { mark_own_children(program)? } else { HashSet::new() };
        let spawner = Spawner::start()?;
        let tags = Tags::new(program, spawner.thread());
        let home = home(cgroups, tags.giver());
        let shared = Arc::new(Shared {
            program,
            snapshots: Snapshots::new(tags.giver()),
            tags,
            own_limit: own_limit(),
            children_before,
            registry: Mutex::default(),
            reap_again: Notify::new(),
        });
        let reaper = AbortOnDropHandle::new(tokio::spawn(reap::run(Arc::clone(&shared), child_ended)));
        let burials = TaskTracker::new();
        Ok(Self { shared, spawner, home, burials, _reaper: reaper, _subreaper: subreaper })
    }

    /// Resolves when all that was killed without being waited for has ended, or takes so long that it waits for a device.
    pub(crate) async fn buried(&self) {
        self.burials.close();
        let _ = timeout(BURIED_WITHIN, self.burials.wait()).await;
    }
}

/// The part of a host that its threads and tasks know.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) program: Program,
    pub(super) tags: Tags,
    /// What children that are not a host's inherit.
    pub(super) own_limit: u64,
    /// As PID 1: children from the time before they were marked.
    children_before: HashSet<i32>,
    registry: Mutex<Registry>,
    /// A process has become, or has stopped to be, one that somebody waits for.
    pub(super) reap_again: Notify,
    pub(super) snapshots: Snapshots,
}

#[derive(Debug, Default)]
struct Registry {
    /// The starts that are under way: their main processes are not known yet.
    starting: HashSet<Tag>,
    /// The processes that runs wait for.
    mains: HashMap<i32, Tag>,
}

impl Shared {
    pub(super) fn is_main(&self, pid: i32) -> bool {
        self.lock().mains.contains_key(&pid)
    }

    pub(super) fn is_starting(&self, tag: Tag) -> bool {
        self.lock().starting.contains(&tag)
    }

    /// Whether a process without a mark has come to PID 1 from outside of its program: `nsenter` brings such. Both its
    /// mark and its session must say so.
    pub(super) fn is_strangers(&self, pid: i32) -> bool {
        is_init() && !self.children_before.contains(&pid) && sys::session(pid).ok() != sys::session(0).ok()
    }

    pub(super) fn begin_start(&self, tag: Tag) {
        self.lock().starting.insert(tag);
    }

    pub(super) fn end_start(&self, tag: Tag, main: Option<i32>) {
        let mut registry = self.lock();
        registry.starting.remove(&tag);
        registry.mains.extend(main.map(|pid| (pid, tag)));
        drop(registry);
        self.reap_again.notify_one();
    }

    /// Nobody waits for it any more.
    pub(super) fn forget(&self, main: i32) {
        self.lock().mains.remove(&main);
        self.reap_again.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host's directory, where it can have one; it is told once which it is.
fn home(cgroups: &Cgroups, giver: Giver) -> Option<Home> {
    match Home::make(cgroups, giver) {
        Ok(Some(home)) => {
            tracing::debug!(cgroup = %home.dir().display(), "descendants are known by their cgroup");
            Some(home)
        }
        Ok(None) => None,
        Err(error) => {
            tracing::info!(%error, "descendants are known by their mark: cgroups can't be had");
            None
        }
    }
}

fn is_init() -> bool {
    rustix::process::getpid() == Pid::INIT
}

fn own_limit() -> u64 {
    rustix::process::getrlimit(Resource::Locks).current.unwrap_or(u64::MAX)
}

/// Marks PID 1 itself, so that what it starts by other means can be told from what others bring into its namespace.
/// Returns the children that it has already.
fn mark_own_children(program: Program) -> io::Result<HashSet<i32>> {
    let before = own_limit();
    if Tag::from_limit(before).is_none() {
        let hard = rustix::process::getrlimit(Resource::Locks).maximum;
        let mark = Rlimit { current: Some(program.own_mark().limit()), maximum: hard };
        rustix::process::setrlimit(Resource::Locks, mark)?;
    }
    let own = procfs::own_pid();
    let is_child = |pid: &i32| procfs::stat(*pid).is_ok_and(|stat| stat.parent == own);
    Ok(procfs::pids()?.into_iter().filter(is_child).collect())
}
