//! Serves a store only while it is the one of this node's volumes, and again when it is back. The first start of
//! serving is here, too: both depend on the same evidence.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_supervisor::Backoff;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::api::call::{ApiCall, ApiError};
use crate::api::retry_tracker::random_fraction;
use crate::api::watches::ObjectCaches;
use crate::api::writer::ApiWriter;
use crate::error_chain::format_chain;
use crate::failure::FailureReporter;
use crate::id::VolumeId;
use crate::loss::condition::required_volume;
use crate::loss::status::{ServedStore, StoreFault, StoreStatus};
use crate::loss::store::{StoreAction, StoreRejection, plan_new_store, plan_store};
use crate::objects::{is_of_driver, named_store, volume_in_store};
use crate::provisioner::RunError;
use crate::resize::bound_claim::volume_capacity;
use crate::snapshot::{SnapshotStore, list_ready_snapshots};
use crate::store::{VolumeStore, VolumeStoreError};
use crate::store_id::{StoreId, StoreIdentity};
use crate::sweep::SweepRequest;

/// The longest time between two looks for a store that no mount has brought back.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The time within which a store is opened at the start, if its disk does not hang.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// The shortest time between two looks: mounts change often while pods start.
const LOOK_PAUSES: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(5), jitter: 0.0 };

/// Decides whether the store is served, and sets its status.
pub(crate) struct StoreGuard {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    /// The snapshots in the other stores of the node.
    pub(crate) other_snapshots: Vec<Arc<dyn SnapshotStore>>,
    pub(crate) caches: ObjectCaches,
    pub(crate) served: ServedStore,
    /// Signals that the cached volumes have changed.
    pub(crate) volumes_changed: Arc<watch::Sender<()>>,
    /// The volumes with a PersistentVolume that the served store does not have.
    pub(crate) missing: Arc<watch::Sender<BTreeSet<VolumeId>>>,
    pub(crate) sweeps: UnboundedSender<SweepRequest>,
    pub(crate) failures: FailureReporter,
    pub(crate) backoff: Backoff,
}

/// The result of a list of the PersistentVolumes of all nodes.
struct ListedVolumes {
    store: StoreId,
    /// One that names the store.
    named: Option<PersistentVolume>,
    until: Instant,
    /// Signals that the cached volumes have changed since.
    changes: watch::Receiver<()>,
}

impl ListedVolumes {
    fn is_current(&self, store: &StoreId) -> bool {
        let is_unchanged = self.changes.has_changed().is_ok_and(|has_changed| !has_changed);
        self.store == *store && Instant::now() < self.until && is_unchanged
    }
}

/// A store that is served, and the volumes that it has.
struct AdmittedStore {
    identity: StoreIdentity,
    present: BTreeSet<VolumeId>,
}

impl StoreGuard {
    /// Serves the store while it is the one of this node's volumes, and looks for it when it is not. Returns why it is
    /// not, if the store can't be opened again.
    pub(crate) async fn run(&self) -> RunError {
        // A store is judged by the volumes that name it, so all of them must be known.
        self.caches.wait_until_complete().await;
        let (mut listed, mut failures) = (None, 0);
        let mut admitted = self.admit_store(&mut listed).await;
        loop {
            let error = match admitted {
                Ok(admitted) => {
                    failures = 0;
                    self.serve_store(admitted);
                    RunError::StoreLost(self.store.wait_until_lost().await)
                }
                Err(error) => error,
            };
            // A change from now on is noticed, also while the store is being opened.
            let Some(change) = self.store.watch_changes() else { return error };
            let mut volumes = self.volumes_changed.subscribe();
            // At the start a store may be closed, which is no loss unless it takes long to open.
            if self.served.status() != StoreStatus::Unknown {
                self.stop_serving(&error);
            }
            let mut reopening = self.store.reopen();
            let reopened = match timeout(OPEN_TIMEOUT, &mut reopening).await {
                Ok(reopened) => reopened,
                Err(_) => {
                    self.stop_serving(&error);
                    reopening.await
                }
            };
            admitted = match reopened {
                Ok(()) => self.admit_store(&mut listed).await,
                Err(error) => Err(RunError::StoreLost(error)),
            };
            if let Err(error) = &admitted {
                self.stop_serving(error);
                failures += 1;
                sleep(LOOK_PAUSES.base_delay(failures)).await;
                let delay = self.backoff.jittered_delay(failures, random_fraction()).min(LOOK_INTERVAL);
                tokio::select! {
                    // A failure to watch is not one to wait: the delay does.
                    Ok(()) = change => {}
                    // The operator has deleted the volumes of a lost disk, or declared them lost.
                    _ = volumes.changed() => {}
                    // Something else may have changed, such as a file.
                    () = sleep(delay) => {}
                }
            }
        }
    }

    fn serve_store(&self, AdmittedStore { identity, present }: AdmittedStore) {
        if matches!(self.served.status(), StoreStatus::Unserved { .. }) {
            tracing::info!(store = identity.id().map(StoreId::as_str), "serving the volumes again");
            // Fails only if the run has ended.
            let _ = self.sweeps.send(SweepRequest::All);
        }
        // The store may be restored from a backup, which lacks some.
        let objects = &self.caches.volumes;
        let required = objects.iter().filter_map(|object| required_volume(&self.api.identity, &object));
        // Before any claim is served: a volume that has lost its limit still has what was promised to it.
        let promised = objects.iter().filter_map(|object| {
            let id = volume_in_store(&self.api.identity, &object).filter(|id| present.contains(id))?;
            Some((id, volume_capacity(&object)))
        });
        self.store.count_promised(&promised.collect::<Vec<_>>());
        // Set before the status: the reporter reads both as soon as the status changes.
        self.missing.send_replace(required.filter(|id| !present.contains(id)).collect());
        self.served.set(StoreStatus::Served(identity));
    }

    fn stop_serving(&self, error: &RunError) {
        let fault = match error {
            RunError::StoreRejected(StoreRejection::Other { .. }) => StoreFault::Replaced,
            RunError::StoreRejected(StoreRejection::Moved { .. }) => StoreFault::Moved,
            _ => StoreFault::Absent,
        };
        let why = format_chain(error);
        if self.served.set(StoreStatus::Unserved { fault, why: why.clone() }) {
            tracing::error!("the volumes are not served, and nothing is changed: {why}");
        }
    }

    /// Decides whether the store is served. One that is not is closed, so that its disk can be unmounted.
    async fn admit_store(&self, listed: &mut Option<ListedVolumes>) -> Result<AdmittedStore, RunError> {
        let admitted = self.check_store(listed).await;
        if admitted.is_err() {
            self.store.close().await;
        }
        admitted
    }

    async fn check_store(&self, listed: &mut Option<ListedVolumes>) -> Result<AdmittedStore, RunError> {
        let found = self.store.identity().await.map_err(RunError::StoreLost)?;
        let present = self.store.list().await.map_err(RunError::StoreLost)?.into_iter().collect();

        // The cache has the PersistentVolumes of this node only. A store that none of them names may be another node's.
        let objects = &self.caches.volumes;
        let elsewhere = match found.id() {
            Some(store) if !objects.iter().any(|volume| named_store(&volume).as_ref() == Some(store)) => {
                self.find_volume_of_store(store, listed).await
            }
            _ => None,
        };
        let action = match plan_store(&self.api.identity, &found, &present, objects.iter().chain(elsewhere)) {
            StoreAction::CreateIdentity => self.confirm_new_store().await?,
            action => action,
        };
        let identity = match action {
            StoreAction::Serve => found,
            StoreAction::CreateIdentity => self.store.create_identity().await.map_err(RunError::StoreLost)?,
            StoreAction::Reject(rejection) => return Err(RunError::StoreRejected(rejection)),
        };
        // Only now is the store known to be the right one, and may erase what a killed process has left.
        self.store.start_serving().await.map_err(RunError::StoreLost)?;
        Ok(AdmittedStore { identity, present })
    }

    /// Finds a PersistentVolume of any node that names a store. The list is kept for a while.
    async fn find_volume_of_store(
        &self,
        store: &StoreId,
        listed: &mut Option<ListedVolumes>,
    ) -> Option<PersistentVolume> {
        if !listed.as_ref().is_some_and(|listed| listed.is_current(store)) {
            // Before the list: a change during it makes the list outdated.
            let changes = self.volumes_changed.subscribe();
            let list = || async {
                let mut found = None;
                let visit = |volume: PersistentVolume| {
                    let is_meant = named_store(&volume).as_ref() == Some(store)
                        && is_of_driver(&self.api.identity, &volume);
                    if !is_meant {
                        return ControlFlow::Continue(());
                    }
                    found = Some(volume);
                    ControlFlow::Break(())
                };
                self.api.for_each(ApiCall::ListVolumes, visit).await?;
                Ok::<_, ApiError>(found)
            };
            let named = self.wait_for_answer("look for the store's node", list).await;
            let until = Instant::now() + LOOK_INTERVAL;
            *listed = Some(ListedVolumes { store: store.clone(), named, until, changes });
        }
        listed.as_ref().and_then(|listed| listed.named.clone())
    }

    /// Decides whether a store without an identity is a new one: snapshots of this node show that it isn't, too.
    async fn confirm_new_store(&self) -> Result<StoreAction, RunError> {
        let Some(store) = &self.snapshots else { return Ok(StoreAction::CreateIdentity) };
        let list = || async {
            let listed = list_ready_snapshots(self.api.client(), &self.api.identity).await;
            listed.map_err(|error| ApiCall::ListSnapshotContents.wrap_error(error))
        };
        let mut ready = self.wait_for_answer("look for the node's snapshots", list).await;
        for other in &self.other_snapshots {
            // Those of a store that is absent may be the ones that are missing here.
            for id in other.list_snapshots().await.unwrap_or_default() {
                ready.remove(&id);
            }
        }
        let lost = |error| RunError::StoreLost(VolumeStoreError::Lost { source: Box::new(error) });
        let present = store.list_snapshots().await.map_err(lost)?.into_iter().collect();
        Ok(plan_new_store(&self.api.identity, &present, &ready, self.caches.volumes.iter()))
    }

    /// Calls the API server until it answers.
    async fn wait_for_answer<T, F: Future<Output = Result<T, ApiError>> + Send>(
        &self,
        what: &str,
        call: impl Fn() -> F + Sync,
    ) -> T {
        let mut failures = 0;
        loop {
            match call().await {
                Ok(answer) => return answer,
                Err(error) => {
                    self.failures.metrics.record_api_error(error.call.metric_label());
                    failures += 1;
                    let delay = self.backoff.jittered_delay(failures, random_fraction());
                    tracing::warn!("{what}: {}; retrying in {delay:?}", format_chain(&error));
                    sleep(delay).await;
                }
            }
        }
    }
}
