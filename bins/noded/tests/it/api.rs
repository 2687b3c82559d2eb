//! The tree, its events, and what an operator does to it, through the control socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_logtree::LogStore;
use nodekeel_node::config::NodedConfig;
use nodekeel_node::node::{Deps, ExtraRunnable, NodeHandle, StartError};
use nodekeel_node::plan::NodePlan;
use nodekeel_node::search_path::SearchPath;
use nodekeel_node::v1::{
    EventsRequest, RestartRequest, StartRequest, State, StatusRequest, StopRequest, TreeRequest,
    VersionRequest,
};
use nodekeel_supervisor::Context;
use testbed::ScratchDir;
use tokio::time::timeout;
use tonic::Code;

use crate::harness::{LocalNode, NO_DAEMONS, TEST_TIMEOUT};

/// An additional runnable that fails while the flag is set.
fn flaky(fails: Arc<AtomicBool>) -> ExtraRunnable {
    ExtraRunnable::new("flaky", move |ctx: Context| {
        let fails = Arc::clone(&fails);
        async move {
            if fails.load(Ordering::Relaxed) {
                return Err(nodekeel_supervisor::Failure::new("failed by the test"));
            }
            ctx.signal_ready()?;
            Err(ctx.canceled().await.into())
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tree_contains_built_in_and_extra_runnables() {
    let fails = Arc::new(AtomicBool::new(false));
    let mut node = LocalNode::start_with(NO_DAEMONS, |deps| deps.runnables.push(flaky(fails))).await;
    node.node.wait_ready("root.flaky").await;
    node.node.wait_ready("root.storage").await;
    let tree = node.client.tree(TreeRequest {}).await.unwrap().into_inner();
    let names: Vec<_> = tree.nodes.iter().map(|node| (node.dn.as_str(), node.state())).collect();
    assert_eq!(names, ["root", "root.control", "root.flaky", "root.storage"].map(|dn| (dn, State::Ready)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extra_runnable_cannot_take_a_reserved_name() {
    for names in [&["etcd"][..], &["service"], &["a", "a"], &["A.b"]] {
        let scratch = ScratchDir::new().unwrap();
        let mut config = NodedConfig::parse_toml("test.toml".as_ref(), NO_DAEMONS).unwrap();
        config.node.data = scratch.path().join("data");
        let plan =
            NodePlan::from_config(config, SearchPath::with_default_directories(None, None), false).unwrap();
        let mut deps = Deps::new(LogStore::default());
        deps.runnables.extend(names.iter().map(|name| {
            ExtraRunnable::new(*name, |ctx: Context| async move { Err::<(), _>(ctx.canceled().await) })
        }));
        let error = NodeHandle::start(plan, deps).unwrap_err();
        assert!(
            matches!(&error, StartError::RunnableName { name } if name == names[names.len() - 1]),
            "{error}"
        );
        assert!(!scratch.path().join("data").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_socket_bound_meanwhile_keeps_the_node_from_starting() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.path().join("s");
    let started = Arc::new(AtomicBool::new(false));
    let mut config = NodedConfig::parse_toml("test.toml".as_ref(), NO_DAEMONS).unwrap();
    config.node.data = scratch.path().join("data");
    config.control.socket = Some(socket.clone());
    let plan =
        NodePlan::from_config(config, SearchPath::with_default_directories(None, None), false).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut deps = Deps::new(LogStore::default());
    let noted = Arc::clone(&started);
    deps.runnables.push(ExtraRunnable::new("noted", move |ctx: Context| {
        noted.store(true, Ordering::Relaxed);
        async move { Err::<(), _>(ctx.canceled().await) }
    }));
    let error = NodeHandle::start(plan, deps).unwrap_err();
    assert!(matches!(&error, StartError::Control(_)), "{error}");
    assert!(error.to_string().contains("is in use by another program: set control.socket"), "{error}");
    assert!(!started.load(Ordering::Relaxed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_tree_shows_a_stop_and_a_start() {
    let mut node = LocalNode::start_with(NO_DAEMONS, |deps| deps.runnables.push(flaky(Arc::default()))).await;
    let mut trees = node.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
    let mut until = async |wanted: State| loop {
        let tree = timeout(TEST_TIMEOUT, trees.message()).await.expect("it changes").unwrap().unwrap();
        if tree.nodes.iter().any(|node| node.dn == "root.flaky" && node.state() == wanted) {
            return;
        }
    };
    until(State::Ready).await;
    let dn = || "root.flaky".to_owned();
    node.client.stop(StopRequest { dn: dn() }).await.unwrap();
    until(State::Stopped).await;
    node.client.start(StartRequest { dn: dn() }).await.unwrap();
    until(State::Ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_a_failing_runnable_says_why_it_is_not_ready() {
    let fails = Arc::new(AtomicBool::new(true));
    let mut node =
        LocalNode::start_with(NO_DAEMONS, |deps| deps.runnables.push(flaky(Arc::clone(&fails)))).await;
    let mut trees = node.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
    // It fails repeatedly, so a snapshot may show any state.
    let status = loop {
        let tree = timeout(TEST_TIMEOUT, trees.message()).await.expect("it changes").unwrap().unwrap();
        let flaky = tree.nodes.into_iter().find(|node| node.dn == "root.flaky").unwrap();
        if flaky.state() == State::Waiting {
            break flaky;
        }
    };
    assert!(status.failures >= 1 && status.waiting_for.contains("backoff"), "{status:?}");
    let request = StatusRequest { dn: "root.flaky".into(), log_entries: 5 };
    let status = node.client.status(request).await.unwrap().into_inner().node.unwrap();
    assert_eq!(
        (status.exits[0].reason.as_str(), status.exits[0].state()),
        ("failed by the test", State::Dead)
    );
    fails.store(false, Ordering::Relaxed);
    node.client.restart(RestartRequest { dn: "root.flaky".into() }).await.unwrap();
    timeout(TEST_TIMEOUT, node.node.wait_ready("root.flaky"))
        .await
        .expect("an operator's restart does not wait");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_dn_is_answered_with_similar_names() {
    let mut node = LocalNode::start(NO_DAEMONS).await;
    for status in [
        node.client.status(StatusRequest { dn: "root.contrl".into(), log_entries: 0 }).await.map(drop),
        node.client.restart(RestartRequest { dn: "contrl".into() }).await.map(drop),
        node.client
            .logs(nodekeel_node::v1::LogsRequest { dn: "root.contrl".into(), ..Default::default() })
            .await
            .map(drop),
    ] {
        let status = status.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("did you mean root.control?"), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_api_can_be_restarted_through_itself_and_not_stopped() {
    let mut node = LocalNode::start(NO_DAEMONS).await;
    let dn = || "root.control".to_owned();
    let status = node.client.stop(StopRequest { dn: dn() }).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    // The restarting control API may or may not answer.
    let _ = node.client.restart(RestartRequest { dn: dn() }).await;
    let mut changes = node.client.clone();
    let again = async {
        while node.node.snapshot().iter().any(|status| *status.dn == *"root.control" && status.generation < 2)
        {
            tokio::task::yield_now().await;
        }
        node.node.wait_ready("root.control").await;
    };
    timeout(TEST_TIMEOUT, again).await.expect("the control API restarts");
    let version = changes.version(VersionRequest {}).await.expect("the client reconnects").into_inner();
    assert_eq!(version.pid, std::process::id());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_delivered_from_the_first_without_a_gap() {
    let mut node = LocalNode::start_with(NO_DAEMONS, |deps| deps.runnables.push(flaky(Arc::default()))).await;
    let mut events =
        node.client.events(EventsRequest { backlog: None, follow: true }).await.unwrap().into_inner();
    node.client.restart(RestartRequest { dn: "root.flaky".into() }).await.unwrap();
    let mut seqs = Vec::new();
    let mut restarted = false;
    while !restarted {
        let chunk = timeout(TEST_TIMEOUT, events.message()).await.expect("an event").unwrap().unwrap();
        for event in chunk.events {
            restarted |= event.dn == "root.flaky" && event.generation == 2 && event.change == "ready";
            seqs.push(event.seq);
        }
    }
    let expected: Vec<_> = (1..=seqs.len() as u64).collect();
    assert_eq!(seqs, expected);
    let newest = EventsRequest { backlog: Some(2), follow: false };
    let mut chunks = node.client.events(newest).await.unwrap().into_inner();
    assert_eq!(chunks.message().await.unwrap().unwrap().events.len(), 2);
    assert!(chunks.message().await.unwrap().is_none(), "the stream ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_of_events_sees_the_gap() {
    let config = format!("{NO_DAEMONS}events.keep = 5\n");
    let mut node = LocalNode::start_with(&config, |deps| deps.runnables.push(flaky(Arc::default()))).await;
    node.node.wait_ready("root.storage").await;
    let mut trees = node.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
    for generation in 2..6 {
        node.client.restart(RestartRequest { dn: "root.flaky".into() }).await.unwrap();
        loop {
            let tree = timeout(TEST_TIMEOUT, trees.message()).await.expect("it changes").unwrap().unwrap();
            let flaky = tree.nodes.into_iter().find(|node| node.dn == "root.flaky").unwrap();
            if flaky.generation == generation && flaky.state() == State::Ready {
                break;
            }
        }
    }
    let all = EventsRequest { backlog: None, follow: true };
    let first = node.client.events(all).await.unwrap().into_inner().message().await.unwrap().unwrap().events;
    assert_eq!(first.len(), 5, "all kept events");
    let is_gap = |pair: &[nodekeel_node::v1::Event]| pair[1].seq > pair[0].seq + 1;
    assert!(first.windows(2).any(is_gap), "the sequence numbers show the dropped events: {first:?}");
    assert!(first[4].seq > 10 && first[4].dn == "root.flaky", "the newest is kept: {first:?}");
}
