//! Timeouts for calls of the API server.

use std::time::Duration;

/// Timeout of a request. The API server itself gives up on most requests after a minute; an unreachable peer
/// never answers, and the caller would hold a volume's lock forever.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The request timed out. The API server may have carried it out.
#[derive(Debug, thiserror::Error)]
#[error("the API server did not answer within {REQUEST_TIMEOUT:?}")]
struct RequestTimeout;

/// Waits for the API server's answer, at most [`REQUEST_TIMEOUT`].
pub(crate) async fn with_timeout<T>(
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, kube::Error> {
    // This variant has no HTTP status, so callers treat the server as unreachable.
    let timed_out = |_| Err(kube::Error::Service(Box::new(RequestTimeout)));
    tokio::time::timeout(REQUEST_TIMEOUT, call).await.unwrap_or_else(timed_out)
}
