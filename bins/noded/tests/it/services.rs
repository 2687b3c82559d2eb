//! The operator's services: order, readiness, restarts, output, environment.

use std::fs;

use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NodedProcess, make_fifo, service_config, sleep_config, wait};

#[test]
fn the_output_of_a_service_is_its_log() {
    let noded = NodedProcess::start(&format!(
        "{NO_DAEMONS}{}",
        service_config("a", "echo out; echo err >&2; exec sleep 1000", "")
    ));
    noded.wait_ready("root.service.a");
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
    let gate = make_fifo(scratch.path(), "gate");
    let config = format!(
        "{NO_DAEMONS}{}{}",
        sleep_config("after", "depends_on = [\"step\"]"),
        service_config("step", &format!("read line < {}; exit 0", gate.display()), "readiness = \"exit\""),
    );
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let waiting = noded.status("root.service.after");
    assert_eq!(waiting["state"], "new");
    assert_eq!(waiting["waiting_on"][0], "root.service.step", "{waiting}");
    fs::write(&gate, "go\n").unwrap();
    noded.wait_ready("root.service.after");
    assert_eq!(noded.status("root.service.step")["state"], "done");
    noded.ask(&["restart", "root.service.step"]);
    fs::write(&gate, "go\n").unwrap();
    noded.wait_for_event("root.service.step", 2, "exited");
    let after = noded.status("root.service.after");
    assert_eq!((after["state"].as_str(), after["generation"].as_u64()), (Some("ready"), Some(1)));
    noded.stop();
}

#[test]
fn a_service_that_exits_shows_its_code_its_last_lines_and_its_restarts() {
    for (code, detail) in [(3, "dead: exited with code 3"), (0, "dead: exited with code 0 by itself")] {
        let keys = "backoff = { initial = \"1ms\", max = \"1ms\" }";
        let service = service_config("a", &format!("echo last words; exit {code}"), keys);
        let noded = NodedProcess::start(&format!("{NO_DAEMONS}{service}"));
        noded.wait_for_event("root.service.a", 3, "started");
        let status = noded.status("root.service.a");
        let exit = &status["exits"][0];
        let how = (exit["code"].as_i64(), exit["signal"].as_i64(), exit["state"].as_str());
        assert_eq!(how, (Some(code), None, Some("dead")), "{exit}");
        assert_eq!(exit["output"][0], "last words", "{exit}");
        assert!(status["restarts"].as_u64() >= Some(2), "{status}");
        let text = noded.ask(&["status", "root.service.a"]);
        assert!(text.contains(&format!("exited with code {code}")) && text.contains("last words"), "{text}");
        let events = noded.events();
        let is_exit = |event: &serde_json::Value| {
            event["detail"].as_str().is_some_and(|found| found.starts_with(detail))
        };
        assert!(events.iter().any(is_exit), "{events:#?}");
        noded.stop();
    }
}

#[test]
fn a_service_that_is_never_restarted_stays_dead() {
    let keys = "readiness = \"exit\"\nrestart = \"never\"";
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "exit 1", keys)));
    noded.wait_for_event("root.service.a", 1, "exited");
    let status = noded.status("root.service.a");
    assert!(status["state"] == "dead" && status["generation"] == 1, "{status}");
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
    let config = format!("{NO_DAEMONS}{}", service_config("a", &script, &keys));
    let mut noded = NodedProcess::spawn(scratch, &config, &[], |command| {
        command.env("NODEKEEL_SECRET", "not for children");
    });
    noded.wait_for_line("control socket at");
    noded.wait_ready("root.service.a");
    assert_eq!(fs::read_to_string(&result).unwrap(), format!("{directory}\nhello\n0\n"));
    noded.stop();
}

#[test]
fn a_probe_decides_when_a_service_is_ready() {
    let scratch = ScratchDir::new().unwrap();
    let (gate, asked) = (make_fifo(scratch.path(), "gate"), scratch.path().join("asked"));
    let probe = format!("touch {}; read line < {}", asked.display(), gate.display());
    let keys = format!("readiness = {{ probe = [\"/bin/sh\", \"-c\", {probe:?}] }}");
    let config = format!("{NO_DAEMONS}{}", sleep_config("a", &keys));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    assert_eq!(noded.status("root.service.a")["state"], "new");
    fs::write(&gate, "go\n").unwrap();
    noded.wait_ready("root.service.a");
    assert!(asked.exists());
    noded.stop();
}

#[test]
fn a_probe_has_the_time_that_the_operator_gives() {
    let keys = "readiness = { probe = [\"/bin/sleep\", \"6\"], timeout = \"60s\" }";
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("a", keys)));
    noded.wait_for_event("root.service.a", 1, "ready");
    noded.stop();
}

#[test]
fn a_probe_that_hangs_ends_with_its_service_and_so_do_its_children() {
    let scratch = ScratchDir::new().unwrap();
    let asked = make_fifo(scratch.path(), "asked");
    let probe = format!("sleep 1000 & echo asked > {}; wait", asked.display());
    let keys = format!("readiness = {{ probe = [\"/bin/sh\", \"-c\", {probe:?}] }}");
    let config = format!("{NO_DAEMONS}{}", sleep_config("a", &keys));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    assert_eq!(fs::read_to_string(&asked).unwrap(), "asked\n");
    noded.ask(&["stop", "--wait", "root.service.a"]);
    // Zombies too: no other process would wait for them.
    wait("the exit of all children of noded", || {
        let children = child_processes(noded.pid());
        anyhow::ensure!(children.is_empty(), "remaining children: {children:?}");
        Ok(())
    });
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
    let program = env!("CARGO_BIN_EXE_noded");
    let command = [program, "run", "--config", inner.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let config =
        format!("{NO_DAEMONS}[[service]]\nname = \"a\"\ncommand = {command:?}\nreadiness = \"notify\"\n");
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    noded.wait_ready("root.service.a");
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
        sleep_config("other", ""),
    );
    let node = NodedProcess::start(&config);
    for round in 1..=2 {
        node.wait_for_event("root.service.loop", 3 * round, "limit-exceeded");
        let status = node.ask(&["status", "root.service.loop"]);
        assert!(status.contains("dead") && status.contains("broken"), "{status}");
        for (dn, runs) in [("root.service.loop", 3 * round), ("root.service.other", 1), ("root", 1)] {
            assert_eq!(node.status(dn)["generation"], runs, "{dn}");
        }
        let logged = node.ask(&["logs", "root.service.loop", "--min-level", "error"]);
        assert!(
            logged.contains("restart limit exceeded, 2 restarts within 600s: stays dead until"),
            "{logged}"
        );
        node.ask(&["start", "root.service.loop"]);
    }
    node.stop();
}
