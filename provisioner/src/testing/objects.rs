//! Sample objects, as the API server returns them.

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};

use crate::identity::{FINALIZER, ProvisionerIdentity};
use crate::snapshot::{CONTENT_FINALIZER, MANAGED_BY_LABEL, VolumeSnapshotContent};
use crate::{DriverName, NodeName};

/// The driver of the sample objects.
pub const DRIVER: &str = "volumes.nodekeel.example";

/// The node of the sample objects.
pub const NODE: &str = "node-a";

/// The class of the sample claims.
pub const CLASS: &str = "local";

/// The UID of the claim with this number.
pub fn sample_uid(number: u32) -> String {
    format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012x}")
}

/// The driver [`DRIVER`] on a node, with the usual finalizer.
pub fn sample_identity(node: &str) -> ProvisionerIdentity {
    ProvisionerIdentity {
        driver: DriverName::try_new(DRIVER).expect("a driver name"),
        node: NodeName::try_new(node).expect("a node name"),
        finalizer: Some(FINALIZER.to_owned()),
        store: None,
    }
}

/// A class of [`DRIVER`] with `WaitForFirstConsumer`, changed by a JSON merge patch.
pub fn sample_class(patch: Value) -> StorageClass {
    let plain = json!({
        "metadata": { "name": CLASS },
        "provisioner": DRIVER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    });
    patched_object(plain, patch)
}

/// A pending claim of 50 MiB for [`NODE`], with [`sample_uid`]`(number)` and named `claim-<number>`, changed
/// by a JSON merge patch.
pub fn sample_claim(number: u32, patch: Value) -> PersistentVolumeClaim {
    let plain = json!({
        "metadata": {
            "namespace": "default",
            "name": format!("claim-{number}"),
            "uid": sample_uid(number),
            "resourceVersion": "7",
            "annotations": {
                "volume.kubernetes.io/storage-provisioner": DRIVER,
                "volume.kubernetes.io/selected-node": NODE,
            },
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "50Mi" } },
            "storageClassName": CLASS,
            "volumeMode": "Filesystem",
        },
        "status": { "phase": "Pending" },
    });
    patched_object(plain, patch)
}

/// The released volume of [`sample_claim`]`(number)`, as this driver creates it, changed by a JSON merge
/// patch.
pub fn sample_volume(number: u32, patch: Value) -> PersistentVolume {
    let id = format!("pvc-{}", sample_uid(number));
    let hostname = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": [NODE] });
    let plain = json!({
        "metadata": {
            "name": id,
            "uid": format!("00000000-0000-4000-8000-{number:012x}"),
            "resourceVersion": "8",
            "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER },
            "finalizers": [FINALIZER, "kubernetes.io/pv-protection"],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "50Mi" },
            "claimRef": { "namespace": "default", "name": format!("claim-{number}"), "uid": sample_uid(number) },
            "csi": { "driver": DRIVER, "volumeHandle": id },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [hostname] }] } },
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
            "volumeMode": "Filesystem",
        },
        "status": { "phase": "Released" },
    });
    patched_object(plain, patch)
}

/// The content of a VolumeSnapshot with [`sample_uid`]`(number)` of the volume of [`sample_claim`]`(number)` on
/// [`NODE`], before its snapshot is taken, changed by a JSON merge patch.
pub fn sample_snapshot_content(number: u32, patch: Value) -> VolumeSnapshotContent {
    let plain = json!({
        "metadata": {
            "name": format!("snapcontent-{}", sample_uid(number)),
            "uid": format!("11111111-0000-4000-8000-{number:012x}"),
            "resourceVersion": "9",
            "labels": { MANAGED_BY_LABEL: NODE },
            "finalizers": [CONTENT_FINALIZER],
        },
        "spec": {
            "deletionPolicy": "Delete",
            "driver": DRIVER,
            "source": { "volumeHandle": format!("pvc-{}", sample_uid(number)) },
            "sourceVolumeMode": "Filesystem",
            "volumeSnapshotRef": {
                "namespace": "default",
                "name": format!("snapshot-{number}"),
                "uid": sample_uid(number),
            },
        },
    });
    patched_object(plain, patch)
}

/// A node without taints, changed by a JSON merge patch.
pub fn sample_node(name: &str, patch: Value) -> Node {
    patched_object(json!({ "metadata": { "name": name } }), patch)
}

/// Merges a patch into an object.
#[cfg(test)]
pub(crate) fn patched<T: serde::Serialize + serde::de::DeserializeOwned>(object: &T, patch: Value) -> T {
    patched_object(serde_json::to_value(object).expect("an object is JSON"), patch)
}

fn patched_object<T: serde::de::DeserializeOwned>(mut plain: Value, patch: Value) -> T {
    merge_patch(&mut plain, patch);
    serde_json::from_value(plain).expect("a valid object")
}

/// Merges a patch into a value. *Source:* RFC 7386.
pub(crate) fn merge_patch(value: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *value = patch;
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let Some(map) = value.as_object_mut() else { return };
    for (key, patch) in patch {
        match patch {
            Value::Null => drop(map.remove(&key)),
            patch => merge_patch(map.entry(key).or_insert(Value::Null), patch),
        }
    }
}
