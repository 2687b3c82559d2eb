//! The pause before a retry.

use std::time::Duration;

use tokio::time::sleep;

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// The pause before another attempt, where nothing notifies that it would succeed: 20 milliseconds at first, then
/// each time twice as long, up to a second.
pub(super) struct RetryPause(Duration);

impl Default for RetryPause {
    fn default() -> RetryPause {
        RetryPause(FIRST)
    }
}

impl RetryPause {
    pub(super) async fn wait(&mut self) {
        sleep(self.0).await;
        self.0 = (self.0 * 2).min(LONGEST);
    }
}
