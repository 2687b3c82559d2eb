//! Plans the expansion of a bound claim's volume.
//!
//! The provisioner of the node owns the limits, so it expands a volume completely, whether a pod uses it or
//! not: it raises the limits, then the capacity of the PersistentVolume, then that in the claim's status. The
//! kubelet takes no part, so that expansion does not wait for a pod, and one process does all of it: the CSI
//! plugin does not have the capability `EXPAND_VOLUME`, and no claim gets one of the `NodeResize...` states,
//! without which the kubelet leaves it alone.
//!
//! The API server admits a larger request only if the class allows expansion, and a lower one only above
//! `status.capacity`. So a request above it is a decision that stands, even if the class has changed since.
//!
//! Each action follows from what the API server and the store have, so a killed process resumes.
//!
//! *Source:* Kubernetes, KEP-1790, "Recovery from volume expansion failure"; the external-resizer,
//! `expandAndRecover`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use nodekeel_fsquota::{Bytes, QuotaLimits};

use crate::claim::size;
use crate::claim::spec::{ClaimRejection, SizeError};
use crate::image::MAX_ROUNDING;
use crate::quantity::parse_quantity;
use crate::resize::bound_claim::{BoundClaim, volume_capacity};
use crate::resize::claim_status;
use crate::store::{VolumeUsage, larger_limit};

/// The next step toward the size that a claim requests.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ExpansionAction {
    /// Nothing.
    Ignore,
    /// Write into the claim's status that its volume is being expanded to this size.
    MarkInProgress(Bytes),
    /// Set the volume's limits. If the node has no room for them, mark the expansion as infeasible, and try
    /// again later: the request may have been lowered then.
    SetLimits(QuotaLimits),
    /// Write this capacity into the PersistentVolume.
    SetCapacity(Bytes),
    /// Write this capacity into the claim's status, and remove the state and the conditions of the expansion.
    Finish(Bytes),
    /// Mark the expansion as infeasible until the request changes.
    Reject(ClaimRejection),
}

/// Plans the next step of an expansion. A volume gets the requested size, or that of its PersistentVolume, if
/// that is larger, since it has been promised. A limit that was raised further, for a request that was lowered
/// since, is lowered again, unless the data need it.
pub fn plan_expansion(observed: &BoundClaim<'_>) -> ExpansionAction {
    if !needs_expansion(observed.claim) {
        return ExpansionAction::Ignore;
    }
    let Some(current) = status_capacity(observed.claim) else { return ExpansionAction::Ignore };
    let request = match requested_bytes(observed.claim) {
        Ok(request) => request,
        Err(rejection) => return ExpansionAction::Reject(rejection),
    };
    // The request was lowered to the present size: only the marks are left to remove.
    if request <= current {
        return ExpansionAction::Finish(current);
    }
    let capacity = volume_capacity(observed.volume);
    let target = observed.expansion_target(request.max(capacity));
    let status = observed.status();
    let (state, allocated) = (claim_status::resize_state(&status), claim_status::allocated_size(&status));
    let is_marked = matches!(state, Some(claim_status::IN_PROGRESS | claim_status::INFEASIBLE));
    // The mark comes before the limits: from then on, the namespace's quota counts this size.
    if !is_marked || allocated != Some(target) {
        return ExpansionAction::MarkInProgress(target);
    }
    // First the limits, then the PersistentVolume: an object never promises more than the store holds.
    let limits = observed.expanded_limits(target);
    let in_force = observed.usage.limits;
    if !is_in_force(in_force.bytes, target) || in_force.inodes != limits.inodes {
        return ExpansionAction::SetLimits(limits);
    }
    if capacity < target { ExpansionAction::SetCapacity(target) } else { ExpansionAction::Finish(target) }
}

/// Returns whether a limit is this one, apart from the rounding of the file system.
fn is_in_force(limit: Option<Bytes>, target: Bytes) -> bool {
    limit.is_some_and(|limit| limit >= target && limit.0 - target.0 < MAX_ROUNDING)
}

/// Returns whether a claim's volume is to be expanded, or its status has an expansion that has not finished.
pub(crate) fn needs_expansion(claim: &PersistentVolumeClaim) -> bool {
    let Some(status) = claim.status.as_ref() else { return false };
    let Some(capacity) = status_capacity(claim) else { return false };
    let is_larger = !requested_bytes(claim).is_ok_and(|request| request <= capacity);
    is_larger || claim_status::resize_state(status).is_some() || claim_status::has_resize_condition(status)
}

impl BoundClaim<'_> {
    /// The size to expand to: the promised one, or a larger one that is in force, if data were or may have been
    /// written up to it.
    fn expansion_target(&self, promised: Bytes) -> Bytes {
        let VolumeUsage { limits, usage } = self.usage;
        match limits.bytes {
            Some(limit)
                if (self.is_image() || usage.bytes > promised) && !is_in_force(Some(limit), promised) =>
            {
                promised.max(limit)
            }
            _ => promised,
        }
    }

    /// The limits of the volume at this size. The number of inodes grows with it, unless a
    /// VolumeAttributesClass has set it.
    fn expanded_limits(&self, size: Bytes) -> QuotaLimits {
        let in_force = self.usage.limits.inodes;
        if self.is_image() {
            return QuotaLimits { bytes: Some(size), inodes: None };
        }
        let inodes = match self.status().current_volume_attributes_class_name.as_deref() {
            None | Some("") => larger_limit(in_force, self.class_inodes(size).or(in_force)),
            Some(_) => in_force,
        };
        QuotaLimits { bytes: Some(size), inodes }
    }
}

fn requested_bytes(claim: &PersistentVolumeClaim) -> Result<Bytes, ClaimRejection> {
    match &claim.spec {
        Some(spec) => size::requested_capacity(spec),
        None => Err(ClaimRejection::InvalidSize { text: String::new(), reason: SizeError::Missing }),
    }
}

fn status_capacity(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    let capacity = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?;
    parse_quantity(&capacity.0).ok().map(Bytes)
}
