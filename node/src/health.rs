//! Health: the problems of the node, since when they exist, what they wait for, and how to fix them.
//!
//! A part answers by a [`HealthSource`], which it adds to [`HealthSources`] while it is prepared. The tree itself, the
//! disks and the clock answer without one. A condition carries its own texts, so that neither the node nor nodectl
//! knows what kinds of conditions exist.
//!
//! ```
//! use nodekeel_node::health::{HealthCondition, HealthSources, NodeSnapshot};
//!
//! let mut sources = HealthSources::default();
//! sources.add("fan", |_: &NodeSnapshot| {
//!     vec![HealthCondition::problem("fan 1", "does not turn").hint("replace it")]
//! });
//! ```

mod certificate;
mod clock;
mod condition;
mod disk;
mod ledger;
mod monitor;
mod records;
mod runnable;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::config::HealthConfig;
use crate::program_name::program_name;
use crate::v1;

pub use certificate::{CertificateValidity, InvalidCertificate};
pub use condition::{ConditionSeverity, HealthCondition};
pub(crate) use disk::{DiskSpace, format_bytes};
use disk::{DiskWatch, MeasureLock};
pub(crate) use ledger::{ConditionChange, ConditionChangeKind};
use monitor::readiness_changes;
pub(crate) use monitor::{Consequences, HealthMonitor, ReadinessChange, RunnableReadiness};
pub(crate) use records::record_conditions;

/// Timeout of one source: together with the call it stays below five seconds.
const SOURCE_TIMEOUT: Duration = Duration::from_millis(4500);

/// The part of conditions that belong to no part: those of the disks, the clock and the root.
pub(crate) const NODE_PART: &str = "node";

/// The answer of a [`HealthSource`].
pub type ConditionsFuture<'a> = Pin<Box<dyn Future<Output = Vec<HealthCondition>> + Send + 'a>>;

/// Reports the problems and warnings of one part. Every `Fn(&NodeSnapshot) -> Vec<HealthCondition>` is one.
///
/// # Contract
/// - It changes nothing, may be called at any time and concurrently, does not block its thread, and should answer at once:
///   after 4.5 s it counts as not answering, which is a condition too, as is a panic. Its future may be dropped at any time.
/// - A condition about a DN replaces that of the tree about this DN, but a warning replaces no problem: start with
///   [`NodeSnapshot::condition_of`] to keep its text. A problem with a runnable that is ready by itself takes its readiness
///   while it lasts, so that the tree, the metrics and those that depend on it see the same.
pub trait HealthSource: Send + Sync + 'static {
    /// Everything that is not well now; empty if all is.
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a>;
}

impl<F> HealthSource for F
where
    F: Fn(&NodeSnapshot) -> Vec<HealthCondition> + Send + Sync + 'static,
{
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        let conditions = self(node);
        Box::pin(std::future::ready(conditions))
    }
}

/// The node at one point in time, as a source sees it.
#[derive(Debug, Clone)]
pub struct NodeSnapshot {
    now: SystemTime,
    nodes: Vec<v1::Node>,
    config: HealthConfig,
}

impl NodeSnapshot {
    /// The time, all runnables of the tree, and the default configuration.
    pub fn new(now: SystemTime, nodes: Vec<v1::Node>) -> Self {
        Self { now, nodes, config: HealthConfig::default() }
    }

    /// With this configuration.
    #[must_use]
    pub fn with_config(self, config: HealthConfig) -> Self {
        Self { config, ..self }
    }

    /// The time.
    pub fn now(&self) -> SystemTime {
        self.now
    }

    /// The runnable with this DN; `None` if it is not in the tree.
    pub fn runnable(&self, dn: &str) -> Option<&v1::Node> {
        self.nodes.iter().find(|node| node.dn == dn)
    }

    /// The condition of this runnable, as the tree knows it; `None` if it is healthy, or not in the tree.
    pub fn condition_of(&self, dn: &str) -> Option<HealthCondition> {
        runnable::runnable_condition(self.runnable(dn)?, self.now)
    }

    /// The condition of this object's certificate now: see [`CertificateValidity::condition`].
    /// `health.warn_certificate_days` sets how early there is a warning.
    pub fn certificate_condition(
        &self,
        object: &str,
        validity: &CertificateValidity,
    ) -> Option<HealthCondition> {
        let days = u64::from(self.config.warn_certificate_days);
        validity.condition(object, self.now, Duration::from_secs(days * 24 * 60 * 60))
    }

    /// The severity of this little room, as for disks; `None` if there is enough.
    pub(crate) fn space_severity(&self, free: u64, total: u64) -> Option<ConditionSeverity> {
        disk::severity(free, total, &self.config)
    }

    /// Returns whether something of this part is in the tree: a reload may have removed it.
    fn has_part(&self, part: &str) -> bool {
        self.nodes.iter().any(|node| node.dn.strip_prefix("root.") == Some(part))
    }

    /// The conditions that the tree knows.
    fn tree_conditions(&self) -> impl Iterator<Item = HealthCondition> {
        self.nodes.iter().filter_map(|node| runnable::runnable_condition(node, self.now))
    }
}

/// The sources of the parts, by name, and the disks that they use. Cheap to clone.
#[derive(Clone, Default)]
pub struct HealthSources {
    sources: Vec<(String, Arc<dyn HealthSource>)>,
    disks: Vec<PathBuf>,
    measuring: MeasureLock,
    changes: HealthChanges,
}

/// Tells the node that what a source says has changed, for those who don't ask: an event is written, and readiness taken or
/// given back, at once. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct HealthChanges(Arc<Notify>);

impl HealthChanges {
    /// All sources are asked soon, within about a second.
    pub fn announce(&self) {
        self.0.notify_one();
    }

    pub(crate) async fn announced(&self) {
        self.0.notified().await;
    }
}

impl HealthSources {
    /// Adds a source. Its name is that of the part, or `part.another` for another source of the part. It replaces one
    /// of the same name: a part whose configuration is changed is prepared again. It is asked while the part is in the
    /// tree.
    pub fn add(&mut self, name: impl Into<String>, source: impl HealthSource) {
        let name = name.into();
        self.sources.retain(|(known, _)| *known != name);
        self.sources.push((name, Arc::new(source)));
    }

    /// Tells the node of changes that it could not see until it asks again, every ten seconds.
    pub fn changes(&self) -> HealthChanges {
        self.changes.clone()
    }

    /// Watches the free space of the file system of this directory, which may be mounted later. One file system is
    /// reported once, by the directory that was added first.
    pub fn add_disk(&mut self, path: impl Into<PathBuf>) {
        let path = path.into();
        if !self.disks.contains(&path) {
            self.disks.push(path);
        }
    }

    /// The disks, each file system once.
    pub(crate) fn disk_watch(&self, config: &HealthConfig) -> DiskWatch {
        DiskWatch::new(self.disks.clone(), config, self.measuring.clone())
    }

    /// Asks all sources. `tree` has the runnables of the snapshot that run, with their present readiness.
    pub(crate) async fn assess(&self, node: &NodeSnapshot, tree: &[RunnableReadiness]) -> Assessment {
        let disks = self.disk_watch(&node.config);
        let clock = |_: &NodeSnapshot| clock::clock_condition(clock::is_synchronized());
        let of_parts = self.sources.iter().map(|(name, source)| (part_of(name), source.as_ref()));
        // A part that a reload has removed leaves its source in the list: it is not asked any more.
        let of_parts = of_parts.filter(|(part, _)| node.has_part(part));
        let of_node: [(&str, &dyn HealthSource); 2] = [(NODE_PART, &disks), (NODE_PART, &clock)];
        let asked = of_parts.chain(of_node).map(|(part, source)| ask_source(part, source, node));
        // All sources are asked at the same time, so that the whole takes no longer than the slowest one.
        let answers: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
        let readiness = readiness_changes(tree, &answers);
        Assessment { conditions: merge_conditions(node.tree_conditions(), answers), readiness }
    }
}

/// The health of the node at one point in time.
#[derive(Debug)]
pub(crate) struct Assessment {
    /// Everything that is not well, problems before warnings: empty if all is.
    pub(crate) conditions: Vec<HealthCondition>,
    /// The readiness of runnables that follows from it.
    readiness: Vec<ReadinessChange>,
}

/// The part in the name of a source.
fn part_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

impl fmt::Debug for HealthSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.sources.iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

async fn ask_source(part: &str, source: &dyn HealthSource, node: &NodeSnapshot) -> Vec<HealthCondition> {
    // A source that panics must not silence the others.
    let answer = AssertUnwindSafe(async { source.conditions(node).await }).catch_unwind();
    let mut conditions =
        match timeout(SOURCE_TIMEOUT, answer).await {
            Ok(Ok(conditions)) => conditions,
            Ok(Err(_)) => {
                let problem = HealthCondition::problem(part, "does not say whether it is well: it panicked");
                let program = program_name();
                vec![problem.hint(format!(
                    "this is a bug of the part: report it with what {program} printed on stderr"
                ))]
            }
            Err(_) => {
                let text = format!("does not say within {SOURCE_TIMEOUT:?} whether it is well");
                let hint = "see what it waits for: `nodectl tree`, `nodectl logs`";
                vec![HealthCondition::problem(part, text).hint(hint)]
            }
        };
    // A source does not name its part: the node does, so that no source reports for another part.
    conditions.iter_mut().for_each(|condition| condition.part = part.to_owned());
    conditions
}

/// Replaces the conditions of the tree by those of the parts about the same DN; but a warning replaces no problem.
fn merge_conditions(
    of_tree: impl Iterator<Item = HealthCondition>,
    mut of_parts: Vec<HealthCondition>,
) -> Vec<HealthCondition> {
    // A problem is less than a warning in the order of the severities.
    let replaces = |part: &HealthCondition, found: &HealthCondition| {
        part.object == found.object && part.severity <= found.severity
    };
    let of_tree: Vec<_> =
        of_tree.filter(|found| !of_parts.iter().any(|part| replaces(part, found))).collect();
    of_parts.extend(of_tree);
    // The sort is stable: conditions of one severity stay in the order of their sources.
    of_parts.sort_by_key(|condition| condition.severity);
    of_parts
}

/// Returns whether the node is healthy: warnings don't count.
pub(crate) fn is_healthy(conditions: &[HealthCondition]) -> bool {
    conditions.iter().all(|condition| !condition.is_problem())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(nodes: Vec<v1::Node>) -> NodeSnapshot {
        NodeSnapshot::new(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000), nodes)
    }

    fn not_ready(dn: &str) -> v1::Node {
        v1::Node { dn: dn.into(), state: v1::State::New.into(), ..v1::Node::default() }
    }

    /// The conditions of the sources, without the clock of this machine.
    async fn assess(sources: &HealthSources, node: &NodeSnapshot) -> Vec<HealthCondition> {
        let mut found = sources.assess(node, &[]).await.conditions;
        found.retain(|condition| condition.object != "clock");
        found
    }

    #[tokio::test]
    async fn a_part_replaces_what_the_tree_says_of_its_dn_and_nothing_else() {
        let node = snapshot(vec![not_ready("root.fan"), not_ready("root.service.a")]);
        let mut sources = HealthSources::default();
        sources.add("fan", |_: &NodeSnapshot| vec![HealthCondition::problem("fan 9", "was prepared again")]);
        sources.add("fan", |node: &NodeSnapshot| {
            let known = node.condition_of("root.fan").map(|condition| condition.hint("replace it"));
            let warning = HealthCondition::warning("fan 2", "is loud");
            std::iter::once(warning).chain(known).collect()
        });
        let found = assess(&sources, &node).await;
        let shown: Vec<_> = found
            .iter()
            .map(|condition| (condition.part.as_str(), condition.object.as_str(), condition.hint.as_str()))
            .collect();
        assert_eq!(
            shown,
            [
                ("fan", "root.fan", "replace it"),
                ("service", "root.service.a", "`nodectl status root.service.a`"),
                ("fan", "fan 2", ""),
            ]
        );
        assert!(!is_healthy(&found));
        assert!(is_healthy(&found[2..]), "a warning is healthy");
    }

    #[tokio::test]
    async fn a_warning_of_a_part_hides_no_problem_of_the_tree() {
        let node = snapshot(vec![not_ready("root.fan")]);
        let mut sources = HealthSources::default();
        sources.add("fan", |_: &NodeSnapshot| vec![HealthCondition::warning("root.fan", "is loud")]);
        let found = assess(&sources, &node).await;
        let shown: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["root.fan: is not ready", "root.fan: is loud"]);
        assert!(!is_healthy(&found));
    }

    #[tokio::test]
    async fn a_source_that_panics_is_a_problem_and_the_others_answer() {
        let ready = |dn: &str| v1::Node { state: v1::State::Ready.into(), ..not_ready(dn) };
        let node = snapshot(vec![ready("root.broken"), ready("root.fan")]);
        let mut sources = HealthSources::default();
        sources.add("broken", |_: &NodeSnapshot| -> Vec<HealthCondition> { panic!("a bug") });
        sources.add("fan", |_: &NodeSnapshot| vec![HealthCondition::problem("fan", "does not turn")]);
        let found = assess(&sources, &node).await;
        let shown: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["broken: does not say whether it is well: it panicked", "fan: does not turn"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_does_not_answer_is_a_problem_and_delays_no_other() {
        struct Hanging;

        impl HealthSource for Hanging {
            fn conditions<'a>(&'a self, _: &'a NodeSnapshot) -> ConditionsFuture<'a> {
                Box::pin(std::future::pending())
            }
        }

        let mut sources = HealthSources::default();
        sources.add("stuck", Hanging);
        sources.add("stuck.again", Hanging);
        sources.add("removed", |_: &NodeSnapshot| vec![HealthCondition::problem("it", "is gone")]);
        sources.add("fan", |_: &NodeSnapshot| vec![HealthCondition::problem("fan", "does not turn")]);
        let started = tokio::time::Instant::now();
        let ready = |dn: &str| v1::Node { state: v1::State::Ready.into(), ..not_ready(dn) };
        let found = assess(&sources, &snapshot(vec![ready("root.stuck"), ready("root.fan")])).await;
        assert_eq!(started.elapsed(), SOURCE_TIMEOUT);
        let shown: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "stuck: does not say within 4.5s whether it is well",
                "stuck: does not say within 4.5s whether it is well",
                "fan: does not turn"
            ]
        );
    }
}
