//! The operator's services: order, readiness, restarts, output, environment.

use std::fs;

use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, service_config};

/// The tree entry of a runnable.
fn tree_entry(noded: &NodedProcess, dn: &str) -> serde_json::Value {
    noded.ask_json(&["status", dn])["node"].clone()
}

#[test]
fn the_output_of_a_service_is_its_log() {
    let noded = NodedProcess::start(&format!(
        "{NO_DAEMONS}{}",
        service_config("a", "echo out; echo err >&2; exec sleep 1000", "")
    ));
    noded.ask(&["start", "--wait", "root.service.a"]);
    for (text, stream) in [("out", "stdout"), ("err", "stderr")] {
        noded
            .follow(&["logs", "-f", "root.service.a"])
            .find_value(|entry| entry["text"] == text && entry["stream"] == stream);
    }
    noded.stop();
}

#[test]
fn a_service_starts_when_its_dependencies_are_ready_and_outlives_their_restart() {
    let scratch = ScratchDir::new().unwrap();
    let gate = scratch.path().join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let config = format!(
        "{NO_DAEMONS}{}{}",
        service_config("after", "exec sleep 1000", "depends_on = [\"step\"]"),
        service_config("step", &format!("read line < {}; exit 0", gate.display()), "readiness = \"exit\""),
    );
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let waiting = tree_entry(&noded, "root.service.after");
    assert_eq!(waiting["state"], "new");
    assert_eq!(waiting["waiting_on"][0], "root.service.step", "{waiting}");
    fs::write(&gate, "go\n").unwrap();
    noded.ask(&["start", "--wait", "root.service.after"]);
    assert_eq!(tree_entry(&noded, "root.service.step")["state"], "done");
    noded.ask(&["restart", "root.service.step"]);
    fs::write(&gate, "go\n").unwrap();
    noded.wait_for_event("root.service.step", 2, "exited");
    let after = tree_entry(&noded, "root.service.after");
    assert_eq!((after["state"].as_str(), after["generation"].as_u64()), (Some("ready"), Some(1)));
    noded.stop();
}

#[test]
fn a_failing_service_shows_its_code_its_last_lines_and_its_restarts() {
    let keys = "backoff = { initial = \"1ms\", max = \"1ms\" }";
    let noded =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "echo last words; exit 3", keys)));
    noded.wait_for_event("root.service.a", 3, "started");
    let status = tree_entry(&noded, "root.service.a");
    let exit = &status["exits"][0];
    assert_eq!(
        (exit["code"].as_i64(), exit["signal"].as_i64(), exit["state"].as_str()),
        (Some(3), None, Some("dead"))
    );
    assert_eq!(exit["output"][0], "last words", "{exit}");
    assert!(status["restarts"].as_u64() >= Some(2), "{status}");
    let text = noded.ask(&["status", "root.service.a"]);
    assert!(text.contains("exited with code 3") && text.contains("last words"), "{text}");
    noded.stop();
}

#[test]
fn a_service_that_exits_with_code_0_shows_the_code_and_its_last_lines() {
    let keys = "backoff = { initial = \"1ms\", max = \"1ms\" }";
    let noded =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "echo last words; exit 0", keys)));
    noded.wait_for_event("root.service.a", 2, "started");
    let status = tree_entry(&noded, "root.service.a");
    let exit = &status["exits"][0];
    assert_eq!((exit["code"].as_i64(), exit["state"].as_str()), (Some(0), Some("dead")), "{exit}");
    assert_eq!(exit["output"][0], "last words", "{exit}");
    let expected = "dead: exited with code 0 by itself";
    noded
        .follow(&["events", "-f"])
        .find_value(|event| event["dn"] == "root.service.a" && event["detail"] == expected);
    noded.stop();
}

#[test]
fn a_service_that_is_never_restarted_stays_dead() {
    let keys = "readiness = \"exit\"\nrestart = \"never\"";
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "exit 1", keys)));
    noded.wait_for_event("root.service.a", 1, "exited");
    let status = tree_entry(&noded, "root.service.a");
    assert_eq!(
        (status["state"].as_str(), status["generation"].as_u64()),
        (Some("dead"), Some(1)),
        "{status}"
    );
    noded.stop();
}

#[test]
fn a_service_has_the_configured_environment_and_directory() {
    let scratch = ScratchDir::new().unwrap();
    let result = scratch.path().join("result");
    let script = format!(
        "{{ pwd; echo $GREETING; /usr/bin/env | /usr/bin/grep -c ^NODEKEEL; }} > {}",
        result.display()
    );
    let keys = format!(
        "readiness = \"exit\"\nrestart = \"never\"\nenvironment = {{ GREETING = \"hello\" }}\ndirectory = {:?}",
        scratch.path()
    );
    let directory = scratch.path().display().to_string();
    let script = format!("{script}; exit 0");
    let mut noded = NodedProcess::spawn(
        scratch,
        &format!("{NO_DAEMONS}{}", service_config("a", &script, &keys)),
        &[],
        |command| {
            command.env("NODEKEEL_SECRET", "not for children");
        },
    );
    noded.wait_for_line("control socket at");
    noded.ask(&["start", "--wait", "root.service.a"]);
    assert_eq!(fs::read_to_string(&result).unwrap(), format!("{directory}\nhello\n0\n"));
    noded.stop();
}

#[test]
#[ignore = "needs root: it runs a service as another user"]
fn a_service_runs_as_the_configured_user() {
    let keys = "user = \"nobody\"\nenvironment = { PATH = \"/usr/bin:/bin\" }";
    let noded =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "id -un; exec sleep 1000", keys)));
    noded.follow(&["logs", "-f", "--raw", "root.service.a"]).find_value(|entry| entry["text"] == "nobody");
    noded.stop();
}

#[test]
fn a_probe_decides_when_a_service_is_ready() {
    let scratch = ScratchDir::new().unwrap();
    let (gate, asked) = (scratch.path().join("gate"), scratch.path().join("asked"));
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let probe = format!("touch {}; read line < {}", asked.display(), gate.display());
    let keys = format!(
        "readiness = {{ probe = [\"/bin/sh\", \"-c\", {probe:?}] }}\nenvironment = {{ PATH = \"/usr/bin:/bin\" }}"
    );
    let noded = NodedProcess::start_in(
        scratch,
        &format!("{NO_DAEMONS}{}", service_config("a", "exec sleep 1000", &keys)),
        &[],
    );
    assert_eq!(tree_entry(&noded, "root.service.a")["state"], "new");
    fs::write(&gate, "go\n").unwrap();
    noded.ask(&["start", "--wait", "root.service.a"]);
    assert!(asked.exists());
    noded.stop();
}

#[test]
fn a_probe_has_the_time_that_the_operator_gives() {
    let keys = "readiness = { probe = [\"/bin/sleep\", \"6\"], timeout = \"60s\" }";
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "exec sleep 1000", keys)));
    noded.wait_for_event("root.service.a", 1, "ready");
    noded.stop();
}

#[test]
fn a_probe_that_hangs_ends_with_its_service_and_so_do_its_children() {
    let scratch = ScratchDir::new().unwrap();
    let asked = scratch.path().join("asked");
    nix::unistd::mkfifo(&asked, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let probe = format!("sleep 1000 & echo asked > {}; wait", asked.display());
    let keys = format!(
        "readiness = {{ probe = [\"/bin/sh\", \"-c\", {probe:?}] }}\nenvironment = {{ PATH = \"/usr/bin:/bin\" }}"
    );
    let noded = NodedProcess::start_in(
        scratch,
        &format!("{NO_DAEMONS}{}", service_config("a", "exec sleep 1000", &keys)),
        &[],
    );
    assert_eq!(fs::read_to_string(&asked).unwrap(), "asked\n");
    noded.ask(&["stop", "--wait", "root.service.a"]);
    // Zombies too: no other process would wait for them.
    let all_exited = || match child_processes(noded.pid()) {
        children if children.is_empty() => Ok(()),
        children => anyhow::bail!("remaining children: {children:?}"),
    };
    testbed::wait_until(TEST_TIMEOUT, "the exit of all children of noded", all_exited).unwrap();
    noded.stop();
}

/// The children of a process, including zombies: pid, name, state.
fn child_processes(of: u32) -> Vec<String> {
    let stats = fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let parent = |stat: &str| stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok();
    stats.filter(|stat| parent(stat) == Some(of)).map(|stat| stat.chars().take(30).collect()).collect()
}

#[test]
fn a_nested_noded_reports_its_readiness_by_sd_notify() {
    let scratch = ScratchDir::new().unwrap();
    let inner = scratch.path().join("inner.toml");
    fs::write(&inner, NO_DAEMONS).unwrap();
    let data = scratch.path().join("inner");
    let command = [
        env!("CARGO_BIN_EXE_noded"),
        "run",
        "--config",
        inner.to_str().unwrap(),
        "--data",
        data.to_str().unwrap(),
    ];
    let config =
        format!("{NO_DAEMONS}[[service]]\nname = \"a\"\ncommand = {command:?}\nreadiness = \"notify\"\n");
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    noded.ask(&["start", "--wait", "root.service.a"]);
    let socket = data.join("run/control.sock");
    let inner = noded.ask_json(&["--socket", socket.to_str().unwrap(), "status"]);
    assert_ne!(inner["pid"].as_u64(), Some(u64::from(noded.pid())), "{inner}");
    noded.stop();
    assert!(!socket.exists(), "the nested noded was stopped gracefully, not killed");
}

#[test]
fn a_service_that_exceeds_its_restart_limit_stays_dead_until_it_is_started() {
    let keys =
        "backoff = { initial = \"1ms\", max = \"1ms\" }\nrestart_limit = { restarts = 2, period = \"10m\" }";
    let config = format!(
        "{NO_DAEMONS}{}{}",
        service_config("loop", "echo broken; exit 3", keys),
        service_config("other", "exec sleep 1000", "environment = { PATH = \"/usr/bin:/bin\" }"),
    );
    let node = NodedProcess::start(&config);
    for round in 1..=2 {
        node.wait_for_event("root.service.loop", 3 * round, "limit-exceeded");
        let status = node.ask(&["status", "root.service.loop"]);
        assert!(status.contains("dead") && status.contains("broken"), "{status}");
        let tree = node.ask_json(&["tree"]);
        let generation = |dn: &str| {
            let found = tree.as_array().unwrap().iter().find(|node| node["dn"] == dn).unwrap();
            found["generation"].as_u64().unwrap()
        };
        assert_eq!(
            [generation("root.service.loop"), generation("root.service.other"), generation("root")],
            [3 * round, 1, 1]
        );
        let logged = node.ask(&["logs", "root.service.loop", "--min-level", "error"]);
        assert!(
            logged.contains("restart limit exceeded, 2 restarts within 600s: stays dead until"),
            "{logged}"
        );
        node.ask(&["start", "root.service.loop"]);
    }
    node.stop();
}
