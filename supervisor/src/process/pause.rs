//! Deadlines of others that a pause of this program does not use up.
//!
//! While this program is stopped, as by SIGSTOP, it neither probes nor reads; its clock goes on. A deadline that passed
//! in that time tells nothing about a process.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// A timer that is this late was not delayed by a busy host.
const PAUSE: Duration = Duration::from_secs(1);

/// A deadline. After a pause in which it passed, it begins anew.
#[derive(Debug, Clone, Copy)]
pub(super) struct PausableDeadline {
    /// `None` beyond the range of the clock: it never passes.
    pub(super) at: Option<Instant>,
    /// The time after a pause.
    within: Duration,
}

impl PausableDeadline {
    pub(super) fn after(within: Duration) -> Self {
        Self::since(Instant::now(), within)
    }

    pub(super) fn since(start: Instant, within: Duration) -> Self {
        Self { at: start.checked_add(within), within }
    }

    /// Resolves when it has passed.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub(super) async fn wait(&mut self) {
        while let Some(at) = self.at {
            sleep_until(at).await;
            if at.elapsed() < PAUSE {
                return;
            }
            *self = Self::after(self.within);
        }
        std::future::pending().await
    }
}

/// Like `tokio::time::timeout`, except that a pause does not use up the time. `None` after it.
pub(super) async fn pausable_timeout<T>(within: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut deadline = PausableDeadline::after(within);
    let mut work = std::pin::pin!(work);
    tokio::select! {
        biased;
        done = &mut work => Some(done),
        () = deadline.wait() => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{advance, timeout};

    /// Nothing runs in between, as in a pause.
    #[tokio::test(start_paused = true)]
    async fn a_pause_does_not_use_up_a_deadline() {
        let started = Instant::now();
        let mut deadline = PausableDeadline::after(Duration::from_secs(3));
        let paused = async {
            tokio::task::yield_now().await;
            advance(Duration::from_secs(60)).await;
        };
        tokio::join!(deadline.wait(), paused);
        assert_eq!(started.elapsed().as_secs(), 63);
        assert_eq!(pausable_timeout(Duration::from_secs(2), std::future::pending::<()>()).await, None);
        assert_eq!(started.elapsed().as_secs(), 65);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_beyond_the_clock_never_passes() {
        let mut deadline = PausableDeadline::after(Duration::MAX);
        assert!(timeout(Duration::from_secs(3600), deadline.wait()).await.is_err());
    }
}
