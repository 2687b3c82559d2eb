//! Capabilities of provisionerd, and of this cluster, that the suite may expect.

use serde_json::{Value, json};

use crate::deployment::DRIVER;

/// The class of the specs about modified volumes: one inode per 2 KiB of their claims is the default.
pub(super) const ATTRIBUTES_CLASS: &str = "
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: nodekeel-suite}
driverName: volumes.nodekeel
parameters: {inodes: '5000'}
";

/// Labels a snapshot content that refers to an existing snapshot with its node: with several nodes, an administrator
/// does. The suite creates such contents without it.
pub(super) const SNAPSHOT_LABEL: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: label-snapshots}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
      - apiGroups: [snapshot.storage.k8s.io]
        apiVersions: [v1]
        operations: [CREATE]
        resources: [volumesnapshotcontents]
  matchConditions:
    - name: refers-to-a-snapshot
      expression: has(object.spec.source.snapshotHandle) && !has(object.metadata.labels)
  mutations:
    - patchType: JSONPatch
      jsonPatch:
        expression: >-
          [JSONPatch{op: "add", path: "/metadata/labels",
          value: {"snapshot.storage.kubernetes.io/managed-by": "guest"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: label-snapshots}
spec: {policyName: label-snapshots}
"#;

/// Specs that need what this cluster does not have, by a part of their names.
const EXCLUSIONS: [(&str, &str); 2] = [
    ("any volume data source", "the images of its populator and its validator are on the network"),
    ("while kubelet is down", "it stops the kubelet by SSH; the tests of this package kill it in the guest"),
];

/// Why a spec is not run; `None` where it is.
pub(super) fn exclusion(spec: &str) -> Option<&'static str> {
    EXCLUSIONS.iter().find(|(part, _)| spec.contains(part)).map(|(_, reason)| *reason)
}

/// The driver as the suite wants it described. What is not named here is not supported, among it access from several
/// nodes, limits of volumes per node, ephemeral inline volumes, two PersistentVolumes of one directory, and a choice of
/// the file system without a class of strict volumes.
///
/// *Source:* Kubernetes 1.36, `test/e2e/storage/external/external.go` and `framework/testdriver.go`.
pub(super) fn driver_definition() -> Value {
    json!({
        "StorageClass": {"FromExistingClassName": "nodekeel"},
        "SnapshotClass": {"FromExistingClassName": "nodekeel"},
        "VolumeAttributesClass": {"FromExistingClassName": "nodekeel-suite"},
        "DriverInfo": {
            "Name": DRIVER,
            // Room for the largest file.
            "SupportedSizeRange": {"Min": "128Mi"},
            "MaxFileSize": 100 << 20,
            "SupportedFsType": {"": {}},
            "SupportedMountOption": {"nodev": {}, "nosuid": {}},
            "TopologyKeys": [format!("topology.{DRIVER}/node")],
            "Capabilities": {
                "persistence": true,
                "block": true,
                "exec": true,
                "fsGroup": true,
                "multipods": true,
                "singleNodeVolume": true,
                "capReadOnlyMany": true,
                "readWriteOncePod": true,
                "topology": true,
                "capacity": true,
                "controllerExpansion": true,
                "nodeExpansion": true,
                "onlineExpansion": true,
                "offlineExpansion": true,
                "snapshotDataSource": true,
                "pvcDataSource": true,
            },
            "StressTestOptions": {"NumPods": 3, "NumRestarts": 3},
            "VolumeSnapshotStressTestOptions": {"NumPods": 3, "NumSnapshots": 3},
            "VolumeModifyStressTestOptions": {"NumPods": 3},
        },
    })
}
