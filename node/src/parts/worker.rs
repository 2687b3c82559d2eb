//! `root.api.worker`: a node of a cluster without a member. It joins by a ticket, follows a voter, and serves what it knew when none
//! answers.
//!
//! ```text
//!  esp/enrolment.pb ──▶ Enrol at a voter ──▶ WatchRecords at one voter at a time ─┬─▶ identities         its operators
//!                                                    ▲        │                  ├─▶ api/membership
//!                                                    └ WhoAmI ┘ not admitted      └─▶ api/peers          its voters
//! ```

mod follow;
mod membership;

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use nodekeel_cluster::node::EnrolmentSources;
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_supervisor::{Context, RunFuture, Runnable};
use serde::Deserialize;
use tokio::sync::watch;
use tonic::Status;

use self::follow::Follower;
#[cfg(feature = "testing")]
pub(crate) use self::membership::check_arbitrary_membership;
use self::membership::{Membership, MembershipFile};
use super::api::Api;
use super::api::{config, running_api};
use crate::config::{ConfigViolation, EtcdConfig, NodedConfig};
use crate::health::{HealthChanges, HealthCondition, HealthSource, NodeSnapshot};
use crate::running::RunningNode;
use crate::v1;

pub(crate) const NAME: &str = "worker";
pub(crate) const DN: &str = "root.api.worker";

/// `[worker]`: the node is a worker of a cluster. Its API is what the cluster knows it by.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerConfig {}

const CUT_OFF: &str = "is cut off from its cluster, and serves what it knew";
const START_VOTER: &str = "start a voter, or repair the way to it";
const REMOVED: &str = "was removed from its cluster";

/// Returns whether the node is a worker.
pub(crate) fn is_worker(config: &NodedConfig) -> bool {
    config.section::<WorkerConfig>(NAME).is_some()
}

/// Checks the rules between `[worker]` and others.
pub(super) fn check_worker(config: &NodedConfig) -> Result<(), ConfigViolation> {
    if !is_worker(config) {
        return Ok(());
    }
    let refuse = |key: &str, text: &str| Err(ConfigViolation::new(key, text.to_owned()));
    if config.cluster.is_some() {
        return refuse(NAME, "conflicts with [cluster], which makes the node a voter; remove one of the two");
    }
    let Some(api) = config.section::<config::ApiConfig>(config::NAME) else {
        return refuse(NAME, "requires [api], by which a worker takes part in its cluster; set api.address");
    };
    if api.address.ip().is_unspecified() {
        return refuse(
            config::ADDRESS_KEY,
            "must be an address of this machine for a worker, which the cluster records; not one that stands for all",
        );
    }
    let etcd = EtcdConfig { enable: true, ..config.services.etcd.clone() };
    match etcd == EtcdConfig::default() {
        true => Ok(()),
        false => refuse("services.etcd", "a worker has no etcd; remove this section, or [worker]"),
    }
}

/// A worker, as its runnable, the health and the control API share it.
#[derive(Debug)]
pub(crate) struct Worker {
    tickets: EnrolmentSources,
    membership: MembershipFile,
    status: Mutex<WorkerStatus>,
    /// Told to those that need no more of it.
    joined: watch::Sender<bool>,
    health: HealthChanges,
}

/// How far a worker is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum WorkerStatus {
    /// Its files were not read yet, or can't be: its runnable says why.
    Starting,
    /// In no cluster: what it waits for, and what to do.
    Waiting { awaited: String, hint: String },
    /// In its cluster, as a voter tells it.
    Following(Membership),
    /// In its cluster, as it knew it: since when, and what the voters that were asked have answered; nothing before that.
    CutOff { member: Membership, since: SystemTime, asked: String },
    /// The cluster has no such node any more: what it waits for then.
    Removed { member: Membership, awaited: String, hint: String },
}

impl Worker {
    pub(super) fn new(tickets: EnrolmentSources, membership: LayoutFile, health: HealthChanges) -> Self {
        let membership = MembershipFile::new(membership);
        Self {
            tickets,
            membership,
            status: Mutex::new(WorkerStatus::Starting),
            joined: watch::Sender::default(),
            health,
        }
    }

    /// Whether it is in a cluster, as far as it knows.
    pub(super) fn watch_joined(&self) -> watch::Receiver<bool> {
        self.joined.subscribe()
    }

    fn status(&self) -> WorkerStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_status(&self, status: WorkerStatus) {
        let has_joined = matches!(status, WorkerStatus::Following(_) | WorkerStatus::CutOff { .. });
        let is_changed = {
            let mut present = self.status.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *present, status.clone()) != status
        };
        self.joined.send_if_modified(|joined| std::mem::replace(joined, has_joined) != has_joined);
        if is_changed {
            self.health.announce();
        }
    }

    /// The answer to a request for the state of the node in its cluster.
    pub(crate) fn cluster_status(&self) -> v1::ClusterResponse {
        let status = self.status();
        let (state, detail, member) = match &status {
            WorkerStatus::Starting => {
                let hint =
                    "waits for its start; if it does not start, `nodectl logs root.api.worker` says why";
                ("Waiting", hint.to_owned(), None)
            }
            WorkerStatus::Waiting { awaited, hint } => {
                ("Waiting", format!("waits for {awaited}; {hint}"), None)
            }
            WorkerStatus::Following(member) => ("Running", String::new(), Some(member)),
            WorkerStatus::CutOff { member, asked, .. } if asked.is_empty() => {
                ("Unhealthy", "it has asked no voter yet".to_owned(), Some(member))
            }
            WorkerStatus::CutOff { member, since, asked } => {
                let since = rfc3339(*since);
                ("Unhealthy", format!("{CUT_OFF} since {since}: {asked}; {START_VOTER}"), Some(member))
            }
            WorkerStatus::Removed { member, awaited, hint } => {
                ("Failed", format!("{REMOVED}, and waits for {awaited}; {hint}"), Some(member))
            }
        };
        v1::ClusterResponse {
            state: state.to_owned(),
            detail,
            node: member.map(|member| member.node.to_string()).unwrap_or_default(),
            cluster: member.map(|member| member.cluster.clone()).unwrap_or_default(),
            ..Default::default()
        }
    }

    /// The reason why a worker can't do what a voter can, with the voters that can.
    #[allow(clippy::result_large_err, reason = "it is the answer of a call")]
    pub(crate) fn refusal(api: &Api) -> Status {
        refusal_with_voters(
            "this node is a worker, and has no member of a cluster: type it on a voter".to_owned(),
            api,
        )
    }

    /// The reason why a worker can't do what acts on the node where it is typed: on a voter, it would do that to the voter.
    pub(crate) fn member_refusal() -> Status {
        Status::failed_precondition(
            "this node is a worker: it has no member and no store on which this could act",
        )
    }

    /// The reason why a worker does not leave: only a voter can write to the store.
    pub(crate) fn leave_refusal(&self, api: &Api) -> Status {
        match self.status() {
            WorkerStatus::Following(member) | WorkerStatus::CutOff { member, .. } => {
                let text = format!(
                    "this node is a worker: to take it out of its cluster, type `nodectl cluster remove {}` on a voter",
                    member.node
                );
                refusal_with_voters(text, api)
            }
            WorkerStatus::Starting | WorkerStatus::Waiting { .. } | WorkerStatus::Removed { .. } => {
                Status::failed_precondition(
                    "this node is a worker that is in no cluster: it has none to leave",
                )
            }
        }
    }
}

fn refusal_with_voters(mut text: String, api: &Api) -> Status {
    let voters = api.peers.read().unwrap_or_default();
    let voters: Vec<_> = voters.iter().map(|voter| voter.address.to_string()).collect();
    if !voters.is_empty() {
        text += &format!("; the APIs of its voters are at {}", voters.join(", "));
    }
    Status::failed_precondition(text)
}

fn rfc3339(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map(|time| time.strftime("%FT%TZ").to_string()).unwrap_or_default()
}

/// The condition of `root.api.worker`.
pub(super) fn worker_health(node: Weak<RunningNode>) -> impl HealthSource {
    move |_: &NodeSnapshot| {
        // That of the present configuration: a reload may have replaced it.
        let worker = node.upgrade().and_then(|node| find_worker(&node));
        worker.and_then(|(_, worker)| worker.condition()).into_iter().collect::<Vec<_>>()
    }
}

/// The worker that this node is, and its API.
pub(crate) fn find_worker(running: &RunningNode) -> Option<(Arc<Api>, Arc<Worker>)> {
    // A reload that removes the section leaves the extension.
    let api = running_api(running).filter(|api| api.worker_joined.is_some())?;
    Some((api, running.extension::<Arc<Worker>>()?))
}

impl Worker {
    fn condition(&self) -> Option<HealthCondition> {
        match self.status() {
            WorkerStatus::Waiting { awaited, hint } => {
                Some(HealthCondition::problem(DN, "is in no cluster yet").waiting_for(awaited).hint(hint))
            }
            WorkerStatus::Removed { awaited, hint, .. } => {
                Some(HealthCondition::problem(DN, REMOVED).waiting_for(awaited).hint(hint))
            }
            // All that the node does goes on.
            WorkerStatus::CutOff { since, asked, .. } if !asked.is_empty() => Some(
                HealthCondition::warning(DN, format!("{CUT_OFF}: {asked}"))
                    .since(Some(since))
                    .hint(START_VOTER),
            ),
            WorkerStatus::Starting | WorkerStatus::Following(_) | WorkerStatus::CutOff { .. } => None,
        }
    }
}

/// Joins the cluster, and follows it.
pub(crate) struct WorkerRun {
    pub(crate) api: Arc<Api>,
    pub(crate) worker: Arc<Worker>,
}

impl Runnable for WorkerRun {
    fn run(&self, ctx: Context) -> RunFuture {
        let follower = Follower { api: Arc::clone(&self.api), worker: Arc::clone(&self.worker), ctx };
        Box::pin(async move {
            tokio::select! {
                canceled = follower.ctx.canceled() => Err(canceled.into()),
                failed = follower.follow() => failed.map(|never| match never {}),
            }
        })
    }
}
