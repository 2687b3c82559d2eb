//! The objects of the snapshot API, with the fields that the provisioner reads.
//!
//! *Source:* kubernetes-csi/external-snapshotter, `client/apis/volumesnapshot/v1`.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};

use crate::identity::ProvisionerIdentity;

/// API group of snapshots.
pub const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";

/// Label of the node that must act on a content; the snapshot-controller sets it with
/// `--enable-distributed-snapshotting`.
pub const MANAGED_BY_LABEL: &str = "snapshot.storage.kubernetes.io/managed-by";

/// Annotation of a content whose VolumeSnapshot was deleted.
pub const BEING_DELETED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";

/// Finalizer that keeps a content until its snapshot is removed.
pub const CONTENT_FINALIZER: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";

/// A user's request for a snapshot of a claim's volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeSnapshot {
    /// Name, namespace and UID.
    pub metadata: ObjectMeta,
    /// Set by the snapshot-controller.
    #[serde(default)]
    pub status: Option<VolumeSnapshotStatus>,
}

/// The status of a [`VolumeSnapshot`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct VolumeSnapshotStatus {
    /// The name of its content.
    pub bound_volume_snapshot_content_name: Option<String>,
}

/// A snapshot, as the driver keeps it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeSnapshotContent {
    /// Name, UID, labels, annotations and finalizers.
    pub metadata: ObjectMeta,
    /// The volume to snapshot, or an existing snapshot.
    pub spec: VolumeSnapshotContentSpec,
    /// Set by the driver's node.
    #[serde(default)]
    pub status: Option<VolumeSnapshotContentStatus>,
}

/// The specification of a [`VolumeSnapshotContent`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct VolumeSnapshotContentSpec {
    /// The driver.
    pub driver: String,
    /// `Delete` or `Retain`: what happens to the snapshot when its VolumeSnapshot is deleted.
    pub deletion_policy: String,
    /// The volume, or an existing snapshot.
    pub source: SnapshotContentSource,
    /// The VolumeSnapshot.
    pub volume_snapshot_ref: ObjectReference,
    /// The volume's mode, if it is known.
    pub source_volume_mode: Option<String>,
}

/// The source of a [`VolumeSnapshotContent`]; exactly one of both is set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct SnapshotContentSource {
    /// The handle of the volume to take a snapshot of.
    pub volume_handle: Option<String>,
    /// The handle of an existing snapshot, for a content that an administrator has created.
    pub snapshot_handle: Option<String>,
}

/// The status of a [`VolumeSnapshotContent`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct VolumeSnapshotContentStatus {
    /// The handle of the snapshot.
    pub snapshot_handle: Option<String>,
    /// When it was created, in nanoseconds since 1970.
    pub creation_time: Option<i64>,
    /// The smallest volume that it can be restored to, in bytes.
    pub restore_size: Option<i64>,
    /// True if volumes can be created from it.
    pub ready_to_use: Option<bool>,
    /// The reason why it was not created.
    pub error: Option<SnapshotContentError>,
}

/// The reason why a snapshot was not created.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SnapshotContentError {
    /// The error.
    pub message: Option<String>,
}

impl VolumeSnapshotContent {
    /// Returns whether volumes can be created from it.
    pub fn is_ready(&self) -> bool {
        self.status.as_ref().and_then(|status| status.ready_to_use) == Some(true)
    }

    /// The node that must act on it.
    pub fn node(&self) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(MANAGED_BY_LABEL).map(String::as_str)
    }

    /// The handle of its snapshot, once it has one.
    pub fn snapshot_handle(&self) -> Option<&str> {
        self.status.as_ref()?.snapshot_handle.as_deref()
    }
}

/// Implements the description of a kind of the snapshot API, version 1.
macro_rules! impl_resource {
    ($kind:ident, $scope:ty, $plural:literal) => {
        impl kube::Resource for $kind {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                SNAPSHOT_GROUP.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

impl_resource!(VolumeSnapshot, NamespaceResourceScope, "volumesnapshots");
impl_resource!(VolumeSnapshotContent, ClusterResourceScope, "volumesnapshotcontents");

/// The annotation of a content with the name of the store of its snapshot; none without a name.
pub(crate) fn store_annotation(identity: &ProvisionerIdentity) -> String {
    format!("{}/store", identity.driver)
}

/// The store that has the snapshot of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentStore<'a> {
    /// The one of this name, unchecked.
    Named(&'a str),
    /// The one without a name.
    Unnamed,
    /// Not known: it was not reported yet, and may be in any store.
    Unknown,
}

/// The store that has the snapshot of a content. A named store is recorded before the snapshot is taken or reported there, so one
/// that was reported and names none is in the store without a name. Files of its name in another store are a copy.
pub(crate) fn content_store<'a>(
    identity: &ProvisionerIdentity,
    content: &'a VolumeSnapshotContent,
) -> ContentStore<'a> {
    match recorded_store(identity, content) {
        Some(name) => ContentStore::Named(name),
        None if content.snapshot_handle().is_some() => ContentStore::Unnamed,
        None => ContentStore::Unknown,
    }
}

/// The name of the store that the snapshot of a content was taken in, unchecked; `None` if it has no name, or is not known.
pub(crate) fn recorded_store<'a>(
    identity: &ProvisionerIdentity,
    content: &'a VolumeSnapshotContent,
) -> Option<&'a str> {
    content.metadata.annotations.as_ref()?.get(&store_annotation(identity)).map(String::as_str)
}
