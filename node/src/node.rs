//! A running node: the tree of everything that a plan contains.

mod builder;
mod config_calls;
mod reload;
mod state;
mod tree;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_fsquota::Bytes;
use nodekeel_logtree::{Level, LogLimits, LogMessage, LogStore};
use nodekeel_supervisor::process::{ProcessRecords, Rlimit};
use nodekeel_supervisor::{Runnable, RunnableStatus, ShutdownReport, Supervisor};

use crate::config::LogConfig;
use crate::control::socket::NodeSocket;
use crate::data::{self, DataDir, DataError};
use crate::dn::CONTROL as CONTROL_DN;
use crate::dn::is_valid_runnable_name;
use crate::layout::ProcessesLayout;
use crate::part::{Part, Parts, PlannedService, PreparedRunnable};
use crate::parts::control::log_levels::set_configured_levels;
use crate::plan::{NodePlan, PartPlanner};
use crate::preparation::{PreparedParts, prepare_services};
use crate::program_name::program_name;
use crate::running::RunningNode;

pub use crate::preparation::StartError;
pub use builder::{BuildError, NodeBuilder};
pub use reload::ReloadError;
use state::NodeState;

/// The log store and the runnables of a node, besides its plan.
#[derive(Debug)]
#[non_exhaustive]
pub struct Deps {
    /// The log store of all output. A program that installs a tracing subscriber adds the layer of this log
    /// store to it.
    pub log_store: LogStore,
    /// Additional runnables. They are children of the root and start before the services, which can't depend on them:
    /// for that, add them as [parts](NodeBuilder::with).
    pub runnables: Vec<ExtraRunnable>,
    /// Limits of all child processes in place of the program's own, unless a service has its own: those that
    /// [`protect_own_memory`](nodekeel_supervisor::process::protect_own_memory) has changed.
    pub child_limits: Vec<Rlimit>,
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
        Self { log_store, runnables: Vec::new(), child_limits: Vec::new() }
    }
}

/// Creates the log store that `[log]` describes, with its levels.
pub fn new_log_store(config: &LogConfig) -> LogStore {
    let in_memory = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
    let limits = LogLimits {
        bytes_per_dn: in_memory(config.bytes_per_dn),
        total_bytes: in_memory(config.bytes),
        ..LogLimits::default()
    };
    let log_store = LogStore::new(limits);
    set_configured_levels(&log_store, &BTreeMap::new(), &config.levels);
    log_store
}

/// A running node. Dropping it stops it without waiting; the data directory stays locked until it has stopped.
#[derive(Debug)]
pub struct NodeHandle {
    shared: Arc<NodeState>,
    socket: PathBuf,
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
        // A mistake of the program is reported before anything is created.
        check_runnable_names(&plan.source.parts, &deps.runnables)?;
        // From here on, no other instance can use the directory.
        let data = DataDir::acquire(&plan.config.node.data)?;
        let shared = NodeState::new(plan, data, deps.log_store);
        let plan = shared.plan();
        // All runnables are prepared before one starts: an error leaves nothing running.
        let PreparedParts { runnables: mut prepared, additions } =
            prepare_services(&shared.running, &plan, plan.active_services())?;
        // The control API, the health and the metrics find what the parts have added from the first call on.
        shared.running.replace_additions(additions);
        log_skipped(&shared.running.log_store, plan.skipped_services());
        log_warnings(&shared.running.log_store, &plan.warnings);
        // The runnables of the program come after the control API, and before the services.
        let at = usize::from(prepared.first().is_some_and(|(dn, _)| dn == CONTROL_DN));
        prepared.splice(
            at..at,
            deps.runnables.into_iter().map(|extra| (format!("root.{}", extra.name), extra.runnable)),
        );
        // The root adds the children that it finds here, and so the tree is filled before the supervisor starts.
        *shared.tree.lock() = prepared;
        // The first thing that the supervisor does is to end, or to adopt, what a killed noded has left behind.
        let builder = Supervisor::builder().output_sink(shared.log_sink.clone());
        let layout = place_processes(&shared)?;
        let builder = builder.process_records(process_records(&layout, &plan));
        let builder = builder.notify_directory(layout.notify.path()).child_limits(deps.child_limits);
        let supervisor =
            builder.event_hook(shared.running.history.clone()).start(shared.tree.root_runnable());
        // From here on, calls of the control API reach the supervisor.
        shared.running.supervisor.replace(Some(Arc::new(supervisor)));
        tokio::spawn(RunningNode::watch_health(Arc::downgrade(&shared.running)));
        Ok(Self { shared, socket: plan.socket.clone() })
    }

    /// The path of the control API's socket.
    pub fn control_socket(&self) -> &Path {
        &self.socket
    }

    /// The cluster service: enrolment and membership of the node; `None` without `[cluster]`.
    pub fn cluster_handle(&self) -> Option<ClusterNode> {
        self.extension()
    }

    /// The value of this type that a part has provided. A reload may replace it.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        self.shared.running.extension()
    }

    /// The current tree, without the skipped services.
    pub fn snapshot(&self) -> Vec<RunnableStatus> {
        self.shared.running.supervisor.with(Supervisor::snapshot).unwrap_or_default()
    }

    /// Waits until a runnable of the tree is ready or done, also one that is not in the tree yet: for ever, if it is
    /// skipped, or if nothing runs it.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, dn: &str) {
        if let Some(supervisor) = self.shared.running.supervisor.get() {
            // Fails only when the tree is shut down, which takes this handle.
            let _ = supervisor.wait_ready(dn).await;
        }
    }

    /// Stops everything, dependents before what they depend on and the control API last, then releases the data
    /// directory.
    pub async fn shutdown(self) -> ShutdownReport {
        let supervisor = self.shared.running.supervisor.get().expect("only drop removes the supervisor");
        let report = supervisor.shutdown().await;
        // The last users of the data directory may be dropped a moment later: the lock does not wait for them.
        self.shared.running.release_data();
        report
    }
}

impl Drop for NodeHandle {
    /// The tree and the supervisor own each other, so this breaks the cycle. What runs still owns the lock of the data
    /// directory.
    fn drop(&mut self) {
        drop(self.shared.running.supervisor.replace(None));
        self.shared.tree.lock().clear();
        // The additions of the parts still hold the socket. Its file goes when no stream of its connections is
        // left.
        if let Some(socket) = self.extension::<Arc<NodeSocket>>() {
            socket.close();
        }
    }
}

/// Logs under their DNs why services are skipped.
fn log_skipped<'p>(log_store: &LogStore, skipped: impl Iterator<Item = &'p PlannedService>) {
    for planned in skipped {
        let reason = planned.skip_reason.as_deref().unwrap_or_default();
        let dn = planned.dn.parse().expect("a planned service has a valid name");
        log_store.append_message(&dn, LogMessage::new(Level::Warn, format!("skipped: {reason}")));
    }
}

/// Logs what will keep runnables from becoming ready.
fn log_warnings(log_store: &LogStore, warnings: &[String]) {
    let dn = program_name().parse().expect("a valid name");
    for warning in warnings {
        log_store.append_message(&dn, LogMessage::new(Level::Warn, warning.clone()));
    }
}

/// The directories of what outlives noded when it is killed.
fn place_processes(state: &NodeState) -> Result<ProcessesLayout, DataError> {
    let root = state.running.data();
    root.run.add_layout().map_err(|error| data::placement_error(root.path(), error))
}

/// The records of the node's processes, and the DNs that adopt kept ones.
fn process_records(layout: &ProcessesLayout, plan: &NodePlan) -> ProcessRecords {
    // The next noded adopts only these. It ends all other processes that a killed noded has left.
    let kept = plan.active_services().filter(|planned| planned.keep);
    let dns = kept.map(|planned| planned.dn.as_str());
    ProcessRecords::new(layout.processes.path()).expect_kept(dns)
}

fn check_runnable_names(parts: &Parts, runnables: &[ExtraRunnable]) -> Result<(), StartError> {
    for (index, ExtraRunnable { name, .. }) in runnables.iter().enumerate() {
        let conflicts = parts.iter().any(|part| part.name() == name)
            || runnables[..index].iter().any(|other| other.name == *name);
        if conflicts || !is_valid_runnable_name(name) {
            return Err(StartError::RunnableName { name: name.clone() });
        }
    }
    Ok(())
}
