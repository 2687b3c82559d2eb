//! Waiting for a program that sends no notice when it is ready.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause behind an attempt that takes long itself.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// Repeats the attempt until it succeeds, with growing pauses, at most until the deadline; `what` completes
/// "waited for".
///
/// A pause is as long as the attempt before it took, up to a second: in an emulated guest, attempts would take the processor
/// that what is waited for needs.
///
/// This is for programs without a notification (etcd's health, containerd's first answer). Where one exists,
/// use it: a child's exit by [`wait_exit`](crate::wait_exit), a file by reading it.
///
/// # Errors
/// The deadline has passed: `what`, and the last attempt's error.
#[expect(clippy::disallowed_methods, reason = "these programs have no event to wait for")]
pub fn wait_until<T>(deadline: Duration, what: &str, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let tried = Instant::now();
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if start.elapsed() + pause > deadline => {
                return Err(error).with_context(|| format!("waited {deadline:?} for {what}"));
            }
            Err(_) => {
                let rest = pause.max(tried.elapsed().min(LONGEST_REST));
                std::thread::sleep(rest.min(deadline.saturating_sub(start.elapsed())));
            }
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_repeated_until_it_succeeds() {
        let mut tries = 0;
        let value = wait_until(Duration::from_secs(5), "the third try", || {
            tries += 1;
            if tries == 3 { Ok(tries) } else { anyhow::bail!("too early") }
        });
        assert_eq!(value.unwrap(), 3);
    }

    #[test]
    fn a_timeout_reports_the_last_error() {
        let error = wait_until(Duration::from_millis(5), "a pig to fly", || -> Result<()> {
            anyhow::bail!("no wings")
        })
        .unwrap_err();
        assert_eq!(format!("{error:#}"), "waited 5ms for a pig to fly: no wings");
    }
}
