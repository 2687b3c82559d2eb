//! The state machine of a volume: unmounted, mounting, mounted.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::error::VolumeError;
use crate::dir::Dir;

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MountState {
    /// The volume is not mounted.
    Unmounted,
    /// A call is in progress.
    Mounting,
    /// The volume is mounted.
    Mounted,
}

impl fmt::Display for MountState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MountState::Unmounted => "not mounted",
            MountState::Mounting => "being mounted",
            MountState::Mounted => "mounted",
        })
    }
}

/// The state of a volume, changed only by a [`StateTransition`].
#[derive(Debug)]
pub(super) struct MountLifecycle(Mutex<MountState>);

impl Default for MountLifecycle {
    fn default() -> MountLifecycle {
        MountLifecycle(Mutex::new(MountState::Unmounted))
    }
}

impl MountLifecycle {
    pub(super) fn state(&self) -> MountState {
        *self.lock_state()
    }

    /// Mounts by `work`, which undoes its changes on failure.
    pub(super) fn mount(&self, work: impl FnOnce() -> Result<Dir, VolumeError>) -> Result<Dir, VolumeError> {
        // The lock is released during the work: other calls find `Mounting` and fail, instead of waiting for minutes.
        let transition = self.start_transition(MountState::Unmounted, MountState::Unmounted)?;
        let dir = work()?;
        transition.end(MountState::Mounted);
        Ok(dir)
    }

    /// Unmounts by `work`, unless the volume is unmounted already.
    pub(super) fn unmount(&self, work: impl FnOnce() -> Result<(), VolumeError>) -> Result<(), VolumeError> {
        if self.state() == MountState::Unmounted {
            return Ok(());
        }
        let transition = self.start_transition(MountState::Mounted, MountState::Mounted)?;
        work()?;
        transition.end(MountState::Unmounted);
        Ok(())
    }

    fn start_transition(
        &self,
        from: MountState,
        failed: MountState,
    ) -> Result<StateTransition<'_>, VolumeError> {
        let mut state = self.lock_state();
        if *state != from {
            return Err(VolumeError::InvalidState { state: *state });
        }
        *state = MountState::Mounting;
        Ok(StateTransition { lifecycle: self, end: failed })
    }

    fn lock_state(&self) -> MutexGuard<'_, MountState> {
        // A panic leaves one valid value, which the transition resets when it is dropped.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call in progress. However it ends, also by a panic, the state is not mounting afterwards.
struct StateTransition<'a> {
    lifecycle: &'a MountLifecycle,
    end: MountState,
}

impl StateTransition<'_> {
    fn end(mut self, state: MountState) {
        self.end = state;
    }
}

impl Drop for StateTransition<'_> {
    fn drop(&mut self) {
        *self.lifecycle.lock_state() = self.end;
    }
}
