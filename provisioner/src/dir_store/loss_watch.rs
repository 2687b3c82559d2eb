//! Waits until a directory is no longer the store that was opened.

use std::time::Duration;

use nodekeel_supervisor::Backoff;
use tokio::time::sleep;

use crate::dir_store::error::DirStoreError;
use crate::error_chain::format_chain;

/// The delay before a look is repeated for which the process or the kernel had no resources.
const RETRY_DELAYS: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(30), jitter: 0.0 };

/// Repeats a look until it fails. Without free file descriptors or memory it tells nothing about the store, and is
/// repeated, too.
pub(super) async fn repeat_looks<F: Future<Output = Result<(), DirStoreError>>>(
    mut look: impl FnMut() -> F,
) -> DirStoreError {
    let mut failures = 0;
    loop {
        match look().await {
            Ok(()) => failures = 0,
            Err(error) if error.is_out_of_resources() => {
                failures += 1;
                let delay = RETRY_DELAYS.base_delay(failures);
                tracing::warn!("look for the volumes: {}; retrying in {delay:?}", format_chain(&error));
                sleep(delay).await;
            }
            Err(error) => return error,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use rustix::io::Errno;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn without_free_descriptors_the_store_is_not_lost_and_is_looked_for_again() {
        let watch = |errno: Errno| Err(DirStoreError::WatchMounts(io::Error::from(errno)));
        let lost = || Err(DirStoreError::Lost { path: PathBuf::new() });
        let mut looks = [
            watch(Errno::MFILE),
            watch(Errno::NFILE),
            watch(Errno::NOMEM),
            Ok(()),
            watch(Errno::MFILE),
            lost(),
        ]
        .into_iter();
        let started = tokio::time::Instant::now();
        let error = repeat_looks(|| std::future::ready(looks.next().expect("it ends"))).await;
        assert!(matches!(error, DirStoreError::Lost { .. }), "{error}");
        assert_eq!((looks.len(), started.elapsed()), (0, Duration::from_secs(1 + 2 + 4 + 1)));

        let error = repeat_looks(|| std::future::ready(watch(Errno::ACCESS))).await;
        assert!(matches!(error, DirStoreError::WatchMounts(_)), "{error}");
    }
}
