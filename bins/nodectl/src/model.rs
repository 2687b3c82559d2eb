//! What `-o json` prints: the schema is described in docs/nodectl.md.

use std::time::SystemTime;

use nodekeel_node::v1;
use serde::Serialize;

use crate::act::Action;
use crate::time::rfc3339;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Node {
    pub(crate) dn: String,
    pub(crate) state: &'static str,
    pub(crate) since: Option<String>,
    pub(crate) generation: u64,
    pub(crate) restarts: u64,
    pub(crate) failures: u32,
    /// Absent if it is ready, or done.
    pub(crate) waiting_for: Option<String>,
    pub(crate) waiting_on: Vec<String>,
    pub(crate) exits: Vec<Exit>,
    #[serde(skip)]
    pub(crate) since_time: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Exit {
    pub(crate) at: Option<String>,
    pub(crate) generation: u64,
    pub(crate) state: &'static str,
    pub(crate) reason: String,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) output: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Event {
    pub(crate) seq: u64,
    pub(crate) at: Option<String>,
    pub(crate) dn: String,
    pub(crate) generation: u64,
    pub(crate) change: String,
    pub(crate) state: Option<&'static str>,
    pub(crate) detail: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Cluster {
    pub(crate) state: String,
    /// What is being done, or why it has failed; absent where it runs.
    pub(crate) detail: Option<String>,
    pub(crate) history: Vec<String>,
    pub(crate) node: Option<String>,
    pub(crate) cluster: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Member {
    pub(crate) id: String,
    /// Absent until it has started for the first time.
    pub(crate) name: Option<String>,
    pub(crate) peer_urls: Vec<String>,
    pub(crate) learner: bool,
    pub(crate) this: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) digest: String,
    pub(crate) media_type: String,
}

/// A ticket that was made, without what is secret.
#[derive(Debug, Serialize)]
pub(crate) struct Ticket {
    pub(crate) node: String,
    pub(crate) address: String,
    pub(crate) file: String,
}

/// A ticket that was taken back.
#[derive(Debug, Serialize)]
pub(crate) struct Withdrawn {
    pub(crate) url: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Version {
    pub(crate) nodectl: &'static str,
    pub(crate) noded: String,
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) started: Option<String>,
    pub(crate) data: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct NodeStatus {
    #[serde(flatten)]
    pub(crate) version: Version,
    pub(crate) nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DnStatus<'a> {
    pub(crate) node: Node,
    /// Entries as `logs` prints them.
    pub(crate) log: &'a [serde_json::Value],
}

/// What has been asked for, and what stands since.
#[derive(Debug, Serialize)]
pub(crate) struct Acted {
    pub(crate) dn: String,
    pub(crate) action: Action,
    pub(crate) state: &'static str,
    pub(crate) generation: u64,
}

impl Node {
    /// Whether there is nothing to be done about it.
    pub(crate) fn is_fine(&self) -> bool {
        matches!(self.state, "ready" | "done")
    }
}

fn state(state: v1::State) -> Option<&'static str> {
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

/// The text of a time on the wire.
fn text(time: Option<impl TryInto<SystemTime>>) -> Option<String> {
    time.and_then(|time| time.try_into().ok()).map(rfc3339)
}

impl From<v1::Node> for Node {
    fn from(node: v1::Node) -> Self {
        Self {
            state: state(node.state()).unwrap_or("unknown"),
            since: text(node.since),
            since_time: node.since.and_then(|time| time.try_into().ok()),
            generation: node.generation,
            restarts: node.restarts,
            failures: node.failures,
            waiting_for: some(node.waiting_for),
            waiting_on: node.waiting_on,
            exits: node.exits.into_iter().map(Exit::from).collect(),
            dn: node.dn,
        }
    }
}

impl From<v1::Exit> for Exit {
    fn from(exit: v1::Exit) -> Self {
        Self {
            at: text(exit.at),
            generation: exit.generation,
            state: state(exit.state()).unwrap_or("unknown"),
            code: exit.code,
            signal: exit.signal,
            reason: exit.reason,
            output: exit.output,
        }
    }
}

impl From<v1::Event> for Event {
    fn from(event: v1::Event) -> Self {
        Self {
            seq: event.seq,
            at: text(event.at),
            state: state(event.state()),
            dn: event.dn,
            generation: event.generation,
            change: event.change,
            detail: event.detail,
        }
    }
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl From<v1::ClusterResponse> for Cluster {
    fn from(cluster: v1::ClusterResponse) -> Self {
        Self {
            state: cluster.state,
            detail: some(cluster.detail),
            history: cluster.history,
            node: some(cluster.node),
            cluster: some(cluster.cluster),
        }
    }
}

impl From<v1::Image> for Image {
    fn from(image: v1::Image) -> Self {
        Self { name: image.name, digest: image.digest, media_type: image.media_type }
    }
}

impl From<v1::Member> for Member {
    fn from(member: v1::Member) -> Self {
        Self {
            id: member.id,
            name: some(member.name),
            peer_urls: member.peer_urls,
            learner: member.is_learner,
            this: member.is_this,
        }
    }
}

impl From<v1::VersionResponse> for Version {
    fn from(version: v1::VersionResponse) -> Self {
        Self {
            nodectl: env!("CARGO_PKG_VERSION"),
            noded: version.version,
            name: version.name,
            pid: version.pid,
            started: text(version.started),
            data: version.data,
        }
    }
}
