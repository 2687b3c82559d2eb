//! A mounter in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::csi::mounter::{
    FileId, MountRestrictions, TargetConflict, TargetMount, TargetMountError, VolumeMounter,
};
use crate::csi::target_path::TargetPath;
use crate::store::OpenVolume;

/// Keeps mounts in memory. Like the kernel, it can stack one mount on another. The parent directory of each
/// target exists. Clones share their mounts.
#[derive(Debug, Clone, Default)]
pub struct MemMounter(Arc<Mutex<MemMounterState>>);

#[derive(Debug, Default)]
struct MemMounterState {
    directories: BTreeSet<TargetPath>,
    mounts: BTreeMap<TargetPath, Vec<TargetMount>>,
    busy: BTreeSet<TargetPath>,
    failures: VecDeque<io::ErrorKind>,
}

impl MemMounter {
    /// The number of mounts stacked at a target.
    pub fn stack_depth(&self, target: &TargetPath) -> usize {
        self.state().mounts.get(target).map_or(0, Vec::len)
    }

    /// Returns whether a target's directory exists.
    pub fn has_directory(&self, target: &TargetPath) -> bool {
        self.state().directories.contains(target)
    }

    /// All targets, each with its topmost mount.
    pub fn list_mounts(&self) -> BTreeMap<TargetPath, TargetMount> {
        let top = |(target, stack): (&TargetPath, &Vec<TargetMount>)| Some((target.clone(), *stack.last()?));
        self.state().mounts.iter().filter_map(top).collect()
    }

    /// Stacks a mount at a target, as another program might.
    pub fn stack_mount(&self, target: &TargetPath, mounted: TargetMount) {
        let mut state = self.state();
        state.directories.insert(target.clone());
        state.mounts.entry(target.clone()).or_default().push(mounted);
    }

    /// Simulates that a process starts or stops using a target.
    pub fn set_busy(&self, target: &TargetPath, is_used: bool) {
        let mut state = self.state();
        if is_used {
            state.busy.insert(target.clone())
        } else {
            state.busy.remove(target)
        };
    }

    /// Makes the next mount fail. Several failures occur in turn.
    pub fn fail_next(&self, kind: io::ErrorKind) {
        self.state().failures.push_back(kind);
    }

    fn state(&self) -> MutexGuard<'_, MemMounterState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VolumeMounter for MemMounter {
    fn find_mount(&self, target: &TargetPath) -> Result<Option<TargetMount>, TargetMountError> {
        Ok(self.state().mounts.get(target).and_then(|stack| stack.last().copied()))
    }

    fn mount(
        &self,
        volume: &OpenVolume,
        target: &TargetPath,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError> {
        let failed = |source| TargetMountError::Mount { target: target.clone(), source };
        let volume = FileId::from_fd(volume.as_fd()).map_err(failed)?;
        let mut state = self.state();
        if state.mounts.contains_key(target) {
            return Err(TargetMountError::Occupied { target: target.clone(), source: TargetConflict::Mount });
        }
        if let Some(kind) = state.failures.pop_front() {
            return Err(failed(kind.into()));
        }
        state.directories.insert(target.clone());
        state.mounts.entry(target.clone()).or_default().push(TargetMount { volume, flags });
        Ok(())
    }

    fn unmount(&self, target: &TargetPath) -> Result<(), TargetMountError> {
        let mut state = self.state();
        if state.busy.contains(target) {
            return Err(TargetMountError::Busy { target: target.clone() });
        }
        state.mounts.remove(target);
        state.directories.remove(target);
        Ok(())
    }

    fn list_targets(&self, volume: &OpenVolume) -> Result<Vec<TargetPath>, TargetMountError> {
        let volume = FileId::from_fd(volume.as_fd()).map_err(|source| TargetMountError::List { source })?;
        let all = self.list_mounts().into_iter();
        Ok(all.filter(|(_, mounted)| mounted.volume == volume).map(|(target, _)| target).collect())
    }
}
