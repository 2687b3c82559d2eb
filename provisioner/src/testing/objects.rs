//! Objects as the API server hands them out.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};

use crate::plan::{FINALIZER, Identity};
use crate::{DriverName, NodeName};

/// The driver of the objects here.
pub const DRIVER: &str = "volumes.nodekeel.example";

/// The node of the objects here.
pub const NODE: &str = "node-a";

/// The class of the claims here.
pub const CLASS: &str = "local";

/// The UID of the claim with this number.
pub fn uid(number: u32) -> String {
    format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012x}")
}

/// The driver [`DRIVER`] on a node, with the usual finalizer.
pub fn identity(node: &str) -> Identity {
    Identity {
        driver: DriverName::try_new(DRIVER).expect("a driver's name"),
        node: NodeName::try_new(node).expect("a node's name"),
        finalizer: Some(FINALIZER.to_owned()),
    }
}

/// A class of [`DRIVER`] that waits for the first consumer, changed by a JSON merge patch.
pub fn class(patch: Value) -> StorageClass {
    let plain = json!({
        "metadata": { "name": CLASS },
        "provisioner": DRIVER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    });
    object(plain, patch)
}

/// A pending claim of 50 MiB for [`NODE`], with [`uid`]`(number)` and named `claim-<number>`, changed by a JSON merge patch.
pub fn claim(number: u32, patch: Value) -> PersistentVolumeClaim {
    let plain = json!({
        "metadata": {
            "namespace": "default",
            "name": format!("claim-{number}"),
            "uid": uid(number),
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
    object(plain, patch)
}

/// The volume of [`claim`]`(number)` as this driver makes it, released, changed by a JSON merge patch.
pub fn volume(number: u32, patch: Value) -> PersistentVolume {
    let id = format!("pvc-{}", uid(number));
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
            "claimRef": { "namespace": "default", "name": format!("claim-{number}"), "uid": uid(number) },
            "csi": { "driver": DRIVER, "volumeHandle": id },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [hostname] }] } },
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
            "volumeMode": "Filesystem",
        },
        "status": { "phase": "Released" },
    });
    object(plain, patch)
}

fn object<T: serde::de::DeserializeOwned>(mut plain: Value, patch: Value) -> T {
    merge(&mut plain, patch);
    serde_json::from_value(plain).expect("an object of its kind")
}

/// Merges a patch into a value. *Source:* RFC 7386.
pub(crate) fn merge(value: &mut Value, patch: Value) {
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
            patch => merge(map.entry(key).or_insert(Value::Null), patch),
        }
    }
}
