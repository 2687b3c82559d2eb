//! The calls of the control API about the configuration: compared with another one, and reloaded.

use std::sync::Arc;

use tonic::Status;

use super::reload::{ReloadError, check_config, reload_config};
use super::state::NodeState;
use crate::control::stopping_status;
use crate::plan::{ChangeEffect, PlanChange, PlanDifference};
use crate::running::{ConfigAnswer, ConfigRequest};
use crate::v1;

/// Answers a request; `None` is a node without a handle, which stops.
pub(super) fn answer_config(state: Option<Arc<NodeState>>, request: ConfigRequest) -> ConfigAnswer {
    Box::pin(async move {
        let state = state.ok_or_else(stopping_status)?;
        let difference = match request {
            ConfigRequest::Check(text) => check_config(state, text).await,
            ConfigRequest::Reload => reload_config(state).await,
        };
        difference.map(difference_to_wire).map_err(|error| reload_status(&error))
    })
}

fn reload_status(error: &ReloadError) -> Status {
    // The code tells the client what to correct: the configuration, or the machine.
    match error {
        ReloadError::Stopping => stopping_status(),
        ReloadError::Config(error) => Status::invalid_argument(error.to_string()),
        ReloadError::Plan(error) if error.keys_conflict => Status::invalid_argument(error.to_string()),
        // One line for each problem.
        ReloadError::Plan(error) => Status::failed_precondition(error.to_string()),
        other => Status::failed_precondition(other.describe()),
    }
}

fn difference_to_wire(difference: PlanDifference) -> v1::ConfigDifference {
    use v1::config_change::Effect;
    let wire = |change: PlanChange| v1::ConfigChange {
        detail: change.to_string(),
        effect: match change.effect {
            ChangeEffect::Add => Effect::Add.into(),
            ChangeEffect::Restart => Effect::Restart.into(),
            ChangeEffect::Remove => Effect::Remove.into(),
            ChangeEffect::Apply => Effect::Apply.into(),
            ChangeEffect::Reorder => Effect::Reorder.into(),
            ChangeEffect::NodeRestart => Effect::NodeRestart.into(),
        },
        name: change.name,
        keys: change.keys,
    };
    v1::ConfigDifference { changes: difference.changes.into_iter().map(wire).collect() }
}
