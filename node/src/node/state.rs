//! The state that the tree, the control API and a reload share.

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::{RunnableStatus, Supervisor};
use tonic::Extensions;

use super::tree::NodeTree;
use crate::control::ControlServices;
use crate::data::DataDir;
use crate::event_history::EventHistory;
use crate::health::{HealthCondition, HealthSources, NODE_PART, NodeSnapshot, record_conditions};
use crate::log_sink::LogStoreSink;
use crate::metrics::{MetricsRegistries, NodeFigures};
use crate::parts::service::control::ServiceHandles;
use crate::parts::storage::keys::VolumeKeys;
use crate::parts::storage::unlock::VolumeUnlock;
use crate::plan::NodePlan;
use crate::volume::NodeVolume;
use crate::{v1, wire};

/// The state that the tree, the control API and a reload share. The data directory is locked as long as it exists.
#[derive(Debug)]
pub(crate) struct NodeState {
    plan: RwLock<Arc<NodePlan>>,
    pub(crate) data: DataDir,
    /// The data volume, while root.storage has it open.
    pub(crate) volume: NodeVolume,
    /// Its keys.
    pub(crate) unlock: Arc<VolumeUnlock>,
    /// Changes them.
    pub(crate) keys: Arc<VolumeKeys>,
    pub(crate) log_store: LogStore,
    pub(super) log_sink: LogStoreSink,
    pub(crate) history: EventHistory,
    pub(crate) started_at: SystemTime,
    /// What the tree adds in each of its incarnations.
    pub(super) tree: NodeTree,
    additions: RwLock<PartAdditions>,
    /// Held by the reload in progress.
    pub(super) reload: tokio::sync::Mutex<()>,
    /// The warning about a file that the last reload refused.
    refused_reload: Mutex<Option<HealthCondition>>,
    /// `None` before the start is complete, and after the shutdown.
    supervisor: RwLock<Option<Arc<Supervisor>>>,
}

/// What the parts have added to the node.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartAdditions {
    pub(crate) extensions: Extensions,
    pub(crate) services: ControlServices,
    pub(crate) health: HealthSources,
    pub(crate) metrics: MetricsRegistries,
}

impl NodeState {
    pub(super) fn new(plan: NodePlan, data: DataDir, log_store: LogStore) -> Self {
        let unlock = Arc::<VolumeUnlock>::default();
        Self {
            history: EventHistory::new(plan.config.events.keep),
            log_sink: LogStoreSink::new(log_store.clone(), plan.log_formats()),
            plan: RwLock::new(Arc::new(plan)),
            data,
            volume: NodeVolume::default(),
            keys: Arc::new(VolumeKeys::new(Arc::clone(&unlock))),
            unlock,
            log_store,
            started_at: SystemTime::now(),
            tree: NodeTree::default(),
            additions: RwLock::default(),
            reload: tokio::sync::Mutex::default(),
            refused_reload: Mutex::default(),
            supervisor: RwLock::new(None),
        }
    }

    /// The plan that the node runs.
    pub(crate) fn plan(&self) -> Arc<NodePlan> {
        Arc::clone(&self.plan.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn replace_plan(&self, plan: Arc<NodePlan>) {
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = plan;
    }

    /// Calls the supervisor; `None` while the node is stopping.
    pub(crate) fn with_supervisor<T>(&self, call: impl FnOnce(&Supervisor) -> T) -> Option<T> {
        self.supervisor.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(call)
    }

    pub(super) fn supervisor(&self) -> Option<Arc<Supervisor>> {
        self.supervisor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn replace_supervisor(&self, supervisor: Option<Arc<Supervisor>>) -> Option<Arc<Supervisor>> {
        let mut slot = self.supervisor.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *slot, supervisor)
    }

    /// What the parts have added.
    pub(super) fn additions(&self) -> PartAdditions {
        self.additions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn replace_additions(&self, additions: PartAdditions) {
        *self.additions.write().unwrap_or_else(PoisonError::into_inner) = additions;
    }

    /// The value of this type that a part has added.
    pub(crate) fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        self.additions.read().unwrap_or_else(PoisonError::into_inner).extensions.get().cloned()
    }

    /// The gRPC services of the parts.
    pub(crate) fn control_services(&self) -> ControlServices {
        self.additions().services
    }

    /// Everything that is not well on the node, problems before warnings.
    pub(crate) async fn assess_health(&self) -> Vec<HealthCondition> {
        if self.with_supervisor(|_| ()).is_none() {
            let problem = HealthCondition::problem("root", "does not run: the node is starting or stopping");
            return vec![HealthCondition { part: NODE_PART.to_owned(), ..problem }];
        }
        let node = NodeSnapshot::new(SystemTime::now(), self.tree_nodes());
        let health = node.with_config(self.plan().config.health.clone());
        let mut conditions = self.health_sources().assess(&health).await;
        conditions
            .extend(record_conditions(self.with_supervisor(Supervisor::record_problems).unwrap_or_default()));
        conditions.extend(self.refused_reload.lock().unwrap_or_else(PoisonError::into_inner).clone());
        conditions
    }

    /// Sets what is not well since the last reload, or that nothing is.
    pub(super) fn set_refused_reload(&self, condition: Option<HealthCondition>) {
        *self.refused_reload.lock().unwrap_or_else(PoisonError::into_inner) = condition;
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
        health.add_disk(self.data.root().path());
        self.volume.path().into_iter().for_each(|path| health.add_disk(path));
        health
    }

    /// The tree, with the skipped services.
    pub(crate) fn tree_nodes(&self) -> Vec<v1::Node> {
        let tree = self.with_supervisor(Supervisor::snapshot).unwrap_or_default();
        let plan = self.plan();
        let skipped = plan.skipped_services().map(|planned| v1::Node {
            dn: planned.dn.clone(),
            state: v1::State::Skipped.into(),
            since: wire::timestamp(self.started_at),
            waiting_for: planned.skip_reason.clone().unwrap_or_default(),
            ..v1::Node::default()
        });
        let handles = self.extension::<ServiceHandles>().unwrap_or_default();
        let with_process = |status: &RunnableStatus| match handles.0.get(&*status.dn) {
            Some(handle) => wire::with_process(wire::node_to_wire(status), handle),
            None => wire::node_to_wire(status),
        };
        tree.iter().map(with_process).chain(skipped).collect()
    }
}
