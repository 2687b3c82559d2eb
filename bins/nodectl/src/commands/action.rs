//! `restart`, `stop` and `start`.

use std::time::Duration;

use nodekeel_node::v1::{Node, RestartRequest, StartRequest, StopRequest, TreeRequest};
use serde::Serialize;
use tokio::time::timeout;

use super::status::unhealthy_reason;
use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::Printer;
use crate::runnable::RunnableView;
use crate::time::parse_duration;

#[derive(Debug, clap::Args)]
pub(crate) struct ActionArgs {
    /// Name in the tree, like root.etcd or etcd
    #[arg(add = complete_dn(), required_unless_present = "wait")]
    dn: Option<String>,
    /// Wait until it is ready, or stopped
    ///
    /// At most this long, like 30s or 5m; without a duration, as long as it takes.
    #[arg(short, long, value_name = "DURATION", value_parser = parse_wait_value, num_args = 0..=1, add = complete_dn())]
    wait: Option<Option<WaitValue>>,
}

/// The word after `--wait`. In `--wait DN`, it is none of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
enum WaitValue {
    Limit(Duration),
    Dn(String),
}

#[expect(clippy::unnecessary_wraps, reason = "clap's parsers return a result")]
fn parse_wait_value(text: &str) -> Result<WaitValue, String> {
    Ok(parse_duration(text).map_or_else(|_| WaitValue::Dn(text.to_owned()), WaitValue::Limit))
}

impl ActionArgs {
    /// The DN; and, if it is to be waited for, the longest wait.
    fn target(self) -> Result<(String, Option<Option<Duration>>), CommandError> {
        match (self.dn, self.wait) {
            (Some(dn), None) => Ok((dn, None)),
            (Some(dn), Some(None)) | (None, Some(Some(WaitValue::Dn(dn)))) => Ok((dn, Some(None))),
            (Some(dn), Some(Some(WaitValue::Limit(limit)))) => Ok((dn, Some(Some(limit)))),
            (Some(_), Some(Some(WaitValue::Dn(text)))) => {
                let message = format!("invalid duration {text:?} of --wait: use a duration like 30s or 5m");
                Err(CommandError::Usage { message })
            }
            (None, _) => Err(CommandError::Usage { message: "the DN is missing".to_owned() }),
        }
    }
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
        let (dn, wait) = self.target()?;
        let dn = api.resolve_dn(dn).await?;
        let before = find_runnable(api, &dn).await?;
        // The generation before the action distinguishes the new incarnation from the former one.
        let generation = before.as_ref().map_or(0, |node| node.generation);
        let was_ready = before.as_ref().is_some_and(|node| node.state == "ready");
        match request_action(api, action, &dn).await {
            // A restarting control API may close the connection before it answers.
            Err(error) if error.is_connection_lost() && serves_the_api(&dn) => {}
            result => result?,
        }
        let node = match wait {
            Some(limit) => Some(wait_within(limit, api, action, &dn, generation).await?),
            None => None,
        };
        if !printer.is_json {
            return Ok(printer.print_line(&action_message(action, &dn, wait.is_some(), was_ready))?);
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

/// The runnable with this DN; `None` if it is not in the tree.
pub(super) async fn find_runnable(
    api: &mut ApiClient,
    dn: &str,
) -> Result<Option<RunnableView>, CommandError> {
    let tree = api.call(async |client| client.tree(TreeRequest {}).await).await?;
    Ok(find_in_tree(tree.nodes, dn))
}

/// Watches the tree until the action has taken effect, at most this long.
async fn wait_within(
    limit: Option<Duration>,
    api: &mut ApiClient,
    action: Action,
    dn: &str,
    old_generation: u64,
) -> Result<RunnableView, CommandError> {
    let mut last = None;
    let reached = wait_with_reconnects(api, action, dn, old_generation, &mut last);
    let Some(limit) = limit else { return reached.await };
    match timeout(limit, reached).await {
        Ok(ended) => ended,
        Err(_) => {
            let what = if action == Action::Stop { "is not stopped" } else { "is not ready" };
            let why = last.as_ref().map(unhealthy_reason).unwrap_or_default();
            Err(CommandError::WaitEnded { dn: dn.to_owned(), what, limit, why })
        }
    }
}

/// Watches the tree until the action has taken effect. Reconnects if the control API itself restarts: the node accepts
/// connections during the restart, and answers them after it.
async fn wait_with_reconnects(
    api: &mut ApiClient,
    action: Action,
    dn: &str,
    old_generation: u64,
    last: &mut Option<RunnableView>,
) -> Result<RunnableView, CommandError> {
    loop {
        match wait_for_state(api, action, dn, old_generation, last).await {
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
    last: &mut Option<RunnableView>,
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
        *last = Some(node);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_has_a_limit_or_none_and_may_stand_before_the_dn() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ActionArgs,
        }
        let parse = |line: &str| {
            let line = std::iter::once("restart").chain(line.split_whitespace());
            let args = <Line as clap::Parser>::try_parse_from(line).map_err(|error| error.to_string())?.args;
            args.target().map_err(|error| error.to_string())
        };
        let minute = Duration::from_secs(60);
        for (line, target) in [
            ("etcd", ("etcd", None)),
            ("etcd --wait", ("etcd", Some(None))),
            ("--wait etcd", ("etcd", Some(None))),
            ("etcd --wait 1m", ("etcd", Some(Some(minute)))),
            ("--wait 60s etcd", ("etcd", Some(Some(minute)))),
            ("-w 1m etcd", ("etcd", Some(Some(minute)))),
        ] {
            assert_eq!(parse(line), Ok((target.0.to_owned(), target.1)), "{line}");
        }
        for (line, says) in [
            ("etcd --wait soon", "invalid duration \"soon\""),
            ("--wait 1m", "the DN is missing"),
            ("--wait", "the DN is missing"),
            ("", "required"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
