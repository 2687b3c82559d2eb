//! nodectl as its user sees it.

use std::io::Read as _;
use std::process::{ExitStatus, Stdio};

use nix::sys::signal::Signal;
use testbed::{ScratchDir, wait_until};

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, service_config, stderr_and_code};

const PATH: &str = "environment = { PATH = \"/usr/bin:/bin\" }";

#[test]
fn a_node_that_does_not_answer_times_out() {
    let node = NodedProcess::start(NO_DAEMONS);
    node.signal(Signal::SIGSTOP);
    for args in [
        &["tree"][..],
        &["tree", "--watch"],
        &["status", "root"],
        &["logs", "-f"],
        &["events"],
        &["restart", "--wait", "root.control"],
        &["version"],
    ] {
        let (text, code) = stderr_and_code(&node.nodectl(&[&["--timeout", "0.2"], args].concat()));
        assert_eq!(code, Some(3), "{args:?}: {text}");
        assert!(text.starts_with("nodectl: noded does not answer"), "{args:?}: {text}");
    }
    node.signal(Signal::SIGCONT);
    node.stop();
}

#[test]
fn a_follower_exits_when_its_reader_closes_the_pipe() {
    let node = NodedProcess::start(NO_DAEMONS);
    for args in [&["logs", "-f", "root"][..], &["events", "-f"], &["tree", "--watch"]] {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut child = node.nodectl_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        if args[0] != "logs" {
            // The first output has arrived: from now on nothing happens.
            reader.read_exact(&mut [0]).unwrap();
        }
        drop(reader);
        let ended = || child.try_wait().unwrap().ok_or_else(|| anyhow::anyhow!("still running"));
        let status: ExitStatus = wait_until(TEST_TIMEOUT, "its exit", ended).unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}");
    }
    node.stop();
}

#[test]
fn actions_report_state_and_generation_in_json() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "exec sleep 1000", PATH)));
    node.ask(&["start", "--wait", "root.service.a"]);
    for (args, state, generation) in [
        (["restart", "--wait"], "ready", 2),
        (["stop", "--wait"], "stopped", 2),
        (["start", "--wait"], "ready", 3),
    ] {
        let output = node.ask_json(&[&args[..], &["root.service.a"]].concat());
        assert_eq!(output["dn"], "root.service.a", "{output}");
        assert_eq!(output["action"], args[0], "{output}");
        assert_eq!(
            (output["state"].as_str(), output["generation"].as_u64()),
            (Some(state), Some(generation))
        );
    }
    let output = node.ask_json(&["restart", "root.service.a"]);
    assert!(output["generation"].as_u64() >= Some(3) && output["state"].is_string(), "{output}");
    node.stop();
}

#[test]
fn the_control_api_can_be_restarted_through_itself_with_wait() {
    let node = NodedProcess::start(NO_DAEMONS);
    for (dn, generation) in [("root.control", 2), ("root.control", 3), ("root", 2)] {
        let output = node.ask_json(&["restart", "--wait", dn]);
        assert_eq!(output["state"], "ready", "{output}");
        assert_eq!(output["generation"].as_u64(), Some(generation), "{output}");
    }
    node.ask(&["restart", "root.control"]);
    node.ask(&["tree"]);
    node.stop();
}

#[test]
fn a_removed_socket_file_is_created_again_by_a_restart() {
    let node = NodedProcess::start(NO_DAEMONS);
    let socket = node.socket();
    let watch = node.follow(&["events", "-f"]);
    watch.find_value(|_| true);
    // The existing connection still works.
    let aside = socket.with_extension("aside");
    std::fs::rename(&socket, &aside).unwrap();
    node.ask(&["--socket", aside.to_str().unwrap(), "restart", "root.control"]);
    let there = || if socket.exists() { Ok(()) } else { anyhow::bail!("not yet") };
    wait_until(TEST_TIMEOUT, "the socket", there).unwrap();
    node.ask(&["tree"]);
    node.stop();
}

#[test]
fn a_stopping_node_answers_reads_and_rejects_actions() {
    let script = "trap '' TERM; echo set; while :; do sleep 1000; done";
    let config = format!("{NO_DAEMONS}{}", service_config("a", script, &format!("grace = \"1h\"\n{PATH}")));
    let mut node = NodedProcess::start_in(ScratchDir::new().unwrap(), &config, &[]);
    node.follow(&["logs", "-f", "--raw", "root.service.a"]).find_value(|entry| entry["text"] == "set");
    let watch = node.follow(&["tree", "--watch"]);
    watch.find_value(|_| true);
    let events = node.follow(&["events", "-f"]);
    node.signal(Signal::SIGTERM);
    events.find_value(|event| event["dn"] == "root.service.a" && event["change"] == "cancelling");

    let nodes = node.ask_json(&["tree"]);
    assert!(nodes.as_array().unwrap().iter().any(|node| node["dn"] == "root.service.a"), "{nodes}");
    let status = node.ask_json(&["status", "root.service.a"]);
    assert_eq!(status["node"]["state"], "ready", "{status}");
    assert!(node.ask(&["logs", "root.service.a"]).contains("set"));
    node.follow(&["tree", "--watch"]).find_value(|_| true);
    for action in ["start", "stop", "restart"] {
        let (text, code) = stderr_and_code(&node.nodectl(&[action, "root.service.a"]));
        assert_eq!((text.as_str(), code), ("nodectl: the node is stopping", Some(3)), "{action}");
    }
    let forced = || {
        node.signal(Signal::SIGTERM);
        node.try_wait().ok_or_else(|| anyhow::anyhow!("still running"))
    };
    assert_eq!(wait_until(TEST_TIMEOUT, "its exit", forced).unwrap().code(), Some(7));
}

#[test]
fn a_failed_service_shows_its_exit_in_the_tree_and_raw_lines_show_their_time() {
    let keys = "readiness = \"exit\"\nrestart = \"never\"";
    let node =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "echo last words; exit 3", keys)));
    node.wait_for_event("root.service.a", 1, "exited");
    let tree = node.ask(&["tree"]);
    assert!(tree.lines().any(|line| line.contains(" a ") && line.contains("exited with code 3")), "{tree}");
    node.follow(&["logs", "-f", "--raw", "root.service.a"]).find_value(|entry| entry["text"] == "last words");
    let log = node.ask(&["logs", "--raw", "root.service.a"]);
    let [line] = &log.lines().collect::<Vec<_>>()[..] else { panic!("one line: {log}") };
    let (time, rest) = line.split_once("  ").unwrap();
    assert!(time.ends_with('Z') && time.len() == 24, "{line}");
    assert_eq!(rest.split_whitespace().collect::<Vec<_>>(), ["root.service.a", "R", "last", "words"]);
    node.stop();
}
