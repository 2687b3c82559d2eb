//! When a bundle that has failed is tried again.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::BundleOutcome;
use crate::error::{LeftOutImage, LeftOutReason};
use crate::plan::{Bundle, WantedBundles};

/// The pause after the first failure; it doubles with each.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause between two attempts.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(300);

/// The pause after so many failures in a row.
pub(crate) fn retry_pause(failures: u32) -> Duration {
    RETRY_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_RETRY_PAUSE)
}

/// What has become of each bundle, for the passes that only look at those that are due.
#[derive(Debug, Default)]
pub(super) struct BundleResults(BTreeMap<Bundle, BundleResult>);

#[derive(Debug)]
struct BundleResult {
    /// Its images and what it left out; or the reason why it is not imported.
    brought: Result<(Vec<String>, Vec<LeftOutImage>), String>,
    /// The failures in a row, and the time of the next attempt; `None` if nothing is to be tried again.
    retry: Option<(u32, Instant)>,
}

impl BundleResults {
    /// Forgets the bundles that are gone or have changed.
    pub(super) fn begin_pass(&mut self, wanted: &WantedBundles) {
        let mut known = std::mem::take(&mut self.0);
        let kept = wanted.bundles.iter().filter_map(|bundle| known.remove_entry(bundle));
        self.0 = kept.collect();
    }

    pub(super) fn record_outcome(&mut self, bundle: &Bundle, outcome: &BundleOutcome) {
        let is_refused = |image: &LeftOutImage| matches!(image.reason, LeftOutReason::Store(_));
        let (brought, fails) = match outcome {
            BundleOutcome::Imported { images, left_out, .. }
            | BundleOutcome::Unchanged { images, left_out, .. } => {
                (Ok((images.clone(), left_out.clone())), left_out.iter().any(is_refused))
            }
            // Not read again before it changes.
            BundleOutcome::KnownInvalid { reason, .. } => (Err(reason.clone()), false),
            BundleOutcome::Delayed { .. } => return,
            BundleOutcome::Failed(error) => {
                (Err(outcome.failure().unwrap_or_default()), error.is_retryable())
            }
        };
        let before = self.0.get(bundle).and_then(|result| result.retry).map_or(0, |(failures, _)| failures);
        let retry = fails.then(|| (before + 1, Instant::now() + retry_pause(before + 1)));
        self.0.insert(bundle.clone(), BundleResult { brought, retry });
    }

    /// The outcomes of the bundles that are not due.
    pub(super) fn list_kept(&self) -> BTreeMap<Bundle, BundleOutcome> {
        let now = Instant::now();
        let is_due = |result: &BundleResult| result.retry.is_some_and(|(_, at)| at <= now);
        let kept = self.0.iter().filter(|(_, result)| !is_due(result));
        let outcome = |(bundle, result): (&Bundle, &BundleResult)| {
            let (bundle, key) = (bundle.clone(), bundle.clone());
            let outcome = match result.brought.clone() {
                Ok((images, left_out)) => BundleOutcome::Unchanged { bundle, images, left_out },
                Err(reason) if result.retry.is_some() => BundleOutcome::Delayed { bundle, reason },
                Err(reason) => BundleOutcome::KnownInvalid { bundle, reason },
            };
            (key, outcome)
        };
        kept.map(outcome).collect()
    }

    /// The time at which the first bundle is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(|result| result.retry).map(|(_, at)| at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_failed_is_tried_again_after_pauses_that_grow_to_five_minutes() {
        let pauses = [1, 2, 3, 9, 10, u32::MAX].map(|failures| retry_pause(failures).as_secs());
        assert_eq!(pauses, [1, 2, 4, 256, 300, 300]);
    }
}
