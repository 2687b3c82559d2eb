//! The control loop: watches the cluster's objects, and has each of them reconciled by its folder.
//!
//! ```text
//!  claims ──┐             ┌─ pending ─▶ claim     bound ─▶ resize
//!  volumes ─┼─▶ filter ───┼─ deletion
//!  classes ─┘             └─ sweep, capacity: what has changed for them
//!  node, contents, store ───▶ node, snapshot, loss
//! ```

use std::future::pending;
use std::sync::Arc;

use futures_util::future::{self, BoxFuture};
use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ability::prober::{StoreProber, ability_changes};
use crate::api::claim_queue::ClaimQueue;
use crate::api::retry_tracker::RetryTracker;
use crate::api::watches::{changed_objects, new_caches, watch_resource};
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::audit::run_auditor;
use crate::capacity::publisher::{CapacityPublisher, PublisherState};
use crate::claim::apply::ClaimProvisioner;
use crate::claim::peers::PeerObserver;
use crate::claim::reconcile::ClaimReconciler;
use crate::controller::event_filter::EventFilter;
use crate::deletion::apply::VolumeRemover;
use crate::deletion::live_claims::LiveClaims;
use crate::deletion::reconcile::VolumeReconciler;
use crate::error_chain::format_chain;
use crate::limits::reconcile::{LimitFindings, LimitReconciler};
use crate::loss::guard::StoreGuard;
use crate::loss::reporter::ConditionReporter;
use crate::loss::status::{ServedStore, StoreStatus};
use crate::node::watch_node;
use crate::node_lease::LeaseRenewer;
use crate::objects::{bound_volume_name, has_data_source};
use crate::provisioner::{Provisioner, RunError};
use crate::resize::apply::ClaimResizer;
use crate::resize::reconcile::ResizeReconciler;
use crate::snapshot::apply::SnapshotApplier;
use crate::snapshot::reconcile::SnapshotReconciler;
use crate::sweep::OrphanSweeper;

mod event_filter;

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
    let Provisioner { config, api, served, failures, .. } = provisioner;
    // An earlier run may have left its status: until this run has checked the store, nothing may act on it.
    served.set(StoreStatus::Unknown);

    // The loops share caches, and send each other signals.
    let (caches, writers) = new_caches();
    let retries = Arc::new(RetryTracker::new(config.backoff));
    let live_claims = Arc::new(LiveClaims::default());
    let (claims, requeued_claims) = ClaimQueue::new(caches.claims.clone());
    let peers = PeerObserver::default();
    let (sweeps, sweep_requests) = unbounded_channel();
    let volumes_changed = Arc::new(watch::Sender::new(()));
    let missing = Arc::new(watch::Sender::default());
    let unlimited = Arc::new(watch::Sender::default());
    // Volumes are served even if these watches fail.
    let optional_watches = provisioner.watch_errors.of_optional_apis();

    // The reconcilers and the loops, each with its dependencies.
    let remover = Arc::new(VolumeRemover {
        api: api.clone(),
        store: Arc::clone(&provisioner.store),
        guard: provisioner.guard.clone(),
        locks: Arc::clone(&provisioner.locks),
        metrics: Arc::clone(&failures.metrics),
    });
    let capacity = Arc::new(CapacityPublisher {
        api: api.clone(),
        store: Arc::clone(&provisioner.store),
        classes: caches.classes.clone(),
        claims: claims.clone(),
        node: provisioner.node.clone(),
        served: served.clone(),
        failures: failures.clone(),
        watch_errors: optional_watches.clone(),
        backoff: config.backoff,
        state: PublisherState::default(),
    });
    let pending_claims = ClaimReconciler {
        provisioner: ClaimProvisioner {
            api: api.clone(),
            store: Arc::clone(&provisioner.store),
            snapshots: provisioner.snapshots.clone(),
            remover: Arc::clone(&remover),
            locks: Arc::clone(&provisioner.locks),
            metrics: Arc::clone(&failures.metrics),
            recorder: Arc::clone(&failures.recorder),
            node: provisioner.node.clone(),
        },
        caches: caches.clone(),
        capacity: Arc::clone(&capacity),
        retries: Arc::clone(&retries),
        served: served.clone(),
        peers: peers.clone(),
        failures: failures.clone(),
        node_selection_delay: config.node_selection_delay,
        reschedule_after: config.reschedule_after,
        max_delay: config.backoff.max,
    };
    let bound_claims = ResizeReconciler {
        resizer: ClaimResizer {
            api: api.clone(),
            store: Arc::clone(&provisioner.store),
            locks: Arc::clone(&provisioner.locks),
            metrics: Arc::clone(&failures.metrics),
            recorder: Arc::clone(&failures.recorder),
        },
        caches: caches.clone(),
        retries: Arc::clone(&retries),
        served: served.clone(),
        failures: failures.clone(),
    };
    let volumes = VolumeReconciler {
        remover: Arc::clone(&remover),
        snapshots: provisioner.snapshots.clone(),
        live_claims: Arc::clone(&live_claims),
        retries: Arc::clone(&retries),
        served: served.clone(),
        failures: failures.clone(),
    };
    let contents = provisioner.snapshots.clone().map(|store| SnapshotReconciler {
        applier: SnapshotApplier { api: api.clone(), store, recorder: Arc::clone(&failures.recorder) },
        claims: claims.clone(),
        sweeps: sweeps.clone(),
        retries: Arc::clone(&retries),
        served: served.clone(),
        failures: failures.clone(),
        watch_errors: optional_watches.clone(),
        concurrency: config.copy_concurrency,
    });
    let sweeper = OrphanSweeper {
        api: api.clone(),
        remover,
        snapshots: provisioner.snapshots.clone(),
        objects: caches.volumes.clone(),
        served: served.clone(),
        missing: Arc::clone(&missing),
        failures: failures.clone(),
        backoff: config.backoff,
    };
    let guard = StoreGuard {
        api: api.clone(),
        store: Arc::clone(&provisioner.store),
        snapshots: provisioner.snapshots.clone(),
        caches: caches.clone(),
        served: served.clone(),
        volumes_changed: Arc::clone(&volumes_changed),
        missing: Arc::clone(&missing),
        sweeps: sweeps.clone(),
        failures: failures.clone(),
        backoff: config.backoff,
    };
    let conditions = ConditionReporter {
        api: api.clone(),
        volumes: caches.volumes.clone(),
        served: served.clone(),
        volumes_changed: Arc::clone(&volumes_changed),
        missing,
        unlimited: Arc::clone(&unlimited),
        failures: failures.clone(),
        backoff: config.backoff,
    };
    let limits = LimitReconciler {
        api: api.clone(),
        store: Arc::clone(&provisioner.store),
        caches: caches.clone(),
        locks: Arc::clone(&provisioner.locks),
        volumes_changed: Arc::clone(&volumes_changed),
        unlimited,
        failures: failures.clone(),
        backoff: config.backoff,
        findings: LimitFindings::default(),
    };

    let prober = StoreProber {
        store: Arc::clone(&provisioner.store),
        served: served.clone(),
        failed: Arc::clone(&failures.store_failed),
        retries: Arc::clone(&retries),
        claims: claims.clone(),
    };

    let lease = LeaseRenewer {
        api: api.clone(),
        node: provisioner.node.clone(),
        failures: failures.clone(),
        status: provisioner.lease.clone(),
    };

    // The watches. Each event passes the filter, then the cache, and then has its object reconciled.
    let filter = Arc::new(EventFilter {
        identity: api.identity.clone(),
        caches: caches.clone(),
        retries: Arc::clone(&retries),
        live_claims,
        capacity: Arc::clone(&capacity),
        claims: claims.clone(),
        sweeps,
    });
    let errors = &provisioner.watch_errors;
    let (passed, watched) = (Arc::clone(&filter), watch_resource(api.all::<PersistentVolumeClaim>(), errors));
    let changed_claims = changed_objects(
        watched.filter_map(move |event| future::ready(passed.filter_claim(event))).reflect(writers.claims),
    );
    // A requeued claim is treated as a changed one: an object that it waits for has changed.
    let changed_claims = stream::select(changed_claims, receiver_stream(requeued_claims));
    let (passed, watched) = (Arc::clone(&filter), watch_resource(api.all::<PersistentVolume>(), errors));
    let changed_volumes = changed_objects(
        watched
            .filter_map(move |event| future::ready(passed.filter_volume(event)))
            .reflect(writers.volumes)
            // After the cache: a receiver of the signal finds the change there.
            .inspect(move |_| volumes_changed.send_replace(())),
    );
    let classes = watch_resource(api.all::<StorageClass>(), errors)
        .filter_map(|event| future::ready(filter.filter_class(event)))
        .reflect(writers.classes)
        // No reconciler handles classes: the filter has requeued the claims of a changed one.
        .for_each(|_| {
            let classes = caches.classes.state();
            peers.observe_classes(&api.identity.driver, classes.iter().map(|class| &**class));
            future::ready(())
        });

    let all_claims = &AllClaims { pending: pending_claims, bound: bound_claims, retries };
    // Volumes with a data source are created separately: a copy may take long, and no other claim waits for it.
    let (copies, copied_claims) = unbounded_channel();
    // A cancellation ends the streams only: the loops still complete the calls in progress.
    let claim_loop = reconcile_changes(
        changed_claims.take_until(token.cancelled()),
        ability_changes(served),
        caches.claims.clone(),
        config.concurrency,
        move |claim: Arc<PersistentVolumeClaim>| {
            // Without a receiver, the run ends.
            let is_passed_on = is_copy(&claim) && copies.send(ObjectRef::from_obj(&*claim)).is_ok();
            async move { if is_passed_on { NextRun::OnChange } else { all_claims.reconcile(&claim).await } }
        },
    );
    let copy_loop = reconcile_changes(
        receiver_stream(copied_claims).take_until(token.cancelled()),
        ability_changes(served),
        caches.claims.clone(),
        config.copy_concurrency,
        async |claim| all_claims.reconcile(&claim).await,
    );
    let volume_loop = reconcile_changes(
        changed_volumes.take_until(token.cancelled()),
        ability_changes(served),
        caches.volumes.clone(),
        config.concurrency,
        async |volume| volumes.reconcile(&volume).await,
    );
    let snapshot_loop = async {
        match &contents {
            Some(contents) => contents.run().await,
            None => pending().await,
        }
    };
    let readiness = async {
        report_ready(provisioner, on_ready).await;
        pending().await
    };
    let node = watch_node(
        api,
        optional_watches.clone(),
        &provisioner.node,
        provisioner.registered.clone(),
        |has_changed| {
            // The kubelet writes at least every five minutes: a time to look at the disk, whose use nothing reports.
            capacity.notify_change();
            if has_changed {
                // Also those that select this node: its labels decide whether their classes allow it.
                claims.requeue_unbound();
            }
        },
    );
    let auditing = served.while_served(|| run_auditor(&*provisioner.store, &limits, config));
    // The first loop that ends ends the run. The others are dropped where they wait, which is like a crash: the next
    // run resumes their work.
    tokio::select! {
        ((), (), ()) = future::join3(claim_loop, copy_loop, volume_loop) => {}
        () = classes => {}
        () = peers.run(api, &optional_watches) => {}
        () = readiness => {}
        () = sweeper.run(sweep_requests) => {}
        () = auditing => {}
        () = capacity.run() => {}
        () = node => {}
        () = snapshot_loop => {}
        () = conditions.run() => {}
        () = prober.run() => {}
        () = lease.run() => {}
        error = guard.run() => return Err(error),
        () = canceled_before_serving(served, token) => {}
    }
    if token.is_cancelled() {
        lease.release().await;
    }
    Ok(())
}

/// The claims of this node, pending and bound.
struct AllClaims {
    pending: ClaimReconciler,
    bound: ResizeReconciler,
    retries: Arc<RetryTracker>,
}

impl AllClaims {
    /// Reconciles a claim, and returns when it is reconciled again.
    async fn reconcile(&self, claim: &PersistentVolumeClaim) -> NextRun {
        let (act, done) = match bound_volume_name(claim) {
            Some(_) => ("resize the volume of", self.bound.reconcile(claim).await),
            None => ("provision", self.pending.reconcile(claim).await),
        };
        done.unwrap_or_else(|error| {
            let time = self.retries.record_failure(claim.metadata.uid.as_deref().unwrap_or_default());
            let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
            tracing::warn!(
                namespace,
                claim = name,
                "{act} claim: {}; retrying in {time:?}",
                format_chain(&error)
            );
            NextRun::After(time)
        })
    }
}

/// Waits for a cancellation while the store is not served: then the loops wait for it and would never end.
async fn canceled_before_serving(served: &ServedStore, token: &CancellationToken) {
    token.cancelled().await;
    served.wait_until_unserved().await;
}

async fn report_ready(provisioner: &Provisioner, on_ready: impl FnOnce() + Send) {
    provisioner.served.wait_until_served().await;
    if let Some(mut registered) = provisioner.registered.clone() {
        // The sender is dropped: the driver will never be registered, so the provisioner never becomes
        // ready.
        if registered.wait_for(|&registered| registered).await.is_err() {
            tracing::warn!("not ready: the registration with the kubelet has ended");
            pending::<()>().await;
        }
    }
    on_ready();
}

/// Returns whether a claim waits for a copy.
fn is_copy(claim: &PersistentVolumeClaim) -> bool {
    has_data_source(claim) && bound_volume_name(claim).is_none()
}

/// The stream of the values that a channel receives.
fn receiver_stream<T: Send + 'static>(
    mut receiver: UnboundedReceiver<T>,
) -> impl Stream<Item = T> + Send + 'static {
    stream::poll_fn(move |cx| receiver.poll_recv(cx))
}
