//! `restart`, `stop` and `start`.

use nodekeel_node::v1::{Node, RestartRequest, StartRequest, StopRequest, TreeRequest};
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::Printer;
use crate::runnable::RunnableView;

#[derive(Debug, clap::Args)]
pub(crate) struct ActionArgs {
    /// Name in the tree, like root.etcd
    #[arg(add = complete_dn())]
    dn: String,
    /// Wait until it is ready, or stopped
    #[arg(short, long)]
    wait: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Restart,
    Stop,
    Start,
}

/// A requested action, and the state after it.
#[derive(Debug, Serialize)]
struct ActionView {
    dn: String,
    action: Action,
    state: &'static str,
    generation: u64,
}

impl ActionArgs {
    pub(crate) async fn run(
        self,
        action: Action,
        api: &mut ApiClient,
        printer: &mut Printer,
    ) -> Result<(), CommandError> {
        let Self { dn, wait } = self;
        let before = find_runnable(api, &dn).await?;
        // The generation before the action distinguishes the new incarnation from the former one.
        let generation = before.as_ref().map_or(0, |node| node.generation);
        let was_ready = before.as_ref().is_some_and(|node| node.state == "ready");
        match request_action(api, action, &dn).await {
            // A restarting control API may close the connection before it answers.
            Err(error) if error.is_connection_lost() && serves_the_api(&dn) => {}
            result => result?,
        }
        let node = if wait { Some(wait_with_reconnects(api, action, &dn, generation).await?) } else { None };
        if !printer.is_json {
            return Ok(printer.print_line(&action_message(action, &dn, wait, was_ready))?);
        }
        let node = match node {
            // A control API that restarts may not answer: the state before is all that is known.
            None if serves_the_api(&dn) => before,
            None => find_runnable(api, &dn).await?,
            found => found,
        };
        let (state, generation) = node.map_or(("unknown", generation), |node| (node.state, node.generation));
        Ok(printer.print_json(&ActionView { dn, action, state, generation })?)
    }
}

/// True for the runnable of the control API, and for its parent.
fn serves_the_api(dn: &str) -> bool {
    matches!(dn, "root" | "root.control")
}

async fn request_action(api: &mut ApiClient, action: Action, dn: &str) -> Result<(), CommandError> {
    let dn = dn.to_owned();
    match action {
        Action::Restart => {
            api.call(async |client| client.restart(RestartRequest { dn }).await).await.map(drop)
        }
        Action::Stop => api.call(async |client| client.stop(StopRequest { dn }).await).await.map(drop),
        Action::Start => api.call(async |client| client.start(StartRequest { dn }).await).await.map(drop),
    }
}

async fn find_runnable(api: &mut ApiClient, dn: &str) -> Result<Option<RunnableView>, CommandError> {
    let tree = api.call(async |client| client.tree(TreeRequest {}).await).await?;
    Ok(find_in_tree(tree.nodes, dn))
}

/// Watches the tree until the action has taken effect. Reconnects if the control API itself restarts: the node accepts
/// connections during the restart, and answers them after it.
async fn wait_with_reconnects(
    api: &mut ApiClient,
    action: Action,
    dn: &str,
    old_generation: u64,
) -> Result<RunnableView, CommandError> {
    loop {
        match wait_for_state(api, action, dn, old_generation).await {
            Err(error) if error.is_connection_lost() && serves_the_api(dn) => api.reconnect().await?,
            result => return result,
        }
    }
}

/// Watches the tree until the action has taken effect; the first tree of a watch is the current one.
async fn wait_for_state(
    api: &mut ApiClient,
    action: Action,
    dn: &str,
    old_generation: u64,
) -> Result<RunnableView, CommandError> {
    let mut trees = api.follow_stream(async |client| client.watch_tree(TreeRequest {}).await).await?;
    loop {
        let tree = trees.next_message().await?.ok_or(CommandError::ConnectionLost)?;
        let Some(node) = find_in_tree(tree.nodes, dn) else {
            return Err(CommandError::ActionFailed {
                dn: dn.to_owned(),
                reason: "was removed from the tree".into(),
            });
        };
        if is_reached(action, &node, old_generation)? {
            return Ok(node);
        }
    }
}

fn find_in_tree(nodes: Vec<Node>, dn: &str) -> Option<RunnableView> {
    nodes.into_iter().find(|node| node.dn == dn).map(RunnableView::from)
}

/// True if the runnable has reached the state of the action; an error if it has failed.
fn is_reached(action: Action, node: &RunnableView, old_generation: u64) -> Result<bool, CommandError> {
    let failed = || {
        // A failure of an earlier incarnation is not one of this action.
        let last = node.exits.iter().rfind(|exit| exit.generation > old_generation && exit.state == "dead");
        last.map(|exit| CommandError::ActionFailed {
            dn: node.dn.clone(),
            reason: format!("failed: {}", exit.reason),
        })
    };
    match action {
        Action::Stop => Ok(node.state == "stopped"),
        Action::Start if node.is_ready_or_done() => Ok(true),
        // Only a new incarnation counts, since the tree may still show the former one as ready.
        Action::Restart if node.is_ready_or_done() && node.generation > old_generation => Ok(true),
        Action::Start | Action::Restart => failed().map_or(Ok(false), Err),
    }
}

fn action_message(action: Action, dn: &str, waited: bool, was_ready: bool) -> String {
    match (action, waited) {
        (Action::Start, _) if was_ready => format!("{dn} is already ready"),
        (Action::Stop, true) => format!("{dn} is stopped"),
        (_, true) => format!("{dn} is ready"),
        (Action::Stop, false) => format!("{dn} is being stopped"),
        (Action::Restart, false) => format!("{dn} is being restarted"),
        (Action::Start, false) => format!("{dn} is being started"),
    }
}
