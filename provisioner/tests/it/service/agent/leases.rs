//! Nodes whose provisioner no longer renews its Lease.

use std::time::Duration;

use http_body_util::BodyExt as _;
use nodekeel_provisioner::SELECTED_NODE;
use nodekeel_provisioner::testing::objects::DRIVER;
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::super::harness::{ApiFixture as _, advance_time, wait_for_event, wait_until};
use super::{TestAgent, cluster_api, select, selected_node};

/// Where the agent looks.
const NAMESPACE: &str = "nodekeel";

/// The capacity that the node has published.
const CAPACITY: &str = "csisc-of-node-a";

fn lease_name() -> String {
    format!("{DRIVER}-node-a")
}

/// Gives node-a its Lease, and its capacity.
fn publish_node(api: &FakeApi) {
    let lease = json!({
        "metadata": { "name": lease_name(), "namespace": NAMESPACE },
        "spec": { "holderIdentity": "node-a", "leaseDurationSeconds": 10, "renewTime": "2001-01-01T00:00:00.000000Z" },
    });
    api.create_object(ObjectKind::Lease, lease);
    publish_capacity(api, CAPACITY, "node-a");
    publish_capacity(api, "csisc-of-node-b", "node-b");
}

fn publish_capacity(api: &FakeApi, name: &str, node: &str) {
    let labels = json!({ "csi.storage.k8s.io/drivername": DRIVER, "csi.storage.k8s.io/managed-by": node });
    let capacity = json!({
        "metadata": { "name": name, "namespace": NAMESPACE, "labels": labels },
        "storageClassName": "sample", "capacity": "1Gi",
    });
    api.create_object(ObjectKind::StorageCapacity, capacity);
}

/// Renews the Lease for so long, by a clock that is a quarter of a century late.
async fn renew_for(api: &FakeApi, seconds: u64, minute: u32) {
    for second in (0..seconds).step_by(3) {
        let time = format!("2001-01-01T00:{minute:02}:{second:02}.000000Z");
        api.patch_object(ObjectKind::Lease, &lease_name(), json!({ "spec": { "renewTime": time } }));
        advance_time(3).await;
    }
}

fn has_capacity(api: &FakeApi) -> bool {
    api.get_object(ObjectKind::StorageCapacity, CAPACITY).is_some()
}

#[tokio::test(start_paused = true)]
async fn a_node_that_no_longer_renews_its_lease_loses_its_capacity_and_then_its_claims() {
    let api = cluster_api();
    publish_node(&api);
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    api.create_claim(1, json!({}));
    renew_for(&api, 48, 1).await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-a"), "it is renewed");
    assert!(has_capacity(&api));

    let stopped = Instant::now();
    wait_until(&api, |api| {
        let is_deselected = selected_node(api, "claim-1").is_none();
        assert!(!is_deselected || !has_capacity(api), "deselected before its capacity is gone");
        is_deselected
    })
    .await;
    assert!(stopped.elapsed() < Duration::from_secs(12), "{:?}", stopped.elapsed());
    assert!(api.get_object(ObjectKind::StorageCapacity, "csisc-of-node-b").is_some());
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("node-a no longer renews its Lease")), "{notes:?}");

    // Back again, it keeps the claims that select it.
    renew_for(&api, 3, 2).await;
    select(&api, "claim-1", "node-a");
    renew_for(&api, 48, 3).await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-a"));
    // Its Lease is deleted: as before it had one.
    api.delete_object(ObjectKind::Lease, &lease_name());
    advance_time(600).await;
    assert_eq!(selected_node(&api, "claim-1").as_deref(), Some("node-a"));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_daemon_crashes_again_and_again_holds_no_claim_between_its_starts() {
    let api = cluster_api();
    publish_node(&api);
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    // The pauses of the kubelet, after the first ones, which are shorter than the Lease.
    for (number, pause) in [(1, 20), (2, 40), (3, 80), (4, 160), (5, 300)] {
        // Each start renews the Lease and publishes the capacity, and the scheduler believes it.
        renew_for(&api, 3, number).await;
        if !has_capacity(&api) {
            publish_capacity(&api, CAPACITY, "node-a");
        }
        let claim = format!("claim-{number}");
        api.create_claim(number, json!({}));
        advance_time(15).await;
        assert_eq!(selected_node(&api, &claim), None, "pause {pause}");
        assert!(!has_capacity(&api), "pause {pause}");
        wait_for_event(&api, &claim, "ProvisioningFailed").await;
        advance_time(pause - 15).await;
    }
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_has_lost_the_driver_in_order_loses_its_capacity_with_its_first_claim() {
    let api = cluster_api();
    publish_node(&api);
    // As an ordered stop leaves it.
    api.delete_object(ObjectKind::Lease, &lease_name());
    api.patch_object(ObjectKind::CsiNode, "node-a", json!({ "spec": { "drivers": [] } }));
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    advance_time(60).await;
    assert!(has_capacity(&api), "no claim needs it");
    api.create_claim(1, json!({}));
    wait_until(&api, |api| {
        let is_deselected = selected_node(api, "claim-1").is_none();
        assert!(!is_deselected || !has_capacity(api), "deselected before its capacity is gone");
        is_deselected
    })
    .await;
    assert!(api.get_object(ObjectKind::StorageCapacity, "csisc-of-node-b").is_some());
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_time_in_which_the_server_takes_no_renewal_of_the_agents_own_is_no_expiry() {
    let api = cluster_api();
    publish_node(&api);
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    renew_for(&api, 9, 1).await;
    // Its own one fails for more than two seconds within the next nine.
    for _ in 0..4 {
        api.fail_next(RequestVerb::Patch, ObjectKind::Lease, RequestFault::Status(500));
    }
    advance_time(10).await;
    assert!(has_capacity(&api), "13 s after the last renewal");
    renew_for(&api, 48, 2).await;
    assert!(has_capacity(&api));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_late_is_no_expiry() {
    let api = cluster_api();
    publish_node(&api);
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    api.create_claim(1, json!({}));
    advance_time(1).await;
    api.pause_watches(ObjectKind::Lease);
    renew_for(&api, 57, 1).await;
    assert!(api.request_count(RequestVerb::Get, ObjectKind::Lease) > 0, "it was read");
    assert!(selected_node(&api, "claim-1").is_some() && has_capacity(&api));
    api.resume_watches(ObjectKind::Lease);
    timeout(Duration::from_secs(60), wait_until(&api, |api| selected_node(api, "claim-1").is_none()))
        .await
        .expect("expired by now");
    let claim = api.get_object(ObjectKind::Claim, "claim-1").expect("a claim");
    assert!(claim["metadata"]["annotations"][SELECTED_NODE].is_null());
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_always_slow_only_delays_an_expiry() {
    let api = cluster_api();
    publish_node(&api);
    let slow = api.clone();
    let answer = move |request: http::Request<kube::client::Body>| {
        let api = slow.clone();
        async move {
            let (parts, body) = request.into_parts();
            if parts.method == http::Method::PATCH && parts.uri.path().contains("/leases/") {
                tokio::time::sleep(Duration::from_millis(2500)).await;
            }
            let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
            api.answer_request(http::Request::from_parts(parts, body)).await
        }
    };
    let client = kube::Client::new(tower::service_fn(answer), "nodekeel");
    let mut agent = TestAgent::start_with(client, super::test_config("agent-1"), None);
    agent.wait_leading().await;
    api.create_claim(1, json!({}));
    advance_time(60).await;
    assert_eq!(selected_node(&api, "claim-1"), None);
    agent.stop().await;
}
