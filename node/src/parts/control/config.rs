//! The configuration: compared with another one, and reloaded.

use std::sync::Arc;

use tonic::Status;

use super::api::ControlService;
use crate::control::stopping_status;
use crate::node::{self, ReloadError};
use crate::plan::{ChangeEffect, PlanChange, PlanDifference};
use crate::v1;

impl ControlService {
    pub(super) async fn check_config(
        &self,
        request: v1::CheckConfigRequest,
    ) -> Result<v1::ConfigDifference, Status> {
        let v1::CheckConfigRequest { file, text } = request;
        let compared =
            node::check_config(Arc::clone(&self.shared), text.map(|text| (file.into(), text))).await;
        compared.map(difference_to_wire).map_err(|error| reload_status(&error))
    }

    pub(super) async fn reload_config(&self) -> Result<v1::ConfigDifference, Status> {
        let reloaded = node::reload_config(Arc::clone(&self.shared)).await;
        reloaded.map(difference_to_wire).map_err(|error| reload_status(&error))
    }
}

fn reload_status(error: &ReloadError) -> Status {
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
            ChangeEffect::NodeRestart => Effect::NodeRestart.into(),
        },
        name: change.name,
        keys: change.keys,
    };
    v1::ConfigDifference { changes: difference.changes.into_iter().map(wire).collect() }
}
