//! The state that a node and its reloads share.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use nodekeel_logtree::LogStore;

use super::config_calls::answer_config;
use super::tree::NodeTree;
use crate::data::DataDir;
use crate::log_sink::LogStoreSink;
use crate::plan::NodePlan;
use crate::running::{AnswerConfig, RunningNode};

/// The state that a node and its reloads share. Its runnables have the parts of it that they need.
#[derive(Debug)]
pub(super) struct NodeState {
    pub(super) running: Arc<RunningNode>,
    plan: RwLock<Arc<NodePlan>>,
    pub(super) log_sink: LogStoreSink,
    /// The children that the tree adds in each of its incarnations.
    pub(super) tree: NodeTree,
    /// Held by the reload in progress.
    pub(super) reload: tokio::sync::Mutex<()>,
}

impl NodeState {
    pub(super) fn new(plan: NodePlan, data: DataDir, log_store: LogStore) -> Arc<Self> {
        let data = Arc::new(data);
        Arc::new_cyclic(|state: &Weak<Self>| {
            // A strong reference would be a cycle, and would keep the data directory locked for ever.
            let state = Weak::clone(state);
            let answer: AnswerConfig = Box::new(move |request| answer_config(state.upgrade(), request));
            Self {
                log_sink: LogStoreSink::new(log_store.clone(), plan.log_formats().collect()),
                running: Arc::new(RunningNode::new(plan.to_running(), Arc::clone(&data), log_store, answer)),
                plan: RwLock::new(Arc::new(plan)),
                tree: NodeTree::new(data),
                reload: tokio::sync::Mutex::default(),
            }
        })
    }

    /// The plan that the node runs.
    pub(super) fn plan(&self) -> Arc<NodePlan> {
        Arc::clone(&self.plan.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn replace_plan(&self, plan: Arc<NodePlan>) {
        self.running.replace_plan(plan.to_running());
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = plan;
    }
}
