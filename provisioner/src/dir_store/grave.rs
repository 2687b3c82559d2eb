//! The end of a volume: graves, and the thread that empties them.

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
use nodekeel_localstorage::{Dir, Error as DirError, Mode, Rename};
use nodekeel_supervisor::Backoff;
use tokio::sync::watch;

use crate::dir_store::{DirStoreError, Inner};
use crate::id::VolumeId;
use crate::step::Step;

/// What a volume is called in its grave.
const VOLUME: &str = "volume";

/// Begins the name of a grave that is the volume itself: there was no room for a directory around it.
const BARE: &str = "bare-";

/// How soon what could not be erased is tried again. What is mounted or kept open needs somebody's doing, so it is told
/// each time.
const RETRY: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(300), jitter: 0.0 };

/// A place in the trash: `pvc-<uid>.<project>.<number>`, where a project of 0 is none and the number tells apart several
/// volumes that had the same id one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Grave {
    id: VolumeId,
    project: Option<ProjectId>,
    number: u32,
    is_bare: bool,
}

impl Grave {
    /// Makes an empty grave, or finds one; or the name of a bare one, where the disk has no room for a directory.
    pub(super) fn dig(trash: &Dir, id: &VolumeId, project: Option<ProjectId>) -> Result<Self, DirError> {
        let mut grave = Self { id: id.clone(), project, number: 0, is_bare: false };
        loop {
            match trash.ensure_dir(grave.to_string(), Mode::PRIVATE_DIR) {
                Ok(dir) if !dir.exists(VOLUME)? => return Ok(grave),
                Ok(_) => grave.number += 1,
                Err(error) if error.is_full() => return Ok(Self { is_bare: true, ..grave }),
                Err(error) => return Err(error),
            }
        }
    }

    /// The quota's number that is to be given back, if it had one.
    pub(super) fn project(&self) -> Option<ProjectId> {
        self.project
    }

    /// Renames the volume into the grave.
    pub(super) fn take(&self, volumes: &Dir, id: &VolumeId, trash: &Dir) -> Result<(), DirError> {
        volumes.rename(id.as_str(), trash, self.content(), Rename::Exclusive)
    }

    /// Where what is to be erased is.
    fn content(&self) -> String {
        match self.is_bare {
            true => self.to_string(),
            false => format!("{self}/{VOLUME}"),
        }
    }
}

impl fmt::Display for Grave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = if self.is_bare { BARE } else { "" };
        let project = self.project.map_or(0, ProjectId::get);
        write!(f, "{bare}{}.{project}.{}", self.id, self.number)
    }
}

impl FromStr for Grave {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let (is_bare, rest) = match name.strip_prefix(BARE) {
            Some(rest) => (true, rest),
            None => (false, name),
        };
        let mut parts = rest.split('.');
        let mut next = || parts.next().ok_or(());
        let (id, project, number) = (next()?, next()?, next()?);
        let grave = Self {
            id: id.parse().map_err(|_| ())?,
            project: ProjectId::new(project.parse().map_err(|_| ())?),
            number: number.parse().map_err(|_| ())?,
            is_bare,
        };
        // A name that isn't written as this would write it is somebody else's.
        if grave.to_string() == name { Ok(grave) } else { Err(()) }
    }
}

/// A grave's name, as it is written; none where the name is nobody's.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn read(name: &str) -> Option<String> {
    name.parse::<Grave>().ok().map(|grave| grave.to_string())
}

/// The graves that are to be emptied. Clones are the same queue.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    graves: Sender<Option<Grave>>,
    waiting: Arc<Mutex<HashSet<Grave>>>,
    pending: watch::Sender<usize>,
}

impl Queue {
    /// Has a grave emptied; once, however often it is asked for.
    pub(super) fn erase(&self, grave: Grave) {
        if self.waiting().insert(grave.clone()) {
            self.pending.send_modify(|pending| *pending += 1);
            // The thread ends after this only; if it has panicked, the next store finds the grave.
            let _ = self.graves.send(Some(grave));
        }
    }

    /// A grave is gone.
    fn done(&self, grave: &Grave) {
        self.waiting().remove(grave);
        self.pending.send_modify(|pending| *pending -= 1);
    }

    fn waiting(&self) -> MutexGuard<'_, HashSet<Grave>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that empties graves, one after the other.
#[derive(Debug)]
pub(super) struct Eraser {
    queue: Queue,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Eraser {
    pub(super) fn start(inner: &Arc<Inner>, graves: Vec<Grave>) -> io::Result<Self> {
        let (sender, to_come) = mpsc::channel();
        let (pending, stop) = (watch::Sender::new(0), Arc::new(AtomicBool::new(false)));
        let queue = Queue { graves: sender, waiting: Arc::default(), pending };
        let worker = Worker {
            inner: Arc::clone(inner),
            queue: queue.clone(),
            stop: Arc::clone(&stop),
            failed: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("erase-volumes".to_owned());
        let thread = Some(thread.spawn(move || worker.run(&to_come))?);
        let eraser = Self { queue, stop, thread };
        graves.into_iter().for_each(|grave| eraser.queue.erase(grave));
        Ok(eraser)
    }

    pub(super) fn queue(&self) -> Queue {
        self.queue.clone()
    }

    pub(super) fn pending(&self) -> usize {
        *self.queue.pending.borrow()
    }

    pub(super) async fn idle(&self) {
        // The sender is held here, so the wait ends by what it waits for.
        let _ = self.queue.pending.subscribe().wait_for(|&pending| pending == 0).await;
    }
}

impl Drop for Eraser {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes it where it waits.
        let _ = self.queue.graves.send(None);
        if let Some(thread) = self.thread.take() {
            // It has told its panic itself.
            let _ = thread.join();
        }
    }
}

/// A grave that could not be emptied.
struct Failed {
    grave: Grave,
    failures: u32,
    due: Instant,
}

struct Worker {
    inner: Arc<Inner>,
    queue: Queue,
    stop: Arc<AtomicBool>,
    failed: Vec<Failed>,
}

impl Worker {
    fn run(mut self, queue: &Receiver<Option<Grave>>) {
        while let Some((grave, failures)) = self.next(queue) {
            match self.empty(&grave) {
                Ok(()) => {}
                Err(_) if self.is_stopped() => return,
                Err(error) => self.fail(grave, failures + 1, &error),
            }
        }
    }

    /// The next grave to empty: one that waits for its next try, or a new one. None once the store is dropped.
    fn next(&mut self, queue: &Receiver<Option<Grave>>) -> Option<(Grave, u32)> {
        let first = self.failed.iter().enumerate().min_by_key(|(_, failed)| failed.due);
        let first = first.map(|(place, failed)| (place, failed.due));
        let wait = first.map_or(Duration::MAX, |(_, due)| due.saturating_duration_since(Instant::now()));
        let next = match (queue.recv_timeout(wait), first) {
            (Ok(grave), _) => grave.map(|grave| (grave, 0)),
            (Err(RecvTimeoutError::Timeout), Some((place, _))) => {
                let failed = self.failed.swap_remove(place);
                Some((failed.grave, failed.failures))
            }
            (Err(_), _) => None,
        };
        next.filter(|_| !self.is_stopped())
    }

    fn fail(&mut self, grave: Grave, failures: u32, error: &DirStoreError) {
        tracing::warn!(%grave, "can't erase a removed volume, will try again: {error}{}", causes(error));
        self.failed.push(Failed { grave, failures, due: Instant::now() + RETRY.interval(failures) });
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn empty(&self, grave: &Grave) -> Result<(), DirStoreError> {
        let (steps, id) = (&self.inner.steps, &grave.id);
        tracing::info!(pv = %id, handle = %id, claim_uid = id.claim_uid(), %grave, "erasing what a deleted volume held");
        loop {
            steps.make(Step::Erase, || self.erase(grave))?;
            if let Some(project) = grave.project.filter(|project| !self.is_alive(grave, *project)) {
                steps.make(Step::Release, || self.release(grave, project))?;
            }
            if self.level(grave)? {
                return Ok(());
            }
        }
    }

    /// Removes an empty grave; not where a removal that was tried again has just put its volume into it.
    fn level(&self, grave: &Grave) -> Result<bool, DirStoreError> {
        let trash = &self.inner.trash;
        let _held = self.inner.hold(&grave.id);
        if trash.exists(grave.content()).map_err(DirStoreError::Directory)? {
            return Ok(false);
        }
        let level = || trash.remove_tree(grave.to_string());
        self.inner.steps.make(Step::Level, level).map_err(DirStoreError::Directory)?;
        self.queue.done(grave);
        Ok(true)
    }

    fn erase(&self, grave: &Grave) -> Result<(), DirStoreError> {
        let mut go_on =
            |_| if self.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let erased = self.inner.trash.remove_tree_with(grave.content(), &mut go_on);
        erased.map(drop).map_err(DirStoreError::Directory)
    }

    /// Whether the volume still is where volumes are, because a crash came between its grave and its funeral.
    fn is_alive(&self, grave: &Grave, project: ProjectId) -> bool {
        let _held = self.inner.hold(&grave.id);
        let status = self.inner.find(&grave.id).ok().flatten().map(|dir| self.inner.find_status(&dir));
        status.is_some_and(|status| {
            status.is_ok_and(|status| status.is_some_and(|status| status.project == project))
        })
    }

    fn release(&self, grave: &Grave, project: ProjectId) -> Result<(), DirStoreError> {
        let path = self.inner.trash.path().join(grave.to_string());
        self.inner.quota.release(project).map_err(|source| DirStoreError::Quota { path, source })
    }
}

/// The causes of an error, each after a colon.
fn causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |error| error.source()).map(|error| format!(": {error}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_as_a_grave_is_one() {
        let id = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
        for good in [format!("{id}.7.0"), format!("{id}.0.12"), format!("bare-{id}.7.0")] {
            assert_eq!(good.parse::<Grave>().map(|grave| grave.to_string()), Ok(good));
        }
        let bad =
            [id.to_owned(), format!("{id}.7"), format!("{id}.07.0"), format!("{id}.7.0.1"), "..".to_owned()];
        for bad in bad {
            assert!(bad.parse::<Grave>().is_err(), "{bad}");
        }
    }
}
