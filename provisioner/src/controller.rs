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
use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Resource;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ability::prober::{StoreProber, ability_changes};
use crate::api::claim_queue::ClaimQueue;
use crate::api::retry_tracker::RetryTracker;
use crate::api::volume_cache::PackedVolume;
use crate::api::watch_errors::WatchErrors;
use crate::api::watches::{ObjectCaches, changed_objects, new_caches, watch_resource};
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::audit::run_auditor;
use crate::capacity::publisher::{CapacityPublisher, PublisherState};
use crate::claim::apply::ClaimProvisioner;
use crate::claim::peers::PeerObserver;
use crate::claim::reconcile::ClaimReconciler;
use crate::controller::event_filter::{EventFilter, StoreSignals};
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
use crate::provisioner::{Provisioner, ProvisionerConfig, RunError, StoreUnit};
use crate::resize::apply::ClaimResizer;
use crate::resize::reconcile::ResizeReconciler;
use crate::scope::StoreScope;
use crate::snapshot::apply::SnapshotApplier;
use crate::snapshot::reconcile::{SnapshotReconciler, SnapshotUnit};
use crate::store::VolumeStore;
use crate::sweep::{OrphanSweeper, SweepRequest};

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
    let Provisioner { config, units, .. } = provisioner;
    let api = &provisioner.first().api;
    for unit in units {
        // An earlier run may have left its status: until this run has checked the store, nothing may act on it.
        unit.served.set(StoreStatus::Unknown);
    }
    // The stores share the watches and caches, and each has loops of its own: none waits for the disk of another.
    let (caches, writers) = new_caches();
    let shared = SharedParts {
        caches: caches.clone(),
        live_claims: Arc::default(),
        peers: PeerObserver::default(),
        volumes_changed: Arc::new(watch::Sender::new(())),
        // Volumes are served even if these watches fail.
        optional_watches: provisioner.watch_errors.of_optional_apis(),
    };
    let (loops, inputs): (Vec<_>, Vec<_>) =
        units.iter().map(|unit| StoreLoops::new(provisioner, unit, &shared)).unzip();
    let contents = snapshot_reconciler(provisioner, &loops, &shared);

    let lease = LeaseRenewer {
        api: api.clone(),
        stores: units.iter().map(|unit| (unit.api.identity.store.clone(), unit.served.clone())).collect(),
        node: provisioner.node.clone(),
        failures: provisioner.first().failures.clone(),
        status: provisioner.lease.clone(),
    };

    // The watches. Each event passes the filter, then the cache, and then has its object reconciled.
    let filter = Arc::new(EventFilter {
        identity: api.identity.clone(),
        caches: caches.clone(),
        live_claims: Arc::clone(&shared.live_claims),
        stores: loops.iter().map(|store| store.signals.clone()).collect(),
    });
    let (claim_inputs, volume_inputs): (Vec<_>, Vec<_>) =
        loops.iter().map(|store| (store.claims.clone(), store.volumes.clone())).unzip();
    let errors = &provisioner.watch_errors;
    let (passed, watched) = (Arc::clone(&filter), watch_resource(api.all::<PersistentVolumeClaim>(), errors));
    let changed_claims = changed_objects(
        watched.filter_map(move |event| future::ready(passed.filter_claim(event))).reflect(writers.claims),
    );
    let (passed, watched) = (Arc::clone(&filter), watch_resource(api.all::<PersistentVolume>(), errors));
    let volumes_changed = Arc::clone(&shared.volumes_changed);
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
            shared.peers.observe_classes(&api.identity.driver, classes.iter().map(|class| &**class));
            future::ready(())
        });

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
        shared.optional_watches.clone(),
        &provisioner.node,
        provisioner.registered.clone(),
        |has_changed| {
            for store in &loops {
                // The kubelet writes at least every five minutes: a time to look at the disk, whose use nothing reports.
                store.signals.capacity.notify_change();
                if has_changed {
                    // Also those that select this node: its labels decide whether their classes allow it.
                    store.signals.claims.requeue_unbound();
                }
            }
        },
    );
    let running = loops.iter().zip(inputs).map(|(store, input)| store.run(input, config, token));
    // The first loop that ends ends the run. The others are dropped where they wait, which is like a crash: the next
    // run resumes their work.
    tokio::select! {
        ended = future::try_join_all(running) => drop(ended?),
        () = send_changes(changed_claims, claim_inputs) => {}
        () = send_changes(changed_volumes, volume_inputs) => {}
        () = classes => {}
        () = shared.peers.run(api, &shared.optional_watches) => {}
        () = readiness => {}
        () = node => {}
        () = snapshot_loop => {}
        () = lease.run() => {}
    }
    if token.is_cancelled() {
        lease.release().await;
    }
    Ok(())
}

/// What the loops of all stores share.
struct SharedParts {
    caches: ObjectCaches,
    live_claims: Arc<LiveClaims>,
    peers: PeerObserver,
    volumes_changed: Arc<watch::Sender<()>>,
    optional_watches: WatchErrors,
}

/// The reconcilers and the loops of a store, each with its dependencies.
struct StoreLoops {
    signals: StoreSignals,
    claims: UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
    volumes: UnboundedSender<ObjectRef<PackedVolume>>,
    caches: ObjectCaches,
    served: ServedStore,
    store: Arc<dyn VolumeStore>,
    all_claims: AllClaims,
    released: VolumeReconciler,
    sweeper: OrphanSweeper,
    guard: StoreGuard,
    conditions: ConditionReporter,
    limits: LimitReconciler,
    prober: StoreProber,
}

/// The objects of all stores that have changed, or are to be reconciled again.
struct StoreInput {
    claims: UnboundedReceiver<ObjectRef<PersistentVolumeClaim>>,
    requeued: UnboundedReceiver<ObjectRef<PersistentVolumeClaim>>,
    volumes: UnboundedReceiver<ObjectRef<PackedVolume>>,
    sweeps: UnboundedReceiver<SweepRequest>,
}

impl StoreLoops {
    fn new(provisioner: &Provisioner, unit: &StoreUnit, shared: &SharedParts) -> (Self, StoreInput) {
        let Provisioner { config, .. } = provisioner;
        let StoreUnit { api, store, snapshots, guard, failures, served } = unit;
        let caches = &shared.caches;
        let names = provisioner.units.iter().filter_map(|unit| unit.api.identity.store.clone());
        let scope = StoreScope { identity: api.identity.clone(), names: Arc::new(names.collect()) };
        let retries = Arc::new(RetryTracker::new(config.backoff));
        let (claims, requeued) = ClaimQueue::new(caches.claims.clone());
        let (sweeps, sweep_requests) = unbounded_channel();
        let (missing, unlimited) = (Arc::new(watch::Sender::default()), Arc::new(watch::Sender::default()));
        let remover = Arc::new(VolumeRemover {
            api: api.clone(),
            store: Arc::clone(store),
            guard: guard.clone(),
            locks: Arc::clone(&provisioner.locks),
            metrics: Arc::clone(&failures.metrics),
        });
        let capacity = Arc::new(CapacityPublisher {
            api: api.clone(),
            store: Arc::clone(store),
            classes: caches.classes.clone(),
            scope: scope.clone(),
            claims: claims.clone(),
            node: provisioner.node.clone(),
            served: served.clone(),
            failures: failures.clone(),
            watch_errors: shared.optional_watches.clone(),
            backoff: config.backoff,
            state: PublisherState::default(),
        });
        let pending = ClaimReconciler {
            provisioner: ClaimProvisioner {
                api: api.clone(),
                store: Arc::clone(store),
                snapshots: snapshots.clone(),
                remover: Arc::clone(&remover),
                locks: Arc::clone(&provisioner.locks),
                metrics: Arc::clone(&failures.metrics),
                recorder: Arc::clone(&failures.recorder),
                node: provisioner.node.clone(),
            },
            scope: scope.clone(),
            caches: caches.clone(),
            capacity: Arc::clone(&capacity),
            retries: Arc::clone(&retries),
            served: served.clone(),
            peers: shared.peers.clone(),
            failures: failures.clone(),
            node_selection_delay: config.node_selection_delay,
            reschedule_after: config.reschedule_after,
            max_delay: config.backoff.max,
        };
        let bound = ResizeReconciler {
            resizer: ClaimResizer {
                api: api.clone(),
                store: Arc::clone(store),
                locks: Arc::clone(&provisioner.locks),
                metrics: Arc::clone(&failures.metrics),
                recorder: Arc::clone(&failures.recorder),
            },
            caches: caches.clone(),
            retries: Arc::clone(&retries),
            served: served.clone(),
            failures: failures.clone(),
        };
        let released = VolumeReconciler {
            remover: Arc::clone(&remover),
            snapshots: snapshots.clone(),
            live_claims: Arc::clone(&shared.live_claims),
            retries: Arc::clone(&retries),
            served: served.clone(),
            failures: failures.clone(),
        };
        let sweeper = OrphanSweeper {
            api: api.clone(),
            remover,
            snapshots: snapshots.clone(),
            objects: caches.volumes.clone(),
            classes: caches.classes.clone(),
            served: served.clone(),
            missing: Arc::clone(&missing),
            failures: failures.clone(),
            backoff: config.backoff,
        };
        let others = provisioner.units.iter().filter(|other| other.api.identity.store != api.identity.store);
        let guard = StoreGuard {
            api: api.clone(),
            store: Arc::clone(store),
            snapshots: snapshots.clone(),
            other_snapshots: others.filter_map(|other| other.snapshots.clone()).collect(),
            caches: caches.clone(),
            served: served.clone(),
            volumes_changed: Arc::clone(&shared.volumes_changed),
            missing: Arc::clone(&missing),
            sweeps: sweeps.clone(),
            failures: failures.clone(),
            backoff: config.backoff,
        };
        let conditions = ConditionReporter {
            api: api.clone(),
            scope,
            volumes: caches.volumes.clone(),
            served: served.clone(),
            volumes_changed: Arc::clone(&shared.volumes_changed),
            missing,
            unlimited: Arc::clone(&unlimited),
            failures: failures.clone(),
            backoff: config.backoff,
        };
        let limits = LimitReconciler {
            api: api.clone(),
            store: Arc::clone(store),
            caches: caches.clone(),
            locks: Arc::clone(&provisioner.locks),
            volumes_changed: Arc::clone(&shared.volumes_changed),
            unlimited,
            failures: failures.clone(),
            backoff: config.backoff,
            findings: LimitFindings::default(),
        };
        let prober = StoreProber {
            store: Arc::clone(store),
            served: served.clone(),
            failed: Arc::clone(&failures.store_failed),
            retries: Arc::clone(&retries),
            claims: claims.clone(),
        };
        let (changed_claims, claim_receiver) = unbounded_channel();
        let (changed_volumes, volumes) = unbounded_channel();
        let this = Self {
            signals: StoreSignals { retries: Arc::clone(&retries), capacity, claims, sweeps },
            claims: changed_claims,
            volumes: changed_volumes,
            caches: caches.clone(),
            served: served.clone(),
            store: Arc::clone(store),
            all_claims: AllClaims { pending, bound, retries },
            released,
            sweeper,
            guard,
            conditions,
            limits,
            prober,
        };
        (this, StoreInput { claims: claim_receiver, requeued, volumes, sweeps: sweep_requests })
    }

    /// Serves the store until a cancellation, once the calls in progress are complete, or until it can't be served any more.
    async fn run(
        &self,
        input: StoreInput,
        config: &ProvisionerConfig,
        token: &CancellationToken,
    ) -> Result<(), RunError> {
        let StoreInput { claims, requeued, volumes, mut sweeps } = input;
        // A requeued claim is treated as a changed one: an object that it waits for has changed.
        let changed_claims = stream::select(receiver_stream(claims), receiver_stream(requeued));
        // Volumes with a data source are created separately: a copy may take long, and no other claim waits for it.
        let (copies, copied_claims) = unbounded_channel();
        let all_claims = &self.all_claims;
        // A cancellation ends the streams only: the loops still complete the calls in progress.
        let claim_loop = reconcile_changes(
            changed_claims.take_until(token.cancelled()),
            ability_changes(&self.served),
            self.caches.claims.clone(),
            config.concurrency,
            move |claim: Arc<PersistentVolumeClaim>| {
                // Without a receiver, the run ends.
                let is_passed_on = is_copy(&claim) && copies.send(ObjectRef::from_obj(&*claim)).is_ok();
                async move { if is_passed_on { NextRun::OnChange } else { all_claims.reconcile(&claim).await } }
            },
        );
        let copy_loop = reconcile_changes(
            receiver_stream(copied_claims).take_until(token.cancelled()),
            ability_changes(&self.served),
            self.caches.claims.clone(),
            config.copy_concurrency,
            async |claim| all_claims.reconcile(&claim).await,
        );
        let volume_loop = reconcile_changes(
            receiver_stream(volumes).take_until(token.cancelled()),
            ability_changes(&self.served),
            self.caches.volumes.0.clone(),
            config.concurrency,
            async |volume| self.released.reconcile(&volume.unpack()).await,
        );
        let auditing = self.served.while_served(|| run_auditor(&*self.store, &self.limits, config));
        tokio::select! {
            ((), (), ()) = future::join3(claim_loop, copy_loop, volume_loop) => Ok(()),
            () = self.sweeper.run(&mut sweeps) => Ok(()),
            () = auditing => Ok(()),
            () = self.signals.capacity.run() => Ok(()),
            () = self.conditions.run() => Ok(()),
            () = self.prober.run() => Ok(()),
            error = self.guard.run() => Err(error),
            () = canceled_before_serving(&self.served, token) => Ok(()),
        }
    }
}

/// Takes the snapshots of all stores; `None` if none of them has any.
fn snapshot_reconciler(
    provisioner: &Provisioner,
    loops: &[StoreLoops],
    shared: &SharedParts,
) -> Option<SnapshotReconciler> {
    let unit = |(unit, store): (&StoreUnit, &StoreLoops)| {
        let StoreUnit { api, snapshots, failures, served, .. } = unit;
        let recorder = Arc::clone(&failures.recorder);
        Some(SnapshotUnit {
            applier: SnapshotApplier { api: api.clone(), store: snapshots.clone()?, recorder },
            claims: store.signals.claims.clone(),
            sweeps: store.signals.sweeps.clone(),
            served: served.clone(),
            failures: failures.clone(),
        })
    };
    let units: Vec<_> = provisioner.units.iter().zip(loops).filter_map(unit).collect();
    let is_needed = !units.is_empty();
    is_needed.then(|| SnapshotReconciler {
        units,
        volumes: shared.caches.volumes.clone(),
        retries: Arc::new(RetryTracker::new(provisioner.config.backoff)),
        watch_errors: shared.optional_watches.clone(),
        concurrency: provisioner.config.copy_concurrency,
    })
}

/// Sends each change to the loops of all stores: which one an object concerns is decided there.
async fn send_changes<K>(changes: impl Stream<Item = ObjectRef<K>>, loops: Vec<UnboundedSender<ObjectRef<K>>>)
where
    K: Resource<DynamicType = ()>,
{
    let send = |object: ObjectRef<K>| {
        // Without a receiver, the run ends.
        loops.iter().for_each(|store| drop(store.send(object.clone())));
        future::ready(())
    };
    changes.for_each(send).await;
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
    let served = provisioner.units.iter().map(|unit| unit.served.wait_until_served().boxed());
    future::select_all(served).await;
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
