//! Unmounted, mounting, mounted: and nothing else, whatever fails.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{State, VolumeError};
use crate::dir::Dir;

/// The state of a volume, which only its guard changes.
#[derive(Debug)]
pub(super) struct Lifecycle(Mutex<State>);

impl Default for Lifecycle {
    fn default() -> Lifecycle {
        Lifecycle(Mutex::new(State::Unmounted))
    }
}

impl Lifecycle {
    pub(super) fn state(&self) -> State {
        *self.lock()
    }

    /// Mounts by `work`, which undoes on failure what it has done.
    pub(super) fn mount(&self, work: impl FnOnce() -> Result<Dir, VolumeError>) -> Result<Dir, VolumeError> {
        let attempt = self.begin(State::Unmounted, State::Unmounted)?;
        let dir = work()?;
        attempt.end(State::Mounted);
        Ok(dir)
    }

    /// Unmounts by `work`, unless there is nothing to do.
    pub(super) fn unmount(&self, work: impl FnOnce() -> Result<(), VolumeError>) -> Result<(), VolumeError> {
        if self.state() == State::Unmounted {
            return Ok(());
        }
        let attempt = self.begin(State::Mounted, State::Mounted)?;
        work()?;
        attempt.end(State::Unmounted);
        Ok(())
    }

    fn begin(&self, from: State, failed: State) -> Result<Attempt<'_>, VolumeError> {
        let mut state = self.lock();
        if *state != from {
            return Err(VolumeError::State { state: *state });
        }
        *state = State::Mounting;
        Ok(Attempt { lifecycle: self, end: failed })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call at work. However it ends, also by a panic, the state is one of the two others afterwards.
struct Attempt<'a> {
    lifecycle: &'a Lifecycle,
    end: State,
}

impl Attempt<'_> {
    fn end(mut self, state: State) {
        self.end = state;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        *self.lifecycle.lock() = self.end;
    }
}
