//! The control loop: watches, plans, applies, and schedules retries.

use std::collections::BTreeSet;
use std::future::ready;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, Stream, StreamExt as _, future, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::runtime::controller::{Action, Config as ControllerConfig, Error as ControllerError, applier};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::apply::{ApplyError, ApplyOutcome, status_code, volume_reference};
use crate::error_chain::format_chain;
use crate::event::EventReason;
use crate::id::VolumeId;
use crate::plan::{
    ClaimAction, ClaimIgnoreReason, ClaimRejection, ObservedClaim, VolumeAction, bound_volume_name,
    claim_reference, class_name, plan_claim, plan_volume,
};
use crate::provisioner::{Provisioner, RunError};
use crate::store_status::StoreStatus;

pub(crate) mod api_health;
mod bound_claims;
mod capacity_publisher;
mod condition_reporter;
mod event_filter;
mod limit_auditor;
mod live_claims;
pub(crate) mod node_observer;
mod orphan_sweeper;
mod retry_tracker;
mod snapshots;
mod store_guard;
pub(crate) mod watch_errors;

use capacity_publisher::CapacityPublisher;
use event_filter::{EventFilter, WatchSignals};
use live_claims::LiveClaims;
use retry_tracker::RetryTracker;
use watch_errors::{WatchErrors, with_backoff};

/// How long to wait for an object that may not be in the cache yet, before it is reported as missing.
const CACHE_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Everything that reconciling an object needs.
struct ReconcileContext {
    provisioner: Provisioner,
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
    classes: Store<StorageClass>,
    retries: Arc<RetryTracker>,
    live_claims: Arc<LiveClaims>,
    signals: WatchSignals,
    capacity: Arc<CapacityPublisher>,
    /// The errors of watches without which volumes are served all the same.
    optional_watches: WatchErrors,
    /// Signals that the cached volumes have changed.
    volumes_changed: watch::Sender<()>,
    /// The volumes with a PersistentVolume that the served store does not have, as of the last sweep.
    missing_volumes: watch::Sender<BTreeSet<VolumeId>>,
}

/// Runs the controller until the token is canceled, a watch ends, or the store cannot be served.
pub(crate) async fn run_controller(
    provisioner: &Provisioner,
    token: &CancellationToken,
    on_ready: impl FnOnce() + Send,
) -> Result<(), RunError> {
    let (claims, claims_writer) = reflector::store();
    let (volumes, volumes_writer) = reflector::store();
    let (classes, classes_writer) = reflector::store();
    let retries = Arc::new(RetryTracker::new(provisioner.config.backoff));
    let (live_claims, (signals, receivers)) = (Arc::new(LiveClaims::default()), WatchSignals::new());
    let capacity = Arc::<CapacityPublisher>::default();
    let context = Arc::new(ReconcileContext {
        provisioner: provisioner.clone(),
        claims: claims.clone(),
        volumes: volumes.clone(),
        classes,
        retries: Arc::clone(&retries),
        live_claims: Arc::clone(&live_claims),
        signals: signals.clone(),
        capacity: Arc::clone(&capacity),
        optional_watches: provisioner.watch_errors.of_optional_apis(),
        volumes_changed: watch::Sender::new(()),
        missing_volumes: watch::Sender::default(),
    });
    provisioner.store_status.send_replace(StoreStatus::Unknown);
    let filter = EventFilter {
        identity: provisioner.config.identity.clone(),
        retries,
        live_claims,
        signals,
        capacity,
        claims: claims.clone(),
        volumes: volumes.clone(),
    };

    let watch_errors = &provisioner.watch_errors;
    let claim_events = {
        let filter = filter.clone();
        watch_resource(context.resource_api(), watch_errors)
            .filter_map(move |event| ready(filter.filter_claim(event)))
            .reflect(claims_writer)
    };
    let volume_events = {
        let filter = filter.clone();
        watch_resource(context.resource_api(), watch_errors)
            .filter_map(move |event| ready(filter.filter_volume(event)))
            .reflect(volumes_writer)
            .inspect({
                let context = Arc::clone(&context);
                move |_| context.volumes_changed.send_replace(())
            })
    };
    let class_events = watch_resource(context.resource_api(), watch_errors)
        .filter_map(move |event| ready(filter.filter_class(event)))
        .reflect(classes_writer)
        .for_each(|_| ready(()));

    let config = ControllerConfig::default().concurrency(provisioner.config.concurrency.get());
    let queue =
        stream::select(changed_objects(claim_events), receivers.claims.map(Ok)).take_until(token.cancelled());
    let claim_loop = applier(
        |object, context| Box::pin(reconcile_claim(object, context)),
        claim_error_policy,
        Arc::clone(&context),
        claims,
        queue,
        config.clone(),
    );
    let queue = changed_objects(volume_events).take_until(token.cancelled());
    let volume_loop = applier(
        |object, context| Box::pin(reconcile_volume(object, context)),
        volume_error_policy,
        Arc::clone(&context),
        volumes,
        queue,
        config,
    );
    let readiness = async {
        context.report_ready(on_ready).await;
        std::future::pending().await
    };
    let sweeping = async {
        context.served_store().await;
        orphan_sweeper::run_sweeper(&context, receivers.sweeps).await;
    };
    let auditing = context.while_served(|| limit_auditor::run_auditor(provisioner));
    let publishing = context.while_served(|| capacity_publisher::run_publisher(&context));
    tokio::select! {
        ((), ()) = future::join(drain_outcomes(claim_loop), drain_outcomes(volume_loop)) => {}
        () = class_events => {}
        () = readiness => {}
        () = sweeping => {}
        () = auditing => {}
        () = publishing => {}
        () = node_observer::watch_node(&context) => {}
        () = snapshots::run_snapshots(&context) => {}
        () = condition_reporter::run_reporter(&context) => {}
        error = context.guard_store() => return Err(error),
        () = context.canceled_before_serving(token) => {}
    }
    Ok(())
}

/// Watches all objects of a kind: lists them, then follows changes, with bookmarks, and retries after errors.
///
/// No selector can restrict it to our objects: the driver of a claim is an annotation, and that of a volume a
/// field that the API server does not index. A label could, but removing the label would leak the volume. So
/// each object is decoded once, and foreign ones are dropped before they are cached; lists are paged.
fn watch_resource<K>(
    api: Api<K>,
    watch_errors: &WatchErrors,
) -> impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send + use<K>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    with_backoff(watcher(api, watcher::Config::default()), watch_errors.clone())
}

impl ReconcileContext {
    fn resource_api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.provisioner.applier.client.0.clone())
    }

    /// Waits for the first lists. Waits forever if a watch has ended before, because then the run ends.
    async fn wait_for_cache_sync(&self) {
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
    async fn canceled_before_serving(&self, token: &CancellationToken) {
        token.cancelled().await;
        self.unserved_store().await;
    }

    async fn report_ready(&self, on_ready: impl FnOnce() + Send) {
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

    /// The cached PersistentVolume of a claim's volume, if it is one of ours.
    fn cached_volume(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let uid = claim.metadata.uid.as_deref()?;
        self.volumes.get(&ObjectRef::new(&format!("pvc-{uid}")))
    }

    async fn try_reconcile_claim(&self, claim: &PersistentVolumeClaim) -> Result<Action, ApplyError> {
        let store = self.served_store().await;
        let applier = &self.provisioner.applier;
        let class = class_name(claim).and_then(|name| self.classes.get(&ObjectRef::new(name)));
        let volume = self.cached_volume(claim);
        let seen = ObservedClaim { claim, class: class.as_deref(), volume: volume.as_deref() };
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let applied = match plan_claim(&applier.identity, seen) {
            ClaimAction::Provision(spec) => {
                // This node was deselected and is selected again: retry with a growing delay.
                if let Some(time) = self.retries.remaining_hold(&uid) {
                    return Ok(Action::requeue(time));
                }
                let Some(class) = &class else { return Ok(Action::await_change()) };
                let may_reschedule =
                    self.retries.failure_count(&uid) + 1 >= self.provisioner.config.reschedule_after;
                applier.provision_claim(&spec, (class, store.id()), may_reschedule).await?
            }
            ClaimAction::SelectNode => {
                let within = self.provisioner.config.node_selection_delay;
                let hold = self.retries.remaining_hold(&uid).unwrap_or_default();
                match self
                    .retries
                    .remaining_wait(&uid, || hold.max(within.mul_f64(retry_tracker::random_fraction())))
                {
                    Some(time) => return Ok(Action::requeue(time)),
                    // Earlier failures are kept: whether the claim can be provisioned here is not known yet.
                    None => {
                        // Otherwise a change of the node or of the capacity brings the claim back.
                        if self.has_space_for(claim).await? {
                            applier.select_node(claim).await?;
                        }
                        return Ok(Action::await_change());
                    }
                }
            }
            ClaimAction::Wait(rejection) => match self.retries.remaining_wait(&uid, || CACHE_GRACE_PERIOD) {
                Some(time) => return Ok(Action::requeue(time)),
                None => ApplyOutcome::Rejected(rejection),
            },
            ClaimAction::Reject(rejection) => ApplyOutcome::Rejected(rejection),
            ClaimAction::Ignore(ClaimIgnoreReason::WaitsForConsumer) => return Ok(Action::await_change()),
            ClaimAction::Ignore(_) => ApplyOutcome::Done,
        };
        match applied {
            ApplyOutcome::Done => {
                self.retries.record_success(&uid);
                Ok(Action::await_change())
            }
            ApplyOutcome::Exhausted { claim: live, size } => {
                self.publish_shortage(size).await?;
                applier.deselect_node(&live).await?;
                self.record_failed_provision(claim);
                self.retries.record_reschedule(&uid);
                Ok(Action::await_change())
            }
            ApplyOutcome::HandedOver => {
                self.retries.record_reschedule(&uid);
                Ok(Action::await_change())
            }
            ApplyOutcome::Rejected(rejection) => Ok(self.reject_claim(claim, &uid, &rejection).await),
        }
    }

    /// Emits a rejection once and waits for a change. A name conflict is retried, because it depends on
    /// another object.
    async fn reject_claim(
        &self,
        claim: &PersistentVolumeClaim,
        uid: &str,
        rejection: &ClaimRejection,
    ) -> Action {
        let text = rejection.to_string();
        if self.retries.is_new_rejection(uid, &text) {
            let about = claim_reference(claim);
            let (namespace, name) = (about.namespace.as_deref(), about.name.as_deref());
            tracing::warn!(namespace, claim = name, "claim rejected: {text}");
            self.record_failed_provision(claim);
            self.provisioner
                .applier
                .recorder
                .record_event(&about, EventReason::ProvisioningFailed, &text)
                .await;
        }
        match rejection {
            ClaimRejection::NameConflict { .. } => Action::requeue(self.provisioner.config.backoff.max),
            _ => Action::await_change(),
        }
    }

    /// Counts an error of the API server.
    fn record_api_error(&self, error: &ApplyError) {
        if let ApplyError::Api { call, .. } = error {
            self.provisioner.applier.metrics.record_api_error(call.metric_label());
        }
    }

    fn record_failed_provision(&self, claim: &PersistentVolumeClaim) {
        let class = class_name(claim).unwrap_or_default();
        self.provisioner.applier.metrics.record_provision(class, Duration::ZERO, false);
    }

    async fn try_reconcile_volume(&self, volume: &PersistentVolume) -> Result<Action, ApplyError> {
        let store = self.served_store().await;
        let applier = &self.provisioner.applier;
        let uid = volume.metadata.uid.clone().unwrap_or_default();
        applier.confirm_publication(volume).await?;
        match plan_volume(&applier.identity, volume) {
            VolumeAction::Delete(id) => {
                let is_claim_cached = self.live_claims.contains_uid(id.claim_uid());
                applier.delete_volume(volume, (&id, store.id()), is_claim_cached).await?;
            }
            VolumeAction::RecordClaim { uid } => applier.record_claim(volume, &uid).await?,
            VolumeAction::AddFinalizer => applier.add_finalizer(volume).await?,
            VolumeAction::RemoveFinalizer => applier.remove_finalizer(volume).await?,
            VolumeAction::Ignore(_) => {}
            VolumeAction::Reject(rejection) => {
                let text = rejection.to_string();
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                if self.retries.is_new_rejection(&uid, &text) {
                    tracing::warn!(pv = name, "volume not deleted: {text}");
                    let class = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
                    applier.metrics.record_delete(class.unwrap_or_default(), Duration::ZERO, false);
                    let about = volume_reference(volume);
                    applier.recorder.record_event(&about, EventReason::VolumeFailedDelete, &text).await;
                }
                return Ok(Action::await_change());
            }
        }
        self.retries.record_success(&uid);
        Ok(Action::await_change())
    }
}

/// Whether a failure gets an event: temporary errors of the API server do not, because they are retried.
fn is_worth_an_event(error: &ApplyError) -> bool {
    match error {
        ApplyError::Api { source, .. } => {
            status_code(source).is_some_and(|code| (400..409).contains(&code) || code == 422)
        }
        _ => true,
    }
}

async fn reconcile_claim(
    claim: Arc<PersistentVolumeClaim>,
    context: Arc<ReconcileContext>,
) -> Result<Action, ApplyError> {
    if bound_volume_name(&claim).is_some() {
        return bound_claims::reconcile_bound_claim(&claim, &context).await;
    }
    let done = catch_panic(context.try_reconcile_claim(&claim)).await;
    if let Err(error) = &done {
        context.record_failed_provision(&claim);
        context.record_api_error(error);
    }
    if let Err(error) = &done
        && is_worth_an_event(error)
    {
        let (recorder, about) = (&context.provisioner.applier.recorder, claim_reference(&claim));
        recorder.record_event(&about, EventReason::ProvisioningFailed, &format_chain(error)).await;
    }
    done
}

async fn reconcile_volume(
    volume: Arc<PersistentVolume>,
    context: Arc<ReconcileContext>,
) -> Result<Action, ApplyError> {
    let done = catch_panic(context.try_reconcile_volume(&volume)).await;
    if let Err(error) = &done {
        context.record_api_error(error);
    }
    if let Err(error) = &done
        && is_worth_an_event(error)
    {
        let (recorder, about) = (&context.provisioner.applier.recorder, volume_reference(&volume));
        recorder.record_event(&about, EventReason::VolumeFailedDelete, &format_chain(error)).await;
    }
    done
}

/// Turns a panic into an error: a bug must affect one object, not the node.
async fn catch_panic(work: impl Future<Output = Result<Action, ApplyError>>) -> Result<Action, ApplyError> {
    let panicked = |payload: Box<dyn std::any::Any + Send>| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(ApplyError::Panicked { text })
    };
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}

fn claim_error_policy(
    claim: Arc<PersistentVolumeClaim>,
    error: &ApplyError,
    context: Arc<ReconcileContext>,
) -> Action {
    let time = context.retries.record_failure(claim.metadata.uid.as_deref().unwrap_or_default());
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let act = if bound_volume_name(&claim).is_some() { "resize the volume of" } else { "provision" };
    tracing::warn!(claim = name, "{act} claim: {}; retrying in {time:?}", format_chain(error));
    Action::requeue(time)
}

fn volume_error_policy(
    volume: Arc<PersistentVolume>,
    error: &ApplyError,
    context: Arc<ReconcileContext>,
) -> Action {
    let time = context.retries.record_failure(volume.metadata.uid.as_deref().unwrap_or_default());
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    tracing::warn!(pv = name, "reconcile PersistentVolume: {}; retrying in {time:?}", format_chain(error));
    Action::requeue(time)
}

/// The changed objects. Watch errors are dropped here: they were logged, and the watch retries.
fn changed_objects<K>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
) -> impl Stream<Item = Result<ObjectRef<K>, watcher::Error>> + Send
where
    K: kube::Resource<DynamicType = ()> + Send,
{
    let objects = events.applied_objects().filter_map(|object| ready(object.ok()));
    objects.map(|object| Ok(ObjectRef::from_obj(&object)))
}

/// Runs a loop to its end. Failures were logged where they happened; an object deleted before its turn is not
/// a failure.
async fn drain_outcomes<K>(
    outcomes: impl Stream<Item = Result<(ObjectRef<K>, Action), ControllerError<ApplyError, watcher::Error>>>,
) where
    K: kube::Resource<DynamicType = ()>,
{
    let log_error = |outcome| {
        if let Err(ControllerError::RunnerError(error)) = outcome {
            tracing::error!("control loop failed: {error}");
        }
        ready(())
    };
    outcomes.for_each(log_error).await;
}
