//! Which of several agents leads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodekeel_provisioner::agent::AgentState;
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestVerb};
use serde_json::json;
use tokio::time::Instant;

use super::super::harness::{advance_time, wait_for_event, wait_until};
use super::{LEASE, TestAgent, cluster_api, holder, test_config, volume_name, volume_of_gone_node};

#[tokio::test(start_paused = true)]
async fn another_agent_leads_after_the_leader_crashed_and_repeats_no_event() {
    let api = cluster_api();
    api.create_object(ObjectKind::Volume, volume_of_gone_node(1, "Released", "Delete"));
    let mut first = TestAgent::start(&api, "agent-1");
    first.wait_leading().await;
    let mut second = TestAgent::start(&api, "agent-2");
    let name = volume_name(1);
    wait_for_event(&api, &name, "ReferencedNodeDeleted").await;
    advance_time(600).await;
    assert_eq!(*second.state.borrow(), AgentState::Standby);
    assert_eq!(holder(&api).as_deref(), Some("agent-1"));
    let crashed = Instant::now();
    first.crash().await;
    second.wait_leading().await;
    assert!(crashed.elapsed() <= Duration::from_secs(16), "{:?}", crashed.elapsed());
    advance_time(900).await;
    assert_eq!(api.event_counts(&name).len(), 1, "the new leader found the same, and its event exists");
    // A graceful stop hands over at once.
    let mut third = TestAgent::start(&api, "agent-3");
    advance_time(1).await;
    let stopped = Instant::now();
    second.stop().await;
    third.wait_leading().await;
    assert!(stopped.elapsed() < Duration::from_secs(2), "{:?}", stopped.elapsed());
    third.stop().await;
    assert_eq!(holder(&api), None);
}

#[tokio::test(start_paused = true)]
async fn of_many_candidates_one_leads_at_a_time() {
    let api = cluster_api();
    let mut agents: Vec<_> =
        (0..6).map(|number| TestAgent::start(&api, &format!("agent-{number}"))).collect();
    while !agents.is_empty() {
        wait_until(&api, |api| holder(api).is_some()).await;
        advance_time(40).await;
        let is_leading = |agent: &TestAgent| *agent.state.borrow() == AgentState::Leading;
        assert_eq!(agents.iter().filter(|agent| is_leading(agent)).count(), 1);
        let leader = agents.iter().position(is_leading).expect("one leads");
        agents.remove(leader).crash().await;
        if agents.is_empty() {
            break;
        }
        let leads =
            futures_util::future::select_all(agents.iter_mut().map(|agent| Box::pin(agent.wait_leading())));
        leads.await;
    }
}

/// A client whose requests hang while the switch is on.
fn partitioned_client(api: &FakeApi, is_cut: &Arc<AtomicBool>) -> kube::Client {
    let (api, is_cut) = (api.clone(), Arc::clone(is_cut));
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (api, is_cut) = (api.clone(), Arc::clone(&is_cut));
        async move {
            if is_cut.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.map_err(std::io::Error::other)?;
            api.answer_request(http::Request::from_parts(parts, body)).await
        }
    });
    kube::Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_partitioned_stops_before_another_leads() {
    let (api, is_cut) = (cluster_api(), Arc::new(AtomicBool::new(false)));
    let client = partitioned_client(&api, &is_cut);
    let mut first = TestAgent::start_with(client, test_config("agent-1"), None);
    first.wait_leading().await;
    let mut second = TestAgent::start(&api, "agent-2");
    advance_time(20).await;
    is_cut.store(true, Ordering::Relaxed);
    let stopped = first.state.wait_for(|state| *state != AgentState::Leading);
    tokio::time::timeout(Duration::from_secs(11), stopped).await.expect("in time").expect("it runs");
    assert_ne!(*second.state.borrow(), AgentState::Leading);
    second.wait_leading().await;
    is_cut.store(false, Ordering::Relaxed);
    advance_time(300).await;
    assert_eq!(*second.state.borrow(), AgentState::Leading);
    assert_ne!(*first.state.borrow(), AgentState::Leading);
    second.stop().await;
    first.crash().await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_an_operator_annotates_stays_with_its_leader_and_a_deleted_one_is_created_again() {
    let api = cluster_api();
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    api.patch_object(ObjectKind::Lease, LEASE, json!({ "metadata": { "annotations": { "note": "x" } } }));
    advance_time(60).await;
    assert_eq!(*agent.state.borrow(), AgentState::Leading);
    let lease = api.get_object(ObjectKind::Lease, LEASE).expect("a Lease");
    assert_eq!(lease["spec"]["leaseTransitions"], 0, "{lease}");
    api.delete_object(ObjectKind::Lease, LEASE);
    let deleted = Instant::now();
    wait_until(&api, |api| holder(api).as_deref() == Some("agent-1")).await;
    assert!(deleted.elapsed() <= Duration::from_secs(10), "{:?}", deleted.elapsed());
    agent.wait_leading().await;
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_leader_asks_the_server_nothing_but_its_lease() {
    let api = cluster_api();
    let mut agent = TestAgent::start(&api, "agent-1");
    agent.wait_leading().await;
    advance_time(10).await;
    let count = |api: &FakeApi| {
        let verbs = [RequestVerb::Get, RequestVerb::List, RequestVerb::Create, RequestVerb::Delete];
        let kinds =
            [ObjectKind::Claim, ObjectKind::Volume, ObjectKind::Node, ObjectKind::CsiNode, ObjectKind::Lease];
        verbs.iter().flat_map(|verb| kinds.map(|kind| api.request_count(*verb, kind))).sum::<usize>()
    };
    let (before, renewals) = (count(&api), api.request_count(RequestVerb::Patch, ObjectKind::Lease));
    advance_time(100).await;
    assert_eq!(count(&api), before);
    let renewals = api.request_count(RequestVerb::Patch, ObjectKind::Lease) - renewals;
    assert!((18..=22).contains(&renewals), "{renewals}");
    agent.stop().await;
}
