//! Volumes of deleted nodes, failures and crashes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_provisioner::testing::objects::{DRIVER, sample_node};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{SELECTED_NODE, StepMoment, VolumeStep};
use serde_json::json;

use super::super::harness::{ApiFixture as _, advance_time, phase, wait_bound, wait_for_event, wait_until};
use super::{TestAgent, cluster_api, csi_node, selected_node, test_config, volume_name, volume_of_gone_node};

#[tokio::test(start_paused = true)]
async fn volumes_of_a_deleted_node_are_reported_after_the_delay_and_stay() {
    let api = cluster_api();
    api.create_object(ObjectKind::Node, sample_node("node-z", json!({})));
    api.create_claim(1, json!({}));
    api.create_object(ObjectKind::Volume, volume_of_gone_node(1, "Pending", "Delete"));
    api.create_object(ObjectKind::Volume, volume_of_gone_node(2, "Released", "Delete"));
    wait_bound(&api, "claim-1").await;
    let agent = TestAgent::start(&api, "agent-1");
    advance_time(3600).await;
    assert_eq!(api.list_objects(ObjectKind::Event).len(), 0, "its node exists");
    api.delete_object(ObjectKind::Node, "node-z");
    advance_time(299).await;
    assert_eq!(api.list_objects(ObjectKind::Event).len(), 0);
    let reported = |api: &FakeApi, name: &str| {
        api.event_counts(name).iter().filter(|(reason, _)| reason == "ReferencedNodeDeleted").count()
    };
    wait_until(&api, |api| reported(api, "claim-1") == 1).await;
    advance_time(2 * 3600).await;
    let counts = [volume_name(1), volume_name(2), "claim-1".to_owned()].map(|name| reported(&api, &name));
    assert_eq!(counts, [1, 1, 1]);
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 2, "nothing is removed unless asked for");
    assert_eq!(api.request_count(RequestVerb::Delete, ObjectKind::Volume), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn only_released_volumes_that_are_to_be_deleted_are_removed_and_only_once_the_node_is_gone() {
    let api = cluster_api();
    for (number, policy) in [(1, "Delete"), (2, "Delete"), (3, "Retain")] {
        if number == 1 {
            api.create_claim(1, json!({}));
        }
        api.create_object(ObjectKind::Volume, volume_of_gone_node(number, "Released", policy));
    }
    api.create_object(
        ObjectKind::Lease,
        json!({ "metadata": { "namespace": "kube-node-lease", "name": "node-z" } }),
    );
    let mut config = test_config("agent-1");
    config.remove_after = Some(Duration::from_secs(600));
    let mut agent = TestAgent::start_with(api.client(), config, None);
    agent.wait_leading().await;
    advance_time(3600).await;
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 3, "the kubelet's Lease exists");
    api.delete_object(ObjectKind::Lease, "node-z");
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, &volume_name(2)).is_none()).await;
    advance_time(3600).await;
    assert_eq!(phase(&api, ObjectKind::Volume, &volume_name(1)), "Bound");
    assert_eq!(phase(&api, ObjectKind::Volume, &volume_name(3)), "Released");
    // Only after its claim is deleted, and the delay.
    api.delete_claim(1);
    advance_time(599).await;
    assert!(api.get_object(ObjectKind::Volume, &volume_name(1)).is_some());
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, &volume_name(1)).is_none()).await;
    advance_time(3600).await;
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 1);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_keeps_its_volumes() {
    let api = cluster_api();
    api.create_object(ObjectKind::Volume, volume_of_gone_node(1, "Released", "Delete"));
    let mut config = test_config("agent-1");
    config.remove_after = Some(Duration::from_secs(600));
    let mut agent = TestAgent::start_with(api.client(), config, None);
    agent.wait_leading().await;
    advance_time(590).await;
    // The watch of nodes lags, and the node is back.
    api.pause_watches(ObjectKind::Node);
    api.create_object(ObjectKind::Node, sample_node("node-z", json!({})));
    advance_time(3600).await;
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 1);
    assert_eq!(api.request_count(RequestVerb::Delete, ObjectKind::Volume), 0);
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn while_a_watch_fails_a_new_node_is_not_taken_for_a_deleted_one() {
    let api = cluster_api();
    let mut config = test_config("agent-1");
    config.remove_after = Some(Duration::from_secs(600));
    let mut agent = TestAgent::start_with(api.client(), config, None);
    agent.wait_leading().await;
    advance_time(60).await;
    for kind in [ObjectKind::Node, ObjectKind::CsiNode] {
        // More than the tries of an hour.
        for verb in [RequestVerb::List, RequestVerb::Watch].repeat(1000) {
            api.fail_next(verb, kind, RequestFault::Status(403));
        }
    }
    api.reset_watches();
    advance_time(10).await;
    api.create_object(ObjectKind::Node, sample_node("node-z", json!({})));
    api.create_object(ObjectKind::CsiNode, csi_node("node-z", DRIVER));
    api.create_object(ObjectKind::Volume, volume_of_gone_node(1, "Released", "Delete"));
    let selected = json!({ "metadata": { "annotations": { SELECTED_NODE: "node-z" } } });
    api.create_claim(2, selected);
    advance_time(3600).await;
    assert_eq!(api.list_objects(ObjectKind::Event).len(), 0, "{:?}", api.list_objects(ObjectKind::Event));
    assert_eq!(api.request_count(RequestVerb::Patch, ObjectKind::Claim), 0);
    assert_eq!(selected_node(&api, "claim-2").as_deref(), Some("node-z"));
    assert!(api.get_object(ObjectKind::Volume, &volume_name(1)).is_some());
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn failed_calls_are_retried_until_the_server_accepts_them() {
    let api = cluster_api();
    for kind in [ObjectKind::Lease, ObjectKind::Event] {
        api.fail_next(RequestVerb::Create, kind, RequestFault::Status(500));
    }
    api.fail_next(RequestVerb::Create, ObjectKind::Event, RequestFault::ResponseLost);
    api.fail_next(RequestVerb::Get, ObjectKind::Volume, RequestFault::Unreachable);
    api.fail_next(RequestVerb::Patch, ObjectKind::Claim, RequestFault::Status(403));
    api.create_object(ObjectKind::Volume, volume_of_gone_node(2, "Released", "Delete"));
    let unknown = json!({ "metadata": { "annotations": { SELECTED_NODE: "gone" } } });
    api.create_claim(1, unknown);
    let agent = TestAgent::start(&api, "agent-1");
    wait_until(&api, |api| selected_node(api, "claim-1").is_none()).await;
    wait_for_event(&api, &volume_name(2), "ReferencedNodeDeleted").await;
    advance_time(3600).await;
    assert_eq!(api.event_counts(&volume_name(2)).len(), 1);
    agent.stop().await;
}

/// The agent's steps.
const STEPS: [VolumeStep; 4] = [
    VolumeStep::DeselectNode,
    VolumeStep::CreateEvent,
    VolumeStep::DeletePersistentVolume,
    VolumeStep::RemoveFinalizer,
];

#[tokio::test(start_paused = true)]
async fn an_agent_killed_at_any_step_is_completed_by_the_next_one() {
    for step in STEPS {
        for moment in [StepMoment::Before, StepMoment::After] {
            let api = cluster_api();
            api.create_object(ObjectKind::Volume, volume_of_gone_node(2, "Released", "Delete"));
            api.create_object(ObjectKind::Volume, volume_of_gone_node(3, "Released", "Retain"));
            let unknown = json!({ "metadata": { "annotations": { SELECTED_NODE: "gone" } } });
            api.create_claim(1, unknown);
            let point = format!("{moment:?} {step:?}");
            let killed = Arc::new(Mutex::new(None));
            let hook = {
                let (killed, point) = (Arc::clone(&killed), point.clone());
                move |at: VolumeStep, when: StepMoment| {
                    let is_here = format!("{when:?} {at:?}") == point;
                    let first = is_here && killed.lock().expect("not poisoned").replace(()).is_none();
                    // A panic ends the run where it is, as SIGKILL does.
                    assert!(!first, "killed {point}");
                }
            };
            let mut config = test_config("agent-1");
            config.remove_after = Some(Duration::from_secs(600));
            let first = TestAgent::start_with(api.client(), config.clone(), Some(Arc::new(hook)));
            assert!(first.run.await.is_err(), "{point}: the step happens");
            config.identity = "agent-2".to_owned();
            let second = TestAgent::start_with(api.client(), config, None);
            advance_time(3600).await;
            assert_eq!(selected_node(&api, "claim-1"), None, "{point}");
            assert!(api.get_object(ObjectKind::Volume, &volume_name(2)).is_none(), "{point}");
            assert!(api.get_object(ObjectKind::Volume, &volume_name(3)).is_some(), "{point}");
            let reports = api.event_counts(&volume_name(3));
            assert_eq!(reports.len(), 1, "{point}: {reports:?}");
            second.stop().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn released_volumes_of_a_named_store_of_a_deleted_node_are_removed_too() {
    let api = cluster_api();
    let mut named = serde_json::to_value(volume_of_gone_node(1, "Released", "Delete")).expect("JSON");
    named["spec"]["csi"]["volumeAttributes"] = json!({ "storeName": "fast" });
    api.create_object(ObjectKind::Volume, named);
    api.create_object(ObjectKind::Volume, volume_of_gone_node(2, "Released", "Delete"));
    let mut config = test_config("agent-1");
    config.remove_after = Some(Duration::from_secs(600));
    let mut agent = TestAgent::start_with(api.client(), config, None);
    agent.wait_leading().await;
    advance_time(7200).await;
    assert!(api.get_object(ObjectKind::Volume, &volume_name(2)).is_none());
    assert!(api.get_object(ObjectKind::Volume, &volume_name(1)).is_none(), "its node is gone, too");
    agent.stop().await;
}
