//! Unsupported claims: each gets an event, and nothing is created.

use serde_json::json;

use super::harness::{TestCluster, phase, run_test, shared_control_plane, test_runtime, user_client};

/// The permissions of deploy/rbac.yaml without changes of claims and volumes.
const READER: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules:
- {apiGroups: [""], resources: [persistentvolumes, persistentvolumeclaims, nodes], verbs: [get, list, watch]}
- {apiGroups: [storage.k8s.io], resources: [storageclasses], verbs: [list, watch]}
- {apiGroups: [events.k8s.io], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]
"#;

#[test]
#[ignore = "needs kube"]
fn a_forbidden_request_is_one_sentence_in_the_event_and_counted() {
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    kube.apply_manifests(READER).expect("the permissions");
    runtime.block_on(async {
        let reader = user_client(&kube, "reader").await;
        let cluster = TestCluster::new(&kube, "reader").await.with_account(reader);
        let node = cluster.start_provisioner("a").await;
        cluster.create_claim("data", json!({})).await;
        let (_, note) = cluster.wait_for_event("data", "ProvisioningFailed").await;
        let start = "can't create the PersistentVolume (forbidden: grant this service account the rules of deploy/rbac.yaml): \
                     persistentvolumes is forbidden: User \"reader\" cannot create resource";
        assert!(note.starts_with(start) && note.matches("is forbidden").count() == 1, "{note}");
        assert!(note.len() < 300 && !note.contains("Status {"), "{note}");
        assert!(node.counts.get()[1] > 0, "the failure is counted");
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn unsupported_claims_are_rejected_with_an_event() {
    run_test("rejected", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_class("rejected-unknown", json!({ "parameters": { "path": "../x" } })).await;
        let of_class = json!({ "spec": { "storageClassName": "rejected-unknown" } });
        let size = json!({ "spec": { "resources": { "requests": { "storage": "1e30" } } } });
        // The claim, and a part of its event's note.
        let cases = [
            ("rwx", json!({ "spec": { "accessModes": ["ReadWriteMany"] } }), "use ReadWriteOnce"),
            ("unknown", of_class, r#"parameter "path""#),
            ("endless", size, "2^63 - 64Ki"),
        ];
        for (name, patch, _) in &cases {
            cluster.create_claim(name, patch.clone()).await;
        }
        for (name, _, says) in &cases {
            let (kind, note) = cluster.wait_for_event(name, "ProvisioningFailed").await;
            assert_eq!(kind, "Warning", "{name}");
            assert!(note.contains(says), "{name}: {note}");
        }
        // It continues, and has emitted each event once.
        cluster.create_claim("good", json!({})).await;
        cluster.wait_bound("good").await;
        for (name, ..) in &cases {
            assert_eq!(cluster.event_reasons(name).await, ["ProvisioningFailed"], "{name}");
            assert_eq!(phase(&cluster.claims().get(name).await.expect("a claim")), "Pending", "{name}");
        }
        assert_eq!(
            (node.volumes().len(), cluster.driver_volumes().await.len()),
            (1, 1),
            "only the valid claim has a volume"
        );
        node.stop().await;
    });
}
