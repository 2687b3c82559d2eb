//! Claims that ask for what there isn't: an event says so, and nothing is made.

use serde_json::{Value, json};

use super::harness::{phase, play};

fn storage(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

#[test]
#[ignore = "needs kube"]
fn what_is_not_an_empty_directory_of_one_node_is_refused_with_an_event() {
    play("refused", async |scene| {
        let node = scene.provisioner("a").await;
        scene.class("refused-odd", json!({ "parameters": { "inodes": "none" } })).await;
        scene.class("refused-unknown", json!({ "parameters": { "path": "../x" } })).await;
        let source = json!({ "kind": "PersistentVolumeClaim", "name": "other" });
        let of_class = |class: &str| json!({ "spec": { "storageClassName": class } });
        // The claim, and what its event says.
        let cases = [
            ("rwx", json!({ "spec": { "accessModes": ["ReadWriteMany"] } }), "use ReadWriteOnce"),
            ("block", json!({ "spec": { "volumeMode": "Block" } }), "use Filesystem"),
            ("source", json!({ "spec": { "dataSource": source } }), "volumes are made empty"),
            ("source-ref", json!({ "spec": { "dataSourceRef": source } }), "volumes are made empty"),
            ("selector", json!({ "spec": { "selector": { "matchLabels": { "a": "b" } } } }), "spec.selector"),
            ("odd", of_class("refused-odd"), r#"parameter "inodes""#),
            ("unknown", of_class("refused-unknown"), r#"parameter "path""#),
            ("most", storage("9223372036854775807"), "2^63 - 64Ki"),
            ("more", storage("9223372036854775808"), "2^63 - 64Ki"),
            ("exa", storage("8Ei"), "2^63 - 64Ki"),
            ("endless", storage("1e30"), "2^63 - 64Ki"),
        ];
        for (name, patch, _) in &cases {
            scene.claim(name, patch.clone()).await;
        }
        for (name, _, says) in &cases {
            let (kind, note) = scene.told(name, "ProvisioningFailed").await;
            assert_eq!(kind, "Warning", "{name}");
            assert!(note.contains(says), "{name}: {note}");
        }
        // It goes on, and has said each thing once.
        scene.claim("good", json!({})).await;
        scene.bound("good").await;
        for (name, ..) in &cases {
            assert_eq!(scene.events(name).await, ["ProvisioningFailed"], "{name}");
            assert_eq!(phase(&scene.claims().get(name).await.expect("a claim")), "Pending", "{name}");
        }
        assert_eq!((node.volumes().len(), scene.own_volumes().await.len()), (1, 1), "only the good one's");
        node.stop().await;
    });
}
