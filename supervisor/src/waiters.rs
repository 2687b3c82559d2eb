//! Callers that wait until a runnable is ready, or no longer is.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;

/// Fewer waiters than this are never searched for those that have given up.
const MIN_SWEEP: usize = 64;

/// Callers that wait for the same change of a runnable, by its DN. A signal costs the number of those that wait for it, however
/// many others there are.
#[derive(Debug, Default)]
pub(crate) struct ReadyWaiters {
    by_dn: HashMap<Arc<str>, Vec<oneshot::Sender<()>>>,
    count: usize,
    /// The number of waiters at which the next one first drops those that have given up.
    sweep_at: usize,
}

impl ReadyWaiters {
    pub(crate) fn add(&mut self, dn: &str, ready: oneshot::Sender<()>) {
        // A caller that gives up leaves its sender here: repeated waits with a timeout must not pile up. The threshold
        // doubles with the number that is left, so that a wait costs no search of all the others.
        if self.count >= self.sweep_at.max(MIN_SWEEP) {
            self.by_dn.retain(|_, waiters| {
                waiters.retain(|ready| !ready.is_closed());
                !waiters.is_empty()
            });
            self.count = self.by_dn.values().map(Vec::len).sum();
            self.sweep_at = self.count * 2;
        }
        match self.by_dn.get_mut(dn) {
            Some(waiters) => waiters.push(ready),
            None => _ = self.by_dn.insert(dn.into(), vec![ready]),
        }
        self.count += 1;
    }

    pub(crate) fn waits_for(&self, dn: &str) -> bool {
        self.by_dn.contains_key(dn)
    }

    /// Resolves the waits for a runnable.
    pub(crate) fn notify(&mut self, dn: &str) {
        for ready in self.by_dn.remove(dn).into_iter().flatten() {
            self.count -= 1;
            // The receiver is gone if the caller no longer waits.
            let _ = ready.send(());
        }
    }

    /// Fails all waits.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_resolves_the_waits_for_its_dn_and_no_others() {
        let mut waiters = ReadyWaiters::default();
        let wait = |waiters: &mut ReadyWaiters, dn: &str| {
            let (ready, waiting) = oneshot::channel();
            waiters.add(dn, ready);
            waiting
        };
        let [mut one, mut two, mut other] = ["root.a", "root.a", "root.b"].map(|dn| wait(&mut waiters, dn));
        waiters.notify("root.a");
        assert_eq!((one.try_recv(), two.try_recv()), (Ok(()), Ok(())));
        assert!(!waiters.waits_for("root.a") && waiters.waits_for("root.b"));
        assert_eq!(other.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        waiters.clear();
        assert_eq!(other.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    }

    #[test]
    fn waits_that_were_given_up_do_not_pile_up() {
        let mut waiters = ReadyWaiters::default();
        let (ready, _waiting) = oneshot::channel();
        waiters.add("root.patient", ready);
        for round in 0..10_000 {
            // Its receiver is dropped at once.
            waiters.add(&format!("root.r{}", round % 1000), oneshot::channel().0);
            assert!(waiters.count <= MIN_SWEEP && waiters.by_dn.len() <= MIN_SWEEP, "{waiters:?}");
        }
        assert!(waiters.waits_for("root.patient"));
    }
}
