//! Plans the modification of a bound claim's volume: its VolumeAttributesClass sets the inode limit.
//!
//! As an expansion, it changes the limits first, then the PersistentVolume, then the claim's status, and each
//! action follows from what the API server and the store have. A class that is not valid, or that the volume
//! does not fit into, changes nothing; the claim can then name another one.
//!
//! *Source:* Kubernetes, KEP-3751, "VolumeAttributesClass"; the external-resizer, `modifycontroller`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use nodekeel_fsquota::{Inodes, QuotaLimits};

use crate::claim::attributes::{AttributesRejection, class_inodes, requested_attributes};
use crate::identity::ProvisionerIdentity;
use crate::resize::bound_claim::{BoundClaim, volume_capacity};
use crate::resize::claim_status;
use crate::resize::claim_status::ModifyState;

/// The next step toward the VolumeAttributesClass that a claim names.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModificationAction {
    /// Nothing.
    Ignore,
    /// Write into the claim's status that its volume gets this class.
    MarkInProgress(String),
    /// Set the volume's limits.
    SetLimits(QuotaLimits),
    /// Write this class into the PersistentVolume.
    SetClass(String),
    /// Write this class into the claim's status, and remove the state and the conditions of the modification.
    Finish(Option<String>),
    /// Mark the modification as infeasible, or, if the class is missing, as pending; try again later.
    Reject(AttributesRejection),
}

/// Plans the next step of a modification.
pub fn plan_modification(identity: &ProvisionerIdentity, observed: &BoundClaim<'_>) -> ModificationAction {
    if !needs_modification(observed.claim) {
        return ModificationAction::Ignore;
    }
    let in_force = observed.usage.limits;
    let with_inodes = |inodes| QuotaLimits { inodes, ..in_force };
    let Some(name) = observed.wanted_attributes() else {
        // The first modification was withdrawn.
        if observed.is_image() {
            return ModificationAction::Finish(None);
        }
        let inodes = observed.class_inodes(volume_capacity(observed.volume)).or(in_force.inodes);
        // The files that were created under the withdrawn class keep their inodes.
        let inodes = inodes.map(|inodes| inodes.max(observed.usage.usage.inodes));
        return if inodes == in_force.inodes {
            ModificationAction::Finish(None)
        } else {
            ModificationAction::SetLimits(with_inodes(inodes))
        };
    };
    // Before the mark: a class that does not apply changes nothing.
    let inodes = match checked_inodes(identity, name, observed) {
        Ok(inodes) => Some(inodes),
        Err(rejection) => return ModificationAction::Reject(rejection),
    };
    let status = observed.status();
    let state = claim_status::modify_state(&status);
    // A modification that was infeasible until now goes on without a second mark.
    let is_marked = [ModifyState::InProgress, ModifyState::Infeasible]
        .iter()
        .any(|marked| state == Some((marked.as_str(), Some(name))));
    let class = observed.volume.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    if !is_marked {
        ModificationAction::MarkInProgress(name.to_owned())
    } else if inodes != in_force.inodes {
        ModificationAction::SetLimits(with_inodes(inodes))
    } else if class != Some(name) {
        ModificationAction::SetClass(name.to_owned())
    } else {
        ModificationAction::Finish(Some(name.to_owned()))
    }
}

/// Returns whether a claim's volume is to get another class, or its status has a modification that has not finished.
pub(crate) fn needs_modification(claim: &PersistentVolumeClaim) -> bool {
    let Some(status) = claim.status.as_ref() else { return false };
    let current = status.current_volume_attributes_class_name.as_deref().filter(|name| !name.is_empty());
    let wanted = requested_attributes(claim);
    (wanted.is_some() && wanted != current)
        || status.modify_volume_status.is_some()
        || claim_status::has_modify_condition(status)
}

/// The state of a modification that is rejected so.
pub(crate) fn rejected_state(rejection: &AttributesRejection) -> ModifyState {
    match rejection {
        AttributesRejection::UnknownClass { .. } => ModifyState::Pending,
        _ => ModifyState::Infeasible,
    }
}

/// The inode limit of the wanted class, if the volume fits into it.
fn checked_inodes(
    identity: &ProvisionerIdentity,
    name: &str,
    observed: &BoundClaim<'_>,
) -> Result<Inodes, AttributesRejection> {
    let inodes = class_inodes(identity, name, observed.attributes)?;
    if observed.is_image() {
        return Err(AttributesRejection::NoInodeLimit { class: name.to_owned() });
    }
    if observed.usage.usage.inodes <= inodes {
        Ok(inodes)
    } else {
        Err(AttributesRejection::TooSmall { class: name.to_owned(), limit: inodes.0 })
    }
}
