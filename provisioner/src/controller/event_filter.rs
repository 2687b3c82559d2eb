//! Filters watch events: foreign objects are dropped before they take memory.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::{self, Event};
use kube::{Resource, ResourceExt as _};
use tokio::sync::mpsc::UnboundedSender;

use crate::api::claim_queue::ClaimQueue;
use crate::api::retry_tracker::RetryTracker;
use crate::api::volume_cache::{PackedVolume, pack_event};
use crate::api::watches::ObjectCaches;
use crate::capacity::publisher::CapacityPublisher;
use crate::claim::decide::claim_ignore_reason;
use crate::deletion::live_claims::LiveClaims;
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::objects::{class_name, is_on_node};
use crate::resize::reconcile::may_resize;
use crate::sweep::SweepRequest;

/// The annotation in which `kubectl apply` keeps the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Passes events of our objects, and sends the signals that follow from others.
pub(crate) struct EventFilter {
    /// Of any store.
    pub(crate) identity: ProvisionerIdentity,
    pub(crate) caches: ObjectCaches,
    pub(crate) live_claims: Arc<LiveClaims>,
    /// The receivers of each store's signals.
    pub(crate) stores: Vec<StoreSignals>,
}

/// The receivers of the signals of one store. Each gets all of them, also those of the objects of other stores.
#[derive(Clone)]
pub(crate) struct StoreSignals {
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) capacity: Arc<CapacityPublisher>,
    pub(crate) claims: ClaimQueue,
    pub(crate) sweeps: UnboundedSender<SweepRequest>,
}

type WatchResult<K> = Result<Event<K>, watcher::Error>;

impl EventFilter {
    /// Passes claims that this node must act on, or may have to select itself for.
    pub(crate) fn filter_claim(
        &self,
        event: WatchResult<PersistentVolumeClaim>,
    ) -> Option<WatchResult<PersistentVolumeClaim>> {
        // Before any claim is dropped: a volume's claim may name another driver or node by now, and still be alive.
        event.iter().for_each(|event| self.live_claims.observe_event(event));
        let is_cached =
            |claim: &PersistentVolumeClaim| self.caches.claims.get(&ObjectRef::from_obj(claim)).is_some();
        let event = filter_event(event, |claim| needs_action(&self.identity, claim), is_cached)?;
        match &event {
            Ok(Event::Delete(claim)) => {
                let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                self.forget(uid);
                if let Ok(id) = VolumeId::from_uid(uid) {
                    self.request_sweep(SweepRequest::One(id));
                }
            }
            Ok(Event::InitDone) => {
                // The watch reports no deletion that happened while it was disconnected.
                for claim in self.caches.claims.state() {
                    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                    if !self.live_claims.contains_uid(uid) {
                        self.forget(uid);
                    }
                }
                self.request_sweep(SweepRequest::All);
            }
            _ => {}
        }
        Some(event)
    }

    /// Passes volumes on this node, packed for their cache.
    pub(crate) fn filter_volume(
        &self,
        event: WatchResult<PersistentVolume>,
    ) -> Option<WatchResult<PackedVolume>> {
        let is_ours = |volume: &PersistentVolume| is_on_node(&self.identity, volume);
        let is_cached = |volume: &PersistentVolume| self.caches.volumes.contains(&volume.name_any());
        let event = filter_event(event, is_ours, is_cached)?;
        match &event {
            Ok(Event::Delete(volume)) => {
                self.forget(volume.metadata.uid.as_deref().unwrap_or_default());
                if let Ok(id) = volume.name_any().parse() {
                    self.request_sweep(SweepRequest::One(id));
                }
                self.requeue_claim_of(volume);
            }
            // A claim that is to be resized may wait for this volume.
            Ok(Event::Apply(volume)) => self.requeue_claim_of(volume),
            Ok(Event::InitDone) => {
                self.request_sweep(SweepRequest::All);
                // The volumes of a list are in the cache when it is complete.
                self.stores.iter().for_each(|store| store.claims.requeue_bound());
            }
            _ => {}
        }
        Some(event.map(pack_event))
    }

    /// Passes all classes, which are few. Claims that wait for one are reconciled again.
    pub(crate) fn filter_class(&self, event: WatchResult<StorageClass>) -> Option<WatchResult<StorageClass>> {
        if matches!(&event, Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone)) {
            self.stores.iter().for_each(|store| store.capacity.notify_change());
        }
        // The classes of a list are in the cache when it is complete.
        // The event is in the cache before the requeued claim is read: one task polls both without a wait in between.
        let waits = |claim: &PersistentVolumeClaim| match &event {
            Ok(Event::Apply(class)) => class_name(claim) == class.metadata.name.as_deref(),
            Ok(Event::InitDone) => true,
            _ => false,
        };
        self.stores.iter().for_each(|store| store.claims.requeue_where(waits));
        Some(event)
    }

    fn forget(&self, uid: &str) {
        self.stores.iter().for_each(|store| store.retries.forget(uid));
    }

    fn request_sweep(&self, request: SweepRequest) {
        for store in &self.stores {
            // Fails only if the run has ended, and then nothing needs to be swept.
            let _ = store.sweeps.send(request.clone());
        }
    }

    /// Reconciles a claim that may wait for a change of its PersistentVolume, or for the deletion of one with its
    /// volume's name.
    fn requeue_claim_of(&self, volume: &PersistentVolume) {
        let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        if let Some((name, namespace)) =
            claim.and_then(|claim| claim.name.as_deref().zip(claim.namespace.as_deref()))
        {
            let claim = ObjectRef::new(name).within(namespace);
            self.stores.iter().for_each(|store| store.claims.requeue(claim.clone()));
        }
    }
}

/// Returns whether this node must provision a claim, or resize its volume.
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
    is_cached: impl Fn(&K) -> bool,
) -> Option<WatchResult<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    // Nothing reads these two, and they can be larger than the rest of the object.
    let strip = |mut object: K| {
        let meta = object.meta_mut();
        meta.managed_fields = None;
        if let Some(annotations) = &mut meta.annotations {
            annotations.remove(LAST_APPLIED);
        }
        object
    };
    // An object that was ours until this event is still in the cache, and only a deletion removes it.
    let deletion = |object: K| is_cached(&object).then(|| Ok(Event::Delete(object)));
    match event {
        Ok(Event::Apply(object)) if is_ours(&object) => Some(Ok(Event::Apply(strip(object)))),
        Ok(Event::Apply(object) | Event::Delete(object)) => deletion(object),
        Ok(Event::InitApply(object)) if is_ours(&object) => Some(Ok(Event::InitApply(strip(object)))),
        // A complete list replaces the cache, so a foreign object in it needs no deletion.
        Ok(Event::InitApply(_)) => None,
        other => Some(other),
    }
}
