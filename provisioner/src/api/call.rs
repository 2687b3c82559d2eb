//! Calls of the API server, their errors, and the advice for these.

use std::fmt;

/// A call of the API server failed, or was rejected.
#[derive(Debug, thiserror::Error)]
#[error("can't {call}{}", error_hint(source))]
pub(crate) struct ApiError {
    pub(crate) call: ApiCall,
    #[source]
    pub(crate) source: kube::Error,
}

/// A call of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiCall {
    ReadClaim,
    ListClaims,
    ListVolumes,
    ReadVolume,
    CreateVolume,
    DeleteVolume,
    PatchVolume,
    PatchClaim,
    PatchClaimStatus,
    ReadAttributesClass,
    ReadNode,
    ReadCapacity,
    CreateCapacity,
    PatchCapacity,
    DeleteCapacity,
    ReadSnapshot,
    ReadSnapshotContent,
    ListSnapshotContents,
    PatchSnapshotContent,
    ReadLease,
    CreateLease,
    PatchLease,
    DeleteLease,
}

impl ApiCall {
    /// The act, as in "can't ...", and the name in metrics.
    fn texts(self) -> (&'static str, &'static str) {
        match self {
            Self::ReadSnapshot => ("read the VolumeSnapshot", "get_volumesnapshot"),
            Self::ReadSnapshotContent => ("read the VolumeSnapshotContent", "get_volumesnapshotcontent"),
            Self::ListSnapshotContents => {
                ("list the VolumeSnapshotContents of this node", "list_volumesnapshotcontents")
            }
            Self::PatchSnapshotContent => ("patch the VolumeSnapshotContent", "patch_volumesnapshotcontent"),
            Self::ReadClaim => ("read the claim", "get_persistentvolumeclaim"),
            Self::ListClaims => ("list the claims", "list_persistentvolumeclaims"),
            Self::ListVolumes => ("list the PersistentVolumes", "list_persistentvolumes"),
            Self::ReadVolume => ("read the PersistentVolume", "get_persistentvolume"),
            Self::CreateVolume => ("create the PersistentVolume", "create_persistentvolume"),
            Self::DeleteVolume => ("delete the PersistentVolume", "delete_persistentvolume"),
            Self::PatchVolume => ("patch the PersistentVolume", "patch_persistentvolume"),
            Self::PatchClaim => ("patch the claim's selected node", "patch_persistentvolumeclaim"),
            Self::PatchClaimStatus => ("patch the claim's status", "patch_persistentvolumeclaim_status"),
            Self::ReadAttributesClass => ("read the VolumeAttributesClass", "get_volumeattributesclass"),
            Self::ReadNode => ("read this node", "get_node"),
            Self::ReadCapacity => ("read a CSIStorageCapacity of this node", "get_csistoragecapacity"),
            Self::CreateCapacity => ("create a CSIStorageCapacity of this node", "create_csistoragecapacity"),
            Self::PatchCapacity => ("patch a CSIStorageCapacity of this node", "patch_csistoragecapacity"),
            Self::ReadLease => ("read the Lease of this node", "get_lease"),
            Self::CreateLease => ("create the Lease of this node", "create_lease"),
            Self::PatchLease => ("renew the Lease of this node", "patch_lease"),
            Self::DeleteLease => ("delete the Lease of this node", "delete_lease"),
            Self::DeleteCapacity => ("delete a CSIStorageCapacity of this node", "delete_csistoragecapacity"),
        }
    }

    /// The act, as in "can't ...".
    pub(crate) fn text(self) -> &'static str {
        self.texts().0
    }

    pub(crate) fn metric_label(self) -> &'static str {
        self.texts().1
    }

    /// Turns a client's error into that of this call.
    pub(crate) fn wrap_error(self, source: kube::Error) -> ApiError {
        ApiError { call: self, source }
    }
}

impl fmt::Display for ApiCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The advice for an error of the API server, if its cause is clear.
pub(crate) fn error_hint(error: &kube::Error) -> &'static str {
    match status_code(error) {
        Some(401) => " (not authenticated: check the credentials)",
        Some(403) => " (forbidden: grant this service account the rules of deploy/rbac.yaml)",
        None => " (is the API server reachable?)",
        Some(_) => "",
    }
}

/// The HTTP status, if the API server answered.
pub(crate) fn status_code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

pub(crate) fn none_if_not_found<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if status_code(&error) == Some(404) => Ok(None),
        Err(error) => Err(error),
    }
}
