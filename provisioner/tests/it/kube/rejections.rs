//! Unsupported claims: each gets an event, and nothing is created.

use serde_json::{Value, json};

use super::harness::{phase, run_test};

fn storage_request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

#[test]
#[ignore = "needs kube"]
fn unsupported_claims_are_rejected_with_an_event() {
    run_test("rejected", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_class("rejected-odd", json!({ "parameters": { "inodes": "none" } })).await;
        cluster.create_class("rejected-unknown", json!({ "parameters": { "path": "../x" } })).await;
        let source = json!({ "kind": "PersistentVolumeClaim", "name": "other" });
        let of_class = |class: &str| json!({ "spec": { "storageClassName": class } });
        // The claim, and a part of its event's note.
        let cases = [
            ("rwx", json!({ "spec": { "accessModes": ["ReadWriteMany"] } }), "use ReadWriteOnce"),
            ("block", json!({ "spec": { "volumeMode": "Block" } }), "use Filesystem"),
            ("source", json!({ "spec": { "dataSource": source } }), "volumes start empty"),
            ("source-ref", json!({ "spec": { "dataSourceRef": source } }), "volumes start empty"),
            ("selector", json!({ "spec": { "selector": { "matchLabels": { "a": "b" } } } }), "spec.selector"),
            ("odd", of_class("rejected-odd"), r#"parameter "inodes""#),
            ("unknown", of_class("rejected-unknown"), r#"parameter "path""#),
            ("most", storage_request("9223372036854775807"), "2^63 - 64Ki"),
            ("more", storage_request("9223372036854775808"), "2^63 - 64Ki"),
            ("exa", storage_request("8Ei"), "2^63 - 64Ki"),
            ("endless", storage_request("1e30"), "2^63 - 64Ki"),
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
