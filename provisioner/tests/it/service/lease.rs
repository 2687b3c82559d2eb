//! The Lease by which a node shows that its provisioner runs.

use std::time::Duration;

use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_identity, sample_node};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{Provisioner, ProvisionerConfig, RunError};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::harness::{RunningProvisioner, advance_time, test_api, test_deps, wait_until};

fn lease(api: &FakeApi) -> Option<Value> {
    api.get_object(ObjectKind::Lease, &format!("{DRIVER}-{NODE}"))
}

fn renew_time(api: &FakeApi) -> Option<String> {
    Some(lease(api)?["spec"]["renewTime"].as_str()?.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_node_renews_its_lease_while_its_provisioner_runs_and_no_longer() {
    let (api, store) = (test_api(), MemStore::default());
    api.delete_object(ObjectKind::Node, NODE);
    let provisioner =
        Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), test_deps(&api, &store));
    let running = RunningProvisioner::spawn(provisioner.clone(), || {});
    advance_time(60).await;
    assert_eq!(lease(&api), None, "the Lease of no Node would stay for ever");
    api.create_object(ObjectKind::Node, sample_node(NODE, json!({ "metadata": { "uid": "uid-1" } })));
    wait_until(&api, |api| lease(api).is_some()).await;
    let found = lease(&api).expect("a Lease");
    assert_eq!(
        (&found["spec"]["holderIdentity"], &found["spec"]["leaseDurationSeconds"]),
        (&json!(NODE), &json!(10))
    );
    let owner = &found["metadata"]["ownerReferences"][0];
    assert_eq!(
        [&owner["kind"], &owner["name"], &owner["uid"]],
        ["Node", NODE, "uid-1"].map(|it| json!(it)).each_ref()
    );
    for _ in 0..5 {
        let last = renew_time(&api);
        advance_time(4).await;
        assert_ne!(renew_time(&api), last);
    }
    // Deleted or changed by others, it is there again; a failed renewal is repeated before it expires.
    api.delete_object(ObjectKind::Lease, &format!("{DRIVER}-{NODE}"));
    advance_time(4).await;
    assert!(lease(&api).is_some());
    api.patch_object(
        ObjectKind::Lease,
        &format!("{DRIVER}-{NODE}"),
        json!({ "spec": { "holderIdentity": "x" } }),
    );
    advance_time(4).await;
    assert_eq!(lease(&api).expect("a Lease")["spec"]["holderIdentity"], NODE);
    api.fail_next(RequestVerb::Patch, ObjectKind::Lease, RequestFault::NoResponse);
    advance_time(9).await;
    assert_eq!(provisioner.check_lease(), None);

    // For a long time, it is known here, too.
    for _ in 0..8 {
        api.fail_next(RequestVerb::Patch, ObjectKind::Lease, RequestFault::Status(403));
    }
    advance_time(15).await;
    assert!(provisioner.check_lease().is_some_and(|why| why.contains("renew the Lease")));
    advance_time(Duration::from_secs(30).as_secs()).await;
    assert_eq!(provisioner.check_lease(), None);

    running.crash().await;
    let last = renew_time(&api);
    advance_time(60).await;
    assert_eq!(renew_time(&api), last);
}

#[tokio::test(start_paused = true)]
async fn an_ordered_stop_deletes_the_lease_once_the_kubelet_has_lost_the_driver() {
    let (api, store) = (test_api(), MemStore::default());
    let set_drivers = |drivers: Value| {
        api.delete_object(ObjectKind::CsiNode, NODE);
        api.create_object(
            ObjectKind::CsiNode,
            json!({ "metadata": { "name": NODE }, "spec": { "drivers": drivers } }),
        );
    };
    let registered = json!([{ "name": DRIVER, "nodeID": NODE }]);
    set_drivers(registered.clone());
    let running = RunningProvisioner::start(test_deps(&api, &store));
    wait_until(&api, |api| lease(api).is_some()).await;
    let stopped = tokio::spawn(running.stop());
    advance_time(1).await;
    assert!(lease(&api).is_some(), "the kubelet still has the driver");
    set_drivers(json!([]));
    assert!(matches!(stopped.await.expect("no panic"), RunError::Canceled));
    assert_eq!(lease(&api), None);

    // Without a permission, or if the kubelet keeps the driver since it has stopped, too, it stops all the same.
    let node = ObjectKind::CsiNode;
    for (drivers, verb, kind, code) in [
        (json!([]), RequestVerb::Delete, ObjectKind::Lease, 403),
        (json!([]), RequestVerb::List, node, 403),
        (registered, RequestVerb::Delete, ObjectKind::Lease, 500),
    ] {
        set_drivers(drivers);
        api.delete_object(ObjectKind::Lease, &format!("{DRIVER}-{NODE}"));
        let running = RunningProvisioner::start(test_deps(&api, &store));
        wait_until(&api, |api| lease(api).is_some()).await;
        api.fail_next(verb, kind, RequestFault::Status(code));
        let stopped = timeout(Duration::from_secs(5), running.stop()).await.expect("in time");
        assert!(matches!(stopped, RunError::Canceled) && lease(&api).is_some());
    }
}
