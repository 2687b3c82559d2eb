//! Options of a directory store.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::{Dir, FileCloner, FileMode, Reflink};

use crate::capacity::policy::CapacityPolicy;
use crate::step::StepHook;
use crate::store::ErrorSource;

/// Opens the directory of a store, and the quota of its file system.
pub type DirectoryOpener = Arc<dyn Fn() -> Result<(Dir, Arc<dyn QuotaSetter>), ErrorSource> + Send + Sync>;

/// Options of a [`DirStore`](crate::DirStore); the defaults are what pods need.
#[derive(Clone)]
#[non_exhaustive]
pub struct DirStoreOptions {
    /// The mode of a volume's directory. Default `0777`: containers run as any user, and without fsGroup
    /// support they could not write otherwise. Its parent has mode `0700`, so other users cannot enter it.
    pub mode: FileMode,
    /// The part of the file system that may be promised to volumes. Default: each byte once, apart from what other
    /// data occupy.
    pub capacity: CapacityPolicy,
    /// Where `mkfs.ext4` and `mkfs.xfs` of strict volumes are searched before `PATH` and the usual directories.
    /// Default: nowhere.
    pub program_directories: Vec<PathBuf>,
    /// Copies the files of snapshots and of volumes created from a source. Default: [`Reflink`].
    pub cloner: Arc<dyn FileCloner>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
    /// Opens the directory again after it was lost. Default `None`: the caller creates another store.
    pub opener: Option<DirectoryOpener>,
}

impl Default for DirStoreOptions {
    fn default() -> Self {
        Self {
            mode: FileMode::new(0o777),
            capacity: CapacityPolicy::default(),
            program_directories: Vec::new(),
            cloner: Arc::new(Reflink),
            hook: None,
            opener: None,
        }
    }
}

impl fmt::Debug for DirStoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStoreOptions").field("mode", &self.mode).finish_non_exhaustive()
    }
}
