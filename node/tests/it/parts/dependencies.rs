//! Dependencies between parts, services and runnables of the program.

use std::time::Duration;

use nodekeel_node::config::NodedConfig;
use nodekeel_node::node::{BuildError, ExtraRunnable, NodeBuilder, NodeHandle};
use nodekeel_node::part::{DependencyEntry, PlannedService};
use nodekeel_node::v1::{Event, EventsRequest};
use nodekeel_supervisor::{Context, Failure};
use testbed::ScratchDir;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::timeout;

use super::{NTP, NtpPart, assert_rejected, ntp_node};
use crate::harness::{TEST_TIMEOUT, TestNode, TestPart, run_ready, service_config};

#[tokio::test(flavor = "multi_thread")]
async fn a_part_waits_for_a_service_and_a_service_for_a_runnable_of_the_program() {
    let services = service_config("clock", "sleep 1000", "depends_on = [\"lease\"]");
    let (scratch, builder) = ntp_node(&format!("{NTP}depends_on = [\"clock\"]\n{services}"));
    let builder = builder.with(ExtraRunnable::new("lease", run_ready));
    let mut node = TestNode::start_in(scratch, builder).await;
    node.wait_ready("root.ntp").await;
    let request = EventsRequest { follow: true, ..EventsRequest::default() };
    let mut stream = node.client.events(request).await.unwrap().into_inner();
    let mut events = Vec::new();
    // An event is recorded after the state that it reports.
    let complete = async {
        while !events.iter().any(|event: &Event| event.dn == "root.ntp" && event.change == "ready") {
            events.extend(stream.message().await.unwrap().unwrap().events);
        }
    };
    timeout(TEST_TIMEOUT, complete).await.unwrap();
    let at = |dn: &str, change: &str| {
        events
            .iter()
            .position(|event| event.dn == dn && event.change == change)
            .unwrap_or_else(|| panic!("{dn}"))
    };
    assert!(at("root.lease", "ready") < at("root.service.clock", "ready"));
    assert!(at("root.service.clock", "ready") < at("root.ntp", "ready"));
    assert!(!events.iter().any(|event| event.change == "exited"), "nothing has failed: {events:#?}");
    node.node.shutdown().await;
}

/// A part that plans these DNs.
pub(super) fn part_of_dns(name: &str, dns: &'static [&'static str]) -> TestPart {
    TestPart::new(name, move |planner| {
        for dn in dns {
            planner.add(PlannedService::from_runnable(*dn, "a runnable", run_ready));
        }
    })
}

#[test]
fn a_part_of_several_runnables_waits_and_is_waited_for_as_a_whole() {
    let service = service_config("s", "true", "depends_on = [\"pair\"]");
    let (_scratch, builder) = ntp_node(&format!("{NTP}[pair]\ndepends_on = [\"ntp\"]\n{service}"));
    let pair = part_of_dns("pair", &["root.pair.a", "root.pair.b"]).section("pair");
    let plan = builder.with(pair).plan().unwrap();
    let waits_for = |dn: &str| &plan.services.iter().find(|planned| planned.dn == dn).unwrap().start_after;
    assert_eq!(waits_for("root.pair.a"), &["root.ntp"]);
    assert_eq!(waits_for("root.pair.b"), &["root.ntp"]);
    assert_eq!(waits_for("root.ntp"), &["root.storage"]);
    assert_eq!(waits_for("root.service.s"), &["root.pair.a", "root.pair.b"]);
}

#[test]
fn what_depends_on_something_that_does_not_run_is_rejected_or_skipped() {
    // [ntp] is missing, so the part runs nothing.
    let service = service_config("a", "true", "depends_on = [\"ntp\"]");
    let error = ntp_node(&service).1.plan().unwrap_err();
    let says = "root.service.a: depends on root.ntp, which nothing runs: configure its part, or";
    assert!(matches!(error, BuildError::Plan(_)) && error.to_string().contains(says), "{error}");
    let reason = |builder: NodeBuilder| {
        let plan = builder.dev(true).plan().unwrap();
        let service = plan.services.into_iter().find(|planned| planned.dn == "root.service.a").unwrap();
        service.skip_reason.expect("skipped")
    };
    assert!(reason(ntp_node(&service).1).contains("depends on root.ntp, which nothing runs"));

    // The images are below containerd in the tree.
    let scratch = ScratchDir::new().unwrap();
    let config = format!(
        "services.etcd.enable = false\nservices.containerd = {{ binary = \"/nowhere\", preseed = \"/images\" }}\n{}",
        service_config("a", "true", "depends_on = [\"containerd.preseed\"]")
    );
    let builder = NodeHandle::builder("test.toml", config).data(scratch.path().join("data"));
    assert_eq!(reason(builder), "depends on root.containerd, which is skipped");
}

/// A part that depends on a runnable that is done, and needs some time to stop.
fn user_part(stopped: UnboundedSender<&'static str>) -> TestPart {
    let run = move |ctx: Context| {
        let stopped = stopped.clone();
        async move {
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            // If the box were stopped too, it would end in this time.
            tokio::time::sleep(Duration::from_millis(200)).await;
            stopped.send("user")?;
            Err::<(), Failure>(canceled.into())
        }
    };
    TestPart::runnable("user", run).after(&["box.init"])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_depends_on_a_part_of_a_runnable_that_is_done_stops_before_the_runnable() {
    let (stopped, mut order) = mpsc::unbounded_channel();
    let sender = stopped.clone();
    // The runnable below it is soon done, as the import of images below containerd.
    let run = move |ctx: Context| {
        let stopped = sender.clone();
        async move {
            ctx.run_child("init", |ctx: Context| async move {
                ctx.signal_ready()?;
                ctx.signal_done()?;
                Ok::<(), Failure>(())
            })?;
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            stopped.send("box")?;
            Err::<(), Failure>(canceled.into())
        }
    };
    let boxed = TestPart::runnable("box", run).child("init");
    let (_scratch, builder) = ntp_node("");
    let node = builder.with(boxed).with(user_part(stopped)).start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.user")).await.unwrap();
    node.shutdown().await;
    assert_eq!((order.try_recv(), order.try_recv()), (Ok("user"), Ok("box")));
}

#[test]
fn a_part_that_depends_on_a_removed_one_is_rejected_by_name() {
    let (stopped, _) = mpsc::unbounded_channel();
    let says = "test.toml: unknown service \"box.init\" in the dependencies of user; known: api, metrics, ";
    assert_rejected(ntp_node("").1.with(user_part(stopped)), says);
    // The operator may name what the part names too.
    let entry = DependencyEntry::of_part(&NtpPart, &NodedConfig::default()).after(["a"]).after(["a", "b"]);
    assert_eq!(entry.depends_on, ["a", "b"]);
}
