//! Parts that fail, can't be prepared, or outlive their node.

use std::time::Duration;

use nodekeel_node::node::{BuildError, ExtraRunnable, NodeHandle, StartError};
use nodekeel_node::v1::HealthRequest;
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Context, Failure, RestartLimit, RestartLimitAction,
};
use testbed::ScratchDir;
use tokio::time::timeout;

use super::{NTP, NtpPart, ntp_node};
use crate::harness::{NO_DAEMONS, TEST_TIMEOUT, TestNode, TestPart};

#[tokio::test(flavor = "multi_thread")]
async fn a_part_whose_child_exceeds_its_restart_limit_names_the_child() {
    let parent = ExtraRunnable::new("parent", |ctx: Context| async move {
        let mut policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        let (restarts, period, action) = (2, Duration::from_secs(60), RestartLimitAction::FailParent);
        policy.restart_limit = Some(RestartLimit { restarts, period, action });
        let fails = |_: Context| async { Err::<(), Failure>(Failure::new("no luck")) };
        ctx.run_child_with(ChildSpec::new("child", fails).policy(policy))?;
        ctx.until_canceled().await
    });
    let mut node = TestNode::start_with("", |builder| builder.with(parent)).await;
    let mut watch = node.client.watch_health(HealthRequest {}).await.unwrap().into_inner();
    let found = timeout(TEST_TIMEOUT, async {
        loop {
            let health = watch.message().await.unwrap().unwrap();
            let mut conditions = health.conditions.into_iter();
            if let Some(found) = conditions
                .find(|found| found.object == "root.parent" && found.problem.contains("crash-loops"))
            {
                return found;
            }
        }
    });
    let found = found.await.unwrap();
    let says = "the last one: child root.parent.child failed more than 2 times within 60s";
    assert!(found.problem.ends_with(says), "{found:?}");
    node.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_cannot_be_prepared_leaves_neither_socket_nor_lock() {
    let (scratch, builder) = ntp_node(NTP);
    let broken = TestPart::prepared("broken", |_| Err("the disk of broken is absent: insert it".into()));
    let error = builder.with(broken).start().unwrap_err();
    assert!(matches!(error, BuildError::Start(StartError::Part(_))), "{error:?}");
    assert_eq!(error.to_string(), "the disk of broken is absent: insert it");
    let data = scratch.path().join("data");
    assert!(data.join("esp").is_dir() && !data.join("run/control.sock").exists());
    let node = NodeHandle::builder("test.toml", format!("{NO_DAEMONS}{NTP}")).with(NtpPart).data(data);
    let node = node.start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.ntp")).await.unwrap();
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_node_holds_its_data_directory_until_it_has_stopped() {
    let scratch = ScratchDir::new().unwrap();
    let data = scratch.path().join("data");
    let node = move || NodeHandle::builder("test.toml", NO_DAEMONS).data(&data);
    let (release, released) = tokio::sync::watch::channel(false);
    let run = move |ctx: Context| {
        let mut released = released.clone();
        async move {
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            released.wait_for(|released| *released).await?;
            Err::<(), Failure>(canceled.into())
        }
    };
    let first = node().with(ExtraRunnable::new("slow", run)).start().unwrap();
    timeout(TEST_TIMEOUT, first.wait_ready("root.slow")).await.unwrap();
    drop(first);
    assert!(node().plan().unwrap_err().to_string().contains("is in use by"));
    release.send(true).unwrap();
    let is_free = move || node().plan().map(drop).map_err(anyhow::Error::from);
    tokio::task::spawn_blocking(move || {
        testbed::wait_until(TEST_TIMEOUT, "the data directory", is_free).unwrap()
    })
    .await
    .unwrap();
}
