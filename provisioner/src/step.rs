//! The effects of this crate, one by one, for whoever wants to stop between two of them.

use std::fmt;
use std::sync::Arc;

/// An effect that survives the process: something in a directory, in the quota, or in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Step {
    /// The directory of a volume is made, where nobody sees it.
    MakeDirectory,
    /// It gets its limits.
    Limit,
    /// It is renamed to where volumes are.
    Publish,
    /// A grave is made for a volume.
    Dig,
    /// The volume is renamed into it.
    Bury,
    /// What it holds is erased.
    Erase,
    /// Its project number is released.
    Release,
    /// The empty grave is removed.
    Level,
    /// This node is written into a claim without one.
    TakeNode,
    /// This node is taken out of a claim whose volume it has no room for.
    GiveUpNode,
    /// The PersistentVolume is made.
    PostVolume,
    /// The PersistentVolume is deleted.
    DeleteVolume,
    /// The finalizer is put on.
    Protect,
    /// The finalizer is taken off.
    Unprotect,
    /// An event is written.
    PostEvent,
}

impl Step {
    /// All steps of a volume's birth and death, in that order.
    pub const ALL: [Self; 15] = [
        Self::TakeNode,
        Self::MakeDirectory,
        Self::Limit,
        Self::Publish,
        Self::PostVolume,
        Self::PostEvent,
        Self::GiveUpNode,
        Self::Protect,
        Self::Dig,
        Self::Bury,
        Self::DeleteVolume,
        Self::Unprotect,
        Self::Erase,
        Self::Release,
        Self::Level,
    ];
}

/// Which side of a step it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums, reason = "a step has two sides")]
pub enum Moment {
    /// Nothing of it has happened.
    Before,
    /// It has happened, and nothing that comes next.
    After,
}

/// Hears of each step, before and after it, on the thread that makes it. Every `Fn(Step, Moment)` is one.
///
/// It is for tests: one that ends the process at a step shows what a crash there leaves behind. It must not block for long.
pub trait Hook: Send + Sync {
    /// A step is about to be made, or was made.
    fn at(&self, step: Step, moment: Moment);
}

impl<F: Fn(Step, Moment) + Send + Sync> Hook for F {
    fn at(&self, step: Step, moment: Moment) {
        self(step, moment);
    }
}

/// A hook, or none.
#[derive(Clone, Default)]
pub(crate) struct Steps(Option<Arc<dyn Hook>>);

impl Steps {
    pub(crate) fn new(hook: Option<Arc<dyn Hook>>) -> Self {
        Self(hook)
    }

    /// Makes a step that may fail; the hook hears of its end only if it didn't.
    pub(crate) fn make<T, E>(&self, step: Step, act: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.at(step, Moment::Before);
        let made = act()?;
        self.at(step, Moment::After);
        Ok(made)
    }

    /// As [`make`](Self::make), for what takes its time.
    pub(crate) async fn wait<T, E>(
        &self,
        step: Step,
        act: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.at(step, Moment::Before);
        let made = act.await?;
        self.at(step, Moment::After);
        Ok(made)
    }

    fn at(&self, step: Step, moment: Moment) {
        if let Some(hook) = &self.0 {
            hook.at(step, moment);
        }
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Hook" } else { "no hook" })
    }
}
