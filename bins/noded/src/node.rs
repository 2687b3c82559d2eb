//! A running node: the tree of everything that a plan contains.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_logtree::{Level, LogLimits, LogMessage, LogStore};
use nodekeel_supervisor::{
    ChildSpec, Context, Failure, RunFuture, Runnable, RunnableStatus, ShutdownReport, Supervisor,
};

use thiserror::Error;

use crate::config::{LogConfig, is_valid_runnable_name};
use crate::data::{self, DataDir, DataError};
use crate::event_history::EventHistory;
use crate::layout::{ContainerdLayout, ContainerdRunLayout, EtcdLayout, VolumesLayout};
use crate::log_sink::LogStoreSink;
use crate::plan::{NodePlan, PlannedService, ServicePlan, UserServicePlan};
use crate::service::cluster::ClusterService;
use crate::service::provisioner::VolumeService;
use crate::{control, service, v1, wire};

/// What a node needs beside its plan.
#[derive(Debug)]
#[non_exhaustive]
pub struct Deps {
    /// The log store of all output. A program that installs a tracing subscriber adds the layer of this log
    /// store to it.
    pub log_store: LogStore,
    /// Additional runnables. They are children of the root and start before the services.
    pub runnables: Vec<ExtraRunnable>,
}

/// An additional runnable of the program that embeds the node.
pub struct ExtraRunnable {
    name: String,
    runnable: Arc<dyn Runnable>,
}

impl ExtraRunnable {
    /// Names the runnable; its DN will be `root.<name>`.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        Self { name: name.into(), runnable: Arc::new(runnable) }
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
    /// The volumes can't be opened. The message has the hint.
    #[error(transparent)]
    Volumes(Box<dyn std::error::Error + Send + Sync>),
    /// The control socket can't be bound. The message has the hint.
    #[error(transparent)]
    Control(Box<dyn std::error::Error + Send + Sync>),
    /// An additional runnable has an invalid, duplicate or reserved name. Use another name.
    #[error("invalid runnable name {name:?}: malformed, duplicate or reserved ({})", RESERVED_NAMES.join(", "))]
    RunnableName {
        /// The name.
        name: String,
    },
}

/// Names of the built-in children of the root.
const RESERVED_NAMES: [&str; 7] =
    ["control", "etcd", "network", "cluster", "containerd", "provisioner", "service"];

/// A running node. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct NodeHandle {
    shared: Arc<NodeState>,
    control_socket: Arc<control::ControlSocket>,
    /// Locked until everything has stopped.
    _data: DataDir,
}

/// The state that the tree and the control API share.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) plan: NodePlan,
    pub(crate) log_store: LogStore,
    pub(crate) history: EventHistory,
    pub(crate) started_at: SystemTime,
    /// The cluster service, if `[cluster]` is configured.
    pub(crate) cluster: Option<ClusterNode>,
    /// `None` before the start is complete, and after the shutdown.
    supervisor: RwLock<Option<Arc<Supervisor>>>,
}

impl NodeState {
    /// Calls the supervisor; `None` while the node is stopping.
    pub(crate) fn with_supervisor<T>(&self, call: impl FnOnce(&Supervisor) -> T) -> Option<T> {
        self.supervisor.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(call)
    }

    fn replace_supervisor(&self, supervisor: Option<Arc<Supervisor>>) -> Option<Arc<Supervisor>> {
        let mut slot = self.supervisor.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *slot, supervisor)
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

impl NodeHandle {
    /// Acquires the data directory and starts everything.
    ///
    /// # Errors
    /// See [`StartError`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(plan: NodePlan, deps: Deps) -> Result<Self, StartError> {
        check_runnable_names(&deps.runnables)?;
        let data = DataDir::acquire(&plan.config.node.data)?;
        place_services(&plan, &data)?;
        let volumes = open_volumes(&plan, &deps.log_store)?;
        let cluster = prepare_cluster(&plan, &data)?;
        let socket =
            control::ControlSocket::new(&plan.socket).map_err(|error| StartError::Control(error.into()))?;
        let socket = Arc::new(socket);
        let history = EventHistory::new(plan.config.events.keep);
        let shared = Arc::new(NodeState {
            plan,
            log_store: deps.log_store.clone(),
            history: history.clone(),
            started_at: SystemTime::now(),
            cluster: cluster.as_ref().map(|service| service.cluster.clone()),
            supervisor: RwLock::new(None),
        });
        for planned in shared.skipped_services() {
            let reason = planned.skip_reason.as_deref().unwrap_or_default();
            let dn = planned.dn.parse().expect("a planned service has a valid name");
            shared.log_store.append_message(&dn, LogMessage::new(Level::Warn, format!("skipped: {reason}")));
        }
        let parts = NodeParts { extra: deps.runnables.into(), cluster, volumes };
        let root = root_runnable(Arc::clone(&shared), Arc::clone(&socket), parts);
        let supervisor =
            Supervisor::builder().output_sink(LogStoreSink(deps.log_store)).event_hook(history).start(root);
        shared.replace_supervisor(Some(Arc::new(supervisor)));
        Ok(Self { shared, control_socket: socket, _data: data })
    }

    /// The path of the control API's socket.
    pub fn control_socket(&self) -> &Path {
        &self.shared.plan.socket
    }

    /// The cluster service: enrolment and membership of the node; `None` without `[cluster]`.
    pub fn cluster_handle(&self) -> Option<&ClusterNode> {
        self.shared.cluster.as_ref()
    }

    /// The current tree, without the skipped services.
    pub fn snapshot(&self) -> Vec<RunnableStatus> {
        self.shared.with_supervisor(Supervisor::snapshot).unwrap_or_default()
    }

    /// Waits until a runnable of the tree is ready or done.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, dn: &str) {
        use nodekeel_supervisor::RunnableState;
        let is_ready = |status: &RunnableStatus| {
            *status.dn == *dn && matches!(status.state, RunnableState::Ready | RunnableState::Done)
        };
        let Some(mut changes) = self.shared.with_supervisor(Supervisor::watch_changes) else { return };
        while !self.snapshot().iter().any(is_ready) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Stops everything in the reverse order of the start, the control API last, then releases the data
    /// directory.
    pub async fn shutdown(self) -> ShutdownReport {
        let supervisor = self.shared.supervisor.read().unwrap_or_else(PoisonError::into_inner).clone();
        supervisor.expect("only drop removes the supervisor").shutdown().await
    }
}

impl Drop for NodeHandle {
    /// The tree and the supervisor own each other through the shared state, so this breaks the cycle.
    fn drop(&mut self) {
        drop(self.shared.replace_supervisor(None));
        self.control_socket.close();
    }
}

fn check_runnable_names(runnables: &[ExtraRunnable]) -> Result<(), StartError> {
    for (index, ExtraRunnable { name, .. }) in runnables.iter().enumerate() {
        let conflicts = RESERVED_NAMES.contains(&name.as_str())
            || runnables[..index].iter().any(|other| other.name == *name);
        if conflicts || !is_valid_runnable_name(name) {
            return Err(StartError::RunnableName { name: name.clone() });
        }
    }
    Ok(())
}

/// Creates the directories of the services.
fn place_services(plan: &NodePlan, data: &DataDir) -> Result<(), DataError> {
    let root = data.root();
    let failed = |error| data::placement_error(root.path(), error);
    for planned in plan.services.iter().filter(|planned| planned.skip_reason.is_none()) {
        match &planned.service {
            ServicePlan::Etcd(_) => drop(root.add_layout::<EtcdLayout>().map_err(failed)?),
            ServicePlan::Containerd(_) => {
                root.add_layout::<ContainerdLayout>().map_err(failed)?;
                root.run.add_layout::<ContainerdRunLayout>().map_err(failed)?;
            }
            ServicePlan::Provisioner(volumes) if volumes.is_in_data_dir => {
                drop(root.add_layout::<VolumesLayout>().map_err(failed)?);
            }
            ServicePlan::Cluster(_) | ServicePlan::Provisioner(_) | ServicePlan::User(_) => {}
        }
    }
    Ok(())
}

/// Prepares the cluster service, if it is planned.
fn prepare_cluster(plan: &NodePlan, data: &DataDir) -> Result<Option<ClusterService>, DataError> {
    let wanted = plan.services.iter().find_map(|planned| match &planned.service {
        ServicePlan::Cluster(cluster) if planned.skip_reason.is_none() => Some(cluster),
        _ => None,
    });
    wanted.map(|cluster| ClusterService::new(cluster, data.root(), plan.config.node.grace)).transpose()
}

/// Opens the volumes, if the provisioner is planned.
fn open_volumes(plan: &NodePlan, log_store: &LogStore) -> Result<Option<VolumeService>, StartError> {
    let wanted = plan.services.iter().find_map(|planned| match &planned.service {
        ServicePlan::Provisioner(volumes) if planned.skip_reason.is_none() => Some(volumes),
        _ => None,
    });
    let volumes = wanted.map(|volumes| VolumeService::open(volumes, log_store)).transpose();
    volumes.map_err(|error| StartError::Volumes(error.into()))
}

/// What is prepared before the tree starts.
#[derive(Clone)]
struct NodeParts {
    extra: Arc<[ExtraRunnable]>,
    cluster: Option<ClusterService>,
    volumes: Option<VolumeService>,
}

/// The root: starts the control API first, so that it stops last; then the additional runnables, then the
/// services.
fn root_runnable(
    shared: Arc<NodeState>,
    socket: Arc<control::ControlSocket>,
    parts: NodeParts,
) -> impl Runnable {
    move |ctx: Context| {
        let (shared, socket) = (Arc::clone(&shared), Arc::clone(&socket));
        let NodeParts { extra, mut cluster, mut volumes } = parts.clone();
        async move {
            ctx.run_child("control", control::serve_control(Arc::clone(&shared), socket))?;
            for ExtraRunnable { name, runnable } in extra.iter() {
                ctx.run_child(name.clone(), share_runnable(runnable))?;
            }
            let grace = shared.plan.config.node.grace;
            let mut user = Vec::new();
            for planned in shared.plan.services.iter().filter(|planned| planned.skip_reason.is_none()) {
                match &planned.service {
                    ServicePlan::Etcd(etcd) => {
                        ctx.run_child("etcd", service::etcd::etcd_process(etcd, grace))?
                    }
                    ServicePlan::Cluster(_) => {
                        let cluster = cluster.take();
                        cluster
                            .expect("a planned cluster is prepared before the tree starts")
                            .start_children(&ctx)?;
                    }
                    ServicePlan::Containerd(containerd) => {
                        let path = shared.plan.search.as_path_variable();
                        let log_store = shared.log_store.clone();
                        ctx.run_child(
                            "containerd",
                            service::containerd::containerd_runnable(containerd, path, grace, log_store),
                        )?;
                    }
                    ServicePlan::Provisioner(_) => {
                        let volumes =
                            volumes.take().expect("planned volumes are opened before the tree starts");
                        ctx.run_child("provisioner", volumes)?;
                    }
                    ServicePlan::User(service) => user.push(UserServicePlan::clone(service)),
                }
            }
            if !user.is_empty() {
                ctx.run_child("service", user_services(user, grace))?;
            }
            ctx.wait_ready("root.control").await?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    }
}

/// The operator's services, each after its dependencies.
fn user_services(user: Vec<UserServicePlan>, grace: Duration) -> impl Runnable {
    move |ctx: Context| {
        let children: Vec<ChildSpec> =
            user.iter().map(|user| service::user::service_child(user, grace)).collect();
        async move {
            for child in children {
                ctx.run_group([child])?;
            }
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    }
}

/// A runnable that runs a shared one, for a parent that starts it in each of its incarnations.
fn share_runnable(runnable: &Arc<dyn Runnable>) -> impl Runnable {
    struct SharedRunnable(Arc<dyn Runnable>);
    impl Runnable for SharedRunnable {
        fn run(&self, ctx: Context) -> RunFuture {
            self.0.run(ctx)
        }

        fn stop_timeout(&self) -> Option<Duration> {
            self.0.stop_timeout()
        }
    }
    SharedRunnable(Arc::clone(runnable))
}
