//! The tree of a node: its parts below the root, and what several parts of one name run below that name.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_supervisor::{AddChildError, ChildSpec, Context, NameError, Runnable};

use crate::data::DataDir;
use crate::dn::CONTROL as CONTROL_DN;
use crate::part::PreparedRunnable;

/// The runnables of the node, by DN: `root.a` is a child of the root, and `root.b.c` and `root.b.d` are the children of
/// another one, `root.b`. Each incarnation of a parent adds the children that are here then.
#[derive(Debug, Clone)]
pub(super) struct NodeTree {
    prepared: Arc<Mutex<Vec<(String, PreparedRunnable)>>>,
    /// Locked until the last runnable has stopped, also if the handle of the node is dropped before.
    _data: Arc<DataDir>,
}

impl NodeTree {
    /// An empty tree of the node with this data directory.
    pub(super) fn new(data: Arc<DataDir>) -> Self {
        Self { prepared: Arc::default(), _data: data }
    }

    /// No parent adds its children while this is held.
    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<(String, PreparedRunnable)>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The root: it is ready when all its children are in the tree, and the control API serves. The control API stops
    /// last.
    pub(super) fn root_runnable(&self) -> impl Runnable + use<> {
        let has_control = self.lock().iter().any(|(dn, _)| dn == CONTROL_DN);
        self.parent_runnable("root".to_owned(), has_control.then_some(CONTROL_DN))
    }

    /// The runnable with this DN as a child of its parent, or the parent of what is below it.
    pub(super) fn child_spec(&self, prepared: &[(String, PreparedRunnable)], dn: &str) -> ChildSpec {
        let runnable = match prepared.iter().find(|(known, _)| *known == dn) {
            Some((_, runnable)) => runnable.clone(),
            None => PreparedRunnable::new(self.parent_runnable(dn.to_owned(), None)),
        };
        let (parent, name) = dn.rsplit_once('.').unwrap_or(("", dn));
        if parent == "root" && dn != CONTROL_DN {
            runnable.stop_before(CONTROL_DN).to_child(name)
        } else {
            runnable.to_child(name)
        }
    }

    /// Starts its children in their order, each after its own dependencies, and waits for `wait_for` among them.
    fn parent_runnable(&self, dn: String, wait_for: Option<&'static str>) -> impl Runnable + use<> {
        let tree = self.clone();
        move |ctx: Context| {
            let added = tree.add_children(&ctx, &dn);
            async move {
                added?;
                if let Some(dn) = wait_for {
                    ctx.wait_ready(dn).await?;
                }
                ctx.signal_ready()?;
                ctx.until_canceled().await
            }
        }
    }

    /// A reload may have added one of them a moment ago.
    fn add_children(&self, ctx: &Context, parent: &str) -> Result<(), AddChildError> {
        // The lock is held until all are added: a reload changes the list either before or after.
        let prepared = self.lock();
        let children = child_dns(prepared.iter().map(|(dn, _)| dn.as_str()), parent);
        children.iter().try_for_each(|dn| match ctx.run_child_with(self.child_spec(&prepared, dn)) {
            Err(AddChildError::Name(NameError::AlreadyInUse { .. })) => Ok(()),
            added => added,
        })
    }
}

/// The DNs of a parent's children, in the order of what is at or below them.
pub(super) fn child_dns<'dn>(dns: impl Iterator<Item = &'dn str>, parent: &str) -> Vec<String> {
    let mut children: Vec<String> = Vec::new();
    for dn in dns {
        let Some(below) = dn.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.')) else { continue };
        let child = format!("{parent}.{}", below.split('.').next().unwrap_or(below));
        if !children.contains(&child) {
            children.push(child);
        }
    }
    children
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_follow_the_order_of_what_is_below_them() {
        let dns = ["root.control", "root.service.b", "root.etcd", "root.service.a", "root.serve"];
        let children = |parent| child_dns(dns.into_iter(), parent);
        assert_eq!(children("root"), ["root.control", "root.service", "root.etcd", "root.serve"]);
        assert_eq!(children("root.service"), ["root.service.b", "root.service.a"]);
        assert!(children("root.etcd").is_empty());
    }
}
