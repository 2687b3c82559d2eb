//! Builds a node of the shipped parts and yours.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_cluster::enrolment::ConsensusFactory;
use nodekeel_cluster::network::Network;
use nodekeel_localstorage::volume::DataVolume;
use nodekeel_logtree::LogStore;
use thiserror::Error;

use super::{Deps, NodeHandle, StartError, new_log_store};
use crate::config::{ConfigError, NodedConfig, read_text};
use crate::part::{CallPanic, Part, catch_panic};
use crate::parts::{ClusterKeySource, PartDeps, shipped_parts};
use crate::plan::{NodePlan, PlanError, PlanSource, SourceError};
use crate::search_path::SearchPath;

/// Builds a node: [`NodeHandle::builder`].
///
/// ```
/// use nodekeel_node::node::{ExtraRunnable, NodeHandle};
/// use nodekeel_supervisor::Context;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let scratch = tempfile::tempdir()?;
/// let greeter = ExtraRunnable::new("greeter", |ctx: Context| async move {
///     ctx.signal_ready()?;
///     ctx.until_canceled().await
/// });
/// let node = NodeHandle::builder("example.toml", "[services.etcd]\nenable = false\n")
///     .without("containerd")
///     .with(greeter)
///     .data(scratch.path().join("data"))
///     .start()?;
/// node.wait_ready("root.greeter").await;
/// node.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct NodeBuilder {
    file: PathBuf,
    text: String,
    /// The text is that of the file, which a reload reads again.
    is_from_file: bool,
    deps: PartDeps,
    changes: Vec<PartChange>,
    data: Option<PathBuf>,
    default_data: Option<PathBuf>,
    search: SearchPath,
    dev: bool,
    log_store: Option<LogStore>,
    beside_node: bool,
}

/// A change of the shipped parts.
enum PartChange {
    Add(Arc<dyn Part>),
    Replace(Arc<dyn Part>),
    Remove(String),
}

impl std::fmt::Debug for PartChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Add(part) => write!(f, "add {}", part.name()),
            Self::Replace(part) => write!(f, "replace {}", part.name()),
            Self::Remove(name) => write!(f, "remove {name}"),
        }
    }
}

/// The reason why a node can't be built. Nothing runs then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The configuration is invalid: correct it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Requirements are missing, or in use.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A part panicked.
    #[error(transparent)]
    Panicked(#[from] CallPanic),
    /// The node can't start.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// The text of a configuration, and the source of the plan that it gives.
struct TextSource {
    file: PathBuf,
    text: String,
    plan: PlanSource,
}

impl NodeBuilder {
    /// A builder with this configuration; `file` is only used in errors.
    pub(super) fn new(file: PathBuf, text: String) -> Self {
        Self {
            file,
            text,
            is_from_file: false,
            deps: PartDeps::default(),
            changes: Vec::new(),
            data: None,
            default_data: None,
            search: SearchPath::with_default_directories(None, None),
            dev: false,
            log_store: None,
            beside_node: false,
        }
    }

    /// A builder with the configuration of a file. [`NodeHandle::reload`] reads it again.
    ///
    /// # Errors
    /// The file can't be read, or is not UTF-8.
    pub fn from_file(file: &Path) -> Result<Self, ConfigError> {
        Ok(Self { is_from_file: true, ..Self::new(file.to_owned(), read_text(file)?) })
    }

    /// Adds a part. It starts after the shipped ones, and before the services of the configuration.
    #[must_use]
    pub fn with(self, part: impl Part) -> Self {
        self.change(PartChange::Add(Arc::new(part)))
    }

    /// Replaces the part of the same name. A name that does not exist is an error of the configuration.
    #[must_use]
    pub fn replace(self, part: impl Part) -> Self {
        self.change(PartChange::Replace(Arc::new(part)))
    }

    /// Removes a shipped part: `control`, `metrics`, `kernel`, `storage`, `etcd`, `network`, `cluster`, `containerd`,
    /// `provisioner` or `service`. Its section in the configuration is then unknown, as is a name that does not exist.
    #[must_use]
    pub fn without(self, name: &str) -> Self {
        self.change(PartChange::Remove(name.to_owned()))
    }

    fn change(mut self, change: PartChange) -> Self {
        self.changes.push(change);
        self
    }

    /// Keeps on this volume everything that must survive the machine. `root.storage` opens it, and creates it if it is
    /// blank and the node has had none. Default: the directory `data` below the data directory.
    #[must_use]
    pub fn volume(mut self, volume: impl DataVolume + 'static) -> Self {
        self.deps.volume = Some(Arc::new(volume));
        self
    }

    /// Reads the node's address from this network. Default: `cluster.address`, or the address of `cluster.interface`.
    #[must_use]
    pub fn network(mut self, network: impl Network + 'static) -> Self {
        self.deps.network = Some(Arc::new(network));
        self
    }

    /// Runs this consensus. Default: etcd.
    #[must_use]
    pub fn consensus(mut self, consensus: ConsensusFactory) -> Self {
        self.deps.consensus = Some(consensus);
        self
    }

    /// Asks this source for the cluster unlock key of a node that starts cold, for `storage.cold_start = "peers"`.
    /// Default: the other nodes of the cluster, by their `[api]`.
    #[must_use]
    pub fn cluster_keys(mut self, source: impl ClusterKeySource) -> Self {
        self.deps.cluster_keys = Some(Arc::new(source));
        self
    }

    /// Sets the data directory, instead of `node.data`.
    #[must_use]
    pub fn data(self, data: impl Into<PathBuf>) -> Self {
        Self { data: Some(data.into()), ..self }
    }

    /// Sets the data directory of a configuration without `node.data`. Default: `/var/lib/nodekeel`.
    #[must_use]
    pub fn default_data(self, data: impl Into<PathBuf>) -> Self {
        Self { default_data: Some(data.into()), ..self }
    }

    /// Sets where programs are searched. Default: the usual directories of programs.
    #[must_use]
    pub fn search_path(self, search: SearchPath) -> Self {
        Self { search, ..self }
    }

    /// Returns whether services with missing requirements are skipped. Default: they are problems.
    #[must_use]
    pub fn dev(self, dev: bool) -> Self {
        Self { dev, ..self }
    }

    /// Plans also while another process runs the node: what that one uses counts as free, and [`NodePlan::beside`] names it.
    /// Such a plan can't be started. Default: the data directory is in use, a problem.
    #[must_use]
    pub fn beside_running_node(self) -> Self {
        Self { beside_node: true, ..self }
    }

    /// Sets the log store. Default: one as `[log]` describes. It has the output of all runnables; their `tracing` events
    /// only if your subscriber has the layer of a log store that you set here.
    #[must_use]
    pub fn log_store(self, log_store: LogStore) -> Self {
        Self { log_store: Some(log_store), ..self }
    }

    /// Parses the configuration.
    ///
    /// # Errors
    /// [`BuildError::Config`], [`BuildError::Panicked`].
    pub fn config(self) -> Result<NodedConfig, BuildError> {
        let parse = || {
            let source = self.into_source();
            source.plan.parse_config(&source.file, &source.text)
        };
        Ok(catch_panic("the configuration", parse)??)
    }

    /// Parses the configuration, and plans the node without changing anything.
    ///
    /// # Errors
    /// [`BuildError::Config`], [`BuildError::Plan`], [`BuildError::Panicked`].
    pub fn plan(self) -> Result<NodePlan, BuildError> {
        let plan = || {
            let source = self.into_source();
            source.plan.plan_text(&source.file, &source.text, None)
        };
        catch_panic("the plan", plan)?.map_err(|error| match error {
            SourceError::Config(error) => BuildError::Config(error),
            SourceError::Plan(error) => BuildError::Plan(error),
        })
    }

    /// The tables of the shipped parts that this node does not have.
    #[cfg(feature = "program")]
    pub(crate) fn removed_tables(self) -> Vec<String> {
        self.into_source().plan.parts.removed_tables()
    }

    fn into_source(self) -> TextSource {
        // The changes apply in the order of the calls: a program may replace a part that it has added.
        let parts = self.changes.into_iter().fold(shipped_parts(self.deps), |parts, change| match change {
            PartChange::Add(part) => parts.add(part),
            PartChange::Replace(part) => parts.replace(part),
            PartChange::Remove(name) => parts.without(&name),
        });
        let Self { file, text, search, dev, data, default_data, .. } = self;
        // Only a file can be read again by a reload.
        let of_file = self.is_from_file.then(|| file.clone());
        let plan = PlanSource {
            parts,
            search,
            dev,
            file: of_file,
            data,
            default_data,
            beside_node: self.beside_node,
        };
        TextSource { file, text, plan }
    }

    /// Plans the node, and starts it.
    ///
    /// # Errors
    /// See [`BuildError`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(mut self) -> Result<NodeHandle, BuildError> {
        let log_store = self.log_store.take();
        let plan = self.plan()?;
        // The default depends on `[log]`, which only the plan has parsed.
        let log_store = log_store.unwrap_or_else(|| new_log_store(&plan.config.log));
        Ok(NodeHandle::start(plan, Deps::new(log_store))?)
    }
}
