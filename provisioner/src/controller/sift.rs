//! What of the watches is ours: the rest is forgotten before it takes memory.

use std::sync::Arc;

use futures_util::Stream;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Resource, ResourceExt as _};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::apply;
use crate::controller::attempts::Attempts;
use crate::controller::living::Living;
use crate::id::VolumeId;
use crate::plan::{Identity, class_name, ignored, not_here};

/// Which volumes may have nobody who refers to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sweep {
    /// All of them: a list has come anew, and what happened before it isn't known.
    All,
    /// This one: its claim or its object is gone.
    One(VolumeId),
}

/// What the watches tell beside objects.
#[derive(Debug, Clone)]
pub(super) struct Signals {
    claims: UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
    sweeps: UnboundedSender<Sweep>,
}

/// The other end of [`Signals`].
pub(super) struct Heard<S> {
    pub(super) claims: S,
    pub(super) sweeps: UnboundedReceiver<Sweep>,
}

impl Signals {
    pub(super) fn new() -> (Self, Heard<impl Stream<Item = ObjectRef<PersistentVolumeClaim>> + Send + 'static>)
    {
        let (claims, mut to_look_at) = mpsc::unbounded_channel();
        let (sweeps, to_sweep) = mpsc::unbounded_channel();
        let claims_heard = futures_util::stream::poll_fn(move |cx| to_look_at.poll_recv(cx));
        (Self { claims, sweeps }, Heard { claims: claims_heard, sweeps: to_sweep })
    }

    fn look_at(&self, claim: ObjectRef<PersistentVolumeClaim>) {
        // The receiver goes with the run, and then nobody has to look.
        let _ = self.claims.send(claim);
    }

    fn sweep(&self, what: Sweep) {
        let _ = self.sweeps.send(what);
    }
}

/// Lets through what is ours, and tells what follows from the rest.
#[derive(Clone)]
pub(super) struct Sifter {
    pub(super) me: Identity,
    pub(super) attempts: Arc<Attempts>,
    pub(super) signals: Signals,
    pub(super) living: Arc<Living>,
    pub(super) claims: Store<PersistentVolumeClaim>,
    pub(super) volumes: Store<PersistentVolume>,
}

type Item<K> = Result<Event<K>, watcher::Error>;

impl Sifter {
    /// Claims that this node has to do something about.
    pub(super) fn claim(&self, event: Item<PersistentVolumeClaim>) -> Option<Item<PersistentVolumeClaim>> {
        event.iter().for_each(|event| self.living.hear(event));
        let event = sift(event, |claim| ignored(&self.me, claim).is_none(), &self.claims)?;
        match &event {
            Ok(Event::Delete(claim)) => {
                let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                self.attempts.forget(uid);
                self.sweep(VolumeId::from_uid(uid).ok());
            }
            Ok(Event::InitDone) => {
                // Nobody tells of those that went while nobody listened.
                for claim in self.claims.state() {
                    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                    if !self.living.has(uid) {
                        self.attempts.forget(uid);
                    }
                }
                self.signals.sweep(Sweep::All);
            }
            _ => {}
        }
        Some(event)
    }

    /// Volumes on this node.
    pub(super) fn volume(&self, event: Item<PersistentVolume>) -> Option<Item<PersistentVolume>> {
        let is_here = |volume: &PersistentVolume| {
            volume.spec.as_ref().is_some_and(|spec| not_here(&self.me, spec).is_none())
        };
        let event = sift(event, is_here, &self.volumes)?;
        match &event {
            Ok(Event::Delete(volume)) => {
                self.attempts.forget(volume.metadata.uid.as_deref().unwrap_or_default());
                self.sweep(volume.name_any().parse().ok());
                self.look_at_claim_of(volume);
            }
            Ok(Event::InitDone) => self.signals.sweep(Sweep::All),
            _ => {}
        }
        Some(event)
    }

    /// All classes: there are few. A claim that waits for one is looked at again.
    pub(super) fn class(&self, event: Item<StorageClass>) -> Option<Item<StorageClass>> {
        if let Ok(Event::Apply(class) | Event::InitApply(class)) = &event {
            let name = class.metadata.name.as_deref();
            let waiting = self.claims.state().into_iter().filter(|claim| class_name(claim) == name);
            waiting.for_each(|claim| self.signals.look_at(ObjectRef::from_obj(&*claim)));
        }
        Some(event)
    }

    fn sweep(&self, id: Option<VolumeId>) {
        id.into_iter().for_each(|id| self.signals.sweep(Sweep::One(id)));
    }

    /// A claim may have waited for a volume of its volume's name to go.
    fn look_at_claim_of(&self, volume: &PersistentVolume) {
        let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        if let Some((name, namespace)) =
            claim.and_then(|claim| claim.name.as_deref().zip(claim.namespace.as_deref()))
        {
            self.signals.look_at(ObjectRef::new(name).within(namespace));
        }
    }
}

/// Turns what is no longer ours into a deletion, drops what never was, and strips the rest of what nobody here reads.
///
/// Only a deletion of what was ours until now goes through: there is one for each object of the cluster.
fn sift<K>(event: Item<K>, is_ours: impl Fn(&K) -> bool, ours: &Store<K>) -> Option<Item<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let strip = |mut object: K| {
        object.meta_mut().managed_fields = None;
        object
    };
    let ends = |object: K| ours.get(&ObjectRef::from_obj(&object)).map(|_| Ok(Event::Delete(object)));
    match event {
        Ok(Event::Apply(object)) if is_ours(&object) => Some(Ok(Event::Apply(strip(object)))),
        Ok(Event::Apply(object) | Event::Delete(object)) => ends(object),
        Ok(Event::InitApply(object)) if is_ours(&object) => Some(Ok(Event::InitApply(strip(object)))),
        Ok(Event::InitApply(_)) => None,
        other => Some(other),
    }
}

/// What to do about a watch that fails, where that is clear.
pub(super) fn hint(error: &watcher::Error) -> &'static str {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => apply::hint(error),
        _ => "",
    }
}
