//! The lifecycle of a node as a process: ready, graceful shutdown, forced exit, skipped services.

use std::io::{PipeReader, PipeWriter, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use testbed::ScratchDir;

use crate::harness::{
    Ended, EtcdPorts, NO_DAEMONS, NodedProcess, PublicProgram, STUBBORN, TEST_TIMEOUT, noded_command,
    plain_user, service_config, sleep_config, wait, wait_gone,
};

/// The socket at which noded notifies its service manager.
pub(crate) struct ServiceManager(UnixDatagram);

impl ServiceManager {
    /// Starts noded with such a manager.
    pub(crate) fn start_noded(config: &str) -> (Self, NodedProcess) {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let node = NodedProcess::spawn(scratch, config, &[], |command| {
            command.env("NOTIFY_SOCKET", &path);
        });
        (Self(socket), node)
    }

    /// The next message.
    pub(crate) fn hear(&self) -> String {
        let mut buffer = [0; 4096];
        let length = self.0.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

#[test]
fn noded_notifies_its_service_manager_of_readiness_and_of_the_stop() {
    let (manager, mut node) = ServiceManager::start_noded(NO_DAEMONS);
    assert_eq!(manager.hear(), "READY=1");
    node.ask(&["tree"]);
    node.signal(Signal::SIGINT);
    assert_eq!(manager.hear(), "STOPPING=1");
    let (status, lines) = node.wait_end();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
}

#[test]
fn a_crash_loop_evicts_no_event_of_another_service() {
    let config = format!(
        "events.keep = 40\n{NO_DAEMONS}{}{}",
        sleep_config("quiet", ""),
        service_config("loop", "exit 1", "backoff = { initial = \"1ms\", max = \"1ms\" }"),
    );
    let node = NodedProcess::start(&config);
    let live = node.follow(&["events", "-f", "-o", "json"]);
    live.find_value(|event| event["dn"] == "root.service.loop" && event["generation"].as_u64() >= Some(50));
    // Events of a running loop come while they are read.
    node.ask(&["stop", "--wait", "root.service.loop"]);
    let events = node.events();
    let of = |dn| events.iter().filter(move |event| event["dn"] == dn).map(|event| event["change"].clone());
    assert_eq!(of("root.service.quiet").collect::<Vec<_>>(), ["started", "ready"]);
    assert!(of("root.service.loop").count() > 10 && events.len() <= 40, "{events:?}");
    node.stop();
}

/// A node with these services, which all ignore SIGTERM by now.
fn node_with_stubborn_services(count: usize, service: impl Fn(usize) -> String) -> NodedProcess {
    let config: String = (0..count).map(service).collect();
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{config}"));
    node.wait_for_outputs("set", count);
    node
}

// One after the other, they take 100 seconds.
#[test]
fn independent_services_that_ignore_sigterm_take_one_grace_period_together() {
    let service = |n| service_config(&format!("s{n}"), STUBBORN, "grace = \"1s\"");
    let node = node_with_stubborn_services(100, service);
    let started = Instant::now();
    node.stop();
    let elapsed = started.elapsed();
    println!("100 services that ignore SIGTERM, grace 1 s: exit after {elapsed:?}");
    assert!((Duration::from_secs(1)..Duration::from_secs(20)).contains(&elapsed), "{elapsed:?}");
}

#[test]
fn services_stop_before_what_they_depend_on() {
    let chain = |n: usize| {
        let after = if n > 0 { format!("depends_on = [\"s{}\"]\n", n - 1) } else { String::new() };
        service_config(&format!("s{n}"), STUBBORN, &format!("grace = \"100ms\"\n{after}"))
    };
    let node = node_with_stubborn_services(10, chain);
    let started = Instant::now();
    let lines = node.stop();
    println!("a chain of 10, grace 100 ms: exit after {:?}", started.elapsed());
    assert!(started.elapsed() >= 10 * Duration::from_millis(100), "{:?}", started.elapsed());
    let killed = lines.iter().filter(|line| line.contains("killed by SIGKILL"));
    let order: Vec<&str> = killed.filter_map(|line| line.split_whitespace().next()).collect();
    let expected: Vec<String> = (0..10).rev().map(|n| format!("root.service.s{n}")).collect();
    assert_eq!(order, expected, "{lines:#?}");
}

#[test]
fn a_stop_that_needed_sigkill_is_seen_in_events_status_and_log() {
    let node = node_with_stubborn_services(1, |_| service_config("stubborn", STUBBORN, "grace = \"300ms\""));
    let dn = "root.service.stubborn";
    node.ask(&["stop", "--wait", dn]);
    let kill = "killed by SIGKILL: still running 300ms after SIGTERM";
    let events = node.ask(&["events"]);
    assert!(events.contains(kill), "{events}");
    let status = node.status(dn);
    let exit = &status["exits"][0];
    assert_eq!(
        (&exit["reason"], &exit["signal"]),
        (&format!("canceled; {kill}").into(), &9.into()),
        "{status}"
    );
    let log = node.ask(&["logs", "--min-level", "warn", dn]);
    assert!(log.contains(kill), "{log}");
    node.stop();
}

/// A service that ignores TERM, and the pid of its shell.
fn start_stubborn_service(grace: &str) -> (NodedProcess, u64) {
    let keys = format!("grace = {grace:?}");
    let node = node_with_stubborn_services(1, |_| service_config("stubborn", STUBBORN, &keys));
    let pid = node.status("root.service.stubborn")["pid"].as_u64().unwrap();
    (node, pid)
}

#[test]
fn a_second_signal_forces_the_exit_and_leaves_no_process_behind() {
    let (mut node, pid) = start_stubborn_service("1h");
    node.signal(Signal::SIGTERM);
    node.wait_for_line("a second signal forces");
    assert_eq!(node.force_exit(), Some(7));
    node.wait_end();
    wait_gone(pid);
}

#[test]
fn repeated_signals_within_a_second_count_as_one() {
    let (mut node, _) = start_stubborn_service("1500ms");
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        node.signal(signal);
    }
    let (status, lines) = node.wait_end();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
}

/// A full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let bytes = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    writer.write_all(&vec![b'x'; usize::try_from(bytes).unwrap()]).unwrap();
    (reader, writer)
}

#[test]
fn noded_exits_on_a_failure_though_its_stderr_is_not_read() {
    let (_reader, writer) = full_pipe();
    let mut child =
        noded_command(&["run", "--config", "/nowhere/noded.toml"]).stderr(writer).spawn().unwrap();
    let ended = || child.try_wait().unwrap().ok_or_else(|| anyhow::anyhow!("still running"));
    let ended = testbed::wait_until(TEST_TIMEOUT, "its exit", ended);
    if ended.is_err() {
        child.kill().unwrap();
    }
    assert_eq!(ended.unwrap().code(), Some(3));
}

#[test]
fn sigterm_stops_noded_though_its_stderr_is_not_read() {
    let (_reader, writer) = full_pipe();
    let mut node =
        NodedProcess::spawn(ScratchDir::new().unwrap(), NO_DAEMONS, &["--log-level", "info"], |command| {
            command.stderr(writer);
        });
    wait("the control API", || {
        anyhow::ensure!(node.nodectl(&["tree"]).code == Some(0), "not yet");
        Ok(())
    });
    node.signal(Signal::SIGTERM);
    assert_eq!(node.wait_exit(), Some(0));
}

#[test]
fn debug_entries_of_noded_are_shown_on_request() {
    for (level, shown) in [("debug", true), ("info", false)] {
        let scratch = ScratchDir::new().unwrap();
        let node = NodedProcess::start_in(scratch, NO_DAEMONS, &["--log-level", level]);
        let log = node.ask(&["-o", "json", "logs"]);
        assert_eq!(log.contains(r#""level":"debug""#), shown, "{log}");
        let lines = node.stop();
        let debug =
            lines.iter().any(|line| line.split_whitespace().nth(1).is_some_and(|at| at.starts_with('D')));
        assert_eq!(debug, shown, "{lines:#?}");
    }
}

/// The kernel hands the words of its command line that it does not know to init.
#[test]
#[ignore = "needs root: it makes a PID namespace"]
fn words_of_the_kernels_command_line_do_no_harm_to_pid_1() {
    for words in [&["nokaslr", "run", "splash"][..], &["run", "nokaslr"]] {
        let scratch = ScratchDir::new().unwrap();
        let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
        std::fs::write(&file, NO_DAEMONS).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc", env!("CARGO_BIN_EXE_noded")]);
        command.args(words).arg("--config").arg(&file).arg("--data").arg(&data);
        let mut node = NodedProcess::spawn_command(scratch, command);
        let lines = node.wait_for_line("control socket at");
        let ignored = "noded: ignoring \"nokaslr\" from the kernel's command line";
        assert!(lines.iter().any(|line| line.starts_with(ignored)), "{lines:#?}");
        assert_eq!(node.ask_json(&["version"])["pid"], 1);
    }
    // For any other process a wrong subcommand is an error.
    Ended::of(&mut noded_command(&["nokaslr"])).assert_fails(2, "unrecognized subcommand 'nokaslr'");
}

#[test]
fn lines_on_the_console_name_no_unknown_source_file() {
    let scratch = ScratchDir::new().unwrap();
    let etcd = scratch.path().join("etcd");
    let line = r#"{"level":"warn","ts":"2026-11-21T21:20:49.655Z","msg":"a line without a caller"}"#;
    std::fs::write(&etcd, format!("#!/bin/sh\necho '{line}'\nexec sleep 1000\n")).unwrap();
    std::fs::set_permissions(&etcd, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ports = EtcdPorts::reserve();
    let section = ports.section(&format!("binary = {etcd:?}\n"));
    let config = format!("services.containerd.enable = false\n{section}");
    let mut node = NodedProcess::spawn(scratch, &config, &[], |_| {});
    let lines = node.wait_for_line("a line without a caller");
    assert!(lines.last().unwrap().contains("root.etcd"), "{lines:#?}");
    assert!(lines.iter().all(|line| !line.contains("???")), "{lines:#?}");
}

#[test]
fn dev_mode_skips_missing_services_with_the_reason_and_runs_the_rest() {
    let config = format!(
        "services.containerd.binary = \"/nowhere/containerd\"\nservices.etcd.binary = \"/nowhere/etcd\"\nkernel.log = false\n{}{}{}",
        sleep_config("runs", ""),
        sleep_config("needs-etcd", "depends_on = [\"etcd\"]"),
        "[[service]]\nname = \"absent\"\ncommand = [\"/nowhere/program\"]\n",
    );
    let mut node = NodedProcess::spawn(ScratchDir::new().unwrap(), &config, &["--dev"], |_| {});
    let is_skipped = |line: &String| line.contains("root.etcd") && line.contains("skipped: /nowhere/etcd");
    // The log and the line about the socket are forwarded to stderr in either order.
    if !node.wait_for_line("control socket at").iter().any(is_skipped) {
        let lines = node.wait_for_line("skipped: /nowhere/etcd");
        assert!(lines.last().is_some_and(is_skipped), "{lines:#?}");
    }
    node.wait_ready("root.service.runs");

    for (dn, reason) in [
        ("root.etcd", "/nowhere/etcd does not exist"),
        ("root.containerd", "/nowhere/containerd does not exist"),
        ("root.service.absent", "/nowhere/program does not exist"),
        ("root.service.needs-etcd", "depends on root.etcd, which is skipped"),
    ] {
        let status = node.status(dn);
        let why = status["waiting_for"].as_str().unwrap();
        assert!(status["state"] == "skipped" && why.contains(reason), "{status}");
        assert!(node.ask(&["logs", dn]).contains("skipped: "), "{dn}");
        assert!(node.ask(&["status", dn]).contains(reason), "{dn}");
    }
    assert_eq!(node.status("root.service.runs")["state"], "ready");
    node.nodectl(&["restart", "root.etcd"]).assert_fails(1, "skipped");
    let text = node.nodectl(&["status"]).output();
    assert!(text.contains(" runnables are ready, 4 skipped"), "{text}");
    node.stop();
}

#[test]
fn containerd_without_root_is_skipped_in_dev_mode_and_otherwise_rejected() {
    let scratch = ScratchDir::new().unwrap();
    // Any executable will do: it does not run.
    let config = "services.etcd.enable = false\nservices.containerd.binary = \"/bin/true\"\n";
    chown(scratch.path(), plain_user(), plain_user()).unwrap();
    let noded = PublicProgram::noded();
    let checked = Ended::of(&mut noded.node_command("check", scratch.path(), config));
    checked.assert_fails(4, "noded: containerd: needs root: run noded as root, or set");

    let mut run = noded.node_command("run", scratch.path(), config);
    run.arg("--dev");
    let node = NodedProcess::start_command(scratch, run);
    assert_eq!(node.status("root.containerd")["state"], "skipped");
    node.stop();
}
