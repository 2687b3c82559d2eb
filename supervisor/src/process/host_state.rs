//! The state of a host that its starts, its reaper and its running processes share.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::process::Pid;
use tokio::sync::Notify;

use super::child_lists::ChildLists;
use super::mark::{MarkAllocator, ProcessMark, ProgramId};
use super::snapshot::SnapshotCache;
use crate::sys;

/// The part of a host that its threads and tasks share.
#[derive(Debug)]
pub(super) struct HostState {
    pub(super) program: ProgramId,
    pub(super) marks: MarkAllocator,
    /// The limit that children which no host has started inherit.
    pub(super) own_lock_limit: u64,
    /// As PID 1: the children from before it marked itself.
    initial_children: HashSet<i32>,
    registry: Mutex<ProcessRegistry>,
    /// Notified when a process becomes, or ceases to be, one that a run waits for.
    pub(super) reap_again: Notify,
    pub(super) snapshots: SnapshotCache,
    children: Arc<ChildLists>,
    /// The latest moment at which nothing was known to be left behind.
    nothing_left_at: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct ProcessRegistry {
    /// Starts in progress, whose main processes are not known yet.
    starting: HashSet<ProcessMark>,
    /// The processes that runs wait for.
    main_processes: HashMap<i32, ProcessMark>,
}

impl HostState {
    pub(super) fn new(
        program: ProgramId,
        marks: MarkAllocator,
        own_lock_limit: u64,
        initial_children: HashSet<i32>,
        children: Arc<ChildLists>,
    ) -> Self {
        Self {
            program,
            snapshots: SnapshotCache::new(marks.host_id()),
            marks,
            own_lock_limit,
            initial_children,
            registry: Mutex::default(),
            reap_again: Notify::new(),
            children,
            nothing_left_at: Mutex::default(),
        }
    }

    pub(super) fn is_main_process(&self, pid: i32) -> bool {
        self.lock().main_processes.contains_key(&pid)
    }

    /// Returns whether no process that was left behind by main processes is there, at a moment after this call. False if
    /// that can't be told. As with snapshots, all tasks that can run now share the answer.
    pub(super) async fn has_nothing_left(&self) -> bool {
        let requested = Instant::now();
        tokio::task::yield_now().await;
        let mut latest = self.nothing_left_at.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.is_some_and(|at| at >= requested) {
            return true;
        }
        let now = Instant::now();
        let are_main = |pids: &[i32]| {
            let registry = self.lock();
            pids.iter().all(|pid| registry.main_processes.contains_key(pid))
        };
        let nothing_left = self.children.show_nothing_left(are_main);
        *latest = nothing_left.then_some(now).or(*latest);
        nothing_left
    }

    pub(super) fn is_starting(&self, mark: ProcessMark) -> bool {
        self.lock().starting.contains(&mark)
    }

    /// Returns whether a process without a mark entered the PID namespace of PID 1 from outside, as `nsenter` makes
    /// one. Both its mark and its session must show it.
    pub(super) fn came_from_outside(&self, pid: i32) -> bool {
        is_init()
            && !self.initial_children.contains(&pid)
            && sys::session_id(pid).ok() != sys::session_id(0).ok()
    }

    pub(super) fn begin_start(&self, mark: ProcessMark) {
        self.lock().starting.insert(mark);
    }

    pub(super) fn end_start(&self, mark: ProcessMark, main: Option<i32>) {
        let mut registry = self.lock();
        registry.starting.remove(&mark);
        registry.main_processes.extend(main.map(|pid| (pid, mark)));
        drop(registry);
        // Only now can the reaper tell the main process from an orphan.
        self.reap_again.notify_one();
    }

    /// No run waits for it any more.
    pub(super) fn forget_main(&self, main: i32) {
        // The reaper may have stopped at this process, which hid exited orphans behind it.
        self.lock().main_processes.remove(&main);
        self.reap_again.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, ProcessRegistry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether this program is PID 1 of its namespace.
pub(super) fn is_init() -> bool {
    rustix::process::getpid() == Pid::INIT
}
