//! Settings of a service: its rights and limits, how it is watched and reloaded, and how its log is read.

use std::fs;
use std::path::Path;
use std::process::Command;

use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NodedProcess, node_command, service_config, wait};

/// Restarts at once.
const NO_BACKOFF: &str = "backoff = { initial = \"1ms\", max = \"1ms\" }";

fn start_service(script: &str, keys: &str) -> NodedProcess {
    let keys = format!("{keys}\n{NO_BACKOFF}");
    NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", script, &keys)))
}

/// The reason of the first exit.
fn first_exit(noded: &NodedProcess) -> String {
    noded.wait_for_event("root.service.a", 2, "started");
    noded.status("root.service.a")["exits"][0]["reason"].to_string()
}

#[test]
fn the_errors_of_a_kubelet_are_errors_of_its_log() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../logtree/testdata");
    for format in ["klog", "json"] {
        let file = testdata.join(format!("kubelet-1.36.3-{format}.txt"));
        let script = format!("cat {}; exec sleep 1000", file.display());
        let noded = start_service(&script, &format!("log = \"{format}\""));
        let errors = noded.follow(&["logs", "-f", "--min-level", "error", "root.service.a"]);
        // It is the only one, and the last line.
        let mut seen = Vec::new();
        errors.find_value(|entry| {
            seen.push(entry["message"].clone());
            entry["message"] == "command failed"
        });
        assert_eq!(seen, ["command failed"], "{format}");
        noded.stop();
    }
}

/// klog writes the local time of its program, without its zone.
#[test]
fn an_error_of_a_service_in_any_zone_is_an_error_of_now() {
    let line = r#"date "+E%m%d %H:%M:%S.000000 1 a.go:1] failed"; exec sleep 1000"#;
    for keys in ["environment = { PATH = \"/usr/bin:/bin\", TZ = \"JST-9\" }", ""] {
        let noded = start_service(line, &format!("log = \"klog\"\n{keys}"));
        let errors = noded.follow(&["logs", "-f", "--min-level", "error", "--since", "1m", "root.service.a"]);
        let entry = errors.find_value(|entry| entry["message"] == "failed");
        let seconds =
            |key: &str| entry[key].as_str().unwrap().parse::<prost_types::Timestamp>().unwrap().seconds;
        assert!((seconds("time") - seconds("claimed_time")).abs() <= 5, "{entry}");
        noded.stop();
    }
}

#[test]
fn a_service_that_is_silent_or_not_alive_restarts_with_the_reason() {
    let cases = [
        ("watchdog = \"200ms\"", "the process did not report to its watchdog (WATCHDOG=1) within 200ms"),
        (
            "liveness = { probe = [\"/bin/sh\", \"-c\", \"echo stuck; exit 3\"], period = \"20ms\", failure_threshold = 2 }",
            "failed 2 liveness probes in a row, and was stopped: killed by SIGTERM; last probe: exited with code 3: stuck",
        ),
    ];
    for (keys, reason) in cases {
        let noded = start_service("exec sleep 1000", keys);
        let exit = first_exit(&noded);
        assert!(exit.contains(reason), "{exit}");
        noded.stop();
    }
}

#[test]
fn nodectl_signals_and_reloads_a_service() {
    let script = "trap 'echo hup' HUP; trap 'echo usr1' USR1; echo up; while :; do sleep 0.01; done";
    let noded = start_service(script, "reload = [\"/bin/sh\", \"-c\", \"kill -HUP $MAINPID\"]");
    let log = noded.follow(&["logs", "-f", "--raw", "root.service.a"]);
    log.find_value(|entry| entry["text"] == "up");
    assert_eq!(noded.ask(&["signal", "root.service.a", "USR1"]).trim(), "USR1 was sent to root.service.a");
    log.find_value(|entry| entry["text"] == "usr1");
    assert_eq!(noded.ask(&["reload", "root.service.a"]).trim(), "root.service.a was asked to reload");
    log.find_value(|entry| entry["text"] == "hup");
    for (args, says) in [
        (["signal", "root.service.a", "SIGNAL"], "unknown signal \"SIGNAL\": use a name of signal(7)"),
        (["signal", "root.control", "HUP"], "root.control is not a [[service]]"),
        (["signal", "root.service.b", "HUP"], "root.service.b"),
    ] {
        let ended = noded.nodectl(&args);
        assert!(ended.code != Some(0) && ended.stderr.contains(says), "{args:?}: {ended:#?}");
    }
    noded.ask(&["stop", "--wait", "root.service.a"]);
    let ended = noded.nodectl(&["reload", "root.service.a"]);
    assert!(ended.stderr.contains("root.service.a has no running process"), "{ended:#?}");
    noded.stop();
}

#[test]
fn a_reload_command_has_more_time_than_other_requests() {
    let script = "trap 'echo hup' HUP; echo up; while :; do sleep 0.01; done";
    let keys = "reload = [\"/bin/sh\", \"-c\", \"sleep 0.5; kill -HUP $MAINPID\"]";
    let noded = start_service(script, keys);
    let log = noded.follow(&["logs", "-f", "--raw", "root.service.a"]);
    log.find_value(|entry| entry["text"] == "up");
    noded.ask(&["--timeout=0.1", "reload", "root.service.a"]);
    log.find_value(|entry| entry["text"] == "hup");
    noded.stop();
}

#[test]
fn a_service_has_its_limits_its_umask_and_its_stop_signal() {
    let script = "trap 'echo quit; exit 0' QUIT; echo $(ulimit -Sn) $(ulimit -Hn) $(umask); while :; do sleep 0.01; done";
    let keys = "stop_signal = \"QUIT\"\nlimits = { rlimits = { nofile = \"40:50\" } }\nprivileges = { umask = \"027\" }";
    let noded = start_service(script, keys);
    let log = noded.follow(&["logs", "-f", "--raw", "root.service.a"]);
    log.find_value(|entry| entry["text"] == "40 50 0027");
    noded.ask(&["stop", "--wait", "root.service.a"]);
    log.find_value(|entry| entry["text"] == "quit");
    noded.stop();
}

#[test]
#[ignore = "needs root: it runs a service as another user"]
fn a_service_of_another_user_has_its_uid_groups_and_capabilities() {
    let script = "grep -E '^(Uid|Groups|CapEff|CapBnd|NoNewPrivs)' /proc/self/status | tr '\\t\\n' ' :'; echo; exec sleep 1000";
    let keys = "user = \"nobody\"\nprivileges = { groups = [\"daemon\"], capabilities = [\"net_bind_service\"], read_only_paths = [\"/usr\"] }";
    let noded = start_service(script, keys);
    let log = noded.follow(&["logs", "-f", "--raw", "root.service.a"]);
    let entry = log.find_value(|entry| entry["stream"] == "stdout");
    let text = entry["text"].to_string();
    for part in [
        "Uid: 65534 65534",
        "Groups: 1 65534",
        "CapEff: 0000000000000400",
        "CapBnd: 0000000000000400",
        "NoNewPrivs: 1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    noded.stop();
}

#[test]
#[ignore = "needs kernel"]
fn a_noded_that_the_kernel_spares_does_not_spare_its_services() {
    let scratch = ScratchDir::new().unwrap();
    let score = |name: &str| scratch.path().join(name);
    let write_score = |name: &str| {
        let to = score(name).display().to_string();
        format!("cat /proc/self/oom_score_adj >{to}.new; mv {to}.new {to}")
    };
    let script = |name: &str| format!("{}; exec sleep 1000", write_score(name));
    let probe = format!("readiness = {{ probe = [\"/bin/sh\", \"-c\", {:?}] }}", write_score("probe"));
    let config = format!(
        "{NO_DAEMONS}{}{}",
        service_config("default", &script("default"), &probe),
        service_config("set", &script("set"), "limits = { oom_score_adj = -300 }")
    );
    let noded = node_command("run", scratch.path(), &config);
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo -900 >/proc/self/oom_score_adj && exec \"$@\"", "sh"]);
    command.arg(noded.get_program()).args(noded.get_args());
    let (default, probe, set) = (score("default"), score("probe"), score("set"));
    let noded = NodedProcess::start_command(scratch, command);
    for (path, expected) in [(default, "0"), (probe, "0"), (set, "-300")] {
        let found = wait("the score", || Ok(fs::read_to_string(&path)?));
        assert_eq!(found.trim(), expected, "{}", path.display());
    }
    let own = fs::read_to_string(format!("/proc/{}/oom_score_adj", noded.pid())).unwrap();
    assert_eq!(own.trim(), "-900");
    noded.stop();
}

#[test]
fn a_service_restarts_with_what_it_depends_on_if_it_is_told_to() {
    let dependent = |name: &str, keys: &str| {
        service_config(name, "exec sleep 1000", &format!("depends_on = [\"a\"]\n{keys}"))
    };
    let bound = dependent("bound", "restart_with_dependencies = true");
    let a = service_config("a", "exec sleep 1000", "");
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{a}{bound}{}", dependent("free", "")));
    for dn in ["root.service.bound", "root.service.free"] {
        noded.wait_for_event(dn, 1, "ready");
    }
    noded.ask(&["stop", "--wait", "root.service.a"]);
    noded.wait_for_event("root.service.bound", 2, "started");
    assert_eq!(noded.status("root.service.bound")["waiting_for"], "root.service.a to become ready");
    let events = noded.ask(&["events", "root.service.bound"]);
    assert!(events.contains("its dependency root.service.a is no longer ready"), "{events}");
    noded.ask(&["start", "--wait", "root.service.a"]);
    noded.wait_for_event("root.service.bound", 2, "ready");
    assert_eq!(noded.status("root.service.free")["generation"], 1);
    noded.stop();
}
