//! Requeues cached claims when something else has changed that they may wait for.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::identity::SELECTED_NODE;
use crate::objects::{bound_volume_name, nonempty_annotation};

/// Has claims reconciled again.
#[derive(Clone)]
pub(crate) struct ClaimQueue {
    claims: Store<PersistentVolumeClaim>,
    requeued: UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
}

impl ClaimQueue {
    /// A queue of the claims in this cache, and its end.
    pub(crate) fn new(
        claims: Store<PersistentVolumeClaim>,
    ) -> (Self, UnboundedReceiver<ObjectRef<PersistentVolumeClaim>>) {
        let (requeued, receiver) = unbounded_channel();
        (Self { claims, requeued }, receiver)
    }

    pub(crate) fn requeue(&self, claim: ObjectRef<PersistentVolumeClaim>) {
        // Fails only if the run has ended, and then nothing needs to be reconciled.
        let _ = self.requeued.send(claim);
    }

    /// Requeues the claims that match.
    pub(crate) fn requeue_where(&self, is_meant: impl Fn(&PersistentVolumeClaim) -> bool) {
        let meant = self.claims.state().into_iter().filter(|claim| is_meant(claim));
        meant.for_each(|claim| self.requeue(ObjectRef::from_obj(&*claim)));
    }

    /// Requeues the claims that no node has been selected for: this node may be the one now.
    pub(crate) fn requeue_unselected(&self) {
        self.requeue_where(|claim| nonempty_annotation(claim, SELECTED_NODE).is_none());
    }

    /// Requeues the claims without a volume.
    pub(crate) fn requeue_unbound(&self) {
        self.requeue_where(|claim| bound_volume_name(claim).is_none());
    }

    /// Requeues the claims whose volumes are being resized: their volume may have changed, or there may be room for them.
    pub(crate) fn requeue_bound(&self) {
        self.requeue_where(|claim| bound_volume_name(claim).is_some());
    }
}
