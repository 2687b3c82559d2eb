//! True if a runnable is healthy: the one definition for the node, and for its clients.

use crate::v1::{Node, State};

impl Node {
    /// Returns whether the runnable should run, but has failed more than once without having been ready in between for the
    /// time that clears its failures: it may be ready between two of them.
    pub fn is_crash_looping(&self) -> bool {
        // A runnable that was stopped, or that is dead for good, does not loop: its state is a problem of its own.
        self.failures > 1 && matches!(self.state(), State::New | State::Ready | State::Waiting)
    }

    /// Returns whether the runnable is ready or done and not in a crash loop, or not part of this run.
    pub fn is_healthy(&self) -> bool {
        matches!(self.state(), State::Ready | State::Done | State::Skipped) && !self.is_crash_looping()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ready_runnable_that_has_failed_is_in_a_crash_loop_and_not_healthy() {
        for (state, failures, crash_looping, healthy) in [
            (State::Ready, 0, false, true),
            (State::Ready, 1, false, true),
            (State::Ready, 2, true, false),
            (State::Done, 0, false, true),
            (State::New, 0, false, false),
            (State::New, 2, true, false),
            (State::Waiting, 2, true, false),
            (State::Dead, 1, false, false),
            (State::Canceled, 0, false, false),
            (State::Stopped, 3, false, false),
            (State::Skipped, 0, false, true),
            (State::Unspecified, 0, false, false),
        ] {
            let node = Node { state: state.into(), failures, ..Node::default() };
            let found = (node.is_crash_looping(), node.is_healthy());
            assert_eq!(found, (crash_looping, healthy), "{state:?} {failures}");
        }
    }
}
