//! Plans the modification of a bound claim's volume: its VolumeAttributesClass sets the inode limit.
//!
//! As an expansion, it changes the limits first, then the PersistentVolume, then the claim's status, and each
//! action follows from what the API server and the store have. A class that is not valid, or that the volume
//! does not fit into, changes nothing; the claim can then name another one.
//!
//! *Source:* Kubernetes, KEP-3751, "VolumeAttributesClass"; the external-resizer, `modifycontroller`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use nodekeel_fsquota::{Inodes, QuotaLimits};

use crate::claim::size::{self, INODES_PARAMETER};
use crate::image::VolumeKind;
use crate::plan::{ProvisionerIdentity, VolumeSpec};
use crate::resize::claim_status::{self, ModifyState};
use crate::resize::expansion::{BoundClaim, volume_capacity};

/// What to do next in order to give a volume the VolumeAttributesClass that its claim names.
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
    /// Write this class into the claim's status, and remove what says that a modification is in progress.
    Finish(Option<String>),
    /// Mark the modification as infeasible, or, if the class is missing, as pending; try again later.
    Reject(AttributesRejection),
}

/// Why a volume does not get a VolumeAttributesClass. The message is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttributesRejection {
    /// The class does not exist.
    #[error("VolumeAttributesClass {class:?} does not exist: create it")]
    UnknownClass {
        /// The class's name.
        class: String,
    },
    /// The class is for another driver.
    #[error("VolumeAttributesClass {class:?} is for the driver {driver:?}: name a class of this driver")]
    OtherDriver {
        /// The class's name.
        class: String,
        /// Its driver.
        driver: String,
    },
    /// A parameter of the class is unknown or missing, or has an invalid value.
    #[error("invalid parameter {name:?} = {value:?} in VolumeAttributesClass {class:?}: {expected}")]
    InvalidParameter {
        /// The class's name.
        class: String,
        /// The parameter's name.
        name: String,
        /// Its value.
        value: String,
        /// What is valid.
        expected: &'static str,
    },
    /// The volume has more inodes than the class allows. How many is not said: while a pod writes, each number would
    /// be another reason, and so another change of the claim's status.
    #[error(
        "VolumeAttributesClass {class:?} allows {limit} inodes, and the volume has more files and directories: delete \
         some, or name another class"
    )]
    TooSmall {
        /// The class's name.
        class: String,
        /// The limit that it sets.
        limit: u64,
    },
    /// The volume is a block or strict one, which has no inode limit.
    #[error(
        "VolumeAttributesClass {class:?} sets an inode limit, and a block or strict volume has none: name no class"
    )]
    NoInodeLimit {
        /// The class's name.
        class: String,
    },
}

impl AttributesRejection {
    /// The class.
    pub(crate) fn class(&self) -> &str {
        match self {
            Self::UnknownClass { class }
            | Self::OtherDriver { class, .. }
            | Self::InvalidParameter { class, .. }
            | Self::TooSmall { class, .. }
            | Self::NoInodeLimit { class } => class,
        }
    }

    /// The state of a modification that is rejected so.
    pub(crate) fn state(&self) -> ModifyState {
        match self {
            Self::UnknownClass { .. } => ModifyState::Pending,
            _ => ModifyState::Infeasible,
        }
    }
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
        let inodes = inodes.map(|inodes| inodes.max(observed.usage.usage.inodes));
        return match inodes == in_force.inodes {
            true => ModificationAction::Finish(None),
            false => ModificationAction::SetLimits(with_inodes(inodes)),
        };
    };
    let inodes = match checked_inodes(identity, name, observed) {
        Ok(inodes) => Some(inodes),
        Err(rejection) => return ModificationAction::Reject(rejection),
    };
    let status = observed.status();
    let state = claim_status::modify_state(&status);
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

/// Gives a volume that is to be created the inode limit of the claim's VolumeAttributesClass.
///
/// # Errors
/// [`AttributesRejection`].
pub(crate) fn apply_attributes(
    identity: &ProvisionerIdentity,
    class: Option<&VolumeAttributesClass>,
    spec: &mut VolumeSpec,
) -> Result<(), AttributesRejection> {
    if let Some(name) = &spec.attributes_class {
        let inodes = class_inodes(identity, name, class)?;
        if spec.kind != VolumeKind::Directory {
            return Err(AttributesRejection::NoInodeLimit { class: name.clone() });
        }
        spec.limits.inodes = Some(inodes);
    }
    Ok(())
}

/// Whether a claim's volume is to get another class, or its status says that it is about to.
pub(crate) fn needs_modification(claim: &PersistentVolumeClaim) -> bool {
    let Some(status) = claim.status.as_ref() else { return false };
    let current = status.current_volume_attributes_class_name.as_deref().filter(|name| !name.is_empty());
    let wanted = requested_attributes(claim);
    (wanted.is_some() && wanted != current)
        || status.modify_volume_status.is_some()
        || claim_status::has_modify_condition(status)
}

/// The VolumeAttributesClass that a claim names.
pub(crate) fn requested_attributes(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    name.filter(|name| !name.is_empty())
}

impl<'a> BoundClaim<'a> {
    /// The VolumeAttributesClass that the volume should have: that of the claim, or else that of the
    /// PersistentVolume, which the API server does not let be removed.
    pub fn wanted_attributes(&self) -> Option<&'a str> {
        let spec = self.volume.spec.as_ref();
        let given = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
        requested_attributes(self.claim).or(given.filter(|name| !name.is_empty()))
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
    match observed.usage.usage.inodes <= inodes {
        true => Ok(inodes),
        false => Err(AttributesRejection::TooSmall { class: name.to_owned(), limit: inodes.0 }),
    }
}

/// The inode limit that a class sets.
fn class_inodes(
    identity: &ProvisionerIdentity,
    name: &str,
    class: Option<&VolumeAttributesClass>,
) -> Result<Inodes, AttributesRejection> {
    let class_name = || name.to_owned();
    let class = class.ok_or_else(|| AttributesRejection::UnknownClass { class: class_name() })?;
    if class.driver_name != identity.driver.as_str() {
        let driver = class.driver_name.clone();
        return Err(AttributesRejection::OtherDriver { class: class_name(), driver });
    }
    let invalid = |name: &str, value: &str, expected| AttributesRejection::InvalidParameter {
        class: class_name(),
        name: name.to_owned(),
        value: value.to_owned(),
        expected,
    };
    match size::inodes_parameter(class.parameters.as_ref()) {
        Ok(Some(inodes)) => Ok(inodes),
        Ok(None) => Err(invalid(INODES_PARAMETER, "", size::EXPECTED_INODES)),
        Err(parameter) => Err(invalid(parameter.name, parameter.value, parameter.expected)),
    }
}
