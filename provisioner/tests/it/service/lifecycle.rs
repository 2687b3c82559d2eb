//! Start, stop, and recovery between two runs.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_provisioner::testing::objects::{NODE, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{Provisioner, ProvisionerConfig, RunError, VolumeStore as _};
use nodekeel_supervisor::{ChildSpec, Context, Failure, Supervisor};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::harness::{
    ApiFixture as _, RunningProvisioner, TestNode, advance_time, id, test_api, test_deps, wait_bound,
    wait_until,
};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

fn provisioner(api: &FakeApi) -> Provisioner {
    Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), test_deps(api, &MemStore::default()))
}

#[tokio::test(start_paused = true)]
async fn a_stopped_provisioner_ends_as_canceled() {
    let node = TestNode::start(&test_api(), NODE).await;
    assert!(matches!(node.stop().await, RunError::Canceled));
}

#[tokio::test(start_paused = true)]
async fn a_provisioner_that_cannot_list_ends_as_canceled() {
    let api = test_api();
    for _ in 0..1000 {
        api.fail_next(RequestVerb::List, ObjectKind::Volume, RequestFault::Status(403));
    }
    api.create_claim(1, json!({}));
    let running = RunningProvisioner::spawn(provisioner(&api), || panic!("ready without a complete list"));
    advance_time(60).await;
    let ended = tokio::time::timeout(Duration::from_secs(1), running.stop()).await;
    assert!(matches!(ended.expect("ends within a second"), RunError::Canceled));
}

#[tokio::test]
async fn a_provisioner_is_a_runnable_that_becomes_ready_and_stops() {
    let provisioner = provisioner(&test_api());
    let (is_ready, mut ready) = watch::channel(false);
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let (provisioner, is_ready) = (provisioner.clone(), is_ready.clone());
        async move {
            ctx.run_child_with(ChildSpec::new("provisioner", provisioner))?;
            ctx.wait_ready("root.provisioner").await?;
            ctx.signal_ready()?;
            is_ready.send_replace(true);
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    });
    ready.wait_for(|&ready| ready).await.expect("ready");
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_provisioner_is_ready_once_its_lists_are_complete_and_the_driver_is_registered() {
    let api = test_api();
    api.fail_next(RequestVerb::List, ObjectKind::Volume, RequestFault::Unreachable);
    let (register, registered) = watch::channel(false);
    let mut deps = test_deps(&api, &MemStore::default());
    deps.registered = Some(registered);
    let starting = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, None);
    tokio::pin!(starting);
    assert!(tokio::time::timeout(Duration::from_secs(60), &mut starting).await.is_err());
    register.send_replace(true);
    let node = starting.await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_question_to_the_api_server_does_not_keep_the_store() {
    let api = test_api();
    let mut deps = test_deps(&api, &MemStore::default());
    let store = Arc::clone(&deps.store);
    let kept = Arc::downgrade(&store);
    deps.store = store;
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps);
    let asked = provisioner.check_api();
    drop(provisioner);
    assert!(kept.upgrade().is_none(), "the next provisioner can't open it");
    assert_eq!(asked.await, None);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_unreachable_or_rejects_a_watch_is_reported_until_it_serves() {
    let api = test_api();
    let provisioner = provisioner(&api);
    let running = RunningProvisioner::spawn(provisioner.clone(), || {});
    advance_time(60).await;
    assert_eq!(provisioner.check_api().await, None);
    api.set_reachable(false);
    advance_time(1).await;
    assert!(provisioner.check_api().await.is_some());
    advance_time(60).await;
    api.set_reachable(true);
    advance_time(1).await;
    assert_eq!(provisioner.check_api().await, None, "at once, and not when the watches try again");

    advance_time(60).await;
    for _ in 0..6 {
        api.fail_next(RequestVerb::Watch, ObjectKind::Volume, RequestFault::Status(403));
    }
    api.reset_watches();
    advance_time(2).await;
    let error = provisioner.check_api().await.expect("the watch of volumes is forbidden");
    assert!(error.contains("forbidden"), "{error}");
    advance_time(180).await;
    assert_eq!(provisioner.check_api().await, None);
    assert!(matches!(running.stop().await, RunError::Canceled));
}

#[tokio::test(start_paused = true)]
async fn claims_made_while_the_api_server_is_unreachable_are_bound_three_seconds_after_it_answers() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.set_reachable(false);
    api.create_claim(1, json!({}));
    advance_time(150).await;
    api.set_reachable(true);
    let answers = Instant::now();
    wait_bound(&api, "claim-1").await;
    assert!(answers.elapsed() < Duration::from_secs(3), "{:?}", answers.elapsed());
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_provisioner_does_not_ask_whether_the_api_server_answers() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    advance_time(60).await;
    let before = api.version_request_count();
    advance_time(3600).await;
    assert_eq!(api.version_request_count(), before);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn watches_resume_after_an_api_server_restart() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    for verb in [RequestVerb::Watch, RequestVerb::List] {
        for kind in [ObjectKind::Claim, ObjectKind::Volume, ObjectKind::Class] {
            api.fail_next(verb, kind, RequestFault::Unreachable);
        }
    }
    api.reset_watches();
    api.create_claim(2, json!({}));
    api.delete_claim(1);
    wait_bound(&api, "claim-2").await;
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).len() == 1).await;
    assert_eq!((node.store.create_count(&id(2)), node.store.remove_count(&id(1))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn volumes_left_by_a_crash_without_a_claim_are_swept_unless_they_hold_data() {
    let (api, store) = (test_api(), MemStore::default());
    for number in [1, 2, 3] {
        store.create(&id(number), LIMITS).await.expect("create");
    }
    store.set_usage(&id(2), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    api.create_claim(3, json!({}));
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_bound(&api, "claim-3").await;
    advance_time(60).await;
    assert_eq!(store.list().await.expect("list"), [id(2), id(3)]);
    assert_eq!((store.remove_count(&id(1)), store.create_count(&id(3))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_claim_deleted_before_its_volume_is_created_leaves_nothing() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    for _ in 0..4 {
        api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::Unreachable);
    }
    api.create_claim(1, json!({}));
    wait_until(&api, |api| api.request_count(RequestVerb::Create, ObjectKind::Volume) == 1).await;
    assert_eq!(node.store.create_count(&id(1)), 1);
    api.delete_claim(1);
    advance_time(60).await;
    assert_eq!(node.store.remove_count(&id(1)), 1);
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 0);
}
