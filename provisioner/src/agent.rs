//! The agent of a cluster: does what no node can do for itself.
//!
//! Nodes serve without it, and it serves no claim. One agent is elected by a Lease, however many run:
//!
//! ```text
//!  claims, classes ─┐                     ┌─ claim: deselect a node that is deleted, cordoned, not ready
//!  nodes, CSINodes, ├─▶ plan (pure) ─▶ agenda ─ or without the driver; report that no node can serve it
//!  Leases, volumes, ┤      (delays)       ├─ pod whose claims are not on its one node: report
//!  pods ────────────┘                     └─ volume of a deleted node: report; remove its object, if asked
//! ```
//!
//! The agent holds no state: everything follows from what the API server has, and a new leader starts its delays
//! again. Each write names the UID and the version of the object that the decision was made on, so that a
//! leader that has lost its Lease changes nothing that has changed since. It never deletes data: those of a
//! deleted node stay on its disk, and if the node comes back, its provisioner reports them as orphans.
//!
//! A node is known to be able to serve by its CSINode, so the nodes need the CSI node plugin; and by the Lease that its
//! provisioner renews, since a CSINode outlives a killed one.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::DriverName;
use crate::api::event::EventRecorder;
use crate::api::watch_errors::WatchErrors;
use crate::api::writer::ClientHandle;
use crate::step::{StepHook, StepRunner};

mod agenda;
mod applier;
mod facts;
mod leader;
mod lease;
mod metrics;
mod mirror;
mod node_leases;
mod plan;
#[cfg(test)]
mod plan_test;

use applier::AgentApplier;
use lease::LeaderElection;
pub use metrics::AgentMetrics;
use metrics::AgentWatchMetrics;
#[cfg(feature = "metrics")]
pub use metrics::PrometheusAgentMetrics;

/// The dependencies of an agent.
#[derive(Clone)]
pub struct AgentDeps {
    /// The API server. To mock it: `Client::new(tower_service, "default")`.
    pub client: Client,
    /// Records metrics; `Arc::new(())` records nothing.
    pub metrics: Arc<dyn AgentMetrics>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
}

/// The configuration of an agent.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AgentConfig {
    /// The driver whose claims and volumes it looks after.
    pub driver: DriverName,
    /// The holder in the Lease, and the reporter in events; no other running agent may have it.
    pub identity: String,
    /// The namespace of the Lease, and of the Leases and CSIStorageCapacity objects of the nodes. Default `nodekeel`.
    pub lease_namespace: String,
    /// The name of the Lease. Default `provisionerd-agent`.
    pub lease_name: String,
    /// The time for which a claim's selected node may be unable to serve, and a claim without a node that could, before
    /// the agent acts: the kubelet registers a driver only once it runs, and a cordoned node completes what it
    /// has started. Doubled, up to 5 min, each time that the scheduler selects such a node again. Default 5 s.
    pub grace_period: Duration,
    /// The time for which a volume's node may be deleted before the volume is reported. Default 5 min.
    pub node_gone_after: Duration,
    /// The time for which a volume's node and claim must have been deleted before its PersistentVolume is removed.
    /// Default `None`: never.
    pub remove_after: Option<Duration>,
}

impl AgentConfig {
    /// The default configuration.
    pub fn new(driver: DriverName, identity: impl Into<String>) -> Self {
        Self {
            driver,
            identity: identity.into(),
            lease_namespace: "nodekeel".to_owned(),
            lease_name: "provisionerd-agent".to_owned(),
            grace_period: Duration::from_secs(5),
            node_gone_after: Duration::from_secs(300),
            remove_after: None,
        }
    }
}

/// The role of an agent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    clippy::exhaustive_enums,
    reason = "complete by nature: the leader is this agent, another, or unknown"
)]
pub enum AgentState {
    /// The leader is not known yet.
    Starting,
    /// Another agent leads, or is about to.
    Standby,
    /// Leads.
    Leading,
}

/// The reason why a run of an agent ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The token was canceled, and the Lease released.
    #[error("the agent was stopped on request")]
    Canceled,
    /// A watch of the API server ended, which is not expected. Run the agent again.
    #[error("the watch of the API server's objects ended")]
    WatchEnded,
}

/// Looks after the claims and volumes that no node looks after.
#[derive(Debug, Clone)]
pub struct Agent {
    config: AgentConfig,
    applier: Arc<AgentApplier>,
    election: Arc<LeaderElection>,
    watch_errors: WatchErrors,
    state: watch::Sender<AgentState>,
}

impl Agent {
    /// Creates an agent; it does nothing before it runs.
    pub fn new(config: AgentConfig, deps: AgentDeps) -> Self {
        let steps = StepRunner::new(deps.hook);
        let watch_errors =
            WatchErrors::new(Arc::new(AgentWatchMetrics(Arc::clone(&deps.metrics))), deps.client.clone());
        let election = LeaderElection::new(deps.client.clone(), &config, watch_errors.clone());
        let recorder =
            EventRecorder::new(deps.client.clone(), &config.driver, &config.identity, steps.clone());
        let applier = AgentApplier {
            driver: config.driver.clone(),
            namespace: config.lease_namespace.clone(),
            client: ClientHandle(deps.client),
            recorder,
            metrics: deps.metrics,
            steps,
        };
        let (applier, election) = (Arc::new(applier), Arc::new(election));
        Self { config, applier, election, watch_errors, state: watch::Sender::new(AgentState::Starting) }
    }

    /// The role of the agent now, and changes of it.
    pub fn watch_state(&self) -> watch::Receiver<AgentState> {
        self.state.subscribe()
    }

    /// The error of a watch of the API server that fails now, if one does.
    pub fn watch_failure(&self) -> Option<String> {
        self.watch_errors.failure()
    }

    /// Runs until canceled: waits for the Lease, and leads while it holds it.
    ///
    /// # Errors
    /// Always returns one: [`AgentError::Canceled`] after the token is canceled and the Lease released;
    /// [`AgentError::WatchEnded`].
    ///
    /// # Cancel safety
    /// Dropping the future is like a crash: another agent leads once the Lease has expired, after 15 s.
    pub async fn run_until(&self, token: CancellationToken) -> Result<Infallible, AgentError> {
        loop {
            let mut held = tokio::select! {
                biased;
                // Checked first: a canceled agent takes no Lease.
                () = token.cancelled() => return Err(AgentError::Canceled),
                held = self.election.acquire_lease(&self.state) => held,
            };
            self.set_leading(true);
            tracing::info!(identity = self.config.identity, "leading");
            let (unanswered, mut slow_times) = mpsc::unbounded_channel();
            let ended = tokio::select! {
                // First: an agent that has lost its Lease must not write.
                biased;
                reason = self.election.keep_lease(&mut held, &unanswered) => LeadershipEnd::Lost(reason),
                () = token.cancelled() => LeadershipEnd::Canceled,
                () = leader::run_leader(&self.config, &self.applier, &self.watch_errors, &mut slow_times) => {
                    LeadershipEnd::WatchEnded
                }
            };
            self.set_leading(false);
            match ended {
                LeadershipEnd::Lost(reason) => tracing::warn!("no longer leading: {reason}"),
                LeadershipEnd::Canceled => {
                    // The leader's loop was dropped, so this agent writes nothing more. Another may lead at once.
                    self.election.release_lease().await;
                    return Err(AgentError::Canceled);
                }
                LeadershipEnd::WatchEnded => {
                    self.election.release_lease().await;
                    return Err(AgentError::WatchEnded);
                }
            }
        }
    }

    fn set_leading(&self, is_leading: bool) {
        let state = if is_leading { AgentState::Leading } else { AgentState::Starting };
        self.state.send_replace(state);
        // The watches of the former role have ended.
        self.watch_errors.clear();
        let metrics = &self.applier.metrics;
        metrics.set_leading(is_leading);
        metrics.set_gone_volumes(&BTreeMap::new());
        metrics.set_unserved_claims(0);
        metrics.set_unresponsive_nodes(0);
        metrics.set_watches_failing(false);
    }
}

/// The reason why an agent stopped leading.
enum LeadershipEnd {
    /// Could not renew its Lease, or another agent has it.
    Lost(String),
    Canceled,
    WatchEnded,
}

impl fmt::Debug for AgentDeps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentDeps").field("metrics", &self.metrics).finish_non_exhaustive()
    }
}
