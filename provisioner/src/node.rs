//! The Node of this provisioner: whether it takes claims that no scheduler has placed, and whether pods can be scheduled to
//! its volumes.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;

use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;
use crate::api::writer::ApiWriter;
use crate::identity::ProvisionerIdentity;
use crate::name::NodeName;

/// The fields of a Node that matter here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    pub(crate) uid: String,
    pub(crate) labels: Arc<BTreeMap<String, String>>,
    /// The taint, or the cordon, that keeps ordinary pods from it.
    taint: Option<String>,
}

impl NodeFacts {
    pub(crate) fn of(node: &Node) -> Self {
        Self {
            uid: node.metadata.uid.clone().unwrap_or_default(),
            labels: Arc::new(node.metadata.labels.clone().unwrap_or_default()),
            taint: taint_against_volumes(node).map(str::to_owned),
        }
    }
}

/// The label that the affinity of the node's volumes refers to is missing or different, so that no pod is
/// scheduled to them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {node} has {} instead of {key}={node}, so no pod can use its volumes: `kubectl label --overwrite node {node} \
     {key}={node}`",
    found.as_ref().map_or("no label".to_owned(), |found| format!("the label {key}={found}"))
)]
pub(crate) struct NodeLabelMismatch {
    node: NodeName,
    key: String,
    found: Option<String>,
}

/// Compares the node's label with its name. The kubelet sets the label before it reports that the driver is
/// registered, so that it may be missing until then.
pub(crate) fn topology_mismatch(
    identity: &ProvisionerIdentity,
    facts: &NodeFacts,
    is_registered: bool,
) -> Option<NodeLabelMismatch> {
    let found = facts.labels.get(&identity.driver.topology_key());
    let is_right = match found {
        Some(found) => found == identity.node.as_str(),
        None => !is_registered,
    };
    let mismatch = || NodeLabelMismatch {
        node: identity.node.clone(),
        key: identity.driver.topology_key(),
        found: found.cloned(),
    };
    (!is_right).then(mismatch)
}

/// The taint, by its key, or the cordon that keeps ordinary pods from a node. A claim with immediate binding has
/// no pod whose tolerations could decide, so such a node leaves it to others.
pub(crate) fn taint_against_volumes(node: &Node) -> Option<&str> {
    let spec = node.spec.as_ref()?;
    let mut taints = spec.taints.iter().flatten();
    // `PreferNoSchedule` only makes the scheduler prefer other nodes.
    let repels = |effect: &str| matches!(effect, "NoSchedule" | "NoExecute");
    match spec.unschedulable {
        Some(true) => Some("cordoned"),
        _ => taints.find(|taint| repels(&taint.effect)).map(|taint| &*taint.key),
    }
}

/// The Node of this provisioner, as its watch has reported it. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeObserver(Arc<watch::Sender<ObservedNode>>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ObservedNode {
    /// `None` if it does not exist, or is not known yet.
    facts: Option<NodeFacts>,
    mismatch: Option<NodeLabelMismatch>,
}

impl NodeObserver {
    /// The Node, if it exists and is known.
    pub(crate) fn facts(&self) -> Option<NodeFacts> {
        self.0.borrow().facts.clone()
    }

    /// Waits until the Node exists, and gives its UID.
    pub(crate) async fn wait_until_known(&self) -> String {
        let mut observed = self.0.subscribe();
        // The sender lives as long as `self`, so the wait doesn't fail.
        let known =
            observed.wait_for(|observed| observed.facts.is_some()).await.map(|known| known.facts.clone());
        match known.ok().flatten() {
            Some(facts) => facts.uid,
            None => std::future::pending().await,
        }
    }

    /// The mismatch because of which pods can't be scheduled to the volumes of the node.
    pub(crate) fn mismatch(&self) -> Option<NodeLabelMismatch> {
        self.0.borrow().mismatch.clone()
    }

    /// Records the Node, and logs a mismatch when it begins and when it ends. Returns whether anything changed.
    fn record(&self, facts: Option<NodeFacts>, mismatch: Option<NodeLabelMismatch>) -> bool {
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

/// Watches the Node. Never returns. Calls `on_event` after each event with whether anything has changed.
pub(crate) async fn watch_node(
    api: &ApiWriter,
    watch_errors: WatchErrors,
    observer: &NodeObserver,
    registered: Option<watch::Receiver<bool>>,
    on_event: impl Fn(bool),
) {
    let identity = &api.identity;
    let config = watcher::Config::default().fields(&format!("metadata.name={}", identity.node));
    let events = with_backoff(watcher::watcher(api.all(), config), watch_errors);
    let observe_node = |node: Option<&Node>| {
        let facts = node.map(NodeFacts::of);
        let is_registered = registered.as_ref().is_some_and(|registered| *registered.borrow());
        let mismatch = facts.as_ref().and_then(|facts| topology_mismatch(identity, facts, is_registered));
        on_event(observer.record(facts, mismatch));
    };
    // Until a list is complete, the Node may still follow: only then is it known to be missing.
    let mut listed = None;
    let observe = |event: Result<Event<Node>, watcher::Error>| {
        let is_ours = |node: &Node| node.metadata.name.as_deref() == Some(identity.node.as_str());
        match event {
            Ok(Event::InitApply(node)) if is_ours(&node) => listed = Some(node),
            // A list without the Node is news, too: it was deleted while the watch was interrupted.
            Ok(Event::InitDone) => observe_node(listed.take().as_ref()),
            Ok(Event::Apply(node)) if is_ours(&node) => observe_node(Some(&node)),
            Ok(Event::Delete(node)) if is_ours(&node) => observe_node(None),
            // Other nodes do not matter, and `with_backoff` has logged the errors.
            Ok(_) | Err(_) => {}
        }
        ready(())
    };
    events.for_each(observe).await;
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::objects::{sample_identity, sample_node};

    #[test]
    fn a_label_other_than_the_nodes_name_keeps_pods_from_its_volumes() {
        let identity = sample_identity("node-a");
        let key = identity.driver.topology_key();
        let find = |value: Value, is_registered| {
            let labels = json!({ "metadata": { "uid": "1", "labels": { &key: value } } });
            let facts = NodeFacts::of(&sample_node("node-a", labels));
            topology_mismatch(&identity, &facts, is_registered).map(|mismatch| mismatch.to_string())
        };
        for is_registered in [false, true] {
            assert_eq!(find(json!("node-a"), is_registered), None);
            let text = find(json!("ip-10-0-0-1"), is_registered).expect("another name");
            assert!(
                text.contains(&format!("has the label {key}=ip-10-0-0-1 instead of {key}=node-a")),
                "{text}"
            );
            assert!(text.contains("kubectl label --overwrite node node-a"), "{text}");
        }
        assert_eq!(find(Value::Null, false), None, "the kubelet will set it");
        assert!(find(Value::Null, true).expect("removed").contains("has no label instead"));
    }

    #[test]
    fn a_cordoned_or_tainted_node_takes_no_claim_that_no_scheduler_has_placed() {
        let taint = |effect: &str| json!({ "taints": [{ "key": "k", "effect": effect }] });
        let table = [
            (Value::Null, None),
            (json!({}), None),
            (json!({ "unschedulable": false }), None),
            (json!({ "unschedulable": true }), Some("cordoned")),
            (taint("PreferNoSchedule"), None),
            (taint("NoSchedule"), Some("k")),
            (taint("NoExecute"), Some("k")),
        ];
        for (spec, reason) in table {
            let node: Node = serde_json::from_value(json!({ "spec": spec })).expect("a node");
            assert_eq!(taint_against_volumes(&node), reason, "{spec}");
        }
    }
}
