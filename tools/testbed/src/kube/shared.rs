//! A control plane that tests of one program share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Kube;

/// A control plane for tests that disturb each other by no object's name. It runs as long as one of them holds it.
///
/// ```no_run
/// use testbed::{Kube, SharedKube};
///
/// static SHARED: SharedKube = SharedKube::new();
/// let kube = SHARED.get_or_start(|| Kube::start().expect("a control plane"));
/// ```
#[derive(Debug)]
pub struct SharedKube(Mutex<Weak<Kube>>);

impl SharedKube {
    /// One that is not started yet.
    #[expect(clippy::new_without_default, reason = "it is for a static, which needs a constant function")]
    pub const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    /// The one that runs, else a new one.
    pub fn get_or_start(&self, start: impl FnOnce() -> Kube) -> Arc<Kube> {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let kube = Arc::new(start());
            *shared = Arc::downgrade(&kube);
            kube
        })
    }
}
