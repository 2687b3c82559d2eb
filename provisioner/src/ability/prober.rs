//! Probes the store, and records whether the node can create volumes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::ability::Ability;
use crate::api::claim_queue::ClaimQueue;
use crate::api::retry_tracker::RetryTracker;
use crate::error_chain::format_chain;
use crate::image::ImageFormat;
use crate::loss::status::ServedStore;
use crate::store::VolumeStore;

/// The time between two probes of a store that can be used. It is also probed after each failure.
const PROBE_INTERVAL: Duration = Duration::from_secs(60);

/// The time between two probes of one that can't: its repair is noticed within it.
const REPAIR_INTERVAL: Duration = Duration::from_secs(2);

/// The shortest time between two probes, however much fails.
const PROBE_PAUSE: Duration = Duration::from_millis(250);

/// The time after which a disk that gives no answer counts as hung. The lock of the quota may take half of it.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// Probes the store.
pub(crate) struct StoreProber {
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) served: ServedStore,
    /// Notified when a call of the store has failed.
    pub(crate) failed: Arc<Notify>,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) claims: ClaimQueue,
}

impl StoreProber {
    /// Probes the store when it is served, after each failure and from time to time. Never returns.
    pub(crate) async fn run(&self) {
        self.served
            .while_served(|| async {
                loop {
                    let is_able = self.probe().await;
                    // Failures within this pause are answered by one probe: `Notify` keeps one permit.
                    sleep(PROBE_PAUSE).await;
                    let interval = if is_able { PROBE_INTERVAL } else { REPAIR_INTERVAL };
                    tokio::select! {
                        () = sleep(interval) => {}
                        () = self.failed.notified(), if is_able => {}
                    }
                }
            })
            .await;
    }

    /// Probes the store once, and returns whether it can be used.
    async fn probe(&self) -> bool {
        // First: once the store is known to be able, so is of which formats. One that is not lacks them all.
        if self.served.ability().inability().is_none() {
            self.check_formats().await;
        }
        let answer = timeout(PROBE_TIMEOUT, self.store.probe()).await.ok();
        let ability = Ability::of_probe(answer, PROBE_TIMEOUT);
        let is_able = ability.is_able();
        // Before the change is seen: what it wakes must not find the holds of before.
        if is_able && !self.served.ability().is_able() {
            self.retries.end_delays();
        }
        let Some(last) = self.served.set_probed(ability.clone()) else { return is_able };
        match ability.inability() {
            Some(why) => tracing::error!("this node can't create volumes: {why}"),
            None => {
                if last != Ability::Unknown {
                    tracing::info!("this node can create volumes again");
                }
                // Those that a node is selected for are woken by the change itself.
                self.claims.requeue_unselected();
            }
        }
        is_able
    }

    /// Looks for the programs that make the file systems of strict volumes. A missing one concerns these alone.
    async fn check_formats(&self) {
        let mut missing = BTreeMap::new();
        for format in ImageFormat::ALL.into_iter().filter(|format| format.mkfs_program().is_some()) {
            // A system that is slow lacks nothing.
            if let Ok(Err(error)) = timeout(PROBE_TIMEOUT, self.store.check_format(format)).await {
                missing.insert(format, format_chain(&error));
            }
        }
        for (format, why) in &missing {
            if !self.served.missing_formats().contains_key(format) {
                tracing::error!("this node can't create strict volumes of {format}: {why}");
            }
        }
        if self.served.set_missing_formats(missing) {
            self.claims.requeue_unselected();
        }
    }
}

/// The changes of a store's ability: what waits for a retry is tried again at once, or given up.
pub(crate) fn ability_changes(served: &ServedStore) -> impl Stream<Item = ()> + Send + use<> {
    stream::unfold(served.subscribe_ability(), |mut ability| async move {
        ability.changed().await.ok()?;
        Some(((), ability))
    })
}
