//! The control loop: watches, plans, applies, and schedules retries.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::{self, BoxFuture};
use futures_util::stream;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::runtime::reflector::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::id::VolumeId;
use crate::loss::status::StoreStatus;
use crate::provisioner::{Provisioner, RunError};

pub(crate) mod event_filter;
pub(crate) mod failures;
pub(crate) mod watches;

use crate::api::retry_tracker::RetryTracker;
use crate::api::watch_errors::WatchErrors;
use crate::capacity::publisher::{self, CapacityPublisher};
use crate::deletion::live_claims::LiveClaims;
use crate::deletion::reconcile as volumes;
use crate::{audit, claim, loss, node, snapshot, sweep};
use event_filter::WatchSignals;
use watches::{ObjectCaches, new_caches};

/// Everything that reconciling an object needs.
pub(crate) struct ReconcileContext {
    pub(crate) provisioner: Provisioner,
    pub(crate) claims: Store<PersistentVolumeClaim>,
    pub(crate) volumes: Store<PersistentVolume>,
    pub(crate) classes: Store<StorageClass>,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) live_claims: Arc<LiveClaims>,
    pub(crate) signals: WatchSignals,
    pub(crate) capacity: Arc<CapacityPublisher>,
    /// The errors of watches without which volumes are served all the same.
    pub(crate) optional_watches: WatchErrors,
    /// Signals that the cached volumes have changed.
    pub(crate) volumes_changed: watch::Sender<()>,
    /// The volumes with a PersistentVolume that the served store does not have, as of the last sweep.
    pub(crate) missing_volumes: watch::Sender<BTreeSet<VolumeId>>,
}

/// Runs the controller until the token is canceled, a watch ends, or the store cannot be served.
///
/// Boxed: without optimization, each caller would copy all loops through its stack, of which a thread of tokio has 2 MiB.
pub(crate) fn run_controller<'a>(
    provisioner: &'a Provisioner,
    token: &'a CancellationToken,
    on_ready: impl FnOnce() + Send + 'a,
) -> BoxFuture<'a, Result<(), RunError>> {
    Box::pin(run_loops(provisioner, token, on_ready))
}

async fn run_loops(
    provisioner: &Provisioner,
    token: &CancellationToken,
    on_ready: impl FnOnce() + Send,
) -> Result<(), RunError> {
    let ((caches, writers), (signals, receivers)) = (new_caches(), WatchSignals::new());
    let context = Arc::new(ReconcileContext::new(provisioner, caches, signals));
    provisioner.store_status.send_replace(StoreStatus::Unknown);
    let changed_claims = stream::select(context.watch_claims(writers.claims), receivers.claims);
    let changed_volumes = context.watch_volumes(writers.volumes);
    let claim_loop = claim::reconcile::run_claims(&context, changed_claims, token);
    let volume_loop = volumes::run_volumes(&context, changed_volumes, token);
    let readiness = async {
        context.report_ready(on_ready).await;
        std::future::pending().await
    };
    let sweeping = async {
        context.served_store().await;
        sweep::run_sweeper(&context, receivers.sweeps).await;
    };
    let auditing = context.while_served(|| audit::run_auditor(provisioner));
    tokio::select! {
        ((), ()) = future::join(claim_loop, volume_loop) => {}
        () = context.watch_classes(writers.classes) => {}
        () = readiness => {}
        () = sweeping => {}
        () = auditing => {}
        () = publisher::run_publisher(&context) => {}
        () = node::observer::watch_node(&context) => {}
        () = snapshot::reconcile::run_snapshots(&context) => {}
        () = loss::reporter::run_reporter(&context) => {}
        error = context.guard_store() => return Err(error),
        () = context.canceled_before_serving(token) => {}
    }
    Ok(())
}

impl ReconcileContext {
    fn new(provisioner: &Provisioner, caches: ObjectCaches, signals: WatchSignals) -> Self {
        let ObjectCaches { claims, volumes, classes } = caches;
        Self {
            provisioner: provisioner.clone(),
            claims,
            volumes,
            classes,
            retries: Arc::new(RetryTracker::new(provisioner.config.backoff)),
            live_claims: Arc::default(),
            signals,
            capacity: Arc::default(),
            optional_watches: provisioner.watch_errors.of_optional_apis(),
            volumes_changed: watch::Sender::new(()),
            missing_volumes: watch::Sender::default(),
        }
    }

    pub(crate) fn resource_api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.provisioner.applier.client.0.clone())
    }

    /// Waits for the first lists. Waits forever if a watch has ended before, because then the run ends.
    pub(crate) async fn wait_for_cache_sync(&self) {
        let lists = (
            self.claims.wait_until_ready(),
            self.volumes.wait_until_ready(),
            self.classes.wait_until_ready(),
        );
        if let (Ok(()), Ok(()), Ok(())) = futures_util::join!(lists.0, lists.1, lists.2) {
            return;
        }
        std::future::pending().await
    }

    /// Waits for a cancellation while the store is not served: then the loops wait for it and would never end.
    pub(crate) async fn canceled_before_serving(&self, token: &CancellationToken) {
        token.cancelled().await;
        self.unserved_store().await;
    }

    pub(crate) async fn report_ready(&self, on_ready: impl FnOnce() + Send) {
        self.served_store().await;
        if let Some(mut registered) = self.provisioner.registered.clone() {
            // The sender is dropped: the driver will never be registered, so the provisioner never becomes
            // ready.
            if registered.wait_for(|&registered| registered).await.is_err() {
                tracing::warn!("not ready: the registration with the kubelet has ended");
                std::future::pending::<()>().await;
            }
        }
        on_ready();
    }
}
