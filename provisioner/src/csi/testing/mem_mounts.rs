//! Mounts in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::csi::mounts::{Conflict, FileId, MountError, MountFlags, Mounted, Mounts};
use crate::csi::target::Target;

/// Mounts that nobody but the caller sees. Like the kernel, it would stack one mount on another. Every directory above a
/// target exists. Clones share their mounts.
#[derive(Debug, Clone, Default)]
pub struct MemMounts(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    directories: BTreeSet<Target>,
    mounts: BTreeMap<Target, Vec<Mounted>>,
    busy: BTreeSet<Target>,
    failures: VecDeque<io::ErrorKind>,
}

impl MemMounts {
    /// How many mounts are stacked at a target.
    pub fn depth(&self, target: &Target) -> usize {
        self.state().mounts.get(target).map_or(0, Vec::len)
    }

    /// Whether a target's directory exists.
    pub fn has_directory(&self, target: &Target) -> bool {
        self.state().directories.contains(target)
    }

    /// All that is mounted, each target once, with what is on top there.
    pub fn all(&self) -> BTreeMap<Target, Mounted> {
        let top = |(target, stack): (&Target, &Vec<Mounted>)| Some((target.clone(), *stack.last()?));
        self.state().mounts.iter().filter_map(top).collect()
    }

    /// Mounts something on top of what is there, as somebody else might.
    pub fn stack(&self, target: &Target, mounted: Mounted) {
        let mut state = self.state();
        state.directories.insert(target.clone());
        state.mounts.entry(target.clone()).or_default().push(mounted);
    }

    /// Lets a process use what is mounted at a target, or end.
    pub fn use_target(&self, target: &Target, is_used: bool) {
        let mut state = self.state();
        match is_used {
            true => state.busy.insert(target.clone()),
            false => state.busy.remove(target),
        };
    }

    /// Lets the next mount fail. Several failures are used up in turn.
    pub fn fail_next(&self, kind: io::ErrorKind) {
        self.state().failures.push_back(kind);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mounts for MemMounts {
    fn mounted(&self, target: &Target) -> Result<Option<Mounted>, MountError> {
        Ok(self.state().mounts.get(target).and_then(|stack| stack.last().copied()))
    }

    fn mount(&self, volume: BorrowedFd<'_>, target: &Target, flags: MountFlags) -> Result<(), MountError> {
        let failed = |source| MountError::Mount { target: target.clone(), source };
        let of = FileId::of(volume).map_err(failed)?;
        let mut state = self.state();
        if state.mounts.contains_key(target) {
            return Err(MountError::Occupied { target: target.clone(), source: Conflict::Mount });
        }
        if let Some(kind) = state.failures.pop_front() {
            return Err(failed(kind.into()));
        }
        state.directories.insert(target.clone());
        state.mounts.entry(target.clone()).or_default().push(Mounted { of, flags });
        Ok(())
    }

    fn unmount(&self, target: &Target) -> Result<(), MountError> {
        let mut state = self.state();
        if state.busy.contains(target) {
            return Err(MountError::Busy { target: target.clone() });
        }
        state.mounts.remove(target);
        state.directories.remove(target);
        Ok(())
    }

    fn targets(&self, volume: BorrowedFd<'_>) -> Result<Vec<Target>, MountError> {
        let of = FileId::of(volume).map_err(|source| MountError::List { source })?;
        let all = self.all().into_iter();
        Ok(all.filter(|(_, mounted)| mounted.of == of).map(|(target, _)| target).collect())
    }
}
