//! The status of a claim whose volume is being resized: its fields, and the patches that change them.
//!
//! *Source:* Kubernetes, `PersistentVolumeClaimStatus`; the external-resizer, which writes the same.

use k8s_openapi::api::core::v1::{PersistentVolumeClaimCondition, PersistentVolumeClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::Bytes;
use serde_json::{Value, json};

use crate::quantity::{format_quantity, parse_quantity};

/// The state of an expansion that was started.
pub(crate) const IN_PROGRESS: &str = "ControllerResizeInProgress";

/// The state of an expansion that cannot succeed now.
pub(crate) const INFEASIBLE: &str = "ControllerResizeInfeasible";

/// The condition of a claim whose volume is being expanded.
const RESIZING: &str = "Resizing";

/// The condition of a claim whose volume could not be expanded.
const RESIZE_ERROR: &str = "ControllerResizeError";

/// All conditions of expansions.
const RESIZE_CONDITIONS: [&str; 4] = [RESIZING, "FileSystemResizePending", RESIZE_ERROR, "NodeResizeError"];

/// The condition of a claim whose volume gets another VolumeAttributesClass.
const MODIFYING: &str = "ModifyingVolume";

/// The condition of a claim whose volume could not get its VolumeAttributesClass.
const MODIFY_ERROR: &str = "ModifyVolumeError";

/// All conditions of modifications.
const MODIFY_CONDITIONS: [&str; 2] = [MODIFYING, MODIFY_ERROR];

/// The state of a modification, as in `status.modifyVolumeStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModifyState {
    Pending,
    InProgress,
    Infeasible,
}

impl ModifyState {
    /// The state's name in the API.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::InProgress => "InProgress",
            Self::Infeasible => "Infeasible",
        }
    }
}

/// The state of the expansion, if one was started.
pub(crate) fn resize_state(status: &PersistentVolumeClaimStatus) -> Option<&str> {
    status.allocated_resource_statuses.as_ref()?.get("storage").map(String::as_str)
}

/// The size that the expansion was started for.
pub(crate) fn allocated_size(status: &PersistentVolumeClaimStatus) -> Option<Bytes> {
    let size = status.allocated_resources.as_ref()?.get("storage")?;
    parse_quantity(&size.0).ok().map(Bytes)
}

/// Returns whether the status has a condition of an expansion, in progress or failed.
pub(crate) fn has_resize_condition(status: &PersistentVolumeClaimStatus) -> bool {
    has_condition(status, &RESIZE_CONDITIONS)
}

/// Returns whether the status has a condition of a modification, in progress or failed.
pub(crate) fn has_modify_condition(status: &PersistentVolumeClaimStatus) -> bool {
    has_condition(status, &MODIFY_CONDITIONS)
}

fn has_condition(status: &PersistentVolumeClaimStatus, types: &[&str]) -> bool {
    status.conditions.iter().flatten().any(|condition| types.contains(&condition.type_.as_str()))
}

/// The patch that marks an expansion to this size as in progress.
pub(crate) fn resize_started(status: &PersistentVolumeClaimStatus, size: Bytes, now: Timestamp) -> Value {
    let conditions = replace_conditions(status, &RESIZE_CONDITIONS, &[(RESIZING, "")], now);
    json!({
        "allocatedResources": { "storage": format_quantity(size.0) },
        "allocatedResourceStatuses": { "storage": IN_PROGRESS },
        "conditions": conditions,
    })
}

/// The patch with the reason why an expansion failed, and its state now; `None` if the status has both already.
pub(crate) fn resize_failed(
    status: &PersistentVolumeClaimStatus,
    reason: &str,
    state: &str,
    now: Timestamp,
) -> Option<Value> {
    let is_known = status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == RESIZE_ERROR && condition.message.as_deref() == Some(reason));
    // The retries of a failure write it once.
    if is_known && resize_state(status) == Some(state) {
        return None;
    }
    let failed = (RESIZE_ERROR, reason);
    // An infeasible expansion is no longer in progress, so it loses the condition `Resizing`.
    let conditions = if state == INFEASIBLE {
        replace_conditions(status, &RESIZE_CONDITIONS, &[failed], now)
    } else {
        replace_conditions(status, &RESIZE_CONDITIONS, &[(RESIZING, ""), failed], now)
    };
    Some(json!({ "allocatedResourceStatuses": { "storage": state }, "conditions": conditions }))
}

/// The patch that ends an expansion.
pub(crate) fn resize_finished(
    status: &PersistentVolumeClaimStatus,
    capacity: Bytes,
    now: Timestamp,
) -> Value {
    json!({
        "capacity": { "storage": format_quantity(capacity.0) },
        // In a merge patch (RFC 7386), null removes the field.
        "allocatedResourceStatuses": { "storage": null },
        "conditions": replace_conditions(status, &RESIZE_CONDITIONS, &[], now),
    })
}

/// The patch with the state of a modification to this class; `None` if the status has it already.
pub(crate) fn modify_marked(
    status: &PersistentVolumeClaimStatus,
    state: ModifyState,
    class: &str,
    reason: &str,
    now: Timestamp,
) -> Option<Value> {
    let wanted = match state {
        ModifyState::InProgress => vec![(MODIFYING, "")],
        ModifyState::Pending | ModifyState::Infeasible => vec![(MODIFY_ERROR, reason)],
    };
    let is_known = wanted.iter().all(|(kind, message)| {
        let mut conditions = status.conditions.iter().flatten();
        conditions.any(|it| it.type_ == *kind && it.message.as_deref().unwrap_or_default() == *message)
    });
    if is_known && modify_state(status) == Some((state.as_str(), Some(class))) {
        return None;
    }
    Some(json!({
        "modifyVolumeStatus": { "status": state.as_str(), "targetVolumeAttributesClassName": class },
        "conditions": replace_conditions(status, &MODIFY_CONDITIONS, &wanted, now),
    }))
}

/// The state of the modification and the class that it was started for.
pub(crate) fn modify_state(status: &PersistentVolumeClaimStatus) -> Option<(&str, Option<&str>)> {
    let state = status.modify_volume_status.as_ref()?;
    Some((state.status.as_str(), state.target_volume_attributes_class_name.as_deref()))
}

/// The patch that ends a modification: the volume has this class now, or none.
pub(crate) fn modify_finished(
    status: &PersistentVolumeClaimStatus,
    class: Option<&str>,
    now: Timestamp,
) -> Value {
    json!({
        "currentVolumeAttributesClassName": class,
        "modifyVolumeStatus": null,
        "conditions": replace_conditions(status, &MODIFY_CONDITIONS, &[], now),
    })
}

/// The conditions without those of these types, and with the wanted ones, by type and message. A condition
/// that was true before keeps the time of its transition. `null` removes an empty list.
fn replace_conditions(
    status: &PersistentVolumeClaimStatus,
    types: &[&str],
    wanted: &[(&str, &str)],
    now: Timestamp,
) -> Value {
    let old = || status.conditions.iter().flatten();
    let others = old().filter(|condition| !types.contains(&condition.type_.as_str())).cloned();
    let since = |kind: &str| {
        let known = old().find(|condition| condition.type_ == kind && condition.status == "True");
        known.and_then(|condition| condition.last_transition_time.clone())
    };
    let new = wanted.iter().map(|(kind, message)| PersistentVolumeClaimCondition {
        type_: (*kind).to_owned(),
        status: "True".to_owned(),
        message: Some((*message).to_owned()).filter(|message| !message.is_empty()),
        last_transition_time: Some(since(kind).unwrap_or(Time(now))),
        ..PersistentVolumeClaimCondition::default()
    });
    let all: Vec<_> = others.chain(new).collect();
    if all.is_empty() { Value::Null } else { json!(all) }
}
