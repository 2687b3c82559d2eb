//! The tasks of runs, which are spawned after the release of the lock: they need it themselves.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::{DriverState, TreeDriver};
use crate::cancellation::RunCancellation;
use crate::containment::Contained;
use crate::context::Context;
use crate::fsm::RunKey;
use crate::runnable::Runnable;
use crate::task;

/// A run whose task is not spawned yet.
pub(super) type PreparedRun = (Contained<Arc<dyn Runnable>>, Context);

/// Spawns the first runs of added children when it is dropped, as its task does at once; so also with the runtime,
/// because each run has to report its exit.
///
/// A parent usually adds all its children before it first waits, and only then does its thread come to this task.
/// Until then, each child would wake another thread, which would take the lock from the parent.
pub(super) struct AddedRuns(Arc<TreeDriver>);

impl Drop for AddedRuns {
    fn drop(&mut self) {
        let added = std::mem::take(&mut self.0.lock().added_runs);
        spawn_runs(&self.0.runtime, added);
    }
}

pub(super) fn spawn_runs(runtime: &Handle, runs: Vec<PreparedRun>) {
    for (runnable, context) in runs {
        runtime.spawn(task::run_incarnation(runnable, context));
    }
}

impl TreeDriver {
    pub(super) fn prepare_run(
        self: &Arc<Self>,
        state: &mut DriverState,
        key: RunKey,
        dn: Arc<str>,
        generation: u64,
    ) -> PreparedRun {
        let run = state.run_mut(key.slot);
        match Arc::get_mut(&mut run.cancellation) {
            Some(unused) => *unused = RunCancellation::default(),
            None => run.cancellation = Arc::default(),
        }
        let context = Context::new(Arc::clone(self), key, dn, generation, Arc::clone(&run.cancellation));
        (Contained::new(Arc::clone(&run.runnable)), context)
    }

    /// Keeps the first runs of added children. `None` if what spawns them is on its way.
    pub(super) fn keep_added(
        self: &Arc<Self>,
        state: &mut DriverState,
        starts: &mut Vec<PreparedRun>,
    ) -> Option<AddedRuns> {
        let is_first = state.added_runs.is_empty() && !starts.is_empty();
        state.added_runs.append(starts);
        is_first.then(|| AddedRuns(Arc::clone(self)))
    }
}
