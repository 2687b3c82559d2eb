//! Claims that no node looks after.

use std::time::Duration;

use nodekeel_fsquota::Bytes;
use nodekeel_provisioner::testing::objects::{DRIVER, sample_class, sample_identity, sample_volume};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{ImageFormat, ProvisionerConfig, RunError, SELECTED_NODE};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::harness::{
    ApiFixture as _, TestNode, advance_time, test_deps, wait_bound, wait_for_event, wait_until,
};
use super::{TestAgent, cluster_api, csi_node, select, selected_node};

#[tokio::test(start_paused = true)]
async fn a_claim_whose_selected_node_cannot_serve_it_is_served_by_another() {
    type Change = fn(&FakeApi);
    let problems: [(&str, Change); 4] = [
        ("does not exist", |api| {
            api.delete_object(ObjectKind::Node, "node-a");
        }),
        ("does not have the driver", |api| {
            api.patch_object(ObjectKind::CsiNode, "node-a", json!({ "spec": { "drivers": [] } }));
        }),
        ("is cordoned", |api| {
            api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "unschedulable": true } }));
        }),
        ("is not ready", |api| {
            let taint = json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule" });
            api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "taints": [taint] } }));
        }),
    ];
    for (why, change) in problems {
        let api = cluster_api();
        let node = TestNode::start(&api, "node-b").await;
        let agent = TestAgent::start(&api, "agent-1");
        api.create_claim(1, json!({}));
        change(&api);
        let started = Instant::now();
        wait_until(&api, |api| selected_node(api, "claim-1").is_none()).await;
        assert!(started.elapsed() < Duration::from_secs(10), "{why}: {:?}", started.elapsed());
        wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
        let notes = api.event_notes("claim-1");
        assert!(notes.iter().any(|note| note.contains("node-a") && note.contains(why)), "{notes:?}");
        // The scheduler.
        select(&api, "claim-1", "node-b");
        wait_bound(&api, "claim-1").await;
        agent.stop().await;
        node.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_node_can_serve_it_and_claims_of_others_are_left_alone() {
    let api = cluster_api();
    let agent = TestAgent::start(&api, "agent-1");
    api.create_claim(1, json!({}));
    let foreign = json!({
        "volume.kubernetes.io/storage-provisioner": "foreign.example", "volume.kubernetes.io/selected-node": "gone",
    });
    api.create_claim(2, json!({ "metadata": { "annotations": foreign } }));
    let reader = json!({ "metadata": { "annotations": { SELECTED_NODE: "node-c" } } });
    api.create_claim(3, reader);
    wait_until(&api, |api| selected_node(api, "claim-3").is_none()).await;
    advance_time(3600).await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-a"));
    assert_eq!(selected_node(&api, "claim-2").as_deref(), Some("gone"));
    assert_eq!(api.event_notes("claim-1").len() + api.event_notes("claim-2").len(), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_with_a_volume_keeps_its_node_though_the_watch_of_volumes_lags() {
    let api = cluster_api();
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    advance_time(1).await;
    api.pause_watches(ObjectKind::Volume);
    api.pause_watches(ObjectKind::Claim);
    api.create_claim(1, json!({}));
    api.resume_watches(ObjectKind::Claim);
    advance_time(1).await;
    api.pause_watches(ObjectKind::Claim);
    // Its node has created the volume; neither that nor the binding is seen yet.
    api.create_object(ObjectKind::Volume, sample_volume(1, json!({ "status": { "phase": "Pending" } })));
    api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "unschedulable": true } }));
    advance_time(60).await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-a"));
    assert_eq!(api.request_count(RequestVerb::Patch, ObjectKind::Claim), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_changed_meanwhile_is_not_patched() {
    let api = cluster_api();
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    let unknown = json!({ "metadata": { "annotations": { SELECTED_NODE: "gone" } } });
    api.create_claim(1, unknown);
    advance_time(1).await;
    api.pause_watches(ObjectKind::Claim);
    select(&api, "claim-1", "node-b");
    advance_time(60).await;
    assert!(api.request_count(RequestVerb::Patch, ObjectKind::Claim) > 0, "it was tried");
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-b"));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_provisions_while_it_is_deselected_makes_one_volume() {
    let api = cluster_api();
    let (a, b) = (TestNode::start(&api, "node-a").await, TestNode::start(&api, "node-b").await);
    let agent = TestAgent::start(&api, "agent-1");
    api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "unschedulable": true } }));
    // The answer to node-a's POST is lost, so that it still retries when it is deselected.
    api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::NoResponse);
    api.create_claim(1, json!({}));
    wait_until(&api, |api| selected_node(api, "claim-1").is_none()).await;
    select(&api, "claim-1", "node-b");
    wait_bound(&api, "claim-1").await;
    // Until node-a's call has timed out, and it has looked again.
    advance_time(600).await;
    let volumes = api.list_objects(ObjectKind::Volume);
    assert_eq!(volumes.len(), 1, "{volumes:?}");
    let affinity = volumes[0]["spec"]["nodeAffinity"].to_string();
    assert!(affinity.contains("node-b"), "{affinity}");
    agent.stop().await;
    let (a, b) = (a.stop().await, b.stop().await);
    assert!([a, b].iter().all(|ended| matches!(ended, RunError::Canceled)));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_no_node_can_serve_gets_one_event_for_each_reason() {
    let api = cluster_api();
    for node in ["node-a", "node-b"] {
        api.patch_object(ObjectKind::CsiNode, node, json!({ "spec": { "drivers": [] } }));
    }
    api.create_object(
        ObjectKind::Class,
        sample_class(json!({ "metadata": { "name": "now" }, "volumeBindingMode": "Immediate" })),
    );
    let agent = TestAgent::start(&api, "agent-1");
    let unselected = json!({
        "metadata": { "annotations": { SELECTED_NODE: null } }, "spec": { "storageClassName": "now" },
    });
    api.create_claim(1, unselected);
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    advance_time(3600).await;
    assert_eq!(api.event_notes("claim-1").len(), 1);
    assert!(api.event_notes("claim-1")[0].contains("no node has the driver"));
    // Another reason.
    api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "unschedulable": true } }));
    api.patch_object(ObjectKind::CsiNode, "node-a", csi_node("node-a", DRIVER));
    wait_until(&api, |api| api.event_notes("claim-1").len() == 2).await;
    assert!(api.event_notes("claim-1").iter().any(|note| note.contains("cordoned or tainted")));
    // The node can serve it: nothing more.
    api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": { "unschedulable": null } }));
    advance_time(3600).await;
    assert_eq!(api.event_notes("claim-1").len(), 2);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_with_immediate_binding_of_a_store_that_no_node_has_gets_an_event() {
    let api = cluster_api();
    let class = json!({
        "metadata": { "name": "now" }, "volumeBindingMode": "Immediate", "parameters": { "store": "fast" },
    });
    api.create_object(ObjectKind::Class, sample_class(class));
    let lease = |node: &str, labels: Value| {
        let mut lease = json!({
            "metadata": { "name": format!("{DRIVER}-{node}"), "namespace": "nodekeel", "labels": labels },
            "spec": { "holderIdentity": node, "leaseDurationSeconds": 31_536_000, "renewTime": "2001-01-01T00:00:00.000000Z" },
        });
        lease["metadata"]["labels"]["csi.storage.k8s.io/drivername"] = json!(DRIVER);
        lease
    };
    api.create_object(ObjectKind::Lease, lease("node-a", json!({ format!("stores.{DRIVER}/bulk"): "" })));
    let agent = TestAgent::start(&api, "agent-1");
    let create_claim = |number| {
        let annotations = json!({ SELECTED_NODE: null });
        let claim =
            json!({ "metadata": { "annotations": annotations }, "spec": { "storageClassName": "now" } });
        api.create_claim(number, claim);
    };
    create_claim(1);
    advance_time(3600).await;
    assert!(api.event_notes("claim-1").is_empty(), "node-b has no Lease, so its stores are not known");
    api.create_object(ObjectKind::Lease, lease("node-b", json!({})));
    create_claim(2);
    wait_for_event(&api, "claim-2", "ProvisioningFailed").await;
    let notes = api.event_notes("claim-2");
    assert!(notes.len() == 1 && notes[0].contains("no node has store fast"), "{notes:?}");
    let label = json!({ "metadata": { "labels": { format!("stores.{DRIVER}/fast"): "" } } });
    api.patch_object(ObjectKind::Lease, &format!("{DRIVER}-node-b"), label);
    advance_time(1).await;
    create_claim(3);
    advance_time(3600).await;
    assert!(api.event_notes("claim-3").is_empty(), "a node has it");
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_with_immediate_binding_that_no_node_has_room_for_gets_one_event_and_then_a_node() {
    let api = cluster_api();
    api.create_object(ObjectKind::CsiNode, csi_node("node-c", DRIVER));
    let class = json!({ "metadata": { "name": "now" }, "volumeBindingMode": "Immediate" });
    api.create_object(ObjectKind::Class, sample_class(class));
    let mut nodes = Vec::new();
    for name in ["node-a", "node-b", "node-c"] {
        let (store, config) =
            (MemStore::with_capacity(Bytes(60 << 20)), ProvisionerConfig::new(sample_identity(name)));
        nodes.push(TestNode::start_with(config, test_deps(&api, &store), Some(&store)).await);
    }
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    let create_claim = |number| {
        let annotations = json!({ SELECTED_NODE: null });
        let claim =
            json!({ "metadata": { "annotations": annotations }, "spec": { "storageClassName": "now" } });
        api.create_claim(number, claim);
    };
    let failures = |number: u32| -> Vec<String> {
        let notes = api.event_notes(&format!("claim-{number}")).into_iter();
        notes.filter(|note| !note.contains("Successfully")).collect()
    };
    // One of 50Mi for each node, though the first of some claims is full by then.
    for number in 1..=3 {
        create_claim(number);
        wait_bound(&api, &format!("claim-{number}")).await;
        assert_eq!(failures(number), [""; 0]);
    }
    create_claim(4);
    wait_for_event(&api, "claim-4", "ProvisioningFailed").await;
    advance_time(600).await;
    let notes = failures(4);
    assert_eq!(notes.len(), 1, "{notes:?}");
    for said in [
        "no node has room for the 50Mi",
        "storage class now",
        "node node-",
        "has the most, 10Mi",
        "Delete volumes",
    ] {
        assert!(notes[0].contains(said), "{notes:?}");
    }
    // Neither a figure that has changed nor another leader makes it another event.
    api.create_claim(5, json!({ "spec": { "resources": { "requests": { "storage": "5Mi" } } } }));
    wait_bound(&api, "claim-5").await;
    agent.crash().await;
    let mut agent = TestAgent::start(&api, "agent-2");
    agent.wait_leading().await;
    advance_time(600).await;
    assert_eq!(failures(4), notes);
    assert_eq!(selected_node(&api, "claim-4"), None);

    api.delete_claim(2);
    let freed = Instant::now();
    wait_bound(&api, "claim-4").await;
    assert!(freed.elapsed() < Duration::from_secs(15), "{:?}", freed.elapsed());
    assert_eq!(failures(4), notes);
    agent.stop().await;
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_file_system_no_node_can_make_gets_one_event_and_then_a_node() {
    let api = cluster_api();
    let class = |name: &str, mode: &str| {
        let parameters = json!({ "strict": "true" });
        let class =
            json!({ "metadata": { "name": name }, "volumeBindingMode": mode, "parameters": parameters });
        api.create_object(ObjectKind::Class, sample_class(class));
    };
    class("now", "Immediate");
    class("later", "WaitForFirstConsumer");
    let (mut nodes, stores) = (Vec::new(), [MemStore::default(), MemStore::default()]);
    for (name, store) in ["node-a", "node-b"].into_iter().zip(&stores) {
        store.set_missing_format(Some(ImageFormat::Ext4));
        let config = ProvisionerConfig::new(sample_identity(name));
        nodes.push(TestNode::start_with(config, test_deps(&api, store), Some(store)).await);
    }
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    for (number, class) in [(1, "now"), (2, "later")] {
        let annotations = json!({ SELECTED_NODE: null });
        let spec = json!({ "storageClassName": class, "resources": { "requests": { "storage": "64Mi" } } });
        api.create_claim(number, json!({ "metadata": { "annotations": annotations }, "spec": spec }));
    }
    let failures = |number: u32| -> Vec<String> {
        let notes = api.event_notes(&format!("claim-{number}")).into_iter();
        notes.filter(|note| !note.contains("Successfully")).collect()
    };
    for (number, class) in [(1, "now"), (2, "later")] {
        wait_for_event(&api, &format!("claim-{number}"), "ProvisioningFailed").await;
        let notes = failures(number);
        for said in ["no node can make", &format!("storage class {class}, ext4"), "mkfs.ext4"] {
            assert!(notes[0].contains(said), "{notes:?}");
        }
    }
    // Another leader does not repeat it.
    agent.crash().await;
    let mut agent = TestAgent::start(&api, "agent-2");
    agent.wait_leading().await;
    advance_time(600).await;
    assert_eq!([1, 2].map(|number| failures(number).len()), [1, 1]);
    assert_eq!(selected_node(&api, "claim-1"), None);

    // Once the program is installed on one node, that one takes the claim that no scheduler places.
    stores[1].set_missing_format(None);
    wait_bound(&api, "claim-1").await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-b"));
    advance_time(600).await;
    assert_eq!([1, 2].map(|number| failures(number).len()), [1, 1]);
    agent.stop().await;
    for node in nodes {
        node.stop().await;
    }
}
