//! Calls of the control API about the processes of services.

use nodekeel_supervisor::process::{ProcessHandle, ProcessHandleError, Signal};
use tonic::Status;

use crate::error_chain::error_chain;

/// Sends a signal to the service with this DN.
#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
pub(crate) fn signal_process(process: &ProcessHandle, dn: &str, signal: &str) -> Result<(), Status> {
    let signal: Signal = signal.parse().map_err(|error| Status::invalid_argument(format!("{error}")))?;
    process.send_signal(signal).map_err(|error| process_status(dn, &error))
}

/// Asks the service with this DN to read its configuration again.
pub(crate) async fn reload_process(process: &ProcessHandle, dn: &str) -> Result<(), Status> {
    process.reload().await.map_err(|error| process_status(dn, &error))
}

fn process_status(dn: &str, error: &ProcessHandleError) -> Status {
    match error {
        ProcessHandleError::NoReload => Status::failed_precondition(format!(
            "{dn} can't reload: set its key reload, or restart it instead"
        )),
        ProcessHandleError::NotRunning => Status::failed_precondition(format!("{dn} has no running process")),
        other => Status::failed_precondition(format!("{dn}: {}", error_chain(other))),
    }
}
