//! The parts of a store that its other parts share.

use std::sync::Arc;

use crate::dir_store::kinds::KindMarks;
use crate::dir_store::limits::VolumeLimits;
use crate::dir_store::locks::EntryLocks;
use crate::dir_store::stored_dirs::StoredDirs;
use crate::step::StepRunner;

/// The volumes and snapshots of a store: their directories, locks, limits and kinds. Clones share them.
#[derive(Clone)]
pub(super) struct StoreParts {
    pub(super) dirs: Arc<StoredDirs>,
    pub(super) locks: Arc<EntryLocks>,
    pub(super) limits: Arc<VolumeLimits>,
    pub(super) kinds: Arc<KindMarks>,
    pub(super) steps: StepRunner,
}
