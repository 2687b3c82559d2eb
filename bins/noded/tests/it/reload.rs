//! The reload of the configuration: only what has changed restarts, the whole file or nothing is applied.

use std::fmt;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};

use nix::sys::signal::Signal;
use nodekeel_logtree::{LogQuery, LogStore, render};
use nodekeel_node::client;
use nodekeel_node::node::{NodeBuilder, NodeHandle, ReloadError};
use nodekeel_node::part::{
    NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::HealthRequest;
use nodekeel_supervisor::Context;
use testbed::ScratchDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::harness::{
    NO_DAEMONS, NodedProcess, TEST_TIMEOUT, noded_command, service_config, stderr_and_code,
};

const SLEEP: &str = "exec sleep 1000";

fn start(services: &[String]) -> NodedProcess {
    NodedProcess::start(&config(services))
}

fn config(services: &[String]) -> String {
    format!("{NO_DAEMONS}{}", services.concat())
}

fn write(node: &NodedProcess, text: &str) {
    fs::write(node.scratch.path().join("noded.toml"), text).unwrap();
}

fn service(name: &str, keys: &str) -> String {
    service_config(name, SLEEP, &format!("environment = {{ PATH = \"/usr/bin:/bin\" }}\n{keys}"))
}

/// The services with their generations, in the order of their names.
fn generations(node: &NodedProcess) -> Vec<(String, u64)> {
    let nodes = node.ask_json(&["tree"]);
    let name =
        |node: &serde_json::Value| Some(node["dn"].as_str()?.strip_prefix("root.service.")?.to_owned());
    let of = |node: &serde_json::Value| Some((name(node)?, node["generation"].as_u64()?));
    let mut found: Vec<_> = nodes.as_array().unwrap().iter().filter_map(of).collect();
    found.sort();
    found
}

fn expected(services: &[(&str, u64)]) -> Vec<(String, u64)> {
    services.iter().map(|(name, generation)| ((*name).to_owned(), *generation)).collect()
}

#[test]
fn a_reload_starts_restarts_and_stops_only_what_differs() {
    let crash_loop = service_config("crash", "exit 1", "");
    let node = start(&[service("keep", ""), service("change", ""), crash_loop]);
    node.wait_for_event("root.service.crash", 2, "started");
    write(
        &node,
        &config(&[
            service("keep", ""),
            service("change", "grace = \"3s\""),
            service("new", "depends_on = [\"keep\"]"),
        ]),
    );
    let lines = "  restart root.service.change: grace\n  add root.service.new\n  remove root.service.crash\n";
    assert_eq!(node.ask(&["reload", "--dry-run"]), format!("a reload would:\n{lines}"));
    assert_eq!(node.ask(&["reload"]), format!("reloaded:\n{lines}"));
    node.wait_for_event("root.service.new", 1, "ready");
    assert_eq!(generations(&node), expected(&[("change", 2), ("keep", 1), ("new", 1)]));
    let unknown = node.nodectl(&["signal", "root.service.crash", "TERM"]);
    assert_eq!(unknown.status.code(), Some(4), "{:?}", stderr_and_code(&unknown));
    assert_eq!(node.ask(&["reload"]), "reloaded: nothing has changed\n");
    assert_eq!(node.ask_json(&["reload"]), serde_json::json!({ "changes": [] }));
    let logged = node.ask(&["logs", "noded"]);
    assert!(logged.contains("configuration reloaded: restart root.service.change: grace"), "{logged}");
    node.stop();
}

#[test]
fn a_file_that_is_refused_changes_nothing() {
    let node = start(&[service("a", "")]);
    let cycle = config(&[service("a", "depends_on = [\"b\"]"), service("b", "depends_on = [\"a\"]")]);
    let missing = config(&[service("a", ""), service_config("b", "", "user = \"nosuchuser\"")]);
    let name = config(&[service("a", "grace = \"1s\"")]) + "\n[node]\nname = \"b\"\n";
    for (text, says) in [
        ("[[service]\n", "noded.toml:1:"),
        (&*cycle, "dependency cycle: a -> b -> a"),
        (&*missing, "nosuchuser"),
        (
            &*name,
            "can't reload the configuration: node.name can't change while noded runs; restart noded, or undo",
        ),
    ] {
        write(&node, text);
        for args in [&["reload"][..], &["reload", "-o", "json"]] {
            let output = node.nodectl(args);
            let (error, code) = stderr_and_code(&output);
            assert!(error.contains(says) && code == Some(1), "{error}\nnot: {says}");
        }
        assert_eq!(generations(&node), expected(&[("a", 1)]));
    }
    let logged = node.ask(&["logs", "noded", "--min-level", "error"]);
    assert!(logged.contains("configuration not reloaded, the former one stays: "), "{logged}");
    let health = node.ask(&["health"]);
    assert!(health.contains("is not what the node runs: can't reload the configuration"), "{health}");
    write(&node, &name);
    let checked = node.ask(&["reload", "--dry-run"]);
    assert!(checked.contains("  restart noded: node.name\n  restart root.service.a: grace\n"), "{checked}");
    node.stop();
}

#[test]
fn noded_check_compares_a_file_with_the_node_that_runs() {
    let node = start(&[service("a", "")]);
    let file = node.scratch.path().join("next.toml");
    let check = |text: &str| {
        fs::write(&file, text).unwrap();
        let data = node.data();
        let args =
            ["check", "--running", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        noded_command(&args).output().unwrap()
    };
    let output = check(&config(&[service("a", ""), service("b", "")]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "a reload would:\n  add root.service.b\n");
    assert!(output.status.success());
    let output = check("[[service]\n");
    let (error, code) = stderr_and_code(&output);
    assert!(error.contains("next.toml:1:") && code == Some(3), "{error}");
    assert_eq!(generations(&node), expected(&[("a", 1)]));
    node.stop();
}

#[test]
fn dependents_stop_first_and_start_last_when_both_have_changed() {
    let node = start(&[service("a", ""), service("b", "depends_on = [\"a\"]")]);
    node.wait_for_event("root.service.b", 1, "ready");
    let changed = "grace = \"9s\"";
    write(
        &node,
        &config(&[service("a", changed), service("b", &format!("depends_on = [\"a\"]\n{changed}"))]),
    );
    node.ask(&["reload"]);
    node.wait_for_event("root.service.b", 2, "ready");
    let events = node.ask(&["events", "-o", "json"]);
    let events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let seen: Vec<_> = events
        .filter_map(|event| {
            let name = event["dn"].as_str()?.strip_prefix("root.service.")?.to_owned();
            Some(format!("{name} {}", event["change"].as_str()?))
        })
        .collect();
    let last = |what: &str| seen.iter().rposition(|known| known == what).expect(what);
    let order = ["b removed", "a removed", "a ready", "b ready"].map(last);
    assert!(order.is_sorted(), "{seen:#?}");
    node.stop();
}

#[test]
fn the_first_service_is_added_and_the_last_one_removed() {
    let node = start(&[]);
    write(&node, &config(&[service("a", "")]));
    assert_eq!(node.ask(&["reload"]), "reloaded:\n  add root.service.a\n");
    node.wait_for_event("root.service.a", 1, "ready");
    write(&node, NO_DAEMONS);
    assert_eq!(node.ask(&["reload"]), "reloaded:\n  remove root.service.a\n");
    assert!(!node.ask(&["tree"]).contains("service"));
    write(&node, &config(&[service("a", "")]));
    node.ask(&["reload"]);
    node.wait_for_event("root.service.a", 2, "ready");
    node.stop();
}

#[test]
fn an_operators_stop_survives_a_change_and_ends_with_a_removal() {
    let node = start(&[service("a", "")]);
    let state = || node.ask_json(&["status", "root.service.a"])["node"]["state"].as_str().map(str::to_owned);
    node.ask(&["stop", "--wait", "root.service.a"]);
    write(&node, &config(&[service("a", "grace = \"3s\"")]));
    node.ask(&["reload"]);
    assert_eq!(state().as_deref(), Some("stopped"));
    for text in [NO_DAEMONS.to_owned(), config(&[service("a", "")])] {
        write(&node, &text);
        node.ask(&["reload"]);
    }
    node.wait_for_event("root.service.a", 2, "ready");
    node.stop();
}

#[test]
fn reloads_at_once_are_one_after_the_other() {
    let node = start(&[service("a", "")]);
    write(&node, &config(&[service("a", "grace = \"3s\"")]));
    let reloads: Vec<_> = (0..8).map(|_| node.nodectl_command(&["reload"]).spawn().unwrap()).collect();
    for mut reload in reloads {
        assert!(reload.wait().unwrap().success());
    }
    node.wait_for_event("root.service.a", 2, "ready");
    assert_eq!(generations(&node), expected(&[("a", 2)]));
    node.stop();
}

#[test]
fn a_stop_ends_a_reload() {
    let stubborn = |keys: &str| {
        let script = "trap '' TERM; echo set; while :; do sleep 0.1; done";
        service_config("a", script, &format!("environment = {{ PATH = \"/usr/bin:/bin\" }}\n{keys}"))
    };
    let mut node = start(&[stubborn("grace = \"2s\"")]);
    node.follow(&["logs", "-f", "--raw", "root.service.a"]).find_value(|entry| entry["text"] == "set");
    write(&node, &config(&[stubborn("grace = \"3s\"")]));
    let events = node.follow(&["events", "-f"]);
    let mut reload = node.nodectl_command(&["reload"]).spawn().unwrap();
    events.find_value(|event| event["change"] == "canceling");
    node.signal(Signal::SIGTERM);
    let (status, lines) = node.wait();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
    assert!(!reload.wait().unwrap().success());
}

/// A part that a reload always replaces, and that is prepared when the test lets it.
struct GatedPart(GatedPlan);

#[derive(Debug, Clone)]
struct GatedPlan {
    started: mpsc::UnboundedSender<()>,
    permits: Arc<Mutex<std::sync::mpsc::Receiver<()>>>,
}

impl Part for GatedPart {
    fn name(&self) -> &str {
        "gated"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.add(PlannedService::new("root.gated", self.0.clone()));
    }
}

impl fmt::Display for GatedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a gate")
    }
}

impl PlannedRunnable for GatedPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        self.started.send(())?;
        self.permits.lock().unwrap().recv()?;
        Ok(node.on_volume(|_| {
            Ok(|ctx: Context| async move {
                ctx.signal_ready()?;
                ctx.until_canceled().await
            })
        }))
    }

    fn is_same(&self, _: &dyn PlannedRunnable) -> Option<bool> {
        Some(false)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_ends_after_its_node_leaves_the_data_directory_free() {
    let scratch = ScratchDir::new().unwrap();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    fs::write(&file, NO_DAEMONS).unwrap();
    let (started, mut preparing) = mpsc::unbounded_channel();
    let (permit, permits) = std::sync::mpsc::channel();
    let plan = GatedPlan { started, permits: Arc::new(Mutex::new(permits)) };
    permit.send(()).unwrap();
    let node = NodeBuilder::from_file(&file).unwrap().data(&data).with(GatedPart(plan)).start().unwrap();
    preparing.recv().await.unwrap();
    let reload = tokio::spawn(node.reload());
    timeout(TEST_TIMEOUT, preparing.recv()).await.unwrap().unwrap();
    node.shutdown().await;
    permit.send(()).unwrap();
    let refused = reload.await.unwrap().unwrap_err();
    assert!(matches!(refused, ReloadError::Stopping), "{refused}");
    let next = NodeHandle::builder("test.toml", NO_DAEMONS).data(&data).start().unwrap();
    next.shutdown().await;
}

#[derive(Debug, thiserror::Error)]
#[error("can't prepare the fan")]
struct SpentError(#[source] std::io::Error);

/// A part that can be prepared once.
#[derive(Debug, Clone, Default)]
struct SpentPart(Arc<Mutex<bool>>);

impl Part for SpentPart {
    fn name(&self) -> &str {
        "spent"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.add(PlannedService::new("root.spent", self.clone()));
    }
}

impl fmt::Display for SpentPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("once")
    }
}

impl PlannedRunnable for SpentPart {
    fn prepare(&self, _: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        if std::mem::replace(&mut *self.0.lock().unwrap(), true) {
            return Err(SpentError(std::io::Error::other("the fan is stuck")).into());
        }
        Ok(PreparedRunnable::new(|ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.until_canceled().await
        }))
    }

    fn is_same(&self, _: &dyn PlannedRunnable) -> Option<bool> {
        Some(false)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_can_not_be_prepared_again_is_logged_with_its_causes() {
    let scratch = ScratchDir::new().unwrap();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    fs::write(&file, NO_DAEMONS).unwrap();
    let log_store = LogStore::default();
    let builder = NodeBuilder::from_file(&file).unwrap().data(&data).log_store(log_store.clone());
    let node = builder.with(SpentPart::default()).start().unwrap();
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

#[test]
fn sighup_reloads_and_notifies_the_service_manager() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let node = NodedProcess::spawn(scratch, &config(&[service("a", "")]), &[], |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    let hear = || {
        let mut buffer = [0; 4096];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert_eq!(hear(), "READY=1");
    write(&node, &config(&[service("b", "")]));
    node.signal(Signal::SIGHUP);
    let started = hear();
    let microseconds = started.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&started);
    assert!(microseconds.parse::<u64>().unwrap() > 0);
    assert_eq!(hear(), "READY=1\nSTATUS=");
    node.wait_for_event("root.service.b", 1, "ready");
    write(&node, "[[service]\n");
    node.signal(Signal::SIGHUP);
    assert!(hear().starts_with("RELOADING=1"));
    let ended = hear();
    assert!(ended.starts_with("READY=1\nSTATUS=") && ended.contains("noded.toml:1:"), "{ended}");
    assert_eq!(generations(&node), expected(&[("b", 1)]));
    node.stop();
}
