//! The tree of a node: its parts below the root, and what several parts of one name run below that name.

use std::sync::Arc;

use nodekeel_supervisor::{Context, Runnable};

use crate::part::PreparedRunnable;
use crate::parts::CONTROL_DN;

/// A child of the root, or of a child of the root.
#[derive(Debug, Clone)]
pub(super) struct TreeChild {
    pub(super) name: String,
    pub(super) runnable: PreparedRunnable,
}

/// The children of the root: `root.a` is one of them, and `root.b.c` and `root.b.d` are the children of another, `root.b`.
pub(super) fn tree_children(prepared: &[(String, PreparedRunnable)]) -> Vec<TreeChild> {
    let mut names: Vec<&str> = Vec::new();
    for name in prepared.iter().filter_map(|(dn, _)| dn.split('.').nth(1)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.into_iter().map(|name| tree_child(name, prepared)).collect()
}

fn tree_child(name: &str, prepared: &[(String, PreparedRunnable)]) -> TreeChild {
    let dn = format!("root.{name}");
    let child_of = |(child, runnable): &(String, PreparedRunnable)| {
        let name = child.strip_prefix(&dn)?.strip_prefix('.')?.to_owned();
        Some(TreeChild { name, runnable: runnable.clone() })
    };
    let runnable = match prepared.iter().find(|(known, _)| *known == dn) {
        Some((_, runnable)) => runnable.clone(),
        None => PreparedRunnable::new(parent_runnable(prepared.iter().filter_map(child_of).collect(), None)),
    };
    TreeChild { name: name.to_owned(), runnable }
}

/// The root: it is ready when all its children are in the tree, and the control API serves. The control API stops
/// last.
pub(super) fn root_runnable(children: Vec<TreeChild>) -> impl Runnable {
    let is_control = |child: &TreeChild| CONTROL_DN.strip_prefix("root.") == Some(&*child.name);
    let wait_for = children.iter().any(is_control).then_some(CONTROL_DN);
    let in_order = |child: TreeChild| match is_control(&child) {
        true => child,
        false => TreeChild { runnable: child.runnable.stop_before(CONTROL_DN), ..child },
    };
    parent_runnable(children.into_iter().map(in_order).collect(), wait_for)
}

/// Starts its children in their order, each after its own dependencies, and waits for `wait_for` among them.
fn parent_runnable(children: Arc<[TreeChild]>, wait_for: Option<&'static str>) -> impl Runnable {
    move |ctx: Context| {
        let children = Arc::clone(&children);
        async move {
            for child in children.iter() {
                ctx.run_group([child.runnable.to_child(&child.name)])?;
            }
            if let Some(dn) = wait_for {
                ctx.wait_ready(dn).await?;
            }
            ctx.signal_ready()?;
            ctx.until_canceled().await
        }
    }
}
