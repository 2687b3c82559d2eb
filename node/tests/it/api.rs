//! The tree, its events, and what an operator does to it, through the control socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_logtree::LogStore;
use nodekeel_node::node::{Deps, ExtraRunnable, NodeHandle, StartError};
use nodekeel_node::v1::{
    EventsRequest, LogsRequest, RestartRequest, StartRequest, State, StatusRequest, StopRequest, TreeRequest,
    VersionRequest,
};
use nodekeel_supervisor::{Context, Failure};
use testbed::ScratchDir;
use tokio::time::timeout;
use tonic::Code;

use crate::harness::{TEST_TIMEOUT, TestNode, node_builder, run_ready};

const FLAKY: &str = "root.flaky";

/// An additional runnable that fails while the flag is set.
fn flaky(fails: Arc<AtomicBool>) -> ExtraRunnable {
    ExtraRunnable::new("flaky", move |ctx: Context| {
        let fails = Arc::clone(&fails);
        async move {
            if fails.load(Ordering::Relaxed) {
                return Err(Failure::new("failed by the test"));
            }
            run_ready(ctx).await
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tree_contains_built_in_and_extra_runnables() {
    let fails = Arc::new(AtomicBool::new(false));
    let mut node = TestNode::start_with("", |node| node.with(flaky(fails))).await;
    for dn in ["root.flaky", "root.storage"] {
        node.wait_ready(dn).await;
    }
    let tree = node.client.tree(TreeRequest {}).await.unwrap().into_inner();
    let names: Vec<_> = tree.nodes.iter().map(|node| (node.dn.as_str(), node.state())).collect();
    assert_eq!(names, ["root", "root.control", "root.storage", FLAKY].map(|dn| (dn, State::Ready)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extra_runnable_cannot_take_a_reserved_name() {
    for names in [&["etcd"][..], &["service"], &["a", "a"], &["A.b"]] {
        let (scratch, builder) = node_builder("");
        let mut deps = Deps::new(LogStore::default());
        deps.runnables.extend(names.iter().map(|name| ExtraRunnable::new(*name, run_ready)));
        let error = NodeHandle::start(builder.plan().unwrap(), deps).unwrap_err();
        let StartError::RunnableName { name } = &error else { panic!("{error}") };
        assert_eq!(name, names[names.len() - 1]);
        assert!(!scratch.path().join("data").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_socket_bound_after_the_plan_keeps_the_node_from_starting() {
    let directory = ScratchDir::new().unwrap();
    let socket = directory.path().join("s");
    let (_scratch, builder) = node_builder(&format!("control.socket = {socket:?}\n"));
    let plan = builder.plan().unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let started = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&started);
    let mut deps = Deps::new(LogStore::default());
    deps.runnables.push(ExtraRunnable::new("noted", move |ctx: Context| {
        noted.store(true, Ordering::Relaxed);
        run_ready(ctx)
    }));
    let error = NodeHandle::start(plan, deps).unwrap_err();
    assert!(matches!(&error, StartError::Control(_)), "{error}");
    assert!(error.to_string().contains("is in use by another program: set control.socket"), "{error}");
    assert!(!started.load(Ordering::Relaxed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_tree_shows_a_stop_and_a_start() {
    let mut node = TestNode::start_with("", |node| node.with(flaky(Arc::default()))).await;
    node.wait_for(FLAKY, |node| node.state() == State::Ready).await;
    node.client.stop(StopRequest { dn: FLAKY.into() }).await.unwrap();
    node.wait_for(FLAKY, |node| node.state() == State::Stopped).await;
    node.client.start(StartRequest { dn: FLAKY.into() }).await.unwrap();
    node.wait_for(FLAKY, |node| node.state() == State::Ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_a_failing_runnable_says_why_it_is_not_ready() {
    let fails = Arc::new(AtomicBool::new(true));
    let mut node = TestNode::start_with("", |node| node.with(flaky(Arc::clone(&fails)))).await;
    // It fails repeatedly, so a snapshot may show any state.
    let status = node.wait_for(FLAKY, |node| node.state() == State::Waiting).await;
    assert!(status.failures >= 1 && status.waiting_for.contains("backoff"), "{status:?}");
    let request = StatusRequest { dn: FLAKY.into(), log_entries: 5 };
    let status = node.client.status(request).await.unwrap().into_inner().node.unwrap();
    assert_eq!(
        (status.exits[0].reason.as_str(), status.exits[0].state()),
        ("failed by the test", State::Dead)
    );
    fails.store(false, Ordering::Relaxed);
    node.client.restart(RestartRequest { dn: FLAKY.into() }).await.unwrap();
    // An operator's restart does not wait for the backoff.
    node.wait_ready(FLAKY).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_dn_is_answered_with_similar_names() {
    let mut node = TestNode::start("").await;
    for status in [
        node.client.status(StatusRequest { dn: "root.contrl".into(), log_entries: 0 }).await.map(drop),
        node.client.restart(RestartRequest { dn: "contrl".into() }).await.map(drop),
        node.client.logs(LogsRequest { dn: "root.contrl".into(), ..Default::default() }).await.map(drop),
    ] {
        let status = status.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("did you mean root.control?"), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_api_can_be_restarted_through_itself_and_not_stopped() {
    let mut node = TestNode::start("").await;
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
    let mut node = TestNode::start_with("", |node| node.with(flaky(Arc::default()))).await;
    let mut events = node
        .client
        .events(EventsRequest { follow: true, ..EventsRequest::default() })
        .await
        .unwrap()
        .into_inner();
    node.client.restart(RestartRequest { dn: FLAKY.into() }).await.unwrap();
    let mut seqs = Vec::new();
    let mut restarted = false;
    while !restarted {
        let chunk = timeout(TEST_TIMEOUT, events.message()).await.expect("an event").unwrap().unwrap();
        for event in chunk.events {
            restarted |= event.dn == FLAKY && event.generation == 2 && event.change == "ready";
            seqs.push(event.seq);
        }
    }
    let expected: Vec<_> = (1..=seqs.len() as u64).collect();
    assert_eq!(seqs, expected);
    let newest = EventsRequest { backlog: Some(2), ..EventsRequest::default() };
    let mut chunks = node.client.events(newest).await.unwrap().into_inner();
    assert_eq!(chunks.message().await.unwrap().unwrap().events.len(), 2);
    assert!(chunks.message().await.unwrap().is_none(), "the stream ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_of_events_sees_the_gap() {
    let mut node = TestNode::start_with("events.keep = 5\n", |node| node.with(flaky(Arc::default()))).await;
    node.wait_ready("root.storage").await;
    for generation in 2..6 {
        node.client.restart(RestartRequest { dn: FLAKY.into() }).await.unwrap();
        node.wait_run(FLAKY, generation).await;
    }
    let all = EventsRequest { follow: true, ..EventsRequest::default() };
    let first = node.client.events(all).await.unwrap().into_inner().message().await.unwrap().unwrap().events;
    assert_eq!(first.len(), 5, "all kept events");
    let is_gap = |pair: &[nodekeel_node::v1::Event]| pair[1].seq > pair[0].seq + 1;
    assert!(first.windows(2).any(is_gap), "the sequence numbers show the dropped events: {first:?}");
    assert!(first[4].seq > 10 && first[4].dn == FLAKY, "the newest is kept: {first:?}");
}
