//! A node: the tree of everything that a plan says.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use nodekeel_cluster::machine::Cluster;
use nodekeel_logtree::{Journal, Level, Limits, Message};
use nodekeel_supervisor::{
    Child, Context, Failure, NodeStatus, RunFuture, Runnable, ShutdownReport, Supervisor,
};

use thiserror::Error;

use crate::config::{LogConfig, valid_name};
use crate::data::{self, DataDir, DataError};
use crate::history::History;
use crate::layout::{OfContainerd, OfEtcd, OfVolumes, RunOfContainerd};
use crate::output::JournalSink;
use crate::plan::{Plan, Planned, Service, User};
use crate::service::cluster::Prepared;
use crate::service::provisioner::Taken;
use crate::{control, service, v1, wire};

/// What a node is given beside its plan.
#[derive(Debug)]
#[non_exhaustive]
pub struct Deps {
    /// Where the log goes; whoever installs a tracing subscriber gives it this journal's layer.
    pub journal: Journal,
    /// Runnables of the builder's own. They stand directly below the root, and are started before the services.
    pub runnables: Vec<Own>,
}

/// A runnable of the builder's own.
pub struct Own {
    name: String,
    runnable: Arc<dyn Runnable>,
}

impl Own {
    /// It will be `root.<name>` in the tree.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        Self { name: name.into(), runnable: Arc::new(runnable) }
    }
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Own").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Deps {
    /// Nothing beside the journal.
    pub fn new(journal: Journal) -> Self {
        Self { journal, runnables: Vec::new() }
    }
}

/// The journal that `[log]` describes.
pub fn journal(config: &LogConfig) -> Journal {
    let limits = Limits {
        bytes_per_dn: config.bytes_per_dn.get(),
        total_bytes: config.bytes.get(),
        ..Limits::default()
    };
    Journal::new(limits)
}

/// Why a node can't be started. Nothing runs then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The data directory can't be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// There can be no volumes.
    #[error(transparent)]
    Volumes(Box<dyn std::error::Error + Send + Sync>),
    /// The control API can't be served where it should be.
    #[error(transparent)]
    Control(Box<dyn std::error::Error + Send + Sync>),
    /// A runnable of the builder's has a name that can't be had.
    #[error("no runnable can be called {name:?}: it is no name, taken, or one of {}", RESERVED.join(", "))]
    Name {
        /// The name.
        name: String,
    },
}

/// What stands below the root already.
const RESERVED: [&str; 7] = ["control", "etcd", "network", "cluster", "containerd", "provisioner", "service"];

/// A running node. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    socket: Arc<control::Socket>,
    /// Other instances are kept out until everything has stopped.
    _data: DataDir,
}

/// What the control API tells.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) plan: Plan,
    pub(crate) journal: Journal,
    pub(crate) history: History,
    pub(crate) started: SystemTime,
    /// The node's place in a cluster, where it is to have one.
    pub(crate) cluster: Option<Cluster>,
    /// `None` before the node is whole, and after its end.
    supervisor: RwLock<Option<Arc<Supervisor>>>,
}

impl Shared {
    /// Asks the supervisor something; `None` when the node is stopping.
    pub(crate) fn ask<T>(&self, question: impl FnOnce(&Supervisor) -> T) -> Option<T> {
        self.supervisor.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(question)
    }

    fn put(&self, supervisor: Option<Arc<Supervisor>>) -> Option<Arc<Supervisor>> {
        let mut slot = self.supervisor.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *slot, supervisor)
    }

    pub(crate) fn skipped(&self) -> impl Iterator<Item = &Planned> {
        self.plan.services.iter().filter(|planned| planned.skipped.is_some())
    }

    /// The tree, and what was skipped.
    pub(crate) fn nodes(&self) -> Vec<v1::Node> {
        let tree = self.ask(Supervisor::snapshot).unwrap_or_default();
        let skipped = self.skipped().map(|planned| v1::Node {
            dn: planned.dn.clone(),
            state: v1::State::Skipped.into(),
            since: wire::time(self.started),
            waiting_for: planned.skipped.clone().unwrap_or_default(),
            ..v1::Node::default()
        });
        tree.iter().map(wire::node).chain(skipped).collect()
    }
}

impl Node {
    /// Takes the data directory and starts everything.
    ///
    /// # Errors
    /// See [`StartError`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(plan: Plan, deps: Deps) -> Result<Self, StartError> {
        check_names(&deps.runnables)?;
        let data = DataDir::take(&plan.config.node.data)?;
        prepare(&plan, &data)?;
        let volumes = take_volumes(&plan, &deps.journal)?;
        let cluster = prepare_cluster(&plan, &data)?;
        let socket = control::Socket::new(&plan.socket).map_err(|error| StartError::Control(error.into()))?;
        let socket = Arc::new(socket);
        let history = History::new(plan.config.events.keep);
        let shared = Arc::new(Shared {
            plan,
            journal: deps.journal.clone(),
            history: history.clone(),
            started: SystemTime::now(),
            cluster: cluster.as_ref().map(|prepared| prepared.cluster.clone()),
            supervisor: RwLock::new(None),
        });
        for planned in shared.skipped() {
            let reason = planned.skipped.as_deref().unwrap_or_default();
            let dn = planned.dn.parse().expect("a planned service has a valid name");
            shared.journal.append(&dn, Message::new(Level::Warn, format!("skipped: {reason}")));
        }
        let parts = Parts { own: deps.runnables.into(), cluster, volumes };
        let root = root(Arc::clone(&shared), Arc::clone(&socket), parts);
        let supervisor = Supervisor::builder().output(JournalSink(deps.journal)).hook(history).start(root);
        shared.put(Some(Arc::new(supervisor)));
        Ok(Self { shared, socket, _data: data })
    }

    /// Where the control API is served.
    pub fn socket(&self) -> &Path {
        &self.shared.plan.socket
    }

    /// The node's way into its cluster, and its place there; `None` where it is to have none.
    pub fn cluster(&self) -> Option<&Cluster> {
        self.shared.cluster.as_ref()
    }

    /// The tree as it stands, without what was skipped.
    pub fn snapshot(&self) -> Vec<NodeStatus> {
        self.shared.ask(Supervisor::snapshot).unwrap_or_default()
    }

    /// Waits until a runnable of the tree is ready or done.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn ready(&self, dn: &str) {
        use nodekeel_supervisor::State;
        let is_ready =
            |status: &NodeStatus| *status.dn == *dn && matches!(status.state, State::Ready | State::Done);
        let Some(mut changes) = self.shared.ask(Supervisor::watch) else { return };
        while !self.snapshot().iter().any(is_ready) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Stops everything in the reverse order of its start, the control API last, then gives the data directory free.
    pub async fn shutdown(self) -> ShutdownReport {
        let supervisor = self.shared.supervisor.read().unwrap_or_else(PoisonError::into_inner).clone();
        supervisor.expect("only a drop takes it").shutdown().await
    }
}

impl Drop for Node {
    /// The tree holds what the control API tells, so the supervisor would not go by itself.
    fn drop(&mut self) {
        drop(self.shared.put(None));
        self.socket.close();
    }
}

fn check_names(runnables: &[Own]) -> Result<(), StartError> {
    for (index, Own { name, .. }) in runnables.iter().enumerate() {
        let taken =
            RESERVED.contains(&name.as_str()) || runnables[..index].iter().any(|other| other.name == *name);
        if taken || !valid_name(name) {
            return Err(StartError::Name { name: name.clone() });
        }
    }
    Ok(())
}

/// Makes the directories that the services expect.
fn prepare(plan: &Plan, data: &DataDir) -> Result<(), DataError> {
    let root = data.root();
    let failed = |error| data::placed(root.path(), error);
    for planned in plan.services.iter().filter(|planned| planned.skipped.is_none()) {
        match &planned.service {
            Service::Etcd(_) => drop(root.extend::<OfEtcd>().map_err(failed)?),
            Service::Containerd(_) => {
                root.extend::<OfContainerd>().map_err(failed)?;
                root.run.extend::<RunOfContainerd>().map_err(failed)?;
            }
            Service::Provisioner(volumes) if volumes.is_own => {
                drop(root.extend::<OfVolumes>().map_err(failed)?);
            }
            Service::Cluster(_) | Service::Provisioner(_) | Service::User(_) => {}
        }
    }
    Ok(())
}

/// Prepares the node's place in a cluster, where it is to have one.
fn prepare_cluster(plan: &Plan, data: &DataDir) -> Result<Option<Prepared>, DataError> {
    let wanted = plan.services.iter().find_map(|planned| match &planned.service {
        Service::Cluster(cluster) if planned.skipped.is_none() => Some(cluster),
        _ => None,
    });
    wanted.map(|cluster| Prepared::new(cluster, data.root(), plan.config.node.grace)).transpose()
}

/// Takes the volumes, where the node is to have some.
fn take_volumes(plan: &Plan, journal: &Journal) -> Result<Option<Taken>, StartError> {
    let wanted = plan.services.iter().find_map(|planned| match &planned.service {
        Service::Provisioner(volumes) if planned.skipped.is_none() => Some(volumes),
        _ => None,
    });
    let taken = wanted.map(|volumes| Taken::take(volumes, journal)).transpose();
    taken.map_err(|error| StartError::Volumes(error.into()))
}

/// What was prepared before the tree is started.
#[derive(Clone)]
struct Parts {
    own: Arc<[Own]>,
    cluster: Option<Prepared>,
    volumes: Option<Taken>,
}

/// The root: the control API first, so that it is the last to stop; then the builder's own, then the services.
fn root(shared: Arc<Shared>, socket: Arc<control::Socket>, parts: Parts) -> impl Runnable {
    move |ctx: Context| {
        let (shared, socket) = (Arc::clone(&shared), Arc::clone(&socket));
        let Parts { own, mut cluster, mut volumes } = parts.clone();
        async move {
            ctx.run("control", control::serve(Arc::clone(&shared), socket))?;
            for Own { name, runnable } in own.iter() {
                ctx.run(name.clone(), share(runnable))?;
            }
            let grace = shared.plan.config.node.grace;
            let mut user = Vec::new();
            for planned in shared.plan.services.iter().filter(|planned| planned.skipped.is_none()) {
                match &planned.service {
                    Service::Etcd(etcd) => ctx.run("etcd", service::etcd::process(etcd, grace))?,
                    Service::Cluster(_) => {
                        let cluster = cluster.take();
                        cluster
                            .expect("a planned cluster is prepared before the tree is started")
                            .run(&ctx)?;
                    }
                    Service::Containerd(containerd) => {
                        let path = shared.plan.search.as_path_variable();
                        let journal = shared.journal.clone();
                        ctx.run(
                            "containerd",
                            service::containerd::runnable(containerd, path, grace, journal),
                        )?;
                    }
                    Service::Provisioner(_) => {
                        let taken =
                            volumes.take().expect("planned volumes are taken before the tree is started");
                        ctx.run("provisioner", taken)?;
                    }
                    Service::User(service) => user.push(User::clone(service)),
                }
            }
            if !user.is_empty() {
                ctx.run("service", services(user, grace))?;
            }
            ctx.wait_ready("root.control").await?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    }
}

/// The operator's services, in an order in which each comes after those that it depends on.
fn services(user: Vec<User>, grace: Duration) -> impl Runnable {
    move |ctx: Context| {
        let children: Vec<Child> = user.iter().map(|user| service::user::child(user, grace)).collect();
        async move {
            for child in children {
                ctx.run_group([child])?;
            }
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    }
}

/// A runnable that runs another one, for a tree that starts it anew with each run of its parent.
fn share(runnable: &Arc<dyn Runnable>) -> impl Runnable {
    struct Shared(Arc<dyn Runnable>);
    impl Runnable for Shared {
        fn run(&self, ctx: Context) -> RunFuture {
            self.0.run(ctx)
        }

        fn stop_within(&self) -> Option<Duration> {
            self.0.stop_within()
        }
    }
    Shared(Arc::clone(runnable))
}
