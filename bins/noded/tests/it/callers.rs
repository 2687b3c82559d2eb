//! The callers of the control API, in the events.

use crate::harness::{NO_DAEMONS, NodedProcess, service_config};

const A: &str = "root.service.a";

#[test]
fn each_request_is_an_event_with_its_caller() {
    let script = "trap : HUP; while :; do sleep 0.1; done";
    let node =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", script, "reload = \"SIGHUP\"")));
    node.wait_for_event(A, 1, "started");
    for args in [
        &["signal", A, "SIGHUP"][..],
        &["reload", A],
        &["restart", "--wait", A],
        &["log-level", A, "warn"],
        &["stop", "--wait", A],
        &["start", "--wait", A],
    ] {
        node.ask(args);
    }
    assert_eq!(node.nodectl(&["stop", "root.nothing"]).code, Some(4));
    node.wait_for_event(A, 3, "started");

    let events = node.events();
    let seqs: Vec<_> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs, (1..=events.len() as u64).collect::<Vec<_>>(), "one numbering without gaps");
    let requests: Vec<_> = events.iter().filter(|event| event["change"] == "requested").collect();
    let actions: Vec<_> = requests.iter().map(|event| event["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["signal SIGHUP", "reload", "restart", "log level warn", "stop", "start"]);
    let uid = nix::unistd::geteuid().as_raw();
    for request in &requests {
        let caller = &request["caller"];
        assert_eq!((&request["dn"], &request["state"]), (&A.into(), &serde_json::Value::Null), "{request}");
        assert_eq!(
            (caller["uid"].as_u64(), &caller["program"]),
            (Some(uid.into()), &"nodectl".into()),
            "{request}"
        );
        let pid = caller["pid"].as_u64().unwrap();
        let text = request["detail"].as_str().unwrap();
        assert!(text.contains(&format!("requested by uid {uid}")), "{text}");
        assert!(text.ends_with(&format!(", pid {pid} nodectl")), "{text}");
    }
    let position = |wanted: &dyn Fn(&serde_json::Value) -> bool| events.iter().position(wanted).unwrap();
    let restart = position(&|event| event["action"] == "restart");
    let second =
        position(&|event| event["dn"] == A && event["change"] == "started" && event["generation"] == 2);
    assert!(restart < second && requests[2]["generation"] == 1, "{events:#?}");
    let changes = events.iter().filter(|event| event["change"] != "requested");
    assert!(changes.into_iter().all(|event| event["caller"].is_null() && event["action"].is_null()));

    let table = node.ask(&["events"]);
    assert!(
        table.lines().any(|line| line.contains(A) && line.contains("run 1    restart requested by uid")),
        "{table}"
    );
    node.stop();
}

#[test]
fn a_refused_request_is_an_event_too() {
    let node = NodedProcess::start(NO_DAEMONS);
    node.nodectl(&["stop", "root.control"]).assert_fails(1, "can't be stopped");
    let long = "x".repeat(100_000);
    assert_eq!(node.nodectl(&["signal", "root.control", &long]).code, Some(1));
    let table = node.ask(&["events"]);
    assert!(table.contains("stop requested by uid"), "{table}");
    let signal = table.lines().find(|line| line.contains("signal xxx")).unwrap();
    assert!(signal.len() < 1000 && signal.contains("requested by uid"), "a bounded text: {signal}");
    node.stop();
}
