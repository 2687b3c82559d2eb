//! The node's data volume: root.storage opens it, and the runnables on it run while it is open.
//!
//! ```text
//!  root.storage   open ──▶ ready ─────────────▶ canceled ──▶ closing ──▶ released ──▶ unmounted
//!  on the volume            starts with a handle             restarts     waits for root.storage
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nodekeel_localstorage::tree::{LayoutEntry, LayoutTarget};
use nodekeel_localstorage::{Dir, OsFileStore};
use nodekeel_supervisor::{RunnableStatus, Supervisor};
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::data::{self, DataError};
use crate::dependency::is_descendant;
use crate::supervisor_slot::SupervisorSlot;

/// The time to stop of a runnable on the volume, beyond `node.grace`.
const STOP_MARGIN: Duration = Duration::from_secs(30);

/// A runnable starts while root.storage is closing the volume.
#[derive(Debug, Error)]
#[error("the data volume is not open: see root.storage")]
pub(crate) struct VolumeClosed;

/// The open data volume of the node, for one incarnation of a runnable. The volume is closed when the runnable and
/// everything below it have stopped.
#[derive(Clone)]
pub struct VolumeHandle {
    // Dropped before the token: who waits for the last token finds the directory closed.
    open: Arc<OpenVolume>,
    _user: TaskTrackerToken,
}

impl VolumeHandle {
    /// The root directory of the volume.
    pub fn dir(&self) -> &Dir {
        &self.open.dir
    }

    /// The mount point, for programs that need a path.
    pub fn path(&self) -> &Path {
        self.open.dir.path()
    }

    /// Resolves when the volume is closing.
    pub(crate) async fn closing(&self) {
        self.open.closing.cancelled().await;
    }

    /// Returns whether the volume is closing: what uses it is to end soon.
    pub(crate) fn is_closing(&self) -> bool {
        self.open.closing.is_cancelled()
    }

    /// Creates a layout on the volume, durably. It blocks.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn create_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        let store = OsFileStore::new(self.dir().try_clone()?);
        let target = LayoutTarget::new(Arc::new(store), self.path());
        target.create_layout().map_err(|error| data::placement_error(self.path(), error))
    }
}

impl fmt::Debug for VolumeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VolumeHandle").field(&self.path()).finish()
    }
}

/// The volume while it is open.
#[derive(Debug)]
struct OpenVolume {
    dir: Dir,
    closing: CancellationToken,
    users: TaskTracker,
    /// The runnables that have used it.
    dns: Mutex<BTreeSet<String>>,
}

/// The data volume of a node, open or not. All clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeVolume {
    open: Arc<Mutex<Option<Arc<OpenVolume>>>>,
    supervisor: SupervisorSlot,
}

impl NodeVolume {
    /// The volume of the node whose tree this supervisor runs.
    pub(crate) fn new(supervisor: SupervisorSlot) -> Self {
        Self { open: Arc::default(), supervisor }
    }

    /// Lets runnables use the volume with this root directory.
    pub(crate) fn open(&self, dir: Dir) {
        // Each opening has its own token and tracker: those of an earlier one stay canceled and closed.
        let (closing, users, dns) = Default::default();
        *self.lock() = Some(Arc::new(OpenVolume { dir, closing, users, dns }));
    }

    /// The open volume, for the runnable with this DN.
    pub(crate) fn handle(&self, dn: &str) -> Result<VolumeHandle, VolumeClosed> {
        // The lock is held until the token is taken: a close waits for all users that it finds.
        let slot = self.lock();
        let open = slot.clone().ok_or(VolumeClosed)?;
        // The DN is remembered beyond the runnable: what runs below it may stop later, and is waited for as well.
        open.dns.lock().unwrap_or_else(PoisonError::into_inner).insert(dn.to_owned());
        Ok(VolumeHandle { _user: open.users.token(), open })
    }

    /// The open volume, for one call of the control API: a close waits for its end.
    pub(crate) fn handle_of_call(&self) -> Option<VolumeHandle> {
        let slot = self.lock();
        let open = slot.clone()?;
        Some(VolumeHandle { _user: open.users.token(), open })
    }

    /// Restarts a user of the volume: it waits for root.storage then.
    pub(crate) fn restart_user(&self, dn: &str) {
        // The restart fails only in a shutdown, which stops the user.
        let _ = self.supervisor.with(|supervisor| supervisor.restart_runnable(dn));
    }

    /// The mount point; `None` if the volume is not open.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        self.lock().as_ref().map(|open| open.dir.path().to_owned())
    }

    /// Tells the users of the volume to stop. Nothing starts on it from then on.
    fn start_close(&self) -> Option<Arc<OpenVolume>> {
        // The slot is emptied before the users stop: a runnable that starts now gets no handle.
        let open = self.lock().take()?;
        open.closing.cancel();
        // A `TaskTracker` must be closed before a wait for it can end.
        open.users.close();
        Some(open)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<OpenVolume>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the volume when root.storage ends in any way.
pub(crate) struct CloseOnDrop(pub(crate) NodeVolume);

impl CloseOnDrop {
    /// Closes the volume, and waits until nothing uses it any more.
    pub(crate) async fn close(self) {
        let Some(open) = self.0.start_close() else { return };
        open.users.wait().await;
        let dns = std::mem::take(&mut *open.dns.lock().unwrap_or_else(PoisonError::into_inner));
        // Runnables below a user may take longer to stop.
        // The watch is taken before the snapshot: a change between the two ends the next wait at once.
        let watch = |supervisor: &Supervisor| (supervisor.watch_changes(), supervisor.snapshot());
        while let Some((mut changes, tree)) = self.0.supervisor.with(watch) {
            if !has_running_descendant(&tree, &dns) || changes.changed().await.is_err() {
                return;
            }
        }
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.start_close();
    }
}

/// Returns whether a runnable at or below one of these DNs runs.
pub(crate) fn has_running_descendant(tree: &[RunnableStatus], dns: &BTreeSet<String>) -> bool {
    let is_below = |dn: &str| dns.iter().any(|user| is_descendant(dn, user));
    tree.iter().any(|status| status.state.is_running() && is_below(&status.dn))
}

/// The time that a runnable on the volume may take to stop.
pub(crate) fn user_stop_timeout(grace: Duration) -> Duration {
    grace + STOP_MARGIN
}

/// The time that root.storage may take to stop: it waits for all that is on the volume.
pub(crate) fn storage_stop_timeout(grace: Duration) -> Duration {
    user_stop_timeout(grace) + STOP_MARGIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_closing_volume_is_released_when_its_last_user_has_ended() {
        let scratch = tempfile::tempdir().expect("a directory");
        let volume = NodeVolume::default();
        assert!(volume.handle("root.a").is_err() && volume.path().is_none());
        volume.open(Dir::open(scratch.path()).expect("there"));
        let first = volume.handle("root.a").expect("open");
        let second = first.clone();
        assert_eq!(first.path(), scratch.path());
        let closing = volume.start_close().expect("open");
        assert!(volume.handle("root.b").is_err(), "nothing starts on a closing volume");
        assert!(first.open.closing.is_cancelled());
        drop(first);
        assert!(!closing.users.is_empty());
        drop(second);
        closing.users.wait().await;
        assert!(volume.start_close().is_none());
    }
}
