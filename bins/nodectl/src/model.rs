//! The output of `-o json`; docs/nodectl.md describes the schema.

use std::time::SystemTime;

use nodekeel_node::v1;
use serde::Serialize;

use crate::health::ConditionView;
use crate::output::TextStyle;
use crate::time::format_rfc3339;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RunnableView {
    pub(crate) dn: String,
    pub(crate) state: &'static str,
    pub(crate) since: Option<String>,
    pub(crate) generation: u64,
    pub(crate) restarts: u64,
    pub(crate) failures: u32,
    /// It should run, but has failed, and has not been ready since for the time that clears its failures.
    pub(crate) crash_looping: bool,
    /// It is ready or done and not in a crash loop, or it is not part of this run.
    pub(crate) healthy: bool,
    /// Absent if it is ready or done.
    pub(crate) waiting_for: Option<String>,
    pub(crate) waiting_on: Vec<String>,
    /// Absent unless it waits for its backoff.
    pub(crate) backoff_until: Option<String>,
    pub(crate) exits: Vec<ExitView>,
    /// Absent unless it is a service whose process is running.
    pub(crate) pid: Option<u32>,
    pub(crate) process_since: Option<String>,
    /// The same as `waiting_for`, if that is a clause.
    #[serde(skip)]
    pub(crate) condition: Option<String>,
    #[serde(skip)]
    pub(crate) since_time: Option<SystemTime>,
    #[serde(skip)]
    pub(crate) process_since_time: Option<SystemTime>,
    #[serde(skip)]
    pub(crate) backoff_end: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ExitView {
    pub(crate) at: Option<String>,
    pub(crate) generation: u64,
    pub(crate) state: &'static str,
    pub(crate) reason: String,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) output: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct EventView {
    pub(crate) seq: u64,
    pub(crate) at: Option<String>,
    pub(crate) dn: String,
    pub(crate) generation: u64,
    pub(crate) change: String,
    pub(crate) state: Option<&'static str>,
    pub(crate) detail: String,
    /// What a client has requested; absent for a change of the tree.
    pub(crate) action: Option<String>,
    /// Who has requested it.
    pub(crate) caller: Option<CallerView>,
}

#[derive(Debug, Serialize)]
pub(crate) struct CallerView {
    pub(crate) uid: u32,
    pub(crate) user: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) program: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ClusterView {
    pub(crate) state: String,
    /// What the node waits for, the step in progress, or the error; absent in state Running.
    pub(crate) detail: Option<String>,
    pub(crate) history: Vec<String>,
    pub(crate) node: Option<String>,
    pub(crate) cluster: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct BootstrapView {
    pub(crate) bootstrapping: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct MemberView {
    pub(crate) id: String,
    /// Absent until the member has started for the first time.
    pub(crate) name: Option<String>,
    pub(crate) peer_urls: Vec<String>,
    pub(crate) learner: bool,
    pub(crate) this: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct ImageView {
    pub(crate) name: String,
    pub(crate) digest: String,
    pub(crate) media_type: String,
}

/// A created ticket without its secrets.
#[derive(Debug, Serialize)]
pub(crate) struct TicketView {
    pub(crate) node: String,
    pub(crate) address: String,
    pub(crate) file: String,
}

/// A revoked ticket.
#[derive(Debug, Serialize)]
pub(crate) struct RevokedTicketView {
    pub(crate) url: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct VersionView {
    pub(crate) nodectl: &'static str,
    pub(crate) noded: String,
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) started: Option<String>,
    pub(crate) data: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct NodeStatusView {
    #[serde(flatten)]
    pub(crate) version: VersionView,
    pub(crate) healthy: bool,
    pub(crate) conditions: Vec<ConditionView>,
    pub(crate) nodes: Vec<RunnableView>,
}

#[derive(Debug, Serialize)]
pub(crate) struct RunnableStatusView<'a> {
    pub(crate) node: RunnableView,
    /// Entries in the format of `logs`.
    pub(crate) log: &'a [serde_json::Value],
}

/// An action on a runnable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Restart,
    Stop,
    Start,
}

/// A requested action, and the state after it.
#[derive(Debug, Serialize)]
pub(crate) struct ActionView {
    pub(crate) dn: String,
    pub(crate) action: Action,
    pub(crate) state: &'static str,
    pub(crate) generation: u64,
}

impl RunnableView {
    pub(crate) fn is_ready_or_done(&self) -> bool {
        matches!(self.state, "ready" | "done")
    }

    /// How often it has failed, if it is in a crash loop.
    pub(crate) fn crash_loop_text(&self) -> Option<String> {
        let failures = match self.failures {
            1 => "1 failure".to_owned(),
            count => format!("{count} consecutive failures"),
        };
        self.crash_looping.then(|| format!("crash-loops: {failures}"))
    }
}

/// A line about all runnables, and its style.
pub(crate) fn health_summary(nodes: &[RunnableView]) -> (String, TextStyle) {
    let skipped = nodes.iter().filter(|node| node.state == "skipped").count();
    let planned = nodes.len() - skipped;
    let (summary, style) = match nodes.iter().filter(|node| !node.healthy).count() {
        0 => (format!("all {planned} runnables are ready"), TextStyle::Good),
        1 => (format!("1 of {planned} runnables is not healthy"), TextStyle::Bad),
        count => (format!("{count} of {planned} runnables are not healthy"), TextStyle::Bad),
    };
    let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    (format!("{summary}{skipped}"), style)
}

fn state_name(state: v1::State) -> Option<&'static str> {
    Some(match state {
        v1::State::Unspecified => return None,
        v1::State::Waiting => "waiting",
        v1::State::New => "new",
        v1::State::Ready => "ready",
        v1::State::Done => "done",
        v1::State::Dead => "dead",
        v1::State::Canceled => "canceled",
        v1::State::Stopped => "stopped",
        v1::State::Skipped => "skipped",
    })
}

/// A time of the wire as RFC 3339.
fn time_text(time: Option<impl TryInto<SystemTime>>) -> Option<String> {
    time.and_then(|time| time.try_into().ok()).map(format_rfc3339)
}

impl From<v1::Node> for RunnableView {
    fn from(node: v1::Node) -> Self {
        let state = state_name(node.state()).unwrap_or("unknown");
        Self {
            state,
            crash_looping: node.is_crash_looping(),
            healthy: node.is_healthy(),
            backoff_until: time_text(node.backoff_until),
            condition: non_empty(node.condition),
            backoff_end: node.backoff_until.and_then(|time| time.try_into().ok()),
            since: time_text(node.since),
            since_time: node.since.and_then(|time| time.try_into().ok()),
            pid: node.pid,
            process_since: time_text(node.process_since),
            process_since_time: node.process_since.and_then(|time| time.try_into().ok()),
            generation: node.generation,
            restarts: node.restarts,
            failures: node.failures,
            waiting_for: non_empty(node.waiting_for),
            waiting_on: node.waiting_on,
            exits: node.exits.into_iter().map(ExitView::from).collect(),
            dn: node.dn,
        }
    }
}

impl From<v1::Exit> for ExitView {
    fn from(exit: v1::Exit) -> Self {
        Self {
            at: time_text(exit.at),
            generation: exit.generation,
            state: state_name(exit.state()).unwrap_or("unknown"),
            code: exit.code,
            signal: exit.signal,
            reason: exit.reason,
            output: exit.output,
        }
    }
}

impl From<v1::Event> for EventView {
    fn from(event: v1::Event) -> Self {
        Self {
            seq: event.seq,
            at: time_text(event.at),
            state: state_name(event.state()),
            dn: event.dn,
            generation: event.generation,
            change: event.change,
            detail: event.detail,
            action: non_empty(event.action),
            caller: event.caller.map(CallerView::from),
        }
    }
}

impl From<v1::Caller> for CallerView {
    fn from(caller: v1::Caller) -> Self {
        let (user, program) = (non_empty(caller.user), non_empty(caller.program));
        Self { uid: caller.uid, user, pid: caller.pid, program }
    }
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl From<v1::ClusterResponse> for ClusterView {
    fn from(cluster: v1::ClusterResponse) -> Self {
        Self {
            state: cluster.state,
            detail: non_empty(cluster.detail),
            history: cluster.history,
            node: non_empty(cluster.node),
            cluster: non_empty(cluster.cluster),
        }
    }
}

impl From<v1::Image> for ImageView {
    fn from(image: v1::Image) -> Self {
        Self { name: image.name, digest: image.digest, media_type: image.media_type }
    }
}

impl From<v1::Member> for MemberView {
    fn from(member: v1::Member) -> Self {
        Self {
            id: member.id,
            name: non_empty(member.name),
            peer_urls: member.peer_urls,
            learner: member.is_learner,
            this: member.is_this,
        }
    }
}

impl From<v1::VersionResponse> for VersionView {
    fn from(version: v1::VersionResponse) -> Self {
        Self {
            nodectl: env!("CARGO_PKG_VERSION"),
            noded: version.version,
            name: version.name,
            pid: version.pid,
            started: time_text(version.started),
            data: version.data,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(state: v1::State, failures: u32) -> RunnableView {
        RunnableView::from(v1::Node { state: state.into(), failures, ..Default::default() })
    }

    #[test]
    fn a_crash_loop_says_how_often_it_has_failed() {
        assert_eq!(
            view(v1::State::New, 2).crash_loop_text().as_deref(),
            Some("crash-loops: 2 consecutive failures")
        );
        assert_eq!(view(v1::State::Ready, 1).crash_loop_text().as_deref(), Some("crash-loops: 1 failure"));
        assert_eq!(view(v1::State::Ready, 0).crash_loop_text(), None);
    }

    #[test]
    fn the_summary_counts_what_is_part_of_the_run() {
        let summary = |states: &[v1::State]| {
            health_summary(&states.iter().map(|state| view(*state, 0)).collect::<Vec<_>>()).0
        };
        use v1::State::{Done, New, Ready, Skipped, Stopped};
        assert_eq!(summary(&[Ready, Done]), "all 2 runnables are ready");
        assert_eq!(summary(&[Ready, Skipped, Skipped, Ready]), "all 2 runnables are ready, 2 skipped");
        assert_eq!(summary(&[Ready, New]), "1 of 2 runnables is not healthy");
        assert_eq!(summary(&[Stopped, Skipped, New]), "2 of 2 runnables are not healthy, 1 skipped");
    }
}
