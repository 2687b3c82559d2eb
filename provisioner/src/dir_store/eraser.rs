//! The thread that erases removed volumes.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nodekeel_fsquota::ProjectId;
use nodekeel_supervisor::Backoff;
use tokio::sync::watch;

use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::erase_schedule::{EraseSchedule, EraseSlice, EraseTurn, WaitingEntry};
use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::detach_image;
use crate::dir_store::parts::StoreParts;
use crate::dir_store::trash::{Trash, TrashEntry};
use crate::error_chain::format_chain;
use crate::snapshot::StoredId;
use crate::step::VolumeStep;

/// The backoff after a failure to erase. A volume that is mounted or kept open needs an administrator, so
/// each failure is logged.
const RETRY_BACKOFF: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(300), jitter: 0.0 };

/// The removed volumes and snapshots that are not erased yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EraseBacklog {
    /// Their number.
    pub entries: usize,
    /// The bytes that they still use, as of the last slice of each.
    pub bytes: u64,
}

/// The entries to erase. Clones share one queue.
#[derive(Clone)]
pub(super) struct EraseQueue(Arc<SharedQueue>);

struct SharedQueue {
    state: Mutex<QueueState>,
    /// An entry was added, or the thread must stop.
    changed: Condvar,
    is_stopped: AtomicBool,
    backlog: watch::Sender<EraseBacklog>,
}

struct QueueState {
    schedule: EraseSchedule<TrashEntry>,
    /// All entries that are not erased yet, also the one in progress, with their bytes.
    queued: HashMap<TrashEntry, u64>,
}

impl Default for EraseQueue {
    fn default() -> Self {
        let state = QueueState { schedule: EraseSchedule::new(RETRY_BACKOFF), queued: HashMap::new() };
        Self(Arc::new(SharedQueue {
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            backlog: watch::Sender::default(),
        }))
    }
}

impl EraseQueue {
    /// Queues an entry that uses so many bytes, unless it is queued already.
    pub(super) fn enqueue_entry(&self, entry: TrashEntry, bytes: u64) {
        let mut state = self.lock_state();
        // The entry may be queued already: a start can be repeated, and a retried removal finds its empty
        // entry again.
        if state.queued.insert(entry.clone(), bytes).is_none() {
            state.schedule.add_entry(entry);
            self.0.changed.notify_one();
        }
        self.report_backlog(&state);
    }

    pub(super) fn backlog(&self) -> EraseBacklog {
        *self.0.backlog.borrow()
    }

    pub(super) async fn wait_until_empty(&self) {
        // Never fails: `self` holds the sender.
        let _ = self.0.backlog.subscribe().wait_for(|backlog| backlog.entries == 0).await;
    }

    /// The next entry to erase, as soon as there is one. `None` once the thread must stop.
    fn next_entry(&self) -> Option<WaitingEntry<TrashEntry>> {
        let mut state = self.lock_state();
        loop {
            if self.is_stopped() {
                return None;
            }
            let now = Instant::now();
            // A new entry, or `stop`, ends each wait early; then the schedule is asked again.
            state = match state.schedule.next_turn(now) {
                EraseTurn::Erase(entry) => return Some(entry),
                EraseTurn::WaitUntil(due) => {
                    let wait = self.0.changed.wait_timeout(state, due.saturating_duration_since(now));
                    wait.unwrap_or_else(PoisonError::into_inner).0
                }
                EraseTurn::Idle => self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Queues an entry again whose slice has ended, and which still uses so many bytes.
    fn yield_entry(&self, entry: WaitingEntry<TrashEntry>, bytes: u64) {
        let mut state = self.lock_state();
        state.queued.insert(entry.entry.clone(), bytes);
        state.schedule.yield_entry(entry);
        self.report_backlog(&state);
    }

    /// Queues an entry again that could not be erased.
    fn fail_entry(&self, entry: WaitingEntry<TrashEntry>) -> Duration {
        self.lock_state().schedule.fail_entry(entry, Instant::now())
    }

    fn mark_erased(&self, entry: &TrashEntry) {
        let mut state = self.lock_state();
        state.queued.remove(entry);
        self.report_backlog(&state);
    }

    fn report_backlog(&self, state: &QueueState) {
        let bytes = state.queued.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        self.0.backlog.send_replace(EraseBacklog { entries: state.queued.len(), bytes });
    }

    fn is_contended(&self) -> bool {
        self.lock_state().schedule.is_contended(Instant::now())
    }

    fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::Relaxed)
    }

    fn stop(&self) {
        // With the lock, so that the thread doesn't miss it between its check and its wait.
        let _state = self.lock_state();
        self.0.is_stopped.store(true, Ordering::Relaxed);
        self.0.changed.notify_one();
    }

    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for EraseQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EraseQueue").field(&self.backlog()).finish()
    }
}

enum SliceEnd {
    Erased,
    /// Other entries wait, or the thread must stop.
    Paused,
}

/// Erases the entries of a queue in the trash of a store.
pub(super) struct Eraser {
    pub(super) parts: StoreParts,
    pub(super) queue: EraseQueue,
    pub(super) trash: Arc<Trash>,
    pub(super) ledger: Arc<CapacityLedger>,
}

impl Eraser {
    fn run(&self) {
        while let Some(entry) = self.queue.next_entry() {
            if entry.is_new() {
                log_erasure(&entry.entry);
            }
            match self.erase_entry(&entry.entry) {
                Ok(SliceEnd::Erased) => {}
                Ok(SliceEnd::Paused) => {
                    // Once for each slice, and not after each file: the metric of the backlog needs no more.
                    let bytes = self.content_bytes(&entry.entry);
                    self.queue.yield_entry(entry, bytes);
                }
                Err(error) => {
                    let name = entry.entry.to_string();
                    let delay = self.queue.fail_entry(entry);
                    let error = format_chain(&error);
                    tracing::warn!(entry = name, "erase removed volume: {error}; retrying in {delay:?}");
                }
            }
        }
    }

    /// Erases an entry in this thread, without the queue.
    pub(super) fn erase_now(&self, entry: &TrashEntry) -> Result<(), DirStoreError> {
        while let SliceEnd::Paused = self.erase_entry(entry)? {}
        Ok(())
    }

    /// The bytes that the data of an entry still use.
    pub(super) fn content_bytes(&self, entry: &TrashEntry) -> u64 {
        self.trash.open_content(entry).map_or(0, |dir| self.parts.limits.used_bytes(&dir))
    }

    /// Erases an entry until a slice has ended and others wait.
    fn erase_entry(&self, entry: &TrashEntry) -> Result<SliceEnd, DirStoreError> {
        let mut slice = EraseSlice::new(Instant::now());
        // It is repeated if a retried removal has moved its volume into the entry after the content was
        // erased.
        loop {
            if let SliceEnd::Paused = self.erase_content(entry, &mut slice)? {
                return Ok(SliceEnd::Paused);
            }
            // The project before the entry: the name of the entry is the last record of its number.
            let project = entry.project();
            if let Some(project) = project.filter(|project| !self.is_volume_in_place(entry, *project)) {
                let path = self.trash.dir.path().join(entry.to_string());
                let release = || self.parts.limits.release_project(project, path);
                self.parts.steps.run_step(VolumeStep::ReleaseProject, release)?;
            }
            if self.remove_entry(entry)? {
                return Ok(SliceEnd::Erased);
            }
        }
    }

    fn erase_content(&self, entry: &TrashEntry, slice: &mut EraseSlice) -> Result<SliceEnd, DirStoreError> {
        // A device of an image keeps the blocks of a removed file.
        if let Ok(dir) = self.trash.open_content(entry) {
            detach_image(&dir)?;
        }
        // Called after each file. The slice goes on past its end while no other entry waits: the next slice
        // would have to search for its first file again.
        let mut keep_going = |_| {
            let has_ended = slice.record_progress(Instant::now());
            if self.queue.is_stopped() || (has_ended && self.queue.is_contended()) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let erase = || self.trash.dir.remove_tree_with(entry.content_path(), &mut keep_going);
        match self.parts.steps.run_step(VolumeStep::EraseContent, erase) {
            Ok(_) => Ok(SliceEnd::Erased),
            Err(error) if error.is_stopped() => Ok(SliceEnd::Paused),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }

    /// Removes an empty entry; returns false if a retried removal has just moved its volume into it.
    fn remove_entry(&self, entry: &TrashEntry) -> Result<bool, DirStoreError> {
        let trash = &self.trash.dir;
        let _held = self.parts.locks.lock(entry.id().as_str());
        // Under the lock: a removal of a new volume with this id may have found the empty entry, and moves into it.
        if trash.exists(entry.content_path()).map_err(DirStoreError::Directory)? {
            return Ok(false);
        }
        let remove = || trash.remove_tree(entry.to_string());
        self.parts.steps.run_step(VolumeStep::RemoveTrashEntry, remove).map_err(DirStoreError::Directory)?;
        self.ledger.mark_erased(entry);
        self.queue.mark_erased(entry);
        Ok(true)
    }

    /// Returns whether the volume is still in its place, because a crash came between creating the entry and moving
    /// the volume.
    fn is_volume_in_place(&self, entry: &TrashEntry, project: ProjectId) -> bool {
        let _held = self.parts.locks.lock(entry.id().as_str());
        let found = self.parts.dirs.find(entry.id()).ok().flatten();
        // A new volume may have the same id, but not the project: no number is allocated again before it is
        // released.
        found.is_some_and(
            |dir| matches!(self.parts.limits.find_project(&dir), Ok(Some(found)) if found == project),
        )
    }
}

fn log_erasure(entry: &TrashEntry) {
    match entry.id() {
        StoredId::Volume(id) => {
            let claim_uid = id.claim_uid();
            tracing::info!(pv = %id, handle = %id, claim_uid, %entry, "erasing the data of a deleted volume");
        }
        StoredId::Snapshot(id) => {
            tracing::info!(handle = %id, %entry, "erasing the data of a deleted snapshot");
        }
    }
}

/// The thread of an eraser. Dropping this stops it between two files.
#[derive(Debug)]
pub(super) struct EraserThread {
    queue: EraseQueue,
    thread: Option<JoinHandle<()>>,
}

impl EraserThread {
    pub(super) fn start(eraser: &Arc<Eraser>) -> io::Result<Self> {
        let (eraser, queue) = (Arc::clone(eraser), eraser.queue.clone());
        // A thread of its own: erasing may take hours, and would keep a thread of the runtime's pool from
        // other work.
        let thread = std::thread::Builder::new().name("erase-volumes".to_owned());
        let thread = Some(thread.spawn(move || eraser.run())?);
        Ok(Self { queue, thread })
    }
}

impl Drop for EraserThread {
    fn drop(&mut self) {
        self.queue.stop();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}
