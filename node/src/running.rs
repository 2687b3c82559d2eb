//! The running node, as those see it that show it: the control API, the metrics, and a reload.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::process::ProcessHandle;
use nodekeel_supervisor::{RunnableStatus, Supervisor, wall_clock_time};
use tokio::time::sleep;
use tonic::Status;

use crate::config::NodedConfig;
use crate::data::DataDir;
use crate::event_history::EventHistory;
use crate::health::{
    ConditionChange, ConditionChangeKind, Consequences, HealthCondition, HealthMonitor, HealthSources,
    NODE_PART, NodeSnapshot, ReadinessChange, RunnableReadiness, record_conditions,
};
use crate::kernel_kills::KernelKills;
use crate::layout::DataLayout;
use crate::metrics::NodeFigures;
use crate::part::PartAdditions;
use crate::supervisor_slot::SupervisorSlot;
use crate::volume::NodeVolume;
use crate::{v1, wire};

/// The pause between two assessments that nobody asks for. Each is a request to the API server, as is a kubelet's lease,
/// which it renews as often. Who asks gets an assessment of that moment, and daemons have probes of their own.
const ASSESSMENT_PERIOD: Duration = Duration::from_secs(10);
/// The same, while parts announce changes.
const ANNOUNCED_PERIOD: Duration = Duration::from_secs(1);

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
    monitor: HealthMonitor,
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
            monitor: HealthMonitor::default(),
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
        let turn = self.monitor.begin();
        let tree = self.supervisor.with(Supervisor::snapshot).unwrap_or_default();
        // The sources see what each runnable says of itself: what they withhold must not be their own reason.
        let own = self.nodes_of(&tree, own_node);
        let node = NodeSnapshot::new(SystemTime::now(), own);
        let node = node.with_config(self.plan().config.health.clone());
        let readiness: Vec<_> = tree
            .iter()
            .filter(|status| status.state.is_running())
            .map(|status| RunnableReadiness {
                dn: Arc::clone(&status.dn),
                is_healthy: node.runnable(&status.dn).is_some_and(v1::Node::is_healthy),
                withheld: status.withheld.clone(),
            })
            .collect();
        let mut found = self.health_sources().assess(&node, &readiness).await;
        found.conditions.extend(record_conditions(record_problems));
        let refused = self.refused_reload.lock().unwrap_or_else(PoisonError::into_inner).clone();
        found.conditions.extend(refused.map(|(condition, at)| condition.since(Some(wall_clock_time(at)))));
        let Consequences { readiness, changes } = self.monitor.apply(turn, &mut found);
        for ReadinessChange { dn, reason } in readiness {
            // It may have left the tree meanwhile.
            _ = self.supervisor.with(|supervisor| supervisor.withhold_ready(&dn, reason));
        }
        // The tree has events of its own.
        for change in changes.into_iter().filter(|change| node.runnable(&change.object).is_none()) {
            self.report_condition(change, &node);
        }
        found.conditions
    }

    /// Logs that a condition begins or ends, and keeps it as an event, under the part's DN.
    fn report_condition(&self, change: ConditionChange, node: &NodeSnapshot) {
        let part = format!("root.{}", change.part);
        let dn = node.runnable(&part).map_or("root", |part| part.dn.as_str());
        match change.kind {
            ConditionChangeKind::Begun => tracing::warn!(dn, "{}", change.text),
            ConditionChangeKind::Ended => tracing::info!(dn, "no longer: {}", change.text),
        }
        self.history.add_condition(dn, change);
    }

    /// Assesses the health every few seconds, as long as the node exists: disks and clocks notify nobody, and a
    /// condition that nobody asks for has an age, too.
    pub(crate) async fn watch_health(node: Weak<Self>) {
        let Some(changes) = node.upgrade().map(|node| node.health_sources().changes()) else { return };
        loop {
            tokio::select! {
                () = sleep(ASSESSMENT_PERIOD) => {}
                // However many are announced, there is one assessment a second.
                () = changes.announced() => sleep(ANNOUNCED_PERIOD).await,
            }
            let Some(node) = node.upgrade() else { return };
            // Without a supervisor the node is stopping, or has not started.
            if node.supervisor.get().is_some() {
                node.assess_health().await;
            }
        }
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
        self.nodes_of(&tree, |_, node| node)
    }

    fn nodes_of(
        &self,
        tree: &[RunnableStatus],
        view: impl Fn(&RunnableStatus, v1::Node) -> v1::Node,
    ) -> Vec<v1::Node> {
        let PartAdditions { processes, extensions, .. } = self.additions();
        // Without the kernel's log there are none.
        let kills = extensions.get::<KernelKills>().cloned().unwrap_or_default();
        let with_process = |status: &RunnableStatus| {
            let node = view(status, wire::node_to_wire(status, &kills));
            match processes.get(&*status.dn) {
                Some(process) => wire::with_process(node, process),
                None => node,
            }
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

/// The runnable as it is by its own signals, without what its part withholds.
fn own_node(status: &RunnableStatus, node: v1::Node) -> v1::Node {
    if status.withheld.is_none() {
        return node;
    }
    let (waiting_for, condition) = (String::new(), String::new());
    v1::Node { state: v1::State::Ready.into(), waiting_for, condition, ..node }
}
