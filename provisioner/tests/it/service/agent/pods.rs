//! Pods that can't start because of where their claims are.

use nodekeel_provisioner::testing::objects::{DRIVER, sample_volume};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{DriverName, SELECTED_NODE};
use serde_json::{Value, json};

use super::super::harness::{ApiFixture as _, advance_time, wait_bound, wait_for_event, wait_until};
use super::{TestAgent, cluster_api, selected_node};

fn create_pod(api: &FakeApi, name: &str, node: Option<&str>, claims: &[u32]) {
    let volume = |number: &u32| json!({ "name": "data", "persistentVolumeClaim": { "claimName": format!("claim-{number}") } });
    let volumes: Vec<Value> = claims.iter().map(volume).collect();
    let pod = json!({
        "metadata": { "namespace": "default", "name": name },
        "spec": { "nodeName": node, "containers": [], "volumes": volumes },
        "status": { "phase": "Pending" },
    });
    api.create_object(ObjectKind::Pod, pod);
}

/// Creates a claim that no node is selected for.
fn create_waiting_claim(api: &FakeApi, number: u32) {
    api.create_claim(number, json!({ "metadata": { "annotations": { SELECTED_NODE: null } } }));
}

/// Creates a claim whose volume is on node-a.
async fn create_bound_claim(api: &FakeApi, number: u32) {
    api.create_claim(number, json!({}));
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let label = json!({ "key": key, "operator": "In", "values": ["node-a"] });
    let affinity = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [label] }] } });
    let volume = json!({ "spec": { "nodeAffinity": affinity }, "status": { "phase": "Pending" } });
    api.create_object(ObjectKind::Volume, sample_volume(number, volume));
    wait_bound(api, &format!("claim-{number}")).await;
}

fn publish_capacity(api: &FakeApi, size: &str) {
    let labels =
        json!({ "csi.storage.k8s.io/drivername": DRIVER, "csi.storage.k8s.io/managed-by": "node-a" });
    let capacity = json!({
        "metadata": { "name": "csisc-of-node-a", "namespace": "nodekeel", "labels": labels },
        "storageClassName": "local", "capacity": size,
    });
    api.create_object(ObjectKind::StorageCapacity, capacity);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_told_once_that_its_claims_do_not_fit_on_one_node_and_nothing_is_deleted() {
    let api = cluster_api();
    publish_capacity(&api, "1Gi");
    create_bound_claim(&api, 1).await;
    create_waiting_claim(&api, 2);
    create_pod(&api, "web", None, &[1, 2]);
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    advance_time(600).await;
    assert_eq!(api.event_notes("web").len(), 0, "there is room: the scheduler says what is wrong");
    api.patch_object(ObjectKind::StorageCapacity, "csisc-of-node-a", json!({ "capacity": "1Mi" }));
    wait_for_event(&api, "web", "ProvisioningFailed").await;
    let notes = api.event_notes("web");
    assert!(
        notes[0].contains("claim claim-1 is on node node-a, which has no room for claim claim-2"),
        "{notes:?}"
    );
    advance_time(3600).await;
    assert_eq!(api.event_notes("web").len(), 1);
    assert_eq!(api.request_count(RequestVerb::Delete, ObjectKind::Claim), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn without_the_permission_to_watch_pods_the_agent_does_everything_else() {
    let api = cluster_api();
    for verb in [RequestVerb::List, RequestVerb::Watch].repeat(1000) {
        api.fail_next(verb, ObjectKind::Pod, RequestFault::Status(403));
    }
    create_waiting_claim(&api, 1);
    create_pod(&api, "web", Some("node-a"), &[1]);
    let gone = json!({ "metadata": { "annotations": { SELECTED_NODE: "gone" } } });
    api.create_claim(2, gone);
    let agent = TestAgent::start(&api, "agent-1");
    wait_until(&api, |api| selected_node(api, "claim-2").is_none()).await;
    advance_time(60).await;
    assert_eq!(api.event_notes("web").len(), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn requests_and_events_about_pods_do_not_grow_with_their_claims() {
    let api = cluster_api();
    publish_capacity(&api, "1Gi");
    create_bound_claim(&api, 1).await;
    (2..=31).for_each(|number| create_waiting_claim(&api, number));
    let claims: Vec<u32> = (1..=31).collect();
    (0..20).for_each(|pod| create_pod(&api, &format!("web-{pod}"), None, &claims));
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    advance_time(600).await;
    let lists = api.request_count(RequestVerb::List, ObjectKind::StorageCapacity);
    assert!((20..500).contains(&lists), "{lists}");
    api.patch_object(ObjectKind::StorageCapacity, "csisc-of-node-a", json!({ "capacity": "1Mi" }));
    advance_time(600).await;
    assert_eq!(api.request_count(RequestVerb::Create, ObjectKind::Event), 20);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn without_the_permission_for_capacities_a_claim_leaves_a_node_without_the_driver() {
    let api = cluster_api();
    for _ in 0..1000 {
        api.fail_next(RequestVerb::List, ObjectKind::StorageCapacity, RequestFault::Status(403));
    }
    api.create_object(ObjectKind::Node, json!({ "metadata": { "name": "node-q" } }));
    let selected = json!({ "metadata": { "annotations": { SELECTED_NODE: "node-q" } } });
    api.create_claim(2, selected);
    let agent = TestAgent::start(&api, "agent-1");
    wait_until(&api, |api| selected_node(api, "claim-2").is_none()).await;
    wait_for_event(&api, "claim-2", "ProvisioningFailed").await;
    agent.stop().await;
}
