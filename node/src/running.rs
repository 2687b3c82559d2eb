//! The running node, as those see it that show it: the control API, the metrics, and a reload.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::process::ProcessHandle;
use nodekeel_supervisor::{RunnableStatus, Supervisor, wall_clock_time};
use tonic::Status;

use crate::config::NodedConfig;
use crate::data::DataDir;
use crate::event_history::EventHistory;
use crate::health::{HealthCondition, HealthSources, NODE_PART, NodeSnapshot, record_conditions};
use crate::layout::DataLayout;
use crate::metrics::NodeFigures;
use crate::part::PartAdditions;
use crate::supervisor_slot::SupervisorSlot;
use crate::volume::NodeVolume;
use crate::{v1, wire};

/// The running node. The data directory is locked as long as it exists.
pub(crate) struct RunningNode {
    pub(crate) log_store: LogStore,
    pub(crate) history: EventHistory,
    pub(crate) started_at: Instant,
    pub(crate) supervisor: SupervisorSlot,
    /// The data volume, while root.storage has it open.
    pub(crate) volume: NodeVolume,
    data: Arc<DataDir>,
    plan: RwLock<Arc<RunningPlan>>,
    additions: RwLock<PartAdditions>,
    /// The warning about a file that the last reload refused, and when it did.
    refused_reload: Mutex<Option<(HealthCondition, Instant)>>,
    answer_config: AnswerConfig,
}

/// The configuration that the node runs, and what it skips.
#[derive(Debug)]
pub(crate) struct RunningPlan {
    pub(crate) config: NodedConfig,
    pub(crate) skipped: Vec<SkippedRunnable>,
}

/// A runnable of the plan that does not run.
#[derive(Debug)]
pub(crate) struct SkippedRunnable {
    pub(crate) dn: String,
    pub(crate) reason: String,
}

/// A request about the configuration.
#[derive(Debug)]
pub(crate) enum ConfigRequest {
    /// Compares the running configuration with this text, of a file of this name, or with the node's file.
    Check(Option<(PathBuf, String)>),
    /// Reads the node's file again, and applies it.
    Reload,
}

/// Answers a request about the configuration: the node does, which plans and prepares again.
pub(crate) type AnswerConfig = Box<dyn Fn(ConfigRequest) -> ConfigAnswer + Send + Sync>;

/// The answer to a [`ConfigRequest`].
pub(crate) type ConfigAnswer = Pin<Box<dyn Future<Output = Result<v1::ConfigDifference, Status>> + Send>>;

impl fmt::Debug for RunningNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningNode").field("data", &self.data).finish_non_exhaustive()
    }
}

impl RunningNode {
    /// A node without a supervisor, and without what its parts will add.
    pub(crate) fn new(
        plan: RunningPlan,
        data: Arc<DataDir>,
        log_store: LogStore,
        answer_config: AnswerConfig,
    ) -> Self {
        let supervisor = SupervisorSlot::default();
        Self {
            log_store,
            history: EventHistory::new(plan.config.events.keep),
            started_at: Instant::now(),
            volume: NodeVolume::new(supervisor.clone()),
            supervisor,
            data,
            plan: RwLock::new(Arc::new(plan)),
            additions: RwLock::default(),
            refused_reload: Mutex::default(),
            answer_config,
        }
    }

    /// The layout of the data directory.
    pub(crate) fn data(&self) -> &DataLayout {
        self.data.root()
    }

    /// Unlocks the data directory: everything has stopped.
    pub(crate) fn release_data(&self) {
        self.data.unlock();
    }

    /// The configuration that the node runs, and what it skips.
    pub(crate) fn plan(&self) -> Arc<RunningPlan> {
        Arc::clone(&self.plan.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets what the node runs from now on.
    pub(crate) fn replace_plan(&self, plan: RunningPlan) {
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(plan);
    }

    /// A copy of the parts' additions, since a reload replaces the whole.
    pub(crate) fn additions(&self) -> PartAdditions {
        self.additions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets what the parts have added.
    pub(crate) fn replace_additions(&self, additions: PartAdditions) {
        *self.additions.write().unwrap_or_else(PoisonError::into_inner) = additions;
    }

    /// The value of this type that a part has added.
    pub(crate) fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        self.additions.read().unwrap_or_else(PoisonError::into_inner).extensions.get().cloned()
    }

    /// The process of this DN that clients may signal.
    pub(crate) fn process(&self, dn: &str) -> Option<ProcessHandle> {
        self.additions.read().unwrap_or_else(PoisonError::into_inner).processes.get(dn).cloned()
    }

    /// Compares the configuration, or reloads it.
    pub(crate) fn answer_config(&self, request: ConfigRequest) -> ConfigAnswer {
        (self.answer_config)(request)
    }

    /// Sets the warning about the last reload, or clears it.
    pub(crate) fn set_refused_reload(&self, condition: Option<HealthCondition>) {
        let refused = condition.map(|condition| (condition, Instant::now()));
        *self.refused_reload.lock().unwrap_or_else(PoisonError::into_inner) = refused;
    }

    /// Everything that is not well on the node, problems before warnings.
    pub(crate) async fn assess_health(&self) -> Vec<HealthCondition> {
        // Without a supervisor there is no tree to judge.
        let Some(record_problems) = self.supervisor.with(Supervisor::record_problems) else {
            let problem = HealthCondition::problem("root", "does not run: the node is starting or stopping");
            return vec![HealthCondition { part: NODE_PART.to_owned(), ..problem }];
        };
        let node = NodeSnapshot::new(SystemTime::now(), self.tree_nodes());
        let health = node.with_config(self.plan().config.health.clone());
        let mut conditions = self.health_sources().assess(&health).await;
        conditions.extend(record_conditions(record_problems));
        let refused = self.refused_reload.lock().unwrap_or_else(PoisonError::into_inner).clone();
        conditions.extend(refused.map(|(condition, at)| condition.since(Some(wall_clock_time(at)))));
        conditions
    }

    /// The metrics of the node and its parts, as text.
    pub(crate) async fn encode_metrics(&self) -> String {
        let config = self.plan().config.health.clone();
        let disks = self.health_sources().disk_watch(&config);
        // At the same time: where a disk hangs, each takes its whole timeout.
        let (disks, conditions) = tokio::join!(disks.measured_disks(), self.assess_health());
        let (nodes, log) = (self.tree_nodes(), self.log_store.dn_stats());
        self.additions().metrics.encode(&NodeFigures { nodes, conditions, disks, log })
    }

    /// The sources of the parts, and the disks of the data directory and of the open volume.
    fn health_sources(&self) -> HealthSources {
        let mut health = self.additions().health;
        health.add_disk(self.data().path());
        // The mount point of a closed volume is on the disk of the data directory, which is watched already.
        self.volume.path().into_iter().for_each(|path| health.add_disk(path));
        health
    }

    /// The tree, with the skipped services.
    pub(crate) fn tree_nodes(&self) -> Vec<v1::Node> {
        let tree = self.supervisor.with(Supervisor::snapshot).unwrap_or_default();
        let processes = self.additions().processes;
        let with_process = |status: &RunnableStatus| match processes.get(&*status.dn) {
            Some(process) => wire::with_process(wire::node_to_wire(status), process),
            None => wire::node_to_wire(status),
        };
        let plan = self.plan();
        // The supervisor does not know the skipped ones. Clients see them with the reason.
        let skipped = plan.skipped.iter().map(|skipped| v1::Node {
            dn: skipped.dn.clone(),
            state: v1::State::Skipped.into(),
            since: wire::timestamp(wall_clock_time(self.started_at)),
            waiting_for: skipped.reason.clone(),
            ..v1::Node::default()
        });
        tree.iter().map(with_process).chain(skipped).collect()
    }
}
