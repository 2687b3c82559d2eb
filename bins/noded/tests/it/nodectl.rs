//! nodectl as its user sees it.

use std::io::Read as _;
use std::process::{ExitStatus, Stdio};

use nix::sys::signal::Signal;
use testbed::{Scratch, wait_until};

use crate::harness::{BARE, HANG, Noded, failed, service};

const PATH: &str = "environment = { PATH = \"/usr/bin:/bin\" }";

#[test]
fn a_node_that_does_not_answer_is_given_up_on() {
    let node = Noded::start(BARE);
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
        let (text, code) = failed(&node.nodectl(&[&["--timeout", "0.2"], args].concat()));
        assert_eq!(code, Some(3), "{args:?}: {text}");
        assert!(text.starts_with("nodectl: noded does not answer"), "{args:?}: {text}");
    }
    node.signal(Signal::SIGCONT);
    node.stop();
}

#[test]
fn a_follower_ends_with_its_reader_though_nothing_comes() {
    let node = Noded::start(BARE);
    for args in [&["logs", "-f", "root"][..], &["events", "-f"], &["tree", "--watch"]] {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut child = node.nodectl_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        if args[0] != "logs" {
            // The first of it has come: from now on nothing happens.
            reader.read_exact(&mut [0]).unwrap();
        }
        drop(reader);
        let ended = || child.try_wait().unwrap().ok_or_else(|| anyhow::anyhow!("it goes on"));
        let status: ExitStatus = wait_until(HANG, "its end", ended).unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}");
    }
    node.stop();
}

#[test]
fn actions_say_in_json_what_stands_since() {
    let node = Noded::start(&format!("{BARE}{}", service("a", "exec sleep 1000", PATH)));
    node.ask(&["start", "--wait", "root.service.a"]);
    for (args, state, generation) in [
        (["restart", "--wait"], "ready", 2),
        (["stop", "--wait"], "stopped", 2),
        (["start", "--wait"], "ready", 3),
    ] {
        let said = node.ask_json(&[&args[..], &["root.service.a"]].concat());
        assert_eq!(said["dn"], "root.service.a", "{said}");
        assert_eq!(said["action"], args[0], "{said}");
        assert_eq!((said["state"].as_str(), said["generation"].as_u64()), (Some(state), Some(generation)));
    }
    let said = node.ask_json(&["restart", "root.service.a"]);
    assert!(said["generation"].as_u64() >= Some(3) && said["state"].is_string(), "{said}");
    node.stop();
}

#[test]
fn the_control_api_is_restarted_and_waited_for_through_itself() {
    let node = Noded::start(BARE);
    for (dn, generation) in [("root.control", 2), ("root.control", 3), ("root", 2)] {
        let said = node.ask_json(&["restart", "--wait", dn]);
        assert_eq!(said["state"], "ready", "{said}");
        assert_eq!(said["generation"].as_u64(), Some(generation), "{said}");
    }
    node.ask(&["restart", "root.control"]);
    node.ask(&["tree"]);
    node.stop();
}

#[test]
fn a_socket_whose_file_was_removed_comes_back_with_a_restart() {
    let node = Noded::start(BARE);
    let socket = node.socket();
    let watch = node.follow(&["events", "-f"]);
    watch.find(|_| true);
    // The connection that is made already still works.
    let aside = socket.with_extension("aside");
    std::fs::rename(&socket, &aside).unwrap();
    node.ask(&["--socket", aside.to_str().unwrap(), "restart", "root.control"]);
    let there = || if socket.exists() { Ok(()) } else { anyhow::bail!("not yet") };
    wait_until(HANG, "the socket", there).unwrap();
    node.ask(&["tree"]);
    node.stop();
}

#[test]
fn a_node_that_drains_can_be_looked_at_and_takes_no_orders() {
    let script = "trap '' TERM; echo set; while :; do sleep 1000; done";
    let config = format!("{BARE}{}", service("a", script, &format!("grace = \"1h\"\n{PATH}")));
    let mut node = Noded::start_in(Scratch::new().unwrap(), &config, &[]);
    node.follow(&["logs", "-f", "--raw", "root.service.a"]).find(|entry| entry["text"] == "set");
    let watch = node.follow(&["tree", "--watch"]);
    watch.find(|_| true);
    let events = node.follow(&["events", "-f"]);
    node.signal(Signal::SIGTERM);
    events.find(|event| event["dn"] == "root.service.a" && event["change"] == "cancelling");

    let nodes = node.ask_json(&["tree"]);
    assert!(nodes.as_array().unwrap().iter().any(|node| node["dn"] == "root.service.a"), "{nodes}");
    let status = node.ask_json(&["status", "root.service.a"]);
    assert_eq!(status["node"]["state"], "ready", "{status}");
    assert!(node.ask(&["logs", "root.service.a"]).contains("set"));
    node.follow(&["tree", "--watch"]).find(|_| true);
    for action in ["start", "stop", "restart"] {
        let (text, code) = failed(&node.nodectl(&[action, "root.service.a"]));
        assert_eq!((text.as_str(), code), ("nodectl: the node is stopping", Some(3)), "{action}");
    }
    let forced = || {
        node.signal(Signal::SIGTERM);
        node.ended().ok_or_else(|| anyhow::anyhow!("it goes on"))
    };
    assert_eq!(wait_until(HANG, "its end", forced).unwrap().code(), Some(7));
}

#[test]
fn a_failed_service_shows_its_end_in_the_tree_and_raw_lines_their_time() {
    let keys = "readiness = \"exit\"\nrestart = \"never\"";
    let node = Noded::start(&format!("{BARE}{}", service("a", "echo last words; exit 3", keys)));
    node.wait_for_event("root.service.a", 1, "exited");
    let tree = node.ask(&["tree"]);
    assert!(tree.lines().any(|line| line.contains(" a ") && line.contains("exited with code 3")), "{tree}");
    node.follow(&["logs", "-f", "--raw", "root.service.a"]).find(|entry| entry["text"] == "last words");
    let log = node.ask(&["logs", "--raw", "root.service.a"]);
    let [line] = &log.lines().collect::<Vec<_>>()[..] else { panic!("one line: {log}") };
    let (time, rest) = line.split_once("  ").unwrap();
    assert!(time.ends_with('Z') && time.len() == 24, "{line}");
    assert_eq!(rest.split_whitespace().collect::<Vec<_>>(), ["root.service.a", "R", "last", "words"]);
    node.stop();
}
