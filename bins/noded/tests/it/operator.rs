//! What an operator types: short names, waits with a limit, errors for programs.

use std::process::Stdio;

use testbed::{ScratchDir, wait_exit};

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, service_config, sleep_config};

#[test]
fn a_wait_ends_after_its_limit_and_says_what_it_waits_for() {
    let scratch = ScratchDir::new().unwrap();
    let keys = "readiness = { probe = [\"/bin/false\"] }";
    let depends = "depends_on = [\"bar\"]";
    let config = format!("{NO_DAEMONS}{}{}", sleep_config("bar", keys), sleep_config("foo", depends));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    for action in ["restart", "start"] {
        let ended = node.nodectl(&[action, "foo", "--wait", "300ms"]);
        ended.assert_fails_in_a_line(
            6,
            "root.service.foo is not ready after 300ms, waiting for root.service.bar to become ready; see \
             `nodectl status root.service.foo`",
        );
    }
    assert_eq!(node.ask(&["stop", "--wait", "60s", "foo"]), "root.service.foo is stopped\n");
    node.stop();
}

#[test]
fn a_short_name_is_that_of_the_only_dn_that_ends_with_it() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("web", "")));
    node.wait_ready("web");
    assert_eq!(node.ask_json(&["status", "web"])["node"]["dn"], "root.service.web");
    assert_eq!(node.ask_json(&["restart", "--wait", "service.web"])["dn"], "root.service.web");
    assert_eq!(node.ask(&["signal", "web", "SIGCONT"]), "SIGCONT was sent to root.service.web\n");
    assert!(node.ask(&["log-level", "web"]).starts_with("root.service.web: "));
    node.ask(&["logs", "web"]);
    node.nodectl(&["status", "webb"]).assert_fails_in_a_line(4, "did you mean root.service.web?");
    node.stop();
}

#[test]
fn events_of_a_dn_leave_out_those_of_all_others() {
    let config = format!("{NO_DAEMONS}{}{}", sleep_config("a", ""), sleep_config("b", ""));
    let node = NodedProcess::start(&config);
    node.wait_ready("a");
    node.wait_ready("b");
    let dns = |args: &[&str]| {
        let lines = node.ask(&[&["-o", "json", "events"], args].concat());
        let dn = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["dn"].clone();
        let mut dns: Vec<_> = lines.lines().map(|line| dn(line).as_str().unwrap().to_owned()).collect();
        dns.dedup();
        dns
    };
    assert_eq!(dns(&["a"]), ["root.service.a"]);
    assert_eq!(dns(&["-n", "1", "root.service.b"]), ["root.service.b"]);
    assert_eq!(dns(&["service"]), ["root.service"]);
    let below = dns(&["service", "--children"]);
    assert!(below.contains(&"root.service.a".to_owned()) && below.contains(&"root.service.b".to_owned()));
    assert!(below.iter().all(|dn| dn.starts_with("root.service")), "{below:?}");
    node.nodectl(&["events", "c"]).assert_fails(4, "unknown DN");
    let mut follow = node.nodectl_command(&["-o", "json", "events", "-f", "-n", "0", "a"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    node.ask(&["restart", "--wait", "b"]);
    node.stop();
    // The stream ends with the node, although the last events are of others.
    assert!(wait_exit(&mut follow, TEST_TIMEOUT).unwrap().is_some());
    let output = follow.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("root.service.a") && !text.contains("root.service.b"), "{text}");
}

#[test]
fn errors_are_json_where_the_output_is() {
    let node =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "exit 3", "restart = \"never\"")));
    let socket = node.scratch.path().join("none.sock");
    let socket = socket.to_str().unwrap();
    for (args, kind, code) in [
        (&["status", "nothing"][..], "not-found", 4),
        (&["start", "root.service.a", "--wait", "soon"], "usage", 2),
        (&["dance"], "usage", 2),
        (&["stop", "root.control"], "failed-precondition", 1),
        (&["--socket", socket, "tree"], "unreachable", 3),
        (&["stop", "--wait", "0s", "control.nothing"], "not-found", 4),
    ] {
        let ended = node.nodectl(&[args, &["-o", "json"]].concat());
        let error: serde_json::Value = serde_json::from_str(&ended.stderr).expect(&ended.stderr);
        let error = &error["error"];
        assert_eq!((&error["kind"], ended.code), (&kind.into(), Some(code)), "{args:?}: {error}");
        assert_eq!(error["exit_code"], code, "{error}");
        assert!(!error["message"].as_str().unwrap().is_empty() && ended.stdout.is_empty(), "{ended:?}");
    }
    node.stop();
}
