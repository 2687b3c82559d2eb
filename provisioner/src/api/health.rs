//! Probes the API server, only when a caller asks: an idle provisioner sends nothing.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::error_chain::format_chain;
use crate::metrics::VolumeMetrics;

const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Time for which an answer is valid, so that a caller that asks again and again does not load the API server.
const PROBE_VALID: Duration = Duration::from_secs(1);

/// Name of the probe in metrics.
const PROBE_CALL: &str = "probe";

/// The last answer of the API server.
#[derive(Debug, Clone, Default)]
pub(crate) struct ApiProbe(Arc<Mutex<Option<ProbeAnswer>>>);

#[derive(Debug)]
struct ProbeAnswer {
    at: Instant,
    /// The reason why the server could not be used.
    error: Option<String>,
}

impl ApiProbe {
    /// Asks for the version, which is cheap, and needs valid credentials if some are sent. Returns why the
    /// server cannot be used.
    pub(crate) async fn probe_server(&self, client: &Client, metrics: &dyn VolumeMetrics) -> Option<String> {
        // Locked during the call, so that concurrent callers share one answer.
        let mut last = self.0.lock().await;
        if let Some(answer) = last.as_ref().filter(|answer| answer.at.elapsed() < PROBE_VALID) {
            return answer.error.clone();
        }
        let error = match timeout(PROBE_TIMEOUT, client.apiserver_version()).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(format_chain(&error)),
            Err(_) => Some(format!("no answer within {PROBE_TIMEOUT:?}")),
        };
        if error.is_some() {
            metrics.record_api_error(PROBE_CALL);
        }
        *last = Some(ProbeAnswer { at: Instant::now(), error: error.clone() });
        error
    }
}
