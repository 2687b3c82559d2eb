//! What the API server knows of a store, beside the PersistentVolumes of its node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolume;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::api::retry_tracker::random_fraction;
use crate::apply::ApplyError;
use crate::controller::ReconcileContext;
use crate::error_chain::format_chain;
use crate::loss::guard::LOOK_INTERVAL;
use crate::loss::new_store::plan_new_store;
use crate::loss::store::StoreAction;
use crate::provisioner::RunError;
use crate::store::VolumeStoreError;
use crate::store_id::StoreId;

/// What a list of the PersistentVolumes of all nodes has shown.
pub(crate) struct ListedVolumes {
    store: StoreId,
    /// One that names the store.
    named: Option<Arc<PersistentVolume>>,
    until: Instant,
    /// Whether the cached volumes have changed since.
    changes: watch::Receiver<()>,
}

impl ListedVolumes {
    fn is_current(&self, store: &StoreId) -> bool {
        let is_unchanged = self.changes.has_changed().is_ok_and(|has_changed| !has_changed);
        self.store == *store && Instant::now() < self.until && is_unchanged
    }
}

impl ReconcileContext {
    /// A PersistentVolume of any node that names a store; the cache has those of this node only. The list is kept for a
    /// while.
    pub(crate) async fn find_volume_of_store(
        &self,
        store: &StoreId,
        listed: &mut Option<ListedVolumes>,
    ) -> Option<Arc<PersistentVolume>> {
        if !listed.as_ref().is_some_and(|listed| listed.is_current(store)) {
            let changes = self.volumes_changed.subscribe();
            let applier = &self.provisioner.applier;
            let found = self
                .wait_for_answer("look for the store's node", || applier.find_volume_of_store(store))
                .await;
            let (named, until) = (found.map(Arc::new), Instant::now() + LOOK_INTERVAL);
            *listed = Some(ListedVolumes { store: store.clone(), named, until, changes });
        }
        listed.as_ref().and_then(|listed| listed.named.clone())
    }

    /// Decides whether a store without an identity is a new one: snapshots of this node show that it isn't, too.
    pub(crate) async fn confirm_new_store(
        &self,
        volumes: &[Arc<PersistentVolume>],
    ) -> Result<StoreAction, RunError> {
        let applier = &self.provisioner.applier;
        let Some(store) = &applier.snapshots else { return Ok(StoreAction::CreateIdentity) };
        let ready =
            self.wait_for_answer("look for the node's snapshots", || applier.list_ready_snapshots()).await;
        let lost = |error| RunError::StoreLost(VolumeStoreError::Lost { source: Box::new(error) });
        let present = store.list_snapshots().await.map_err(lost)?.into_iter().collect();
        Ok(plan_new_store(&applier.identity, (&present, &ready), volumes.iter().map(AsRef::as_ref)))
    }

    /// Calls the API server until it answers.
    async fn wait_for_answer<T, F: Future<Output = Result<T, ApplyError>> + Send>(
        &self,
        what: &str,
        call: impl Fn() -> F + Sync,
    ) -> T {
        let mut failures = 0;
        loop {
            match call().await {
                Ok(answer) => return answer,
                Err(error) => {
                    self.record_api_error(&error);
                    failures += 1;
                    let delay = self.provisioner.config.backoff.jittered_delay(failures, random_fraction());
                    tracing::warn!("{what}: {}; retrying in {delay:?}", format_chain(&error));
                    sleep(delay).await;
                }
            }
        }
    }
}
