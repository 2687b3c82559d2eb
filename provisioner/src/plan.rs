//! Plans the action for a claim or a volume: pure functions of the observed objects.

use k8s_openapi::api::core::v1::ObjectReference;
use nodekeel_fsquota::{Bytes, QuotaLimits};

use crate::claim::source::DataSource;
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::name::{DriverName, NodeName};
use crate::quantity::QuantityError;

/// Names the driver that must provision a claim. *Source:* Kubernetes, "well-known labels, annotations and
/// taints".
pub const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The beta name of [`STORAGE_PROVISIONER`]; read if the stable annotation is missing.
pub const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";

/// Names the node on which a claim's volume must be created.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Names the driver that provisioned a volume.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The node label that the node affinity of volumes of release 0.1.0 refers to; later ones refer to
/// [`DriverName::topology_key`].
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// The finalizer that keeps a deleted PersistentVolume until its data are removed.
///
/// The same as that of the Kubernetes external-provisioner, which tools and administrators know.
pub const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// The driver and the node whose claims and volumes a provisioner serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvisionerIdentity {
    /// The driver that claims and volumes name.
    pub driver: DriverName,
    /// The node of the volumes: the value of its label [`DriverName::topology_key`], which their node affinity
    /// refers to and which the kubelet sets.
    pub node: NodeName,
    /// The finalizer that volumes get, usually [`FINALIZER`]. With `None`, a volume's data leak if its object
    /// is deleted by hand before its claim.
    pub finalizer: Option<String>,
}

impl ProvisionerIdentity {
    /// Whether a label names this node, in a node affinity of this release or of an earlier one.
    pub(crate) fn is_label_of_node(&self, key: &str, values: &[String]) -> bool {
        (key == HOSTNAME || key == self.driver.topology_key()) && values == [self.node.as_str()]
    }
}

/// A volume to create: everything that determines its directory and its PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeSpec {
    /// The volume's id.
    pub id: VolumeId,
    /// The capacity in the PersistentVolume: the claim's request, in whole bytes.
    pub capacity: Bytes,
    /// What it is.
    pub kind: VolumeKind,
    /// The limits that it is created with. Those of a block or strict volume are its size.
    pub limits: QuotaLimits,
    /// From what it is created; `None` is an empty volume.
    pub source: Option<DataSource>,
    /// The claim, with its UID.
    pub claim_ref: ObjectReference,
    /// The claim's access modes; those that permit writing come first.
    pub access_modes: Vec<String>,
    /// The claim's class.
    pub storage_class: String,
    /// The claim's VolumeAttributesClass.
    pub attributes_class: Option<String>,
    /// The class's mount options.
    pub mount_options: Vec<String>,
    /// What happens to it after the claim is deleted.
    pub reclaim_policy: ReclaimPolicy,
}

/// What happens to a volume after its claim is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    clippy::exhaustive_enums,
    reason = "Kubernetes supports the third, Recycle, for two volume types only"
)]
pub enum ReclaimPolicy {
    /// It is deleted, with all data.
    Delete,
    /// It is kept until an administrator deletes it.
    Retain,
}

impl ReclaimPolicy {
    /// The policy's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Delete => "Delete",
            Self::Retain => "Retain",
        }
    }
}

/// Why a claim is rejected until it, or its class, changes. The message is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimRejection {
    /// The claim has no class, or the empty one.
    #[error("the claim has no storage class: set spec.storageClassName")]
    NoClass,
    /// The class does not exist.
    #[error("the claim's storage class {class:?} does not exist: create it")]
    UnknownClass {
        /// The class's name.
        class: String,
    },
    /// A field has a value that this driver does not support or does not know.
    #[error("{field} {value:?} is not supported{hint}")]
    Unsupported {
        /// The field's path.
        field: &'static str,
        /// Its value.
        value: String,
        /// The supported values, after a colon.
        hint: &'static str,
    },
    /// The requested size is not valid for a volume.
    #[error("invalid storage request {text:?}: {reason}; request 1 byte to 2^63 - 64Ki")]
    InvalidSize {
        /// The requested size.
        text: String,
        /// Why it is invalid.
        reason: SizeError,
    },
    /// A parameter of the class is unknown or has an invalid value.
    #[error("invalid parameter {name:?} = {value:?} in storage class {class:?}: {expected}")]
    InvalidParameter {
        /// The class.
        class: String,
        /// The parameter's name.
        name: String,
        /// Its value.
        value: String,
        /// What is valid.
        expected: &'static str,
    },
    /// The claim has a data source, and the store can't copy volumes.
    #[error(
        "the claim has a data source, and this driver can't copy volumes on this node: volumes start empty"
    )]
    SourcesUnsupported,
    /// The volume would be smaller than its source.
    #[error(
        "the claim requests {} bytes, and its data source {source_name} needs {}: request at least as much",
        capacity.0, size.0
    )]
    SmallerThanSource {
        /// The data source.
        source_name: String,
        /// The minimum size.
        size: Bytes,
        /// The requested size.
        capacity: Bytes,
    },
    /// The volume would be too small for a file system.
    #[error(
        "the claim requests {} bytes, and a strict volume of {format} needs at least {}: request at least as much",
        capacity.0, format.min_size().0
    )]
    TooSmall {
        /// The file system.
        format: ImageFormat,
        /// The requested size.
        capacity: Bytes,
    },
    /// The data source is of another kind than the claim's volume.
    #[error(
        "the kind of data source {source_name} is {found}, and that of the claim's volume {wanted}: copy it with a claim \
         whose volumeMode, class and csi.storage.k8s.io/fstype give the kind of the source"
    )]
    OtherSourceKind {
        /// The data source.
        source_name: String,
        /// What it is.
        found: VolumeKind,
        /// What the claim's volume would be.
        wanted: VolumeKind,
    },
    /// The data source belongs to another driver.
    #[error(
        "data source {source_name} belongs to driver {driver:?}, not to this one: copy it with that driver"
    )]
    ForeignSource {
        /// The data source.
        source_name: String,
        /// Its driver.
        driver: String,
    },
    /// A PersistentVolume of this name exists and belongs to another claim.
    #[error(
        "can't provision the claim: a PersistentVolume {id} already exists and belongs to another claim; \
         delete it if its data is not needed"
    )]
    NameConflict {
        /// The volume's name.
        id: VolumeId,
    },
    /// The claim's UID is not a UUID, so it cannot name a volume.
    #[error("the claim's UID {uid:?} is not a UUID, and volumes are named by it: create the claim again")]
    InvalidUid {
        /// The UID.
        uid: String,
    },
}

/// Why a size is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// The claim requests no size.
    #[error("the size is missing")]
    Missing,
    /// The size is zero.
    #[error("the size is zero")]
    Zero,
    /// Not a quantity, or out of range.
    #[error(transparent)]
    Quantity(QuantityError),
}

/// Why a volume is not deleted although its state asks for it: its fields contradict each other. The message
/// is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeRejection {
    /// The handle is not a volume id.
    #[error("invalid volume handle {handle:?}: not a volume of this driver; nothing was deleted")]
    InvalidHandle {
        /// The handle, truncated to what fits into an event.
        handle: String,
    },
    /// The handle is the id of another volume.
    #[error(
        "the PersistentVolume's spec.csi.volumeHandle {handle} differs from its name, so it is not a volume \
         of this driver; nothing was deleted"
    )]
    HandleMismatch {
        /// The handle.
        handle: VolumeId,
    },
    /// The claim reference is missing or incomplete: an administrator has made the volume available to
    /// another claim.
    #[error(
        "PersistentVolume {handle} has no complete spec.claimRef, so its data may still be needed; nothing \
         was deleted (to delete the object and keep the data, remove the driver's finalizer)"
    )]
    NoClaim {
        /// The handle.
        handle: VolumeId,
    },
    /// Its claim is neither the one that the volume was created for, nor one that it was seen bound to.
    #[error(
        "PersistentVolume {handle} was created for another claim than {claim:?} in its spec.claimRef; \
         nothing was deleted (to delete its data, annotate it: {annotation}={claim})"
    )]
    ClaimMismatch {
        /// The handle.
        handle: VolumeId,
        /// The UID of the claim in its reference.
        claim: String,
        /// The annotation of a volume that was bound to another claim.
        annotation: String,
    },
    /// The annotation of volumes provisioned by this driver is missing.
    #[error("the PersistentVolume was not provisioned by this driver; nothing was deleted")]
    NotProvisioned,
}
