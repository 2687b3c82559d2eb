//! What is to be done with a claim or a volume, as pure functions of what is known of them.

mod claim;
mod size;
mod volume;

#[cfg(test)]
mod claim_test;
#[cfg(test)]
mod volume_test;

use k8s_openapi::api::core::v1::ObjectReference;
use nodekeel_fsquota::{Bytes, Limits};

use crate::id::VolumeId;
use crate::name::{DriverName, NodeName};
use crate::quantity::QuantityError;

pub use claim::{ClaimAction, ClaimIgnored, SeenClaim, plan_claim};
pub(crate) use claim::{class_name, ignored, reference};
pub use volume::{VolumeAction, VolumeIgnored, plan_volume};
pub(crate) use volume::{has_finalizer, not_here};

/// Names the driver that must provision a claim. *Source:* Kubernetes, "well-known labels, annotations and taints".
pub const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The name of [`STORAGE_PROVISIONER`] before it was stable; read where the other lacks.
pub const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";

/// Names the node on which a claim's volume must be.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Names the driver that made a volume.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The label of a node, and so the key of a volume's affinity, by which volumes are bound to it.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// The finalizer by which a volume outlives the deletion of its object until its data are gone.
///
/// The one of Kubernetes' own external-provisioner: tools and people know it.
pub const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// Whose claims and volumes these are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The driver that claims name and volumes carry.
    pub driver: DriverName,
    /// The node that volumes are on. A volume is bound to it by the label `kubernetes.io/hostname`, which must be the same.
    pub node: NodeName,
    /// The finalizer that volumes get, [`FINALIZER`] as a rule; `None`: none, and a volume's data are left behind where its
    /// object is removed by hand before its claim.
    pub finalizer: Option<String>,
}

/// A volume to make: everything that its directory and its PersistentVolume are made from.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeSpec {
    /// What it is called.
    pub id: VolumeId,
    /// What the PersistentVolume says that it holds: what the claim asks for, in whole bytes.
    pub capacity: Bytes,
    /// The limits that it is born with.
    pub limits: Limits,
    /// The claim that it is for, with its UID.
    pub claim: ObjectReference,
    /// The claim's access modes; those that let somebody write come first.
    pub access_modes: Vec<String>,
    /// The claim's class.
    pub class: String,
    /// The class's mount options.
    pub mount_options: Vec<String>,
    /// What becomes of it without the claim.
    pub reclaim: Reclaim,
}

/// What becomes of a volume whose claim is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    clippy::exhaustive_enums,
    reason = "Kubernetes has dropped the third, Recycle, for all volumes but two"
)]
pub enum Reclaim {
    /// It is destroyed, with all data.
    Delete,
    /// It stays until somebody decides.
    Retain,
}

impl Reclaim {
    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Delete => "Delete",
            Self::Retain => "Retain",
        }
    }
}

/// Why a claim is refused for good: until it, or its class, changes. The text is the event's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimRefusal {
    /// It names no class, or the empty one.
    #[error("the claim names no storage class; set spec.storageClassName")]
    NoClass,
    /// The class isn't there.
    #[error("storage class {class:?} does not exist")]
    UnknownClass {
        /// Its name.
        class: String,
    },
    /// A field asks for what this driver doesn't do, or holds what isn't known.
    #[error("{field} {value:?} is not supported{hint}")]
    Unsupported {
        /// The field's path.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What is supported instead, after a colon.
        hint: &'static str,
    },
    /// The size asked for is no amount that a volume can have.
    #[error("the requested storage {text:?} is {reason}; ask for 1 byte to 2^63 - 64Ki")]
    Size {
        /// The size as it was given.
        text: String,
        /// What is wrong with it.
        reason: SizeError,
    },
    /// A parameter of the class doesn't hold what it must.
    #[error("parameter {name:?} of storage class {class:?} can't be {value:?}: {expected}")]
    Parameter {
        /// The class.
        class: String,
        /// The parameter's name.
        name: String,
        /// Its value.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
    /// A volume of the name exists, and it is not this claim's.
    #[error("a PersistentVolume {id} exists already and is not for this claim; remove it")]
    Taken {
        /// The volume's name.
        id: VolumeId,
    },
    /// The claim's UID is none that a volume could be named after.
    #[error("the claim's UID {uid:?} is no UUID")]
    Uid {
        /// The UID.
        uid: String,
    },
}

/// What is wrong with a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// There is none.
    #[error("missing")]
    Missing,
    /// It is zero.
    #[error("zero")]
    Zero,
    /// It is no quantity, or none in the range.
    #[error(transparent)]
    Quantity(QuantityError),
}

/// Why a volume that is to be destroyed isn't: it looks like one of ours and can't be. The text is the event's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeRefusal {
    /// Its handle is not the id of a volume.
    #[error("the volume handle {handle:?} names no volume of this driver; nothing was deleted")]
    Handle {
        /// The handle, cut to what an event can carry.
        handle: String,
    },
    /// Its handle is the id of another volume.
    #[error("the volume handle {handle} is not the PersistentVolume's name; nothing was deleted")]
    OtherVolume {
        /// The handle.
        handle: VolumeId,
    },
    /// It doesn't say which claim it belongs to, or where that is: somebody has made it free for another.
    #[error(
        "volume {handle} names no claim, so nothing says that its data may go; nothing was deleted (to let its object go \
         and keep the data, take the driver's finalizer off)"
    )]
    NoClaim {
        /// The handle.
        handle: VolumeId,
    },
    /// Its claim is not the one that the volume was made for.
    #[error("volume {handle} was made for another claim than {claim:?}; nothing was deleted")]
    OtherClaim {
        /// The handle.
        handle: VolumeId,
        /// The UID of the claim that it names.
        claim: String,
    },
    /// It doesn't carry the annotation of what this driver made.
    #[error("the PersistentVolume was not provisioned by this driver; nothing was deleted")]
    NotProvisioned,
}
