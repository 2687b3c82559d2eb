//! Snapshots of all processes.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::mark::{HostId, ProcessMark};
use super::procfs;

/// The processes that this program may signal, with their marks.
#[derive(Debug)]
pub(super) struct ProcessSnapshot {
    /// The host whose marks are known, so that their parents are not needed.
    own_host: HostId,
    /// The soft limits of file locks by pid, ascending.
    limits: Vec<(i32, u64)>,
    /// The last assigned pid: a process that is missing has a later one.
    newest_pid: i32,
    parents: OnceLock<HashMap<i32, i32>>,
}

impl ProcessSnapshot {
    fn read_processes(own: HostId) -> io::Result<Self> {
        // Before the list: a process that is born while the list is read has a later pid.
        let newest = procfs::newest_pid()?;
        let pids = procfs::list_pids()?;
        // A process that has exited by now, or that this program may not signal, is left out.
        let limit = |&pid: &i32| Some((pid, procfs::locks_limit_if_signalable(pid).ok()?));
        let limits = pids.iter().filter_map(limit).collect();
        Ok(Self { own_host: own, limits, newest_pid: newest, parents: OnceLock::new() })
    }

    pub(super) fn limits(&self) -> &[(i32, u64)] {
        &self.limits
    }

    pub(super) fn limit_of(&self, pid: i32) -> Option<u64> {
        let at = self.limits.binary_search_by_key(&pid, |(pid, _)| *pid).ok()?;
        Some(self.limits[at].1)
    }

    pub(super) fn newest_pid(&self) -> i32 {
        self.newest_pid
    }

    /// The parents of the processes without this host's mark. They are read on demand, because it takes
    /// longer than the rest.
    pub(super) fn parents(&self) -> &HashMap<i32, i32> {
        let is_own =
            |limit| ProcessMark::from_limit(limit).is_some_and(|mark| mark.host_id() == self.own_host);
        self.parents.get_or_init(|| {
            let others = self.limits.iter().filter(|(_, limit)| !is_own(*limit));
            others.filter_map(|&(pid, _)| Some((pid, procfs::parent_pid(pid).ok()?))).collect()
        })
    }
}

/// Hands out snapshots. Callers that wait while one is being taken share the next one.
///
/// No orphan is reaped while a snapshot is being taken. The snapshot therefore contains at least one of the orphans of
/// a start, alive or a zombie, and a process that forks and exits is never taken for gone.
#[derive(Debug)]
pub(super) struct SnapshotCache {
    own_host: HostId,
    latest: Mutex<Option<(Instant, Arc<ProcessSnapshot>)>>,
}

impl SnapshotCache {
    pub(super) fn new(own_host: HostId) -> Self {
        Self { own_host, latest: Mutex::default() }
    }

    /// A snapshot that was started after this call. All tasks that can run now get the same one if they ask for it:
    /// of a hundred processes that stop at one instant, each would otherwise cost a scan of the host.
    pub(super) async fn take_shared(&self) -> io::Result<Arc<ProcessSnapshot>> {
        let requested = Instant::now();
        tokio::task::yield_now().await;
        self.take_since(requested)
    }

    /// A snapshot that was started after this call.
    pub(super) fn take_fresh(&self) -> io::Result<Arc<ProcessSnapshot>> {
        self.take_since(Instant::now())
    }

    fn take_since(&self, requested: Instant) -> io::Result<Arc<ProcessSnapshot>> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((started, snapshot)) = &*latest
            // An earlier one may lack a process that existed at the request.
            && *started >= requested
        {
            return Ok(Arc::clone(snapshot));
        }
        let started = Instant::now();
        let snapshot = Arc::new(ProcessSnapshot::read_processes(self.own_host)?);
        *latest = Some((started, Arc::clone(&snapshot)));
        Ok(snapshot)
    }

    /// Calls `wait`, which reaps an orphan, while no snapshot is being taken.
    pub(super) fn reap_between_snapshots<T>(&self, wait: impl FnOnce() -> T) -> T {
        let _nobody_looks = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        wait()
    }
}
