//! Signals to the processes of the operator's services.

use std::collections::BTreeMap;

use nodekeel_supervisor::process::{ProcessHandle, ProcessHandleError, Signal};
use tonic::Status;

use crate::error_chain::error_chain;
use crate::parts::control::api::ControlService;

/// The handles of the operator's services, by DN.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServiceHandles(pub(crate) BTreeMap<String, ProcessHandle>);

impl ControlService {
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    pub(crate) fn signal_process(&self, dn: &str, signal: &str) -> Result<(), Status> {
        let handle = self.find_handle(dn)?;
        let signal: Signal = signal.parse().map_err(invalid_signal)?;
        handle.send_signal(signal).map_err(|error| handle_status(dn, &error))
    }

    pub(crate) async fn reload_process(&self, dn: &str) -> Result<(), Status> {
        self.find_handle(dn)?.reload().await.map_err(|error| handle_status(dn, &error))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn find_handle(&self, dn: &str) -> Result<ProcessHandle, Status> {
        self.check_not_skipped(dn)?;
        // A service that a reload has removed leaves its handle.
        if self.shared.tree_nodes().iter().all(|node| node.dn != dn) {
            return Err(self.unknown_dn(dn));
        }
        let handles = self.shared.extension::<ServiceHandles>();
        handles.and_then(|handles| handles.0.get(dn).cloned()).ok_or_else(|| {
            let why = format!(
                "{dn} is not a [[service]]: only these can be signaled or reloaded; restart it instead"
            );
            Status::failed_precondition(why)
        })
    }
}

fn invalid_signal(error: impl ToString) -> Status {
    Status::invalid_argument(error.to_string())
}

fn handle_status(dn: &str, error: &ProcessHandleError) -> Status {
    match error {
        ProcessHandleError::NoReload => Status::failed_precondition(format!(
            "{dn} can't reload: set its key reload, or restart it instead"
        )),
        ProcessHandleError::NotRunning => Status::failed_precondition(format!("{dn} has no running process")),
        other => Status::failed_precondition(format!("{dn}: {}", error_chain(other))),
    }
}
