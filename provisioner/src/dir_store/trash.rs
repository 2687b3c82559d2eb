//! Removed volumes: trash entries, and the thread that erases them.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nodekeel_fsquota::ProjectId;
use nodekeel_localstorage::{Dir, Error as DirError, FileMode, RenameMode};
use nodekeel_supervisor::Backoff;
use tokio::sync::watch;

use crate::dir_store::{DirStoreError, StoreInner};
use crate::id::VolumeId;
use crate::step::VolumeStep;

/// Name of the volume in its trash entry.
const CONTENT_NAME: &str = "volume";

/// Prefix of the name of a trash entry that is the volume itself: the disk had no free space for a directory
/// around it.
const BARE_PREFIX: &str = "bare-";

/// The backoff after a failure to erase. A volume that is mounted or kept open needs an administrator, so
/// each failure is logged.
const RETRY_BACKOFF: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(300), jitter: 0.0 };

/// An entry of the trash directory: `pvc-<uid>.<project>.<number>`, where project 0 means none and the number
/// distinguishes successive volumes with the same id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct TrashEntry {
    id: VolumeId,
    project: Option<ProjectId>,
    number: u32,
    is_bare: bool,
}

impl TrashEntry {
    /// Creates or finds an empty entry; if the disk has no free space for a directory, returns the name of a
    /// bare one.
    pub(super) fn create_entry(
        trash: &Dir,
        id: &VolumeId,
        project: Option<ProjectId>,
    ) -> Result<Self, DirError> {
        let mut entry = Self { id: id.clone(), project, number: 0, is_bare: false };
        loop {
            match trash.ensure_dir(entry.to_string(), FileMode::PRIVATE_DIR) {
                Ok(dir) if !dir.exists(CONTENT_NAME)? => return Ok(entry),
                Ok(_) => entry.number += 1,
                Err(error) if error.is_full() => return Ok(Self { is_bare: true, ..entry }),
                Err(error) => return Err(error),
            }
        }
    }

    /// The project to release, if the volume had one.
    pub(super) fn project(&self) -> Option<ProjectId> {
        self.project
    }

    /// Renames the volume into the entry.
    pub(super) fn move_volume_in(&self, volumes: &Dir, id: &VolumeId, trash: &Dir) -> Result<(), DirError> {
        volumes.rename(id.as_str(), trash, self.content_path(), RenameMode::NoReplace)
    }

    /// The path of the data to erase.
    fn content_path(&self) -> String {
        match self.is_bare {
            true => self.to_string(),
            false => format!("{self}/{CONTENT_NAME}"),
        }
    }
}

impl fmt::Display for TrashEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = if self.is_bare { BARE_PREFIX } else { "" };
        let project = self.project.map_or(0, ProjectId::get);
        write!(f, "{bare}{}.{project}.{}", self.id, self.number)
    }
}

impl FromStr for TrashEntry {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let (is_bare, rest) = match name.strip_prefix(BARE_PREFIX) {
            Some(rest) => (true, rest),
            None => (false, name),
        };
        let mut parts = rest.split('.');
        let mut next = || parts.next().ok_or(());
        let (id, project, number) = (next()?, next()?, next()?);
        let entry = Self {
            id: id.parse().map_err(|_| ())?,
            project: ProjectId::new(project.parse().map_err(|_| ())?),
            number: number.parse().map_err(|_| ())?,
            is_bare,
        };
        // Only canonical names are ours.
        if entry.to_string() == name { Ok(entry) } else { Err(()) }
    }
}

/// Parses and formats the name of a trash entry; `None` if it is not one.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn read_trash_name(name: &str) -> Option<String> {
    name.parse::<TrashEntry>().ok().map(|entry| entry.to_string())
}

/// The entries to erase. Clones share one queue.
#[derive(Debug, Clone)]
pub(super) struct EraseQueue {
    entries: Sender<Option<TrashEntry>>,
    queued_entries: Arc<Mutex<HashSet<TrashEntry>>>,
    pending: watch::Sender<usize>,
}

impl EraseQueue {
    /// Queues an entry for erasing, unless it is queued already.
    pub(super) fn enqueue_entry(&self, entry: TrashEntry) {
        if self.queued_entries().insert(entry.clone()) {
            self.pending.send_modify(|pending| *pending += 1);
            // Fails only if the thread has panicked; then the next store finds the entry.
            let _ = self.entries.send(Some(entry));
        }
    }

    /// Marks an entry as erased.
    fn mark_erased(&self, entry: &TrashEntry) {
        self.queued_entries().remove(entry);
        self.pending.send_modify(|pending| *pending -= 1);
    }

    fn queued_entries(&self) -> MutexGuard<'_, HashSet<TrashEntry>> {
        self.queued_entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that erases entries, one after the other.
#[derive(Debug)]
pub(super) struct VolumeEraser {
    queue: EraseQueue,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl VolumeEraser {
    pub(super) fn start(inner: &Arc<StoreInner>, entries: Vec<TrashEntry>) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let (pending, stop) = (watch::Sender::new(0), Arc::new(AtomicBool::new(false)));
        let queue = EraseQueue { entries: sender, queued_entries: Arc::default(), pending };
        let worker = EraseWorker {
            inner: Arc::clone(inner),
            queue: queue.clone(),
            stop: Arc::clone(&stop),
            failed: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("erase-volumes".to_owned());
        let thread = Some(thread.spawn(move || worker.run(&receiver))?);
        let eraser = Self { queue, stop, thread };
        entries.into_iter().for_each(|entry| eraser.queue.enqueue_entry(entry));
        Ok(eraser)
    }

    pub(super) fn queue(&self) -> EraseQueue {
        self.queue.clone()
    }

    pub(super) fn pending_count(&self) -> usize {
        *self.queue.pending.borrow()
    }

    pub(super) async fn wait_until_idle(&self) {
        // Never fails: `self` holds the sender.
        let _ = self.queue.pending.subscribe().wait_for(|&pending| pending == 0).await;
    }
}

impl Drop for VolumeEraser {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread if it waits.
        let _ = self.queue.entries.send(None);
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// An entry that could not be erased.
struct FailedErasure {
    entry: TrashEntry,
    failures: u32,
    due: Instant,
}

struct EraseWorker {
    inner: Arc<StoreInner>,
    queue: EraseQueue,
    stop: Arc<AtomicBool>,
    failed: Vec<FailedErasure>,
}

impl EraseWorker {
    fn run(mut self, queue: &Receiver<Option<TrashEntry>>) {
        while let Some((entry, failures)) = self.next_entry(queue) {
            match self.erase_entry(&entry) {
                Ok(()) => {}
                Err(_) if self.is_stopped() => return,
                Err(error) => self.schedule_retry(entry, failures + 1, &error),
            }
        }
    }

    /// The next entry to erase: one whose retry is due, or a new one. `None` once the store is dropped.
    fn next_entry(&mut self, queue: &Receiver<Option<TrashEntry>>) -> Option<(TrashEntry, u32)> {
        let first = self.failed.iter().enumerate().min_by_key(|(_, failed)| failed.due);
        let first = first.map(|(index, failed)| (index, failed.due));
        let wait = first.map_or(Duration::MAX, |(_, due)| due.saturating_duration_since(Instant::now()));
        let next = match (queue.recv_timeout(wait), first) {
            (Ok(entry), _) => entry.map(|entry| (entry, 0)),
            (Err(RecvTimeoutError::Timeout), Some((index, _))) => {
                let failed = self.failed.swap_remove(index);
                Some((failed.entry, failed.failures))
            }
            (Err(_), _) => None,
        };
        next.filter(|_| !self.is_stopped())
    }

    fn schedule_retry(&mut self, entry: TrashEntry, failures: u32, error: &DirStoreError) {
        tracing::warn!(%entry, "erase removed volume: {error}{}; retrying", format_causes(error));
        self.failed.push(FailedErasure {
            entry,
            failures,
            due: Instant::now() + RETRY_BACKOFF.base_delay(failures),
        });
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn erase_entry(&self, entry: &TrashEntry) -> Result<(), DirStoreError> {
        let (steps, id) = (&self.inner.steps, &entry.id);
        let claim_uid = id.claim_uid();
        tracing::info!(pv = %id, handle = %id, claim_uid, %entry, "erasing the data of a deleted volume");
        loop {
            steps.run_step(VolumeStep::EraseContent, || self.erase_content(entry))?;
            if let Some(project) = entry.project.filter(|project| !self.is_volume_in_place(entry, *project)) {
                steps.run_step(VolumeStep::ReleaseProject, || self.release_project(entry, project))?;
            }
            if self.remove_entry(entry)? {
                return Ok(());
            }
        }
    }

    /// Removes an empty entry; returns false if a retried removal has just moved its volume into it.
    fn remove_entry(&self, entry: &TrashEntry) -> Result<bool, DirStoreError> {
        let trash = &self.inner.trash;
        let _held = self.inner.lock_volume(&entry.id);
        if trash.exists(entry.content_path()).map_err(DirStoreError::Directory)? {
            return Ok(false);
        }
        let remove = || trash.remove_tree(entry.to_string());
        self.inner.steps.run_step(VolumeStep::RemoveTrashEntry, remove).map_err(DirStoreError::Directory)?;
        self.queue.mark_erased(entry);
        Ok(true)
    }

    fn erase_content(&self, entry: &TrashEntry) -> Result<(), DirStoreError> {
        let mut keep_going =
            |_| if self.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let erased = self.inner.trash.remove_tree_with(entry.content_path(), &mut keep_going);
        erased.map(drop).map_err(DirStoreError::Directory)
    }

    /// Whether the volume is still in `volumes`, because a crash came between creating the entry and moving
    /// the volume.
    fn is_volume_in_place(&self, entry: &TrashEntry, project: ProjectId) -> bool {
        let _held = self.inner.lock_volume(&entry.id);
        let found = self.inner.find_volume(&entry.id).ok().flatten();
        found.is_some_and(|dir| matches!(self.inner.find_project(&dir), Ok(Some(found)) if found == project))
    }

    fn release_project(&self, entry: &TrashEntry, project: ProjectId) -> Result<(), DirStoreError> {
        let path = self.inner.trash.path().join(entry.to_string());
        self.inner.quota.release_project(project).map_err(|source| DirStoreError::Quota { path, source })
    }
}

/// Formats the causes of an error, each after a colon.
fn format_causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |error| error.source()).map(|error| format!(": {error}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_names_are_trash_entries() {
        let id = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
        for good in [format!("{id}.7.0"), format!("{id}.0.12"), format!("bare-{id}.7.0")] {
            assert_eq!(good.parse::<TrashEntry>().map(|entry| entry.to_string()), Ok(good));
        }
        let bad =
            [id.to_owned(), format!("{id}.7"), format!("{id}.07.0"), format!("{id}.7.0.1"), "..".to_owned()];
        for bad in bad {
            assert!(bad.parse::<TrashEntry>().is_err(), "{bad}");
        }
    }
}
