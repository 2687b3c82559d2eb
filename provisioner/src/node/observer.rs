//! Watches the Node of this provisioner: whether pods can be scheduled to its volumes.

use std::future::ready;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;

use crate::api::watch_backoff::with_backoff;
use crate::controller::ReconcileContext;
use crate::node::{NodeFacts, TopologyMismatch, topology_mismatch};

/// What is known of the Node; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeObserver(Arc<watch::Sender<ObservedNode>>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ObservedNode {
    /// `None` if it does not exist, or is not known yet.
    facts: Option<NodeFacts>,
    mismatch: Option<TopologyMismatch>,
}

impl NodeObserver {
    /// The UID of the Node, if it exists.
    pub(crate) fn uid(&self) -> Option<String> {
        self.0.borrow().facts.as_ref().map(|facts| facts.uid.clone())
    }

    /// Why pods can't be scheduled to the volumes of the node.
    pub(crate) fn mismatch(&self) -> Option<TopologyMismatch> {
        self.0.borrow().mismatch.clone()
    }

    /// Records the Node, and logs a mismatch when it begins and when it ends. Returns whether anything changed.
    fn record(&self, facts: Option<NodeFacts>, mismatch: Option<TopologyMismatch>) -> bool {
        let old = self.mismatch();
        match &mismatch {
            Some(mismatch) if old.as_ref() != Some(mismatch) => tracing::error!("{mismatch}"),
            None if old.is_some() => {
                tracing::info!("the label of the node is repaired: pods can use its volumes")
            }
            _ => {}
        }
        let new = ObservedNode { facts, mismatch };
        self.0.send_if_modified(|old| std::mem::replace(old, new.clone()) != new)
    }
}

/// Watches the Node, and what depends on it. Never returns.
pub(crate) async fn watch_node(context: &ReconcileContext) {
    let identity = &context.provisioner.applier.identity;
    let config = watcher::Config::default().fields(&format!("metadata.name={}", identity.node));
    let events =
        with_backoff(watcher::watcher(context.resource_api(), config), context.optional_watches.clone());
    let mut listed = None;
    let observe = |event: Result<Event<Node>, watcher::Error>| {
        let is_ours = |node: &Node| node.metadata.name.as_deref() == Some(identity.node.as_str());
        match event {
            Ok(Event::InitApply(node)) if is_ours(&node) => listed = Some(node),
            Ok(Event::InitDone) => context.observe_node(listed.take().as_ref()),
            Ok(Event::Apply(node)) if is_ours(&node) => context.observe_node(Some(&node)),
            Ok(Event::Delete(node)) if is_ours(&node) => context.observe_node(None),
            // Of other nodes, or logged.
            Ok(_) | Err(_) => {}
        }
        ready(())
    };
    events.for_each(observe).await;
}

impl ReconcileContext {
    fn observe_node(&self, node: Option<&Node>) {
        let identity = &self.provisioner.applier.identity;
        let facts = node.map(|node| NodeFacts::of(identity, node));
        let is_registered =
            self.provisioner.registered.as_ref().is_some_and(|registered| *registered.borrow());
        let mismatch = facts.as_ref().and_then(|facts| topology_mismatch(identity, facts, is_registered));
        // The kubelet writes at least every five minutes: a time to look at the disk, whose use nothing reports.
        self.capacity.notify_change();
        if self.provisioner.node.record(facts, mismatch) {
            self.requeue_unselected_claims();
        }
    }
}
