//! A planned stop as an operator sees it.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;

use crate::harness::{NO_DAEMONS, NodedProcess, service_config};

#[test]
fn a_planned_stop_is_no_failure_and_says_how_the_process_exited() {
    let script = "trap 'echo stopping; exit 9' TERM; echo set; while :; do sleep 1000 & wait; done";
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", script, "")));
    let dn = "root.service.a";
    let log = node.follow(&["logs", "-f", "--raw", dn]);
    log.find_value(|entry| entry["text"] == "set");
    node.ask(&["restart", dn]);
    log.find_value(|entry| entry["text"] == "set");
    node.ask(&["stop", "--wait", dn]);
    let status = node.status(dn);
    assert_eq!((&status["state"], &status["failures"]), (&"stopped".into(), &0.into()));
    let exits = status["exits"].as_array().unwrap();
    assert_eq!(exits.len(), 2, "{status}");
    for exit in exits {
        assert_eq!(exit["state"], "canceled", "{status}");
        assert_eq!(exit["reason"], "canceled; exited with code 9", "{status}");
        assert_eq!((&exit["code"], &exit["output"]), (&9.into(), &serde_json::json!([])), "{status}");
    }
    let events = node.ask(&["events"]);
    assert!(events.contains("canceled; exited with code 9"), "{events}");
    node.stop();
}

#[test]
fn a_client_that_follows_gets_the_last_events_and_entries_of_a_stop() {
    let script = "trap 'echo bye; exit 0' TERM; echo set; while :; do sleep 1000 & wait; done";
    let names: Vec<_> = (0..20).map(|n| format!("s{n}")).collect();
    let services: String = names.iter().map(|name| service_config(name, script, "")).collect();
    let mut node = NodedProcess::start(&format!("{NO_DAEMONS}{services}"));
    let (events, log) =
        (node.follow(&["events", "-f"]), node.follow(&["logs", "-f", "--raw", "--children", "root.service"]));
    let mut set = 0;
    log.find_value(|entry| {
        set += usize::from(entry["text"] == "set");
        set == names.len()
    });
    node.signal(Signal::SIGTERM);
    let mut exited = BTreeSet::new();
    events.find_value(|event| {
        if event["change"] == "exited" {
            exited.insert(event["dn"].as_str().unwrap().to_owned());
        }
        event["dn"] == "root.control" && event["change"] == "canceling"
    });
    let missing: Vec<_> =
        names.iter().filter(|name| !exited.contains(&format!("root.service.{name}"))).collect();
    assert!(missing.is_empty(), "{missing:?} not among {exited:?}");
    let mut bye = 0;
    log.find_value(|entry| {
        bye += usize::from(entry["text"] == "bye");
        bye == names.len()
    });
    let (status, lines) = node.wait_end();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
}
