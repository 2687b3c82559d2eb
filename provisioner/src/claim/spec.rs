//! The volume that a claim asks for, and the reasons why it can't have one.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim, PersistentVolumeClaimSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use nodekeel_fsquota::{Bytes, QuotaLimits};

use crate::claim::attributes::requested_attributes;
use crate::claim::mount_option::{MountOption, UnknownMountOption, split_options};
use crate::claim::size;
use crate::claim::source::{DataSource, requested_source};
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::name::NodeName;
use crate::objects::{class_name, object_reference};
use crate::quantity::QuantityError;

/// Access modes that a volume on one node can serve.
const ACCESS_MODES: [&str; 3] = ["ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"];

/// A volume to create: everything that determines its directory and its PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeSpec {
    /// The volume's id.
    pub id: VolumeId,
    /// The capacity in the PersistentVolume: the claim's request, in whole bytes.
    pub capacity: Bytes,
    /// A directory, a block volume or a strict one.
    pub kind: VolumeKind,
    /// The limits that it is created with. Those of a block or strict volume are its size.
    pub limits: QuotaLimits,
    /// The source of its data; `None` is an empty volume.
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
    /// The fate of the volume after the claim is deleted.
    pub reclaim_policy: ReclaimPolicy,
}

/// The fate of a volume after its claim is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    clippy::exhaustive_enums,
    reason = "Kubernetes supports the third, Recycle, for two volume types only"
)]
pub enum ReclaimPolicy {
    /// Is deleted, with all data.
    Delete,
    /// Is kept until an administrator deletes it.
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

/// The reason why a claim is rejected until it, or its class, changes. The message is the event's note.
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
    /// The selected node is not one that the class allows. The scheduler selects none such.
    #[error(
        "selected node {node} does not meet the allowedTopologies of the claim's storage class {class:?}: remove the claim's \
         annotation volume.kubernetes.io/selected-node, so that the scheduler selects another node, or use another class"
    )]
    NodeNotAllowed {
        /// The selected node.
        node: NodeName,
        /// The class's name.
        class: String,
    },
    /// A field has a value that this driver does not support or does not know.
    #[error("{field} {value:?} is not supported{hint}")]
    Unsupported {
        /// The field's path.
        field: &'static str,
        /// The value.
        value: String,
        /// The supported values, after a colon.
        hint: &'static str,
    },
    /// The requested size is not valid for a volume.
    #[error("invalid storage request {text:?}: {reason}; request 1 byte to 2^63 - 64Ki")]
    InvalidSize {
        /// The requested size.
        text: String,
        /// The reason.
        reason: SizeError,
    },
    /// A parameter of the class is unknown or has an invalid value.
    #[error("invalid parameter {name:?} = {value:?} in storage class {class:?}: {expected}")]
    InvalidParameter {
        /// The class.
        class: String,
        /// The parameter's name.
        name: String,
        /// The value.
        value: String,
        /// The valid values.
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
        /// The kind of the data source.
        found: VolumeKind,
        /// The kind that the claim's volume would have.
        wanted: VolumeKind,
    },
    /// The data source belongs to another driver.
    #[error(
        "data source {source_name} belongs to driver {driver:?}, not to this one: copy it with that driver"
    )]
    ForeignSource {
        /// The data source.
        source_name: String,
        /// The driver.
        driver: String,
    },
    /// The data source is in another store of the node: blocks are shared within one file system only.
    #[error("{}", other_store_note(source_name, store.as_deref()))]
    SourceInOtherStore {
        /// The data source.
        source_name: String,
        /// The name of its store, unchecked; `None` is the one without a name.
        store: Option<String>,
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

fn other_store_note(source_name: &str, store: Option<&str>) -> String {
    let (place, class) = match store {
        Some(store) => (format!("store {store:?}"), format!("with the parameter `store: {store}`")),
        None => ("the store without a name".to_owned(), "without the parameter `store`".to_owned()),
    };
    format!(
        "data source {source_name} is in {place} of its node, and the claim's storage class has its volumes in another one: \
         create the claim again with a class {class}"
    )
}

/// The reason why a size is invalid.
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

pub(crate) fn build_spec(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
) -> Result<VolumeSpec, ClaimRejection> {
    let (meta, empty) = (&claim.metadata, PersistentVolumeClaimSpec::default());
    let request = claim.spec.as_ref().unwrap_or(&empty);
    let uid = meta.uid.as_deref().unwrap_or_default();
    let id = VolumeId::from_uid(uid).map_err(|_| ClaimRejection::InvalidUid { uid: uid.to_owned() })?;
    let is_block = checked_mode(request)?;
    let capacity = size::requested_capacity(request)?;
    let (kind, limits) = size::volume_shape(capacity, class, is_block)?;
    Ok(VolumeSpec {
        id,
        capacity,
        kind,
        limits,
        claim_ref: object_reference(claim),
        access_modes: checked_access_modes(request)?,
        storage_class: class_name(claim).unwrap_or_default().to_owned(),
        source: requested_source(request)?,
        attributes_class: requested_attributes(claim).map(str::to_owned),
        // A device is not mounted.
        mount_options: if is_block { Vec::new() } else { checked_mount_options(class, kind)? },
        reclaim_policy: parse_reclaim_policy(class)?,
    })
}

/// Returns whether a claim asks for a block volume. Rejects one for an existing volume.
fn checked_mode(request: &PersistentVolumeClaimSpec) -> Result<bool, ClaimRejection> {
    let reject =
        |field, value: &str, hint| Err(ClaimRejection::Unsupported { field, value: value.to_owned(), hint });
    if request.selector.is_some() {
        return reject("spec.selector", "", ": selectors apply to pre-provisioned volumes only");
    }
    match request.volume_mode.as_deref() {
        None | Some("" | "Filesystem") => Ok(false),
        Some("Block") => Ok(true),
        Some(mode) => reject("spec.volumeMode", mode, ": use Filesystem or Block"),
    }
}

fn checked_access_modes(request: &PersistentVolumeClaimSpec) -> Result<Vec<String>, ClaimRejection> {
    let mut modes = request.access_modes.clone().unwrap_or_default();
    // The kubelet passes only the first mode to the CSI plugin; with ReadOnlyMany first, no pod could write.
    modes.sort_by_key(|mode| mode == "ReadOnlyMany");
    let rejected = match modes.iter().find(|mode| !ACCESS_MODES.contains(&mode.as_str())) {
        Some(mode) => Some(mode.clone()),
        None => modes.is_empty().then(String::new),
    };
    let Some(value) = rejected else { return Ok(modes) };
    let hint = ": use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany";
    Err(ClaimRejection::Unsupported { field: "spec.accessModes", value, hint })
}

/// The class's mount options for a volume of this kind. The kubelet would report one that is unknown or refused only
/// once a pod waits for its mount.
fn checked_mount_options(class: &StorageClass, kind: VolumeKind) -> Result<Vec<String>, ClaimRejection> {
    let options = class.mount_options.as_deref().unwrap_or_default();
    let reject = |value: &str, hint| {
        let field = "the class's mountOptions";
        Err(ClaimRejection::Unsupported { field, value: value.to_owned(), hint })
    };
    let mut has_devices = false;
    for flag in split_options(options) {
        match flag.parse() {
            // As for mount(8), the last of several options counts.
            Ok(MountOption::Dev(allowed)) => has_devices = allowed,
            Ok(_) => {}
            Err(UnknownMountOption) => return reject(flag, UnknownMountOption::HINT),
        }
    }
    if has_devices && kind != VolumeKind::Directory {
        reject("dev", " by strict volumes: remove it, or use a class without strict")
    } else {
        Ok(options.to_owned())
    }
}

fn parse_reclaim_policy(class: &StorageClass) -> Result<ReclaimPolicy, ClaimRejection> {
    match class.reclaim_policy.as_deref() {
        None | Some("" | "Delete") => Ok(ReclaimPolicy::Delete),
        Some("Retain") => Ok(ReclaimPolicy::Retain),
        Some(other) => Err(ClaimRejection::Unsupported {
            field: "the class's reclaimPolicy",
            value: other.to_owned(),
            hint: ": use Delete or Retain",
        }),
    }
}
