//! Reloads of a node in this process.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_logtree::{LogQuery, LogStore, render};
use nodekeel_node::client;
use nodekeel_node::node::{NodeBuilder, NodeHandle, ReloadError};
use nodekeel_node::part::PreparedRunnable;
use nodekeel_node::v1::HealthRequest;
use testbed::ScratchDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::harness::{NO_DAEMONS, TEST_TIMEOUT, TestPart, run_ready};

/// The builder of a node whose configuration is a file.
fn node_of_file() -> (ScratchDir, NodeBuilder) {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, NO_DAEMONS).unwrap();
    let builder = NodeBuilder::from_file(&file).unwrap().data(scratch.path().join("data"));
    (scratch, builder)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_ends_after_its_node_leaves_the_data_directory_free() {
    let (scratch, builder) = node_of_file();
    let (started, mut preparing) = mpsc::unbounded_channel();
    let (permit, permits) = std::sync::mpsc::channel();
    let permits = Mutex::new(permits);
    let gated = TestPart::prepared("gated", move |node| {
        started.send(())?;
        permits.lock().unwrap().recv()?;
        Ok(node.on_volume(|_| Ok(run_ready)))
    });
    permit.send(()).unwrap();
    let node = builder.with(gated).start().unwrap();
    preparing.recv().await.unwrap();
    let reload = tokio::spawn(node.reload());
    timeout(TEST_TIMEOUT, preparing.recv()).await.unwrap().unwrap();
    node.shutdown().await;
    permit.send(()).unwrap();
    let refused = reload.await.unwrap().unwrap_err();
    assert!(matches!(refused, ReloadError::Stopping), "{refused}");
    let data = scratch.path().join("data");
    let next = NodeHandle::builder("test.toml", NO_DAEMONS).data(data).start().unwrap();
    next.shutdown().await;
}

#[derive(Debug, thiserror::Error)]
#[error("can't prepare the fan")]
struct SpentError(#[source] std::io::Error);

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_can_not_be_prepared_again_is_logged_with_its_causes() {
    let (_scratch, builder) = node_of_file();
    let is_spent = AtomicBool::new(false);
    let spent = TestPart::prepared("spent", move |_| {
        if is_spent.swap(true, Ordering::Relaxed) {
            return Err(SpentError(std::io::Error::other("the fan is stuck")).into());
        }
        Ok(PreparedRunnable::new(run_ready))
    });
    let log_store = LogStore::default();
    let node = builder.log_store(log_store.clone()).with(spent).start().unwrap();
    node.wait_ready("root.spent").await;
    let refused = node.reload().await.unwrap_err();
    let says = "can't prepare the fan: the fan is stuck";
    assert_eq!(refused.describe(), says);
    let mut log = log_store.open_reader(LogQuery::of_dn("noded".parse().unwrap())).unwrap();
    let logged: Vec<_> = log.read_backlog().iter().map(render::full_text).collect();
    assert!(logged.iter().any(|line| line.contains(says)), "{logged:#?}");
    let mut client = client::connect(node.control_socket()).await.unwrap();
    let health = client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(health.conditions.iter().any(|found| found.problem.contains(says)), "{health:#?}");
    node.shutdown().await;
}
