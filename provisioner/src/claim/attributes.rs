//! The VolumeAttributesClass of a claim: the inode limit that it sets, or why it does not apply.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use nodekeel_fsquota::Inodes;

use crate::claim::size;
use crate::claim::size::INODES_PARAMETER;
use crate::claim::spec::VolumeSpec;
use crate::identity::ProvisionerIdentity;
use crate::image::VolumeKind;

/// The reason why a volume does not get a VolumeAttributesClass. The message is the event's note.
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
        /// The driver.
        driver: String,
    },
    /// A parameter of the class is unknown or missing, or has an invalid value.
    #[error("invalid parameter {name:?} = {value:?} in VolumeAttributesClass {class:?}: {expected}")]
    InvalidParameter {
        /// The class's name.
        class: String,
        /// The parameter's name.
        name: String,
        /// The value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// The volume has more inodes than the class allows. The message omits their number: while a pod writes, each
    /// number would be another reason, and so another change of the claim's status.
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
}

/// The VolumeAttributesClass that a claim names.
pub(crate) fn requested_attributes(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    name.filter(|name| !name.is_empty())
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

/// The inode limit that a class sets.
pub(crate) fn class_inodes(
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
