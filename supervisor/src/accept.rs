//! Accepts connections without using a whole core where that fails.

use std::io;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};

/// The pause after a failed accept, for example without a free descriptor: an immediate retry would fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Delays each error by [`ACCEPT_PAUSE`], and what follows it.
pub(crate) fn pause_after_errors<I>(
    connections: impl Stream<Item = io::Result<I>>,
) -> impl Stream<Item = io::Result<I>> {
    connections.then(async |accepted| {
        if accepted.is_err() {
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
        accepted
    })
}
