//! A node in this process, and parts that are made of functions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_logtree::LogStore;
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::config::{ConfigSection, NodedConfig};
use nodekeel_node::node::{NodeBuilder, NodeHandle};
use nodekeel_node::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::{Node, State, TreeRequest};
use nodekeel_supervisor::{Context, Failure, Runnable};
use testbed::ScratchDir;
use tokio::time::timeout;

pub(crate) use testbed::noded::{NO_DAEMONS, service_config};

/// Timeout of every wait: longer than anything takes that does not hang.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The builder of a node without daemons, and the directory of its data.
pub(crate) fn node_builder(config: &str) -> (ScratchDir, NodeBuilder) {
    let scratch = ScratchDir::new().unwrap();
    let text = format!("{NO_DAEMONS}{config}");
    let builder = NodeHandle::builder("test.toml", text).data(scratch.path().join("data"));
    (scratch, builder)
}

/// A node that runs, with a log store that the test can write to.
pub(crate) struct TestNode {
    pub(crate) node: NodeHandle,
    pub(crate) log_store: LogStore,
    pub(crate) client: NodeClient,
    pub(crate) scratch: ScratchDir,
}

impl TestNode {
    pub(crate) async fn start(config: &str) -> Self {
        Self::start_with(config, |builder| builder).await
    }

    pub(crate) async fn start_with(config: &str, change: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        let (scratch, builder) = node_builder(config);
        Self::start_in(scratch, change(builder)).await
    }

    /// Starts the node of a builder, whose control API must be one of its parts.
    pub(crate) async fn start_in(scratch: ScratchDir, builder: NodeBuilder) -> Self {
        let log_store = LogStore::default();
        let node = builder.log_store(log_store.clone()).start().unwrap();
        timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
        let client = client::connect(node.control_socket()).await.unwrap();
        Self { node, log_store, client, scratch }
    }

    pub(crate) async fn wait_ready(&self, dn: &str) {
        timeout(TEST_TIMEOUT, self.node.wait_ready(dn)).await.unwrap();
    }

    pub(crate) async fn status(&mut self, dn: &str) -> Node {
        let tree = self.client.tree(TreeRequest {}).await.unwrap().into_inner();
        tree.nodes.into_iter().find(|node| node.dn == dn).unwrap_or_else(|| panic!("no {dn}"))
    }

    /// Waits until the status of a DN satisfies the predicate.
    pub(crate) async fn wait_for(&mut self, dn: &str, is: impl Fn(&Node) -> bool) -> Node {
        let mut trees = self.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
        let found = async {
            while let Some(tree) = trees.message().await.unwrap() {
                if let Some(node) = tree.nodes.into_iter().find(|node| node.dn == dn && is(node)) {
                    return node;
                }
            }
            panic!("the node has stopped");
        };
        timeout(TEST_TIMEOUT, found).await.unwrap()
    }

    /// Waits until a runnable is ready in this run.
    pub(crate) async fn wait_run(&mut self, dn: &str, generation: u64) -> Node {
        self.wait_for(dn, |node| node.generation == generation && node.state() == State::Ready).await
    }
}

/// A runnable that is ready until it is canceled.
pub(crate) async fn run_ready(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    ctx.until_canceled().await
}

/// A part that is planned by a function.
pub(crate) struct TestPart {
    name: String,
    sections: Vec<ConfigSection>,
    after: Vec<&'static str>,
    child: Option<&'static str>,
    plan: Box<dyn Fn(&mut PartPlanner<'_>) + Send + Sync>,
}

impl TestPart {
    pub(crate) fn new(name: &str, plan: impl Fn(&mut PartPlanner<'_>) + Send + Sync + 'static) -> Self {
        Self { name: name.into(), sections: Vec::new(), after: Vec::new(), child: None, plan: Box::new(plan) }
    }

    /// A part of this runnable, `root.NAME`.
    pub(crate) fn runnable(name: &str, run: impl Runnable + Clone) -> Self {
        let dn = format!("root.{name}");
        Self::new(name, move |planner| {
            planner.add(PlannedService::from_runnable(&*dn, "a runnable of the test", run.clone()));
        })
    }

    /// A part whose runnable, `root.NAME`, is prepared by this function, again at every reload.
    pub(crate) fn prepared(
        name: &str,
        prepare: impl Fn(&mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        let (dn, plan) = (format!("root.{name}"), FnPlan(Arc::new(prepare)));
        Self::new(name, move |planner| planner.add(PlannedService::new(&*dn, plan.clone())))
    }

    /// The same with a section of the configuration.
    pub(crate) fn section(mut self, name: &str) -> Self {
        self.sections.push(ConfigSection::new::<toml::Table>(name));
        self
    }

    /// The same, started after these.
    pub(crate) fn after(self, names: &[&'static str]) -> Self {
        Self { after: names.to_vec(), ..self }
    }

    /// The same with a name below it for others to depend on.
    pub(crate) fn child(self, name: &'static str) -> Self {
        Self { child: Some(name), ..self }
    }
}

impl Part for TestPart {
    fn name(&self) -> &str {
        &self.name
    }

    fn sections(&self) -> Vec<ConfigSection> {
        self.sections.clone()
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let entry = DependencyEntry::of_part(self, config).after(self.after.iter().copied());
        self.child.map(|name| entry.child(name)).into_iter().chain([entry]).collect()
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        (self.plan)(planner);
    }
}

type Prepare = dyn Fn(&mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> + Send + Sync;

#[derive(Clone)]
struct FnPlan(Arc<Prepare>);

impl fmt::Debug for FnPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FnPlan")
    }
}

impl fmt::Display for FnPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a runnable of the test")
    }
}

impl PlannedRunnable for FnPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        (self.0)(node)
    }

    fn is_same(&self, _: &dyn PlannedRunnable) -> Option<bool> {
        Some(false)
    }
}
