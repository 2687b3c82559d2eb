//! Calls that come to an end.

use std::time::Duration;

/// How long the API server may take to answer. It gives up on most requests itself after a minute; a peer that is gone
/// never answers, and would hold a volume's lock for ever.
const LIMIT: Duration = Duration::from_secs(60);

/// No answer came in time. What was asked for may have been done.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {LIMIT:?}")]
struct NoAnswer;

/// Waits for an answer of the API server, and not for ever.
pub(crate) async fn in_time<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let silent = |_| Err(kube::Error::Service(Box::new(NoAnswer)));
    tokio::time::timeout(LIMIT, call).await.unwrap_or_else(silent)
}
