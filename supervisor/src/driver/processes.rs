//! What the tree knows of its child processes.

use std::sync::{Arc, PoisonError};

use super::TreeDriver;
use crate::event::RunnableChange;
use crate::process::{ProcessHost, RecordProblem};

impl TreeDriver {
    /// The host of child processes, created by the first caller.
    ///
    /// # Errors
    /// The error that kept it from being created.
    pub(crate) fn process_host(&self) -> std::io::Result<Arc<ProcessHost>> {
        let mut processes = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = &*processes {
            return Ok(Arc::clone(host));
        }
        let (host, leftovers) = ProcessHost::new(&self.host_settings)?;
        for leftover in leftovers {
            let change = RunnableChange::LeftoverEnded { pid: leftover.pid, name: leftover.name.into() };
            self.publish_event(&mut self.lock(), self.now(), ("supervisor".into(), 0, change));
        }
        Ok(Arc::clone(processes.insert(Arc::new(host))))
    }

    /// Why processes of an earlier program may still run.
    pub(crate) fn record_problems(&self) -> Vec<RecordProblem> {
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        host.as_ref().map(|host| host.record_problems().to_vec()).unwrap_or_default()
    }

    /// Whether a process of this DN that an earlier program has kept waits for its adoption.
    pub(crate) fn has_kept_process(&self, dn: &str) -> bool {
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        host.as_ref().is_some_and(|host| host.has_unclaimed(dn))
    }
}
