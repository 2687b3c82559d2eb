//! `restart`, `stop` and `start`.

use nodekeel_node::v1::{RestartRequest, StartRequest, StopRequest, TreeRequest};
use serde::Serialize;

use crate::caller::Caller;
use crate::cli::ActArgs;
use crate::failure::Failure;
use crate::model::{Acted, Node};
use crate::out::Out;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Restart,
    Stop,
    Start,
}

pub(crate) async fn run(
    caller: &mut Caller,
    action: Action,
    args: ActArgs,
    out: &mut Out,
) -> Result<(), Failure> {
    let ActArgs { dn, wait } = args;
    let before = look(caller, &dn).await?;
    let generation = before.as_ref().map_or(0, |node| node.generation);
    match ask(caller, action, &dn).await {
        // What answers may be gone before its answer is.
        Err(failure) if failure.is_gone() && answers(&dn) => {}
        asked => asked?,
    }
    let node = if wait { Some(reached_at_last(caller, action, &dn, generation).await?) } else { None };
    if !out.json {
        return Ok(out.line(&said(action, &dn, wait))?);
    }
    let node = match node {
        None if answers(&dn) => before,
        None => look(caller, &dn).await?,
        reached => reached,
    };
    let (state, generation) = node.map_or(("unknown", generation), |node| (node.state, node.generation));
    Ok(out.json(&Acted { dn, action, state, generation })?)
}

/// Whether this is what answers, or holds it.
fn answers(dn: &str) -> bool {
    matches!(dn, "root" | "root.control")
}

async fn ask(caller: &mut Caller, action: Action, dn: &str) -> Result<(), Failure> {
    let dn = dn.to_owned();
    match action {
        Action::Restart => {
            caller.ask(async |client| client.restart(RestartRequest { dn }).await).await.map(drop)
        }
        Action::Stop => caller.ask(async |client| client.stop(StopRequest { dn }).await).await.map(drop),
        Action::Start => caller.ask(async |client| client.start(StartRequest { dn }).await).await.map(drop),
    }
}

async fn look(caller: &mut Caller, dn: &str) -> Result<Option<Node>, Failure> {
    let tree = caller.ask(async |client| client.tree(TreeRequest {}).await).await?;
    Ok(find(tree.nodes, dn))
}

/// Watches the tree until the action has had its effect, anew where what answers is itself restarted: the node takes
/// new connections meanwhile, and answers them when it is back.
async fn reached_at_last(
    caller: &mut Caller,
    action: Action,
    dn: &str,
    before: u64,
) -> Result<Node, Failure> {
    loop {
        match wait_until_reached(caller, action, dn, before).await {
            Err(failure) if failure.is_gone() && answers(dn) => caller.reconnect().await?,
            result => return result,
        }
    }
}

/// Watches the tree until the action has had its effect; the first tree of a watch is the present one.
async fn wait_until_reached(
    caller: &mut Caller,
    action: Action,
    dn: &str,
    before: u64,
) -> Result<Node, Failure> {
    let mut trees = caller.follow(async |client| client.watch_tree(TreeRequest {}).await).await?;
    loop {
        let tree = trees.next().await?.ok_or(Failure::Gone)?;
        let Some(node) = find(tree.nodes, dn) else {
            return Err(Failure::NotReached { dn: dn.to_owned(), how: "has left the tree".into() });
        };
        if reached(action, &node, before)? {
            return Ok(node);
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
