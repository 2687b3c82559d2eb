//! What becomes of a call that failed or panicked.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;

use crate::api::work_queue::NextRun;
use crate::apply::{ApplyError, status_code};
use crate::controller::ReconcileContext;

/// Whether a failure gets an event: temporary errors of the API server do not, because they are retried.
pub(crate) fn is_worth_an_event(error: &ApplyError) -> bool {
    match error {
        ApplyError::Api { source, .. } => {
            status_code(source).is_some_and(|code| (400..409).contains(&code) || code == 422)
        }
        _ => true,
    }
}

/// Turns a panic into an error: a bug must affect one object, not the node.
pub(crate) async fn catch_panic(
    work: impl Future<Output = Result<NextRun, ApplyError>>,
) -> Result<NextRun, ApplyError> {
    let panicked = |payload: Box<dyn std::any::Any + Send>| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(ApplyError::Panicked { text })
    };
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}

impl ReconcileContext {
    /// Counts an error of the API server.
    pub(crate) fn record_api_error(&self, error: &ApplyError) {
        if let ApplyError::Api { call, .. } = error {
            self.provisioner.applier.metrics.record_api_error(call.metric_label());
        }
    }
}
