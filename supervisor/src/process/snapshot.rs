//! All processes at one moment.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::procfs;
use super::tag::{Giver, Tag};

/// The processes that this program may signal, with their marks.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// Whose marks need no parents to be understood.
    own: Giver,
    /// The soft limits of file locks by pid, ascending.
    limits: Vec<(i32, u64)>,
    /// The last pid that had been given out: whoever is missing has a later one.
    newest: i32,
    parents: OnceLock<HashMap<i32, i32>>,
}

impl Snapshot {
    fn take(own: Giver) -> io::Result<Self> {
        let newest = procfs::newest_pid()?;
        let pids = procfs::pids()?;
        let limit = |&pid: &i32| Some((pid, procfs::locks_limit_to_signal(pid).ok()?));
        let limits = pids.iter().filter_map(limit).collect();
        Ok(Self { own, limits, newest, parents: OnceLock::new() })
    }

    pub(super) fn limits(&self) -> &[(i32, u64)] {
        &self.limits
    }

    pub(super) fn limit(&self, pid: i32) -> Option<u64> {
        let at = self.limits.binary_search_by_key(&pid, |(pid, _)| *pid).ok()?;
        Some(self.limits[at].1)
    }

    pub(super) fn newest(&self) -> i32 {
        self.newest
    }

    /// The parents of those that don't carry this host's own mark. Read only when somebody asks: it takes longer than the
    /// rest.
    pub(super) fn parents(&self) -> &HashMap<i32, i32> {
        let is_own = |limit| Tag::from_limit(limit).is_some_and(|tag| tag.giver() == self.own);
        self.parents.get_or_init(|| {
            let others = self.limits.iter().filter(|(_, limit)| !is_own(*limit));
            others.filter_map(|&(pid, _)| Some((pid, procfs::parent(pid).ok()?))).collect()
        })
    }
}

/// Hands out snapshots. Who asks while one is being taken shares the next with all others who do.
///
/// While one is taken no orphan is waited for. So whatever the orphans of one start do, at least one of them is in it,
/// alive or a zombie, and nobody is taken for gone who has become another process meanwhile.
#[derive(Debug)]
pub(super) struct Snapshots {
    own: Giver,
    latest: Mutex<Option<(Instant, Arc<Snapshot>)>>,
}

impl Snapshots {
    pub(super) fn new(own: Giver) -> Self {
        Self { own, latest: Mutex::default() }
    }

    /// One that was begun after this was called.
    pub(super) fn fresh(&self) -> io::Result<Arc<Snapshot>> {
        let asked = Instant::now();
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((began, snapshot)) = &*latest
            && *began >= asked
        {
            return Ok(Arc::clone(snapshot));
        }
        let began = Instant::now();
        let snapshot = Arc::new(Snapshot::take(self.own)?);
        *latest = Some((began, Arc::clone(&snapshot)));
        Ok(snapshot)
    }

    /// Waits for an orphan, while no snapshot is being taken.
    pub(super) fn reap<T>(&self, wait: impl FnOnce() -> T) -> T {
        let _nobody_looks = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        wait()
    }
}
