//! Additions of a part to the health and the metrics of the node.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_node::health::{HealthCondition, NodeSnapshot};
use nodekeel_node::part::PreparedRunnable;
use nodekeel_node::v1::{HealthRequest, HealthResponse};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use testbed::ScratchDir;
use tokio::time::timeout;

use crate::harness::{TEST_TIMEOUT, TestNode, TestPart, run_ready};

/// A part that adds a condition while the flag is set, and a counter.
fn fan_part(is_stuck: Arc<AtomicBool>) -> TestPart {
    TestPart::prepared("fan", move |node| {
        let is_stuck = Arc::clone(&is_stuck);
        node.health_sources().add("fan", move |_: &NodeSnapshot| {
            let stuck = HealthCondition::problem("fan 1", "does not turn").waiting_for("its owner");
            is_stuck.load(Ordering::Relaxed).then(|| stuck.hint("replace it")).into_iter().collect()
        });
        let (mut registry, turns) = (Registry::default(), Counter::<u64>::default());
        registry.register("fan_turns", "Turns of the fan", turns.clone());
        turns.inc_by(7);
        node.metrics().add("fan", registry);
        Ok(PreparedRunnable::new(run_ready))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_program_answers_health_and_serves_its_metrics_like_a_shipped_one() {
    let is_stuck = Arc::new(AtomicBool::new(false));
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.path().join("metrics.sock");
    let config = format!("[health]\nmin_free_percent = 0\n[metrics]\naddress = {socket:?}\n");
    let part = fan_part(Arc::clone(&is_stuck));
    let node = TestNode::start_with(&config, |builder| builder.with(part)).await;
    for dn in ["root.fan", "root.metrics", "root.storage"] {
        node.wait_ready(dn).await;
    }
    let mut client = node.client.clone();
    let health = client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(health.healthy, "{health:?}");
    is_stuck.store(true, Ordering::Relaxed);
    let health = client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(!health.healthy, "{health:?}");
    let found = &health.conditions[0];
    let shown = [&found.part, &found.object, &found.problem, &found.waiting_for, &found.hint];
    assert_eq!(shown, ["fan", "fan 1", "does not turn", "its owner", "replace it"]);
    let mut watch = client.watch_health(HealthRequest {}).await.unwrap().into_inner();
    let is_healthy = async |watch: &mut tonic::Streaming<HealthResponse>| {
        timeout(TEST_TIMEOUT, watch.message()).await.unwrap().unwrap().unwrap().healthy
    };
    assert!(!is_healthy(&mut watch).await);
    is_stuck.store(false, Ordering::Relaxed);
    while !is_healthy(&mut watch).await {}
    let text = tokio::task::spawn_blocking(move || {
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    });
    let text = text.await.unwrap();
    assert!(text.contains("\nfan_turns_total 7\n") && text.contains("\nnodekeel_healthy 1\n"), "{text}");
    node.node.shutdown().await;
}
