//! Runnables on the data volume.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::task::spawn_blocking;

use super::{NodePreparation, PlannedRunnable, PrepareError, PreparedRunnable};
use crate::volume::{NodeVolume, VolumeHandle, user_stop_timeout};

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
    pub(crate) volume: NodeVolume,
    /// The time to stop, before the margin: `node.grace`.
    pub(crate) grace: Duration,
}

impl Runnable for VolumeRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(run_on_volume(Arc::clone(&self.build), self.volume.clone(), ctx))
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(user_stop_timeout(self.grace))
    }
}

async fn run_on_volume(build: BuildOnVolume, of_node: NodeVolume, ctx: Context) -> Result<(), Failure> {
    // From here on, root.storage waits for this incarnation before it closes the volume.
    let volume = of_node.handle(ctx.dn())?;
    let (on_thread, span) = (volume.clone(), tracing::Span::current());
    let runnable = spawn_blocking(move || span.in_scope(|| build(&on_thread))).await??;
    let mut run = runnable.run(ctx.clone());
    let ended = tokio::select! {
        ended = &mut run => ended,
        () = volume.closing() => {
            // A runnable that stops already is not to start again, if an operator or a reload has stopped it.
            if !ctx.is_canceled() {
                tracing::info!("stops until root.storage has opened the data volume again");
                of_node.restart_user(ctx.dn());
            }
            // The supervisor cancels the runnable for the restart. It stops by itself, within its own timeout.
            run.await
        }
    };
    // root.storage waits for the handle, and then finds nothing of the runnable on the volume.
    drop(runnable);
    drop(volume);
    ended
}
