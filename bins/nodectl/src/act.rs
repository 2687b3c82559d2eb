//! `restart`, `stop` and `start`.

use nodekeel_node::client::Client;
use nodekeel_node::v1::{RestartRequest, StartRequest, StopRequest, TreeRequest};

use crate::cli::ActArgs;
use crate::failure::Failure;
use crate::model::Node;
use crate::out::Out;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Restart,
    Stop,
    Start,
}

pub(crate) async fn run(
    client: &mut Client,
    action: Action,
    args: ActArgs,
    out: &mut Out,
) -> Result<(), Failure> {
    let ActArgs { dn, wait } = args;
    let tree = client.tree(TreeRequest {}).await?.into_inner();
    let before = find(tree.nodes, &dn).map_or(0, |node| node.generation);
    match action {
        Action::Restart => drop(client.restart(RestartRequest { dn: dn.clone() }).await?),
        Action::Stop => drop(client.stop(StopRequest { dn: dn.clone() }).await?),
        Action::Start => drop(client.start(StartRequest { dn: dn.clone() }).await?),
    }
    if wait {
        wait_until_reached(client, action, &dn, before).await?;
    }
    if out.json { Ok(()) } else { Ok(out.line(&said(action, &dn, wait))?) }
}

/// Watches the tree until the action has had its effect; the first tree of a watch is the present one.
async fn wait_until_reached(
    client: &mut Client,
    action: Action,
    dn: &str,
    before: u64,
) -> Result<(), Failure> {
    let mut trees = client.watch_tree(TreeRequest {}).await?.into_inner();
    loop {
        let tree = trees.message().await?.ok_or(Failure::Gone)?;
        let Some(node) = find(tree.nodes, dn) else {
            return Err(Failure::NotReached { dn: dn.to_owned(), how: "has left the tree".into() });
        };
        if reached(action, &node, before)? {
            return Ok(());
        }
    }
}

fn find(nodes: Vec<nodekeel_node::v1::Node>, dn: &str) -> Option<Node> {
    nodes.into_iter().find(|node| node.dn == dn).map(Node::from)
}

/// Whether the node stands where the action leads, or fails on the way.
fn reached(action: Action, node: &Node, before: u64) -> Result<bool, Failure> {
    let failed = || {
        let last = node.exits.iter().rfind(|exit| exit.generation > before && exit.state == "dead");
        last.map(|exit| Failure::NotReached { dn: node.dn.clone(), how: format!("failed: {}", exit.reason) })
    };
    match action {
        Action::Stop => Ok(node.state == "stopped"),
        Action::Start if node.is_fine() => Ok(true),
        Action::Restart if node.is_fine() && node.generation > before => Ok(true),
        Action::Start | Action::Restart => failed().map_or(Ok(false), Err),
    }
}

fn said(action: Action, dn: &str, waited: bool) -> String {
    match (action, waited) {
        (Action::Stop, true) => format!("{dn} is stopped"),
        (_, true) => format!("{dn} is ready"),
        (Action::Stop, false) => format!("{dn} is being stopped"),
        (Action::Restart, false) => format!("{dn} is being restarted"),
        (Action::Start, false) => format!("{dn} is being started"),
    }
}
