//! The reload of the configuration: only what has changed restarts, the whole file or nothing is applied.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{NO_DAEMONS, NodedProcess, check, service_config, sleep_config as service};
use crate::lifecycle::ServiceManager;

fn start(services: &[String]) -> NodedProcess {
    NodedProcess::start(&config(services))
}

fn config(services: &[String]) -> String {
    format!("{NO_DAEMONS}{}", services.concat())
}

/// Asserts the services and their generations, in the order of their names.
#[track_caller]
fn assert_generations(node: &NodedProcess, expected: &[(&str, u64)]) {
    let nodes = node.ask_json(&["tree"]);
    let of = |node: &Value| {
        let name = node["dn"].as_str()?.strip_prefix("root.service.")?.to_owned();
        Some((name, node["generation"].as_u64()?))
    };
    let mut found: Vec<_> = nodes.as_array().unwrap().iter().filter_map(of).collect();
    found.sort();
    let expected: Vec<_> = expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_reload_starts_restarts_and_stops_only_what_differs() {
    let crash_loop = service_config("crash", "exit 1", "");
    let node = start(&[service("keep", ""), service("change", ""), crash_loop]);
    node.wait_for_event("root.service.crash", 2, "started");
    node.write_config(&config(&[
        service("keep", ""),
        service("change", "grace = \"3s\""),
        service("new", "depends_on = [\"keep\"]"),
    ]));
    let lines = "  restart root.service.change: grace\n  add root.service.new\n  remove root.service.crash\n";
    assert_eq!(node.ask(&["reload", "--dry-run"]), format!("a reload would:\n{lines}"));
    assert_eq!(node.ask(&["reload"]), format!("reloaded:\n{lines}"));
    node.wait_for_event("root.service.new", 1, "ready");
    assert_generations(&node, &[("change", 2), ("keep", 1), ("new", 1)]);
    assert_eq!(node.nodectl(&["signal", "root.service.crash", "TERM"]).code, Some(4));
    assert_eq!(node.ask(&["reload"]), "reloaded: nothing has changed\n");
    assert_eq!(node.ask_json(&["reload"]), serde_json::json!({ "changes": [] }));
    let logged = node.ask(&["logs", "noded"]);
    assert!(logged.contains("configuration reloaded: restart root.service.change: grace"), "{logged}");
    node.stop();
}

#[test]
fn a_change_of_dependencies_restarts_nothing_and_counts_from_the_next_start() {
    let closed = "readiness = { probe = [\"/bin/false\"] }";
    let node =
        start(&[service("a", ""), service("closed", closed), service("waits", "depends_on = [\"closed\"]")]);
    node.wait_ready("root.service.a");
    node.wait_status("root.service.waits", |status| status["waiting_on"][0] == "root.service.closed");
    node.write_config(&config(&[
        service("a", "depends_on = [\"closed\"]"),
        service("closed", closed),
        service("waits", "depends_on = [\"a\"]"),
    ]));
    let lines = "  reorder root.service.a: depends_on; it runs on\n  reorder root.service.waits: depends_on; it runs on\n";
    assert_eq!(node.ask(&["reload", "--dry-run"]), format!("a reload would:\n{lines}"));
    let changes = node.ask_json(&["reload"]);
    assert_eq!(changes["changes"][0]["effect"], "reorder", "{changes}");
    // It had not started, and need not wait for the former one.
    node.wait_ready("root.service.waits");
    assert_eq!(node.status("root.service.a")["generation"], 1);
    node.ask(&["restart", "a"]);
    node.wait_status("root.service.a", |status| status["waiting_on"][0] == "root.service.closed");
    assert_eq!(node.ask(&["reload"]), "reloaded: nothing has changed\n");
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
        node.write_config(text);
        for args in [&["reload"][..], &["reload", "-o", "json"]] {
            node.nodectl(args).assert_fails(1, says);
        }
        assert_generations(&node, &[("a", 1)]);
    }
    let logged = node.ask(&["logs", "noded", "--min-level", "error"]);
    assert!(logged.contains("configuration not reloaded, the former one stays: "), "{logged}");
    let health = node.ask(&["health"]);
    assert!(health.contains("is not what the node runs: can't reload the configuration"), "{health}");
    node.write_config(&name);
    let checked = node.ask(&["reload", "--dry-run"]);
    assert!(checked.contains("  restart noded: node.name\n  restart root.service.a: grace\n"), "{checked}");
    node.stop();
}

#[test]
fn noded_check_compares_a_file_with_the_node_that_runs() {
    let node = start(&[service("a", "")]);
    let check = |text: &str| check(node.scratch.path(), text, &["--running"]);
    let text = check(&config(&[service("a", ""), service("b", "")])).output();
    assert_eq!(text, "a reload would:\n  add root.service.b\n");
    check("[[service]\n").assert_fails(3, "noded.toml:1:");
    assert_generations(&node, &[("a", 1)]);
    node.stop();
}

#[test]
fn dependents_stop_first_and_start_last_when_both_have_changed() {
    let node = start(&[service("a", ""), service("b", "depends_on = [\"a\"]")]);
    node.wait_for_event("root.service.b", 1, "ready");
    let changed = "grace = \"9s\"";
    node.write_config(&config(&[
        service("a", changed),
        service("b", &format!("depends_on = [\"a\"]\n{changed}")),
    ]));
    node.ask(&["reload"]);
    node.wait_for_event("root.service.b", 2, "ready");
    let seen: Vec<_> = node
        .events()
        .iter()
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
    node.write_config(&config(&[service("a", "")]));
    assert_eq!(node.ask(&["reload"]), "reloaded:\n  add root.service.a\n");
    node.wait_for_event("root.service.a", 1, "ready");
    node.write_config(NO_DAEMONS);
    assert_eq!(node.ask(&["reload"]), "reloaded:\n  remove root.service.a\n");
    assert!(!node.ask(&["tree"]).contains("service"));
    node.write_config(&config(&[service("a", "")]));
    node.ask(&["reload"]);
    node.wait_for_event("root.service.a", 2, "ready");
    node.stop();
}

#[test]
fn an_operators_stop_survives_a_change_and_ends_with_a_removal() {
    let node = start(&[service("a", "")]);
    node.ask(&["stop", "--wait", "root.service.a"]);
    node.write_config(&config(&[service("a", "grace = \"3s\"")]));
    node.ask(&["reload"]);
    assert_eq!(node.status("root.service.a")["state"], "stopped");
    for text in [NO_DAEMONS.to_owned(), config(&[service("a", "")])] {
        node.write_config(&text);
        node.ask(&["reload"]);
    }
    node.wait_for_event("root.service.a", 2, "ready");
    node.stop();
}

#[test]
fn reloads_at_once_are_one_after_the_other() {
    let node = start(&[service("a", "")]);
    node.write_config(&config(&[service("a", "grace = \"3s\"")]));
    let reloads: Vec<_> = (0..8).map(|_| node.nodectl_command(&["reload"]).spawn().unwrap()).collect();
    for mut reload in reloads {
        assert!(reload.wait().unwrap().success());
    }
    node.wait_for_event("root.service.a", 2, "ready");
    assert_generations(&node, &[("a", 2)]);
    node.stop();
}

#[test]
fn a_stop_ends_a_reload() {
    let stubborn = |keys: &str| {
        let script = "trap '' TERM; echo set; while :; do sleep 0.1; done";
        service_config("a", script, keys)
    };
    let mut node = start(&[stubborn("grace = \"2s\"")]);
    node.wait_for_output("root.service.a", "set");
    node.write_config(&config(&[stubborn("grace = \"3s\"")]));
    let events = node.follow(&["events", "-f"]);
    let mut reload = node.nodectl_command(&["reload"]).spawn().unwrap();
    events.find_value(|event| event["change"] == "canceling");
    node.signal(Signal::SIGTERM);
    let (status, lines) = node.wait_end();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
    assert!(!reload.wait().unwrap().success());
}

#[test]
fn sighup_reloads_and_notifies_the_service_manager() {
    let (manager, node) = ServiceManager::start_noded(&config(&[service("a", "")]));
    assert_eq!(manager.hear(), "READY=1");
    node.write_config(&config(&[service("b", "")]));
    node.signal(Signal::SIGHUP);
    let started = manager.hear();
    let microseconds = started.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&started);
    assert!(microseconds.parse::<u64>().unwrap() > 0);
    assert_eq!(manager.hear(), "READY=1\nSTATUS=");
    node.wait_for_event("root.service.b", 1, "ready");
    node.write_config("[[service]\n");
    node.signal(Signal::SIGHUP);
    assert!(manager.hear().starts_with("RELOADING=1"));
    let ended = manager.hear();
    assert!(ended.starts_with("READY=1\nSTATUS=") && ended.contains("noded.toml:1:"), "{ended}");
    assert_generations(&node, &[("b", 1)]);
    node.stop();
}
