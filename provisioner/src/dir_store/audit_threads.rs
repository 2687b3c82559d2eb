//! The threads that audit the limits of a store.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

/// The threads in progress. Dropping this waits for them, because each holds the directories and the lock of the store; they
/// end soon, since the futures of their audits were dropped before.
#[derive(Debug)]
pub(super) struct AuditThreads {
    threads: Option<Sender<()>>,
    /// Disconnected when no thread is left.
    ended: Mutex<Receiver<()>>,
}

/// One of the threads, as long as this exists.
#[derive(Debug)]
pub(super) struct AuditThread(#[expect(dead_code, reason = "dropped")] Option<Sender<()>>);

impl AuditThreads {
    pub(super) fn add_thread(&self) -> AuditThread {
        AuditThread(self.threads.clone())
    }
}

impl Default for AuditThreads {
    fn default() -> Self {
        let (threads, ended) = mpsc::channel();
        Self { threads: Some(threads), ended: Mutex::new(ended) }
    }
}

impl Drop for AuditThreads {
    fn drop(&mut self) {
        self.threads = None;
        // Nothing is ever sent.
        let _ = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}
