//! Unsupported claims: each gets an event, and nothing is created.

use serde_json::{Value, json};

use super::harness::{phase, run_scenario};

fn storage_request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

#[test]
#[ignore = "needs kube"]
fn unsupported_claims_are_rejected_with_an_event() {
    run_scenario("refused", async |scene| {
        let node = scene.start_provisioner("a").await;
        scene.create_class("refused-odd", json!({ "parameters": { "inodes": "none" } })).await;
        scene.create_class("refused-unknown", json!({ "parameters": { "path": "../x" } })).await;
        let source = json!({ "kind": "PersistentVolumeClaim", "name": "other" });
        let of_class = |class: &str| json!({ "spec": { "storageClassName": class } });
        // The claim, and a part of its event's note.
        let cases = [
            ("rwx", json!({ "spec": { "accessModes": ["ReadWriteMany"] } }), "use ReadWriteOnce"),
            ("block", json!({ "spec": { "volumeMode": "Block" } }), "use Filesystem"),
            ("source", json!({ "spec": { "dataSource": source } }), "volumes start empty"),
            ("source-ref", json!({ "spec": { "dataSourceRef": source } }), "volumes start empty"),
            ("selector", json!({ "spec": { "selector": { "matchLabels": { "a": "b" } } } }), "spec.selector"),
            ("odd", of_class("refused-odd"), r#"parameter "inodes""#),
            ("unknown", of_class("refused-unknown"), r#"parameter "path""#),
            ("most", storage_request("9223372036854775807"), "2^63 - 64Ki"),
            ("more", storage_request("9223372036854775808"), "2^63 - 64Ki"),
            ("exa", storage_request("8Ei"), "2^63 - 64Ki"),
            ("endless", storage_request("1e30"), "2^63 - 64Ki"),
        ];
        for (name, patch, _) in &cases {
            scene.create_claim(name, patch.clone()).await;
        }
        for (name, _, says) in &cases {
            let (kind, note) = scene.wait_for_event(name, "ProvisioningFailed").await;
            assert_eq!(kind, "Warning", "{name}");
            assert!(note.contains(says), "{name}: {note}");
        }
        // It continues, and has emitted each event once.
        scene.create_claim("good", json!({})).await;
        scene.wait_bound("good").await;
        for (name, ..) in &cases {
            assert_eq!(scene.event_reasons(name).await, ["ProvisioningFailed"], "{name}");
            assert_eq!(phase(&scene.claims().get(name).await.expect("a claim")), "Pending", "{name}");
        }
        assert_eq!(
            (node.volumes().len(), scene.driver_volumes().await.len()),
            (1, 1),
            "only the valid claim has a volume"
        );
        node.stop().await;
    });
}
