//! A running node: the tree of everything that a plan contains.

mod builder;
mod state;
mod tree;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_logtree::{Level, LogLimits, LogMessage, LogStore};
use nodekeel_supervisor::{Runnable, RunnableStatus, ShutdownReport, Supervisor};
use thiserror::Error;
use tonic::Extensions;

use crate::config::{LogConfig, is_valid_runnable_name};
use crate::control::{BindError, ControlServices, ControlSocket};
use crate::data::{DataDir, DataError};
use crate::log_sink::LogStoreSink;
use crate::part::{NodePreparation, Part, PlannedService, PrepareError, PreparedRunnable};
use crate::parts::CONTROL_DN;
use crate::plan::{NodePlan, PartPlanner};

pub use builder::{BuildError, NodeBuilder};
pub(crate) use state::NodeState;

/// What a node needs beside its plan.
#[derive(Debug)]
#[non_exhaustive]
pub struct Deps {
    /// The log store of all output. A program that installs a tracing subscriber adds the layer of this log
    /// store to it.
    pub log_store: LogStore,
    /// Additional runnables. They are children of the root and start before the services, which can't depend on them:
    /// for that, add them as [parts](NodeBuilder::with).
    pub runnables: Vec<ExtraRunnable>,
}

/// An additional runnable of the program that embeds the node.
pub struct ExtraRunnable {
    name: String,
    runnable: PreparedRunnable,
}

impl ExtraRunnable {
    /// Names the runnable; its DN will be `root.<name>`.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        Self { name: name.into(), runnable: PreparedRunnable::new(runnable) }
    }
}

/// A part that runs it, and on which services can depend.
impl Part for ExtraRunnable {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let dn = format!("root.{}", self.name);
        planner.add(PlannedService::from_prepared(dn, "a runnable of this program", self.runnable.clone()));
    }
}

impl std::fmt::Debug for ExtraRunnable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExtraRunnable").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Deps {
    /// Deps without additional runnables.
    pub fn new(log_store: LogStore) -> Self {
        Self { log_store, runnables: Vec::new() }
    }
}

/// Creates the log store that `[log]` describes.
pub fn new_log_store(config: &LogConfig) -> LogStore {
    let limits = LogLimits {
        bytes_per_dn: config.bytes_per_dn.get(),
        total_bytes: config.bytes.get(),
        ..LogLimits::default()
    };
    LogStore::new(limits)
}

/// Why a node can't start. Nothing runs then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The data directory can't be used. The message has the hint.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A part can't be prepared: the volumes can't be opened, for example. The message has the hint.
    #[error(transparent)]
    Part(PrepareError),
    /// The control socket can't be bound. The message has the hint.
    #[error(transparent)]
    Control(Box<dyn std::error::Error + Send + Sync>),
    /// An additional runnable has an invalid name, or that of a part or another one. Use another name.
    #[error(
        "invalid runnable name {name:?}: use 1 to 64 of a-z, 0-9, '_' and '-', and no name of a part or another runnable"
    )]
    RunnableName {
        /// The name.
        name: String,
    },
}

/// Chooses the variant by the error's type.
impl From<PrepareError> for StartError {
    fn from(error: PrepareError) -> Self {
        match error.downcast::<DataError>() {
            Ok(error) => Self::Data(*error),
            Err(error) if error.is::<BindError>() => Self::Control(error),
            Err(error) => Self::Part(error),
        }
    }
}

/// A running node. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct NodeHandle {
    shared: Arc<NodeState>,
    /// Locked until everything has stopped.
    _data: DataDir,
}

impl NodeHandle {
    /// Builds a node with the shipped parts and yours from the text of a configuration; `file` is only used in errors.
    pub fn builder(file: impl Into<PathBuf>, text: impl Into<String>) -> NodeBuilder {
        NodeBuilder::new(file.into(), text.into())
    }

    /// Acquires the data directory and starts everything.
    ///
    /// # Errors
    /// See [`StartError`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(plan: NodePlan, deps: Deps) -> Result<Self, StartError> {
        check_runnable_names(&plan.part_names, &deps.runnables)?;
        let data = DataDir::acquire(&plan.config.node.data)?;
        let shared = Arc::new(NodeState::new(plan, deps.log_store));
        let mut prepared = prepare_services(&shared, &data)?;
        for planned in shared.skipped_services() {
            let reason = planned.skip_reason.as_deref().unwrap_or_default();
            let dn = planned.dn.parse().expect("a planned service has a valid name");
            shared.log_store.append_message(&dn, LogMessage::new(Level::Warn, format!("skipped: {reason}")));
        }
        let at = usize::from(prepared.first().is_some_and(|(dn, _)| dn == CONTROL_DN));
        prepared.splice(
            at..at,
            deps.runnables.into_iter().map(|extra| (format!("root.{}", extra.name), extra.runnable)),
        );
        let formats = shared.plan.active_services().flat_map(|planned| planned.log_formats.iter().cloned());
        let sink = LogStoreSink::new(shared.log_store.clone(), formats);
        let root = tree::root_runnable(tree::tree_children(&prepared));
        let supervisor =
            Supervisor::builder().output_sink(sink).event_hook(shared.history.clone()).start(root);
        shared.replace_supervisor(Some(Arc::new(supervisor)));
        Ok(Self { shared, _data: data })
    }

    /// The path of the control API's socket.
    pub fn control_socket(&self) -> &Path {
        &self.shared.plan.socket
    }

    /// The cluster service: enrolment and membership of the node; `None` without `[cluster]`.
    pub fn cluster_handle(&self) -> Option<&ClusterNode> {
        self.extension()
    }

    /// The value of this type that a part has provided.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&T> {
        self.shared.extension()
    }

    /// The current tree, without the skipped services.
    pub fn snapshot(&self) -> Vec<RunnableStatus> {
        self.shared.with_supervisor(Supervisor::snapshot).unwrap_or_default()
    }

    /// Waits until a runnable of the tree is ready or done, also one that is not in the tree yet: for ever, if it is
    /// skipped, or if nothing runs it.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, dn: &str) {
        if let Some(supervisor) = self.shared.supervisor() {
            // Fails only when the tree is shut down, which takes this handle.
            let _ = supervisor.wait_ready(dn).await;
        }
    }

    /// Stops everything, dependents before what they depend on and the control API last, then releases the data
    /// directory.
    pub async fn shutdown(self) -> ShutdownReport {
        self.shared.supervisor().expect("only drop removes the supervisor").shutdown().await
    }
}

impl Drop for NodeHandle {
    /// The tree and the supervisor own each other through the shared state, so this breaks the cycle.
    fn drop(&mut self) {
        drop(self.shared.replace_supervisor(None));
        if let Some(socket) = self.extension::<Arc<ControlSocket>>() {
            socket.close();
        }
    }
}

fn check_runnable_names(part_names: &[String], runnables: &[ExtraRunnable]) -> Result<(), StartError> {
    for (index, ExtraRunnable { name, .. }) in runnables.iter().enumerate() {
        let conflicts =
            part_names.contains(name) || runnables[..index].iter().any(|other| other.name == *name);
        if conflicts || !is_valid_runnable_name(name) {
            return Err(StartError::RunnableName { name: name.clone() });
        }
    }
    Ok(())
}

/// Prepares everything that is not skipped, in the order of the plan.
fn prepare_services(
    shared: &Arc<NodeState>,
    data: &DataDir,
) -> Result<Vec<(String, PreparedRunnable)>, StartError> {
    let (mut extensions, mut services) = (Extensions::new(), ControlServices::default());
    let mut node = NodePreparation {
        state: shared,
        data: data.root(),
        extensions: &mut extensions,
        services: &mut services,
    };
    let prepare = |planned: &PlannedService| {
        let prepared = planned.runnable.prepare(&mut node)?;
        Ok((planned.dn.clone(), prepared.start_after(&planned.start_after)))
    };
    let prepared = shared.plan.active_services().map(prepare).collect::<Result<_, PrepareError>>()?;
    shared.set_additions(extensions, services);
    Ok(prepared)
}
