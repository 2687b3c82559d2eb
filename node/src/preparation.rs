//! The preparation of what a plan has, under the lock of the data directory: of a node that starts or reloads, and of one that
//! is only reset.

use std::sync::Arc;

use thiserror::Error;

use crate::control::socket::BindError;
use crate::data::DataError;
use crate::part::{
    CallPanic, NodePreparation, PartAdditions, PlannedService, PrepareError, PreparedRunnable, call_part,
    catch_panic, part_of_dn,
};
use crate::plan::NodePlan;
use crate::running::RunningNode;

/// The reason why a node can't start. Nothing runs then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The data directory can't be used. The message has the hint.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A part can't be prepared: the volumes can't be opened, for example. The message has the hint.
    #[error(transparent)]
    Part(PrepareError),
    /// A part panicked while it was prepared.
    #[error(transparent)]
    Panicked(CallPanic),
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
            Err(error) => match error.downcast::<CallPanic>() {
                Ok(panic) => Self::Panicked(*panic),
                Err(error) => Self::Part(error),
            },
        }
    }
}

/// Prepared runnables and additions of the parts, before the node uses them.
pub(crate) struct PreparedParts {
    /// By DN, in the order of the plan.
    pub(crate) runnables: Vec<(String, PreparedRunnable)>,
    pub(crate) additions: PartAdditions,
}

/// Prepares runnables of a plan, in their order. The node does not have yet what they add to it.
pub(crate) fn prepare_services<'p>(
    running: &Arc<RunningNode>,
    plan: &NodePlan,
    services: impl Iterator<Item = &'p PlannedService>,
) -> Result<PreparedParts, PrepareError> {
    // The runnables add to a copy: an error leaves the additions of the node as they are.
    let mut additions = running.additions();
    let mut node =
        NodePreparation { running, config: &plan.config, search: &plan.search, additions: &mut additions };
    let prepare = |planned: &PlannedService| {
        let call = || call_part(part_of_dn(&planned.dn), "prepare", || planned.runnable.prepare(&mut node));
        let prepared = catch_panic("prepare", call)??;
        Ok((planned.dn.clone(), prepared.start_after(&planned.start_after)))
    };
    let runnables = services.map(prepare).collect::<Result<_, PrepareError>>()?;
    Ok(PreparedParts { runnables, additions })
}
