//! A part of a node: its name and configuration, what it needs, what it runs, and what it adds to the control
//! API, to the health of the node and to its metrics.
//!
//! etcd, the cluster, containerd, the provisioner, the control API and `[[service]]` are parts, and a program that
//! embeds the node adds, replaces and removes parts with [`NodeBuilder`](crate::node::NodeBuilder).
//!
//! ```text
//!  file ──▶ sections, check, dependencies    the configuration alone
//!       ──▶ plan                             reads the machine, changes nothing
//!       ──▶ prepare                          the data directory is locked; nothing runs yet
//!       ──▶ runnable                         below root, after its dependencies
//! ```
//!
//! A runnable with data declares where they are: [`PlannedService::layout`] on the data volume of the node, which survives
//! its machine, or [`PlannedService::run_layout`] in `run` of the data directory. A runnable on the volume is built
//! at each start, when the volume is open ([`NodePreparation::on_volume`]): it waits for `root.storage`, and restarts
//! after it.

mod additions;
mod guard;
mod list;
mod node_preparation;
mod on_volume;
mod planned_service;
mod planner;
mod prepared_runnable;

use std::any::Any;
use std::fmt;

use tonic::Extensions;

use crate::config::{ConfigSection, ConfigViolation, NodedConfig};

pub use crate::control::ControlServices;
pub use crate::dependency::DependencyEntry;
pub use crate::volume::VolumeHandle;
pub(crate) use additions::PartAdditions;
pub use guard::CallPanic;
pub(crate) use guard::{call_part, catch_panic, part_of_dn};
pub(crate) use list::Parts;
pub use node_preparation::NodePreparation;
pub use planned_service::PlannedService;
pub use planner::PartPlanner;
pub(crate) use planner::{PlannerInput, RunningUse};
pub use prepared_runnable::{PrepareError, PreparedRunnable};

/// A part of a node.
///
/// # Contract
/// - A name is 1 to 64 of `a-z`, `0-9`, `_` and `-`. The part plans one runnable, `root.<name>`, or several,
///   `root.<name>.<another>`; what depends on the part waits for all of them.
/// - [`check`](Self::check) and [`dependencies`](Self::dependencies) depend on the configuration alone.
/// - [`plan`](Self::plan) changes nothing on the machine: `noded check` calls it too.
/// - A call that panics fails the start, the check or the reload, with a text that names the part and the call.
pub trait Part: Send + Sync + 'static {
    /// The name, unique in the node.
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

    /// Adds the runnables of the part to the plan, and reports requirements that are missing or in use.
    fn plan(&self, planner: &mut PartPlanner<'_>);
}

impl DependencyEntry {
    /// The entry of a part, with the `depends_on` of its first section.
    pub fn of_part(part: &(impl Part + ?Sized), config: &NodedConfig) -> Self {
        let name = part.name().to_owned();
        let depends_on = config.depends_on.get(&name).cloned().unwrap_or_default();
        let section = part.sections().first().map(|section| section.path().to_owned()).unwrap_or_default();
        Self { dn: format!("root.{name}"), name, unavailable: None, depends_on, section }
    }
}

/// A plan of what a part runs under one DN. [`Display`](fmt::Display) describes it in the output of `noded check`.
pub trait PlannedRunnable: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Creates its directories and opens what must exist before the tree starts. Called before anything runs, in the
    /// order of the plan; and again by a reload that replaces the runnable, while the former one still runs.
    ///
    /// # Errors
    /// Nothing runs then, and a reload changes nothing.
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError>;

    /// Returns whether `new`, which a reload of the configuration has planned for the same DN, runs the same: [`is_equal`] for a
    /// plan that can be compared. If not, the reload prepares it, and restarts the runnable. `None`, the default: no reload
    /// adds, replaces or removes the runnable, and a change of its part's sections needs a restart of the program.
    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        let _ = new;
        None
    }

    /// Returns whether `new`, which is not the same, differs only in what [`apply`](Self::apply) changes while this one runs: nothing
    /// restarts then. Default: no.
    fn is_applicable(&self, new: &dyn PlannedRunnable) -> bool {
        let _ = new;
        false
    }

    /// Applies this plan to the runnable of the former one, which runs on, by what its part has put into the
    /// [extensions](NodePreparation::extensions). Default: nothing.
    fn apply(&self, extensions: &Extensions) {
        let _ = extensions;
    }
}

/// The answer of [`PlannedRunnable::is_same`] for a plan that can be compared.
pub fn is_equal<T: PlannedRunnable + PartialEq>(running: &T, new: &dyn PlannedRunnable) -> Option<bool> {
    Some((new as &dyn Any).downcast_ref::<T>() == Some(running))
}
