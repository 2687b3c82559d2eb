//! A part of a node: its name and configuration, what it needs, what it runs, and what it adds to the control
//! API, to the health of the node and to its metrics.
//!
//! etcd, the cluster, containerd, the provisioner, the control API and `[[service]]` are parts, and a program that
//! embeds the node adds, replaces and removes parts with [`Parts`](crate::parts::Parts).
//!
//! ```text
//!  file ──▶ sections, check, dependencies    the configuration alone
//!       ──▶ plan                             reads the machine, changes nothing
//!       ──▶ prepare                          the data directory is locked; nothing runs yet
//!       ──▶ runnable                         below root, after its dependencies
//! ```
//!
//! A runnable with data declares where they lie: [`PlannedService::layout`] on the data volume of the node, which survives
//! its machine, or [`PlannedService::run_layout`] in `run` of the data directory. What lies on the volume is built when the
//! volume is open, at each start ([`NodePreparation::on_volume`]): it waits for `root.storage`, and restarts after it.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::tree::LayoutEntry;
use nodekeel_logtree::LogStore;
use nodekeel_logtree::parse::LogFormat;
use nodekeel_supervisor::{ChildPolicy, ChildSpec, Context, RunFuture, Runnable};
use tonic::Extensions;

use crate::config::{ConfigSection, ConfigViolation, NodedConfig};
use crate::data::{self, DataError};
use crate::health::HealthSources;
use crate::layout::{self, DataLayout};
use crate::metrics::MetricsRegistries;
use crate::node::{NodeState, PartAdditions};
use crate::parts::STORAGE_DN;
use crate::plan::{NodePlan, PartPlanner};
use crate::search_path::SearchPath;
use crate::volume::{self, BuildOnVolume, RunnableOnVolume, VolumeRunnable};

pub use crate::control::ControlServices;
pub use crate::volume::VolumeHandle;

/// A part of a node.
///
/// # Contract
/// - A name is 1 to 64 of `a-z`, `0-9`, `_` and `-`. The part plans one runnable, `root.<name>`, or several,
///   `root.<name>.<another>`; what depends on the part waits for all of them.
/// - [`check`](Self::check) and [`dependencies`](Self::dependencies) depend on the configuration alone.
/// - [`plan`](Self::plan) changes nothing on the machine: `noded check` calls it too.
pub trait Part: Send + Sync + 'static {
    /// Its name, unique in the node.
    fn name(&self) -> &str;

    /// The tables of the configuration that belong to it. In the first one, the operator can set `depends_on`.
    fn sections(&self) -> Vec<ConfigSection> {
        Vec::new()
    }

    /// Checks the rules between keys.
    ///
    /// # Errors
    /// The first rule that the configuration violates.
    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        let _ = config;
        Ok(())
    }

    /// The names by which parts and services depend on it. Default: its name, for `root.<name>`.
    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        vec![DependencyEntry::of_part(self, config)]
    }

    /// Adds to the plan what it runs, and reports what is missing or in use.
    fn plan(&self, planner: &mut PartPlanner<'_>);
}

/// A name of the dependency graph.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DependencyEntry {
    /// The name in `depends_on`.
    pub name: String,
    /// The DN that must be ready.
    pub dn: String,
    /// Why it does not run, and what to do: a clause that starts with "which". `None` if it runs.
    pub unavailable: Option<String>,
    /// The names of its dependencies.
    pub depends_on: Vec<String>,
    /// The table of its `depends_on`, for errors.
    pub section: String,
}

impl DependencyEntry {
    /// The entry of a part, with the `depends_on` of its first section.
    pub fn of_part(part: &(impl Part + ?Sized), config: &NodedConfig) -> Self {
        let name = part.name().to_owned();
        let depends_on = config.depends_on.get(&name).cloned().unwrap_or_default();
        let section = part.sections().first().map(|section| section.path().to_owned()).unwrap_or_default();
        Self { dn: format!("root.{name}"), name, unavailable: None, depends_on, section }
    }

    /// The entry of a runnable below this one.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        let (name, dn) = (format!("{}.{name}", self.name), format!("{}.{name}", self.dn));
        Self { name, dn, depends_on: Vec::new(), ..self.clone() }
    }

    /// Sets why it does not run.
    #[must_use]
    pub fn unavailable(self, why: Option<impl Into<String>>) -> Self {
        Self { unavailable: why.map(Into::into), ..self }
    }

    /// Adds dependencies that the configuration need not name.
    #[must_use]
    pub fn after<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        for name in names {
            if !self.depends_on.iter().any(|known| known == name) {
                self.depends_on.push(name.to_owned());
            }
        }
        self
    }
}

/// Why a runnable can't be prepared. Its message has the hint.
pub type PrepareError = Box<dyn Error + Send + Sync>;

/// What a part runs under one DN. [`Display`](fmt::Display) describes it in the output of `noded check`.
pub trait PlannedRunnable: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Creates its directories and opens what must exist before the tree starts. Called before anything runs, in the
    /// order of the plan; and again by a reload that replaces the runnable, while the former one still runs.
    ///
    /// # Errors
    /// Nothing runs then, and a reload changes nothing.
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError>;

    /// Whether `new`, which a reload of the configuration has planned for the same DN, runs the same: [`is_equal`] for a
    /// plan that can be compared. If not, the reload prepares it, and restarts the runnable. `None`, the default: no reload
    /// adds, replaces or removes the runnable, and a change of its part's sections needs a restart of the program.
    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        let _ = new;
        None
    }
}

/// The answer of [`PlannedRunnable::is_same`] for a plan that can be compared.
pub fn is_equal<T: PlannedRunnable + PartialEq>(running: &T, new: &dyn PlannedRunnable) -> Option<bool> {
    Some((new as &dyn Any).downcast_ref::<T>() == Some(running))
}

/// A runnable of the plan, and what it needs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PlannedService {
    /// Its DN: `root.<name>`, or `root.<part>.<name>`.
    pub dn: String,
    /// What it runs.
    pub runnable: Arc<dyn PlannedRunnable>,
    /// Why it is skipped; `None` if it will run.
    pub skip_reason: Option<String>,
    /// DNs that must be ready before it starts; the planner adds the dependencies of its name.
    pub start_after: Vec<String>,
    /// Its directories outside of the data volume, relative to the data directory, parents first.
    pub directories: Vec<String>,
    /// Its directories on the data volume, parents first.
    pub volume_directories: Vec<String>,
    /// The bytes that must be free for it on the data volume.
    pub disk_bytes: u64,
    /// The log formats of runnables at and below its DN.
    pub log_formats: Vec<(String, LogFormat)>,
    /// The next noded adopts a process of this DN that was [kept](nodekeel_supervisor::process::Process::keep).
    pub keep: bool,
}

impl PlannedService {
    /// A runnable of this DN that needs nothing.
    pub fn new(dn: impl Into<String>, runnable: impl PlannedRunnable + 'static) -> Self {
        Self {
            dn: dn.into(),
            runnable: Arc::new(runnable),
            skip_reason: None,
            start_after: Vec::new(),
            directories: Vec::new(),
            volume_directories: Vec::new(),
            disk_bytes: 0,
            log_formats: Vec::new(),
            keep: false,
        }
    }

    /// A runnable of this DN that needs no preparation; `summary` describes it in the output of `noded check`.
    pub fn from_runnable(dn: impl Into<String>, summary: impl Into<String>, runnable: impl Runnable) -> Self {
        Self::from_prepared(dn, summary, PreparedRunnable::new(runnable))
    }

    /// A runnable of this DN that is prepared already.
    pub fn from_prepared(
        dn: impl Into<String>,
        summary: impl Into<String>,
        prepared: PreparedRunnable,
    ) -> Self {
        Self::new(dn, SimpleRunnable { summary: summary.into(), prepared })
    }

    /// A runnable of this DN that is built on the open data volume at each start, and needs nothing else; `summary`
    /// describes it in the output of `noded check`. See [`NodePreparation::on_volume`].
    pub fn on_volume<R: Runnable>(
        dn: impl Into<String>,
        summary: impl Into<String>,
        build: impl Fn(&VolumeHandle) -> Result<R, PrepareError> + Send + Sync + 'static,
    ) -> Self {
        let plan = RunnableOnVolume { summary: summary.into(), build: volume::share_build(build) };
        Self::new(dn, plan).after_storage()
    }

    /// Sets why it is skipped.
    #[must_use]
    pub fn skip(self, reason: Option<String>) -> Self {
        Self { skip_reason: reason, ..self }
    }

    /// Needs the directories of this layout on the data volume, and so starts after `root.storage`.
    #[must_use]
    pub fn layout<L: LayoutEntry>(mut self) -> Self {
        self.volume_directories.extend(layout::directories_of::<L>(""));
        self.after_storage()
    }

    fn after_storage(mut self) -> Self {
        if !self.start_after.iter().any(|dn| dn == STORAGE_DN) {
            self.start_after.push(STORAGE_DN.to_owned());
        }
        self
    }

    /// Needs the directories of this layout in the data directory, outside of the volume.
    #[must_use]
    pub(crate) fn node_layout<L: LayoutEntry>(mut self) -> Self {
        self.directories.extend(layout::directories_of::<L>(""));
        self
    }

    /// Needs the directories of this layout in `run` below the data directory.
    #[must_use]
    pub fn run_layout<L: LayoutEntry>(mut self) -> Self {
        self.directories.extend(layout::directories_of::<L>("run/"));
        self
    }

    /// Needs this many free bytes on the data volume.
    #[must_use]
    pub fn disk_bytes(self, bytes: u64) -> Self {
        Self { disk_bytes: bytes, ..self }
    }

    /// Its process, which must be set to be [kept](nodekeel_supervisor::process::Process::keep), stays when noded is
    /// killed, and the next noded adopts it. Without this, the next noded ends it.
    #[must_use]
    pub fn keep(self, keep: bool) -> Self {
        Self { keep, ..self }
    }

    /// Parses the lines of the runnable with this DN.
    #[must_use]
    pub fn log_format(mut self, dn: impl Into<String>, format: LogFormat) -> Self {
        self.log_formats.push((dn.into(), format));
        self
    }
}

/// A runnable without a plan.
struct SimpleRunnable {
    summary: String,
    prepared: PreparedRunnable,
}

impl fmt::Debug for SimpleRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimpleRunnable").field(&self.summary).finish()
    }
}

impl fmt::Display for SimpleRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)
    }
}

impl PlannedRunnable for SimpleRunnable {
    fn prepare(&self, _: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        Ok(self.prepared.clone())
    }
}

/// A runnable that is ready to start, in each incarnation of its parent.
#[derive(Clone)]
pub struct PreparedRunnable {
    runnable: Arc<dyn Runnable>,
    policy: Option<ChildPolicy>,
    /// DNs that must be ready before it starts, and stop after it.
    start_after: Vec<Arc<str>>,
    /// DNs that stop after it.
    stop_before: Vec<Arc<str>>,
}

impl PreparedRunnable {
    /// A runnable with the supervisor's default policy.
    pub fn new(runnable: impl Runnable) -> Self {
        let (start_after, stop_before) = (Vec::new(), Vec::new());
        Self { runnable: Arc::new(runnable), policy: None, start_after, stop_before }
    }

    /// Restarts it by this policy.
    #[must_use]
    pub fn policy(self, policy: ChildPolicy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// Starts it when these DNs are ready, and stops it before them.
    #[must_use]
    pub(crate) fn start_after(mut self, dns: &[String]) -> Self {
        for dn in dns {
            if !self.start_after.iter().any(|known| **known == **dn) {
                self.start_after.push(dn.as_str().into());
            }
        }
        self
    }

    /// Stops it before this DN.
    #[must_use]
    pub fn stop_before(mut self, dn: &str) -> Self {
        self.stop_before.push(dn.into());
        self
    }

    /// The child of one incarnation of its parent.
    pub(crate) fn to_child(&self, name: &str) -> ChildSpec {
        let child = ChildSpec::new(name, SharedRunnable(Arc::clone(&self.runnable)));
        let child =
            child.depends_on(self.start_after.iter().cloned()).stop_before(self.stop_before.iter().cloned());
        match &self.policy {
            Some(policy) => child.policy(*policy),
            None => child,
        }
    }
}

impl fmt::Debug for PreparedRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedRunnable").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// A runnable that its parent starts in each of its incarnations.
struct SharedRunnable(Arc<dyn Runnable>);

impl Runnable for SharedRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        self.0.run(ctx)
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.0.stop_timeout()
    }
}

/// What a runnable finds while it is prepared, and what it adds to the node.
#[derive(Debug)]
pub struct NodePreparation<'a> {
    pub(crate) state: &'a Arc<NodeState>,
    pub(crate) plan: &'a NodePlan,
    pub(crate) additions: &'a mut PartAdditions,
}

impl NodePreparation<'_> {
    /// The data directory.
    pub(crate) fn data(&self) -> &DataLayout {
        self.state.data.root()
    }

    /// The configuration.
    pub fn config(&self) -> &NodedConfig {
        &self.plan.config
    }

    /// The directories of programs.
    pub fn search_path(&self) -> &SearchPath {
        &self.plan.search
    }

    /// The log of the node.
    pub fn log_store(&self) -> &LogStore {
        &self.state.log_store
    }

    /// A runnable on the data volume: `build` creates its layout and builds it at each start, when the volume is open. It
    /// may block, and its error is one of the runnable, which the supervisor restarts. When `root.storage` closes the
    /// volume, the runnable stops, and starts again with the open one. It may take `node.grace` and 30 seconds to stop.
    pub fn on_volume<R: Runnable>(
        &self,
        build: impl Fn(&VolumeHandle) -> Result<R, PrepareError> + Send + Sync + 'static,
    ) -> PreparedRunnable {
        self.prepare_on_volume(volume::share_build(build))
    }

    pub(crate) fn prepare_on_volume(&self, build: BuildOnVolume) -> PreparedRunnable {
        let runnable = VolumeRunnable { build, state: Arc::clone(self.state) };
        PreparedRunnable::new(runnable).start_after(&[STORAGE_DN.to_owned()])
    }

    /// Creates a layout in the data directory, outside of the volume, durably.
    ///
    /// # Errors
    /// See [`DataError`].
    pub(crate) fn create_node_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.data().add_layout().map_err(|error| data::placement_error(self.data().path(), error))
    }

    /// Creates a layout in `run` below the data directory.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn create_run_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.data().run.add_layout().map_err(|error| data::placement_error(self.data().path(), error))
    }

    /// Values of the parts, by their type: what a part puts here is found by the parts after it, and by
    /// [`NodeHandle::extension`](crate::node::NodeHandle::extension).
    pub fn extensions(&mut self) -> &mut Extensions {
        &mut self.additions.extensions
    }

    /// What answers `nodectl health`.
    pub fn health_sources(&mut self) -> &mut HealthSources {
        &mut self.additions.health
    }

    /// What `[metrics]` serves.
    pub fn metrics(&mut self) -> &mut MetricsRegistries {
        &mut self.additions.metrics
    }

    /// The gRPC services on the control socket.
    pub fn control_services(&mut self) -> &mut ControlServices {
        &mut self.additions.services
    }
}
