//! Beginning, end, and what is between two runs.

use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, Limits, Usage};
use nodekeel_provisioner::testing::objects::{NODE, claim, identity};
use nodekeel_provisioner::testing::{Fault, Kind, MemStore, Verb};
use nodekeel_provisioner::{Config, Provisioner, RunError, VolumeStore as _};
use nodekeel_supervisor::{Child, Context, Failure, Supervisor};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::harness::{Node, api, bound, deps, id, pass, until};

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

#[tokio::test(start_paused = true)]
async fn it_ends_as_cancelled() {
    let node = Node::start(&api(), NODE).await;
    assert!(matches!(node.stop().await, Some(RunError::Cancelled)));
}

#[tokio::test(start_paused = true)]
async fn it_ends_as_cancelled_also_while_a_list_cannot_be_had() {
    let api = api();
    for _ in 0..1000 {
        api.fail_next(Verb::List, Kind::Volume, Fault::Status(403));
    }
    api.create(Kind::Claim, claim(1, json!({})));
    let provisioner = Provisioner::new(Config::new(identity(NODE)), deps(&api, &MemStore::default()));
    let token = CancellationToken::new();
    let run = tokio::spawn({
        let token = token.clone();
        async move { provisioner.run_until(token, || panic!("it isn't ready")).await }
    });
    pass(60).await;
    token.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(1), run).await.expect("it ends at once");
    assert!(matches!(ended.expect("no panic"), Err(RunError::Cancelled)));
}

#[tokio::test]
async fn it_is_a_runnable_that_gets_ready_and_stops() {
    let provisioner = Provisioner::new(Config::new(identity(NODE)), deps(&api(), &MemStore::default()));
    let (is_ready, mut ready) = watch::channel(false);
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let (provisioner, is_ready) = (provisioner.clone(), is_ready.clone());
        async move {
            ctx.run_group([Child::new("provisioner", provisioner)])?;
            ctx.wait_ready("root.provisioner").await?;
            ctx.ready()?;
            is_ready.send_replace(true);
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    });
    ready.wait_for(|&ready| ready).await.expect("ready");
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn it_is_ready_only_when_lists_are_complete_and_the_kubelet_knows_the_driver() {
    let api = api();
    api.fail_next(Verb::List, Kind::Volume, Fault::Unreachable);
    let (register, registered) = watch::channel(false);
    let mut deps = deps(&api, &MemStore::default());
    deps.registered = Some(registered);
    let starting = Node::with(Config::new(identity(NODE)), deps, None);
    tokio::pin!(starting);
    assert!(tokio::time::timeout(Duration::from_secs(60), &mut starting).await.is_err());
    register.send_replace(true);
    let node = starting.await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_api_server_is_found_again() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    api.create(Kind::Claim, claim(1, json!({})));
    bound(&api, "claim-1").await;
    for verb in [Verb::Watch, Verb::List] {
        for kind in [Kind::Claim, Kind::Volume, Kind::Class] {
            api.fail_next(verb, kind, Fault::Unreachable);
        }
    }
    api.restart();
    api.create(Kind::Claim, claim(2, json!({})));
    api.delete(Kind::Claim, "claim-1");
    bound(&api, "claim-2").await;
    until(&api, |api| api.list(Kind::Volume).len() == 1).await;
    assert_eq!((node.store.births(&id(2)), node.store.deaths(&id(1))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn what_a_crash_left_without_a_claim_is_swept_and_data_are_not() {
    let (api, store) = (api(), MemStore::default());
    for number in [1, 2, 3] {
        store.create(&id(number), LIMITS).await.expect("create");
    }
    store.fill(&id(2), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    api.create(Kind::Claim, claim(3, json!({})));
    let _node = Node::over(&api, &store).await;
    bound(&api, "claim-3").await;
    pass(60).await;
    assert_eq!(store.list().await.expect("list"), [id(2), id(3)]);
    assert_eq!((store.deaths(&id(1)), store.births(&id(3))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_goes_before_its_volume_is_posted_leaves_nothing() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    for _ in 0..4 {
        api.fail_next(Verb::Create, Kind::Volume, Fault::Unreachable);
    }
    api.create(Kind::Claim, claim(1, json!({})));
    until(&api, |api| api.requests(Verb::Create, Kind::Volume) == 1).await;
    assert_eq!(node.store.births(&id(1)), 1);
    api.delete(Kind::Claim, "claim-1");
    pass(60).await;
    assert_eq!(node.store.deaths(&id(1)), 1);
    assert_eq!(api.list(Kind::Volume).len(), 0);
}
