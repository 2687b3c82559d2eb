//! The node's data volume: root.storage opens it, and what lies on it runs while it is open.
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
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable, RunnableStatus, Supervisor};
use thiserror::Error;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::data::{self, DataError};
use crate::dependency::is_descendant;
use crate::node::NodeState;
use crate::part::{NodePreparation, PlannedRunnable, PrepareError, PreparedRunnable};

/// How long a runnable on the volume may take to stop, beyond `node.grace`.
const STOP_MARGIN: Duration = Duration::from_secs(30);

/// A runnable starts while root.storage is closing the volume.
#[derive(Debug, Error)]
#[error("the data volume is not open: see root.storage")]
struct VolumeClosed;

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

    /// Where it is mounted, for programs that need a path.
    pub fn path(&self) -> &Path {
        self.open.dir.path()
    }

    /// Whether the volume is closing: what uses it is to end soon.
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

/// The data volume of a node, open or not.
#[derive(Debug, Default)]
pub(crate) struct NodeVolume(Mutex<Option<Arc<OpenVolume>>>);

impl NodeVolume {
    /// Lets runnables use the volume with this root directory.
    pub(crate) fn open(&self, dir: Dir) {
        let (closing, users, dns) = Default::default();
        *self.lock() = Some(Arc::new(OpenVolume { dir, closing, users, dns }));
    }

    /// The open volume, for the runnable with this DN.
    fn handle(&self, dn: &str) -> Result<VolumeHandle, VolumeClosed> {
        // The lock is held until the token is taken: a close waits for all users that it finds.
        let slot = self.lock();
        let open = slot.clone().ok_or(VolumeClosed)?;
        open.dns.lock().unwrap_or_else(PoisonError::into_inner).insert(dn.to_owned());
        Ok(VolumeHandle { _user: open.users.token(), open })
    }

    /// The open volume, for one call of the control API: a close waits for its end.
    pub(crate) fn handle_of_call(&self) -> Option<VolumeHandle> {
        let slot = self.lock();
        let open = slot.clone()?;
        Some(VolumeHandle { _user: open.users.token(), open })
    }

    /// Where the volume is mounted; `None` if it is not open.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        self.lock().as_ref().map(|open| open.dir.path().to_owned())
    }

    /// Tells the users of the volume to stop. Nothing starts on it from then on.
    fn start_close(&self) -> Option<Arc<OpenVolume>> {
        let open = self.lock().take()?;
        open.closing.cancel();
        open.users.close();
        Some(open)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<OpenVolume>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the volume when root.storage ends in any way.
pub(crate) struct CloseOnDrop<'a>(pub(crate) &'a NodeState);

impl CloseOnDrop<'_> {
    /// Closes the volume, and waits until nothing uses it any more.
    pub(crate) async fn close(self) {
        let Some(open) = self.0.volume.start_close() else { return };
        open.users.wait().await;
        let dns = std::mem::take(&mut *open.dns.lock().unwrap_or_else(PoisonError::into_inner));
        // What a user runs below it may take longer to stop.
        let watch = |supervisor: &Supervisor| (supervisor.watch_changes(), supervisor.snapshot());
        while let Some((mut changes, tree)) = self.0.with_supervisor(watch) {
            if !has_running_descendant(&tree, &dns) || changes.changed().await.is_err() {
                return;
            }
        }
    }
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.volume.start_close();
    }
}

fn has_running_descendant(tree: &[RunnableStatus], dns: &BTreeSet<String>) -> bool {
    let is_below = |dn: &str| dns.iter().any(|user| is_descendant(dn, user));
    tree.iter().any(|status| status.state.is_running() && is_below(&status.dn))
}

/// Builds a runnable on the open volume. It may block.
pub(crate) type BuildOnVolume =
    Arc<dyn Fn(&VolumeHandle) -> Result<Arc<dyn Runnable>, PrepareError> + Send + Sync>;

/// A runnable on the volume without a plan.
pub(crate) struct RunnableOnVolume {
    pub(crate) summary: String,
    pub(crate) build: BuildOnVolume,
}

impl fmt::Debug for RunnableOnVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RunnableOnVolume").field(&self.summary).finish()
    }
}

impl fmt::Display for RunnableOnVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)
    }
}

impl PlannedRunnable for RunnableOnVolume {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        Ok(node.prepare_on_volume(Arc::clone(&self.build)))
    }
}

/// The function that builds a runnable, for each of its incarnations.
pub(crate) fn share_build<R: Runnable>(
    build: impl Fn(&VolumeHandle) -> Result<R, PrepareError> + Send + Sync + 'static,
) -> BuildOnVolume {
    Arc::new(move |volume| Ok(Arc::new(build(volume)?)))
}

/// A runnable on the volume: built at each start, and restarted when the volume closes.
pub(crate) struct VolumeRunnable {
    pub(crate) build: BuildOnVolume,
    pub(crate) state: Arc<NodeState>,
}

impl Runnable for VolumeRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(run_on_volume(Arc::clone(&self.build), Arc::clone(&self.state), ctx))
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(user_stop_timeout(&self.state))
    }
}

/// How long a runnable on the volume may take to stop.
fn user_stop_timeout(state: &NodeState) -> Duration {
    state.plan().config.node.grace + STOP_MARGIN
}

/// How long root.storage may take to stop: it waits for all that lies on the volume.
pub(crate) fn storage_stop_timeout(state: &NodeState) -> Duration {
    user_stop_timeout(state) + STOP_MARGIN
}

async fn run_on_volume(build: BuildOnVolume, state: Arc<NodeState>, ctx: Context) -> Result<(), Failure> {
    let volume = state.volume.handle(ctx.dn())?;
    let (on_thread, span) = (volume.clone(), tracing::Span::current());
    let runnable = spawn_blocking(move || span.in_scope(|| build(&on_thread))).await??;
    let mut run = runnable.run(ctx.clone());
    let ended = tokio::select! {
        ended = &mut run => ended,
        () = volume.open.closing.cancelled() => {
            // What stops already is not to start again, if an operator or a reload has stopped it.
            if !ctx.is_canceled() {
                tracing::info!("stops until root.storage has opened the data volume again");
                // It fails only in a shutdown, which stops it.
                let _ = state.with_supervisor(|supervisor| supervisor.restart_runnable(ctx.dn()));
            }
            run.await
        }
    };
    drop(runnable);
    drop(volume);
    ended
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
