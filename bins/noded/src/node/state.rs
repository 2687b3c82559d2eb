//! The state that the tree and the control API share.

use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::SystemTime;

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::Supervisor;
use tonic::Extensions;

use crate::control::ControlServices;
use crate::event_history::EventHistory;
use crate::part::PlannedService;
use crate::plan::NodePlan;
use crate::{v1, wire};

/// The state that the tree and the control API share.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) plan: NodePlan,
    pub(crate) log_store: LogStore,
    pub(crate) history: EventHistory,
    pub(crate) started_at: SystemTime,
    /// What the parts have added; set before the tree starts.
    additions: OnceLock<(Extensions, ControlServices)>,
    /// `None` before the start is complete, and after the shutdown.
    supervisor: RwLock<Option<Arc<Supervisor>>>,
}

impl NodeState {
    pub(super) fn new(plan: NodePlan, log_store: LogStore) -> Self {
        let history = EventHistory::new(plan.config.events.keep);
        let (additions, supervisor) = (OnceLock::new(), RwLock::new(None));
        Self { plan, log_store, history, started_at: SystemTime::now(), additions, supervisor }
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

    /// Sets what the parts have added, once.
    pub(super) fn set_additions(&self, extensions: Extensions, services: ControlServices) {
        // Nothing reads it before, and only the start sets it.
        let _ = self.additions.set((extensions, services));
    }

    /// The value of this type that a part has added.
    pub(crate) fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.additions.get()?.0.get()
    }

    /// The gRPC services of the parts.
    pub(crate) fn control_services(&self) -> ControlServices {
        self.additions.get().map(|(_, services)| services.clone()).unwrap_or_default()
    }

    pub(crate) fn skipped_services(&self) -> impl Iterator<Item = &PlannedService> {
        self.plan.services.iter().filter(|planned| planned.skip_reason.is_some())
    }

    /// The tree, with the skipped services.
    pub(crate) fn tree_nodes(&self) -> Vec<v1::Node> {
        let tree = self.with_supervisor(Supervisor::snapshot).unwrap_or_default();
        let skipped = self.skipped_services().map(|planned| v1::Node {
            dn: planned.dn.clone(),
            state: v1::State::Skipped.into(),
            since: wire::timestamp(self.started_at),
            waiting_for: planned.skip_reason.clone().unwrap_or_default(),
            ..v1::Node::default()
        });
        tree.iter().map(wire::node_to_wire).chain(skipped).collect()
    }
}
