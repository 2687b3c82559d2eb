//! Filters watch events: foreign objects are dropped before they take memory.

use std::sync::Arc;

use futures_util::Stream;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Resource, ResourceExt as _};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::api::retry_tracker::RetryTracker;

use crate::capacity::publisher::CapacityPublisher;
use crate::claim::decide::{claim_ignore_reason, class_name};
use crate::controller::ReconcileContext;
use crate::deletion::decide::ownership_mismatch;
use crate::deletion::live_claims::LiveClaims;
use crate::id::VolumeId;
use crate::plan::ProvisionerIdentity;
use crate::resize::expansion::{bound_volume_name, may_resize};

/// Which volumes may have lost their claim or their PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SweepRequest {
    /// All volumes: a watch has listed again, and changes before it may have been missed.
    All,
    /// One volume: its claim or its PersistentVolume was deleted.
    One(VolumeId),
}

/// Sends the signals that follow from watch events.
#[derive(Debug, Clone)]
pub(crate) struct WatchSignals {
    claims: UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
    sweeps: UnboundedSender<SweepRequest>,
}

/// Receives the signals of [`WatchSignals`].
pub(crate) struct SignalReceivers<S> {
    pub(crate) claims: S,
    pub(crate) sweeps: UnboundedReceiver<SweepRequest>,
}

impl WatchSignals {
    pub(crate) fn new()
    -> (Self, SignalReceivers<impl Stream<Item = ObjectRef<PersistentVolumeClaim>> + Send + 'static>) {
        let (claims, claim_receiver) = mpsc::unbounded_channel();
        let (sweeps, sweep_receiver) = mpsc::unbounded_channel();
        let receivers = SignalReceivers { claims: receiver_stream(claim_receiver), sweeps: sweep_receiver };
        (Self { claims, sweeps }, receivers)
    }

    pub(crate) fn requeue_claim(&self, claim: ObjectRef<PersistentVolumeClaim>) {
        // Fails only if the run has ended, and then nothing needs to be reconciled.
        let _ = self.claims.send(claim);
    }

    pub(crate) fn request_sweep(&self, request: SweepRequest) {
        let _ = self.sweeps.send(request);
    }
}

/// The stream of what a channel receives.
pub(crate) fn receiver_stream<T: Send + 'static>(
    mut receiver: UnboundedReceiver<T>,
) -> impl Stream<Item = T> + Send + 'static {
    futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx))
}

/// Passes events of our objects, and sends the signals that follow from others.
pub(crate) struct EventFilter {
    identity: ProvisionerIdentity,
    retries: Arc<RetryTracker>,
    signals: WatchSignals,
    live_claims: Arc<LiveClaims>,
    capacity: Arc<CapacityPublisher>,
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
}

type WatchResult<K> = Result<Event<K>, watcher::Error>;

impl EventFilter {
    pub(crate) fn new(context: &ReconcileContext) -> Self {
        Self {
            identity: context.provisioner.config.identity.clone(),
            retries: Arc::clone(&context.retries),
            signals: context.signals.clone(),
            live_claims: Arc::clone(&context.live_claims),
            capacity: Arc::clone(&context.capacity),
            claims: context.claims.clone(),
            volumes: context.volumes.clone(),
        }
    }

    /// Passes claims that this node must act on.
    pub(crate) fn filter_claim(
        &self,
        event: WatchResult<PersistentVolumeClaim>,
    ) -> Option<WatchResult<PersistentVolumeClaim>> {
        event.iter().for_each(|event| self.live_claims.observe_event(event));
        let event = filter_event(event, |claim| needs_action(&self.identity, claim), &self.claims)?;
        match &event {
            Ok(Event::Delete(claim)) => {
                let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                self.retries.forget(uid);
                self.request_volume_sweep(VolumeId::from_uid(uid).ok());
            }
            Ok(Event::InitDone) => {
                // The watch reports no deletion that happened while it was disconnected.
                for claim in self.claims.state() {
                    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                    if !self.live_claims.contains_uid(uid) {
                        self.retries.forget(uid);
                    }
                }
                self.signals.request_sweep(SweepRequest::All);
            }
            _ => {}
        }
        Some(event)
    }

    /// Passes volumes on this node.
    pub(crate) fn filter_volume(
        &self,
        event: WatchResult<PersistentVolume>,
    ) -> Option<WatchResult<PersistentVolume>> {
        let is_on_node = |volume: &PersistentVolume| {
            volume.spec.as_ref().is_some_and(|spec| ownership_mismatch(&self.identity, spec).is_none())
        };
        let event = filter_event(event, is_on_node, &self.volumes)?;
        match &event {
            Ok(Event::Delete(volume)) => {
                self.retries.forget(volume.metadata.uid.as_deref().unwrap_or_default());
                self.request_volume_sweep(volume.name_any().parse().ok());
                self.requeue_claim_of(volume);
            }
            // It may be the volume of a claim that is to be resized.
            Ok(Event::Apply(volume)) => self.requeue_claim_of(volume),
            Ok(Event::InitDone) => {
                self.signals.request_sweep(SweepRequest::All);
                // The volumes of a list are in the cache when it is complete.
                self.requeue_bound_claims();
            }
            _ => {}
        }
        Some(event)
    }

    /// Passes all classes, which are few. Claims that wait for one are reconciled again.
    pub(crate) fn filter_class(&self, event: WatchResult<StorageClass>) -> Option<WatchResult<StorageClass>> {
        if matches!(&event, Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone)) {
            self.capacity.notify_change();
        }
        // The classes of a list are in the cache when it is complete.
        let is_meant = |claim: &PersistentVolumeClaim| match &event {
            Ok(Event::Apply(class)) => class_name(claim) == class.metadata.name.as_deref(),
            Ok(Event::InitDone) => true,
            _ => false,
        };
        let waiting = self.claims.state().into_iter().filter(|claim| is_meant(claim));
        waiting.for_each(|claim| self.signals.requeue_claim(ObjectRef::from_obj(&*claim)));
        Some(event)
    }

    fn request_volume_sweep(&self, id: Option<VolumeId>) {
        id.into_iter().for_each(|id| self.signals.request_sweep(SweepRequest::One(id)));
    }

    /// Reconciles the claims whose PersistentVolumes may have changed while the watch was disconnected.
    fn requeue_bound_claims(&self) {
        let bound = self.claims.state().into_iter().filter(|claim| bound_volume_name(claim).is_some());
        bound.for_each(|claim| self.signals.requeue_claim(ObjectRef::from_obj(&*claim)));
    }

    /// Reconciles a claim that may wait for a change of its PersistentVolume, or for the deletion of one with its
    /// volume's name.
    fn requeue_claim_of(&self, volume: &PersistentVolume) {
        let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        if let Some((name, namespace)) =
            claim.and_then(|claim| claim.name.as_deref().zip(claim.namespace.as_deref()))
        {
            self.signals.requeue_claim(ObjectRef::new(name).within(namespace));
        }
    }
}

/// Whether this node must provision a claim, or resize its volume.
fn needs_action(identity: &ProvisionerIdentity, claim: &PersistentVolumeClaim) -> bool {
    claim_ignore_reason(identity, claim).is_none() || may_resize(identity, claim)
}

/// Turns an object that is no longer ours into a deletion, drops foreign ones, and strips unused fields from
/// the rest.
///
/// Passes a deletion only if the object was ours until now: the watch reports one for each object of the
/// cluster.
fn filter_event<K>(
    event: WatchResult<K>,
    is_ours: impl Fn(&K) -> bool,
    ours: &Store<K>,
) -> Option<WatchResult<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let strip = |mut object: K| {
        object.meta_mut().managed_fields = None;
        object
    };
    let deletion = |object: K| ours.get(&ObjectRef::from_obj(&object)).map(|_| Ok(Event::Delete(object)));
    match event {
        Ok(Event::Apply(object)) if is_ours(&object) => Some(Ok(Event::Apply(strip(object)))),
        Ok(Event::Apply(object) | Event::Delete(object)) => deletion(object),
        Ok(Event::InitApply(object)) if is_ours(&object) => Some(Ok(Event::InitApply(strip(object)))),
        Ok(Event::InitApply(_)) => None,
        other => Some(other),
    }
}

/// What to do about a failing watch, if that is clear.
pub(crate) fn watch_hint(error: &watcher::Error) -> &'static str {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => crate::apply::error_hint(error),
        _ => "",
    }
}
