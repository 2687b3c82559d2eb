//! The lifecycle of a node as a process: ready, graceful shutdown, forced exit, skipped services.

use std::io::{PipeReader, PipeWriter, Write as _};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use testbed::ScratchDir;

use crate::harness::{
    NO_DAEMONS, NodedProcess, PublicProgram, TEST_TIMEOUT, noded_command, plain_user, service_config,
    stderr_and_code,
};

/// The key of a service whose script runs programs.
const PATH: &str = "environment = { PATH = \"/usr/bin:/bin\" }";

#[test]
fn noded_notifies_its_service_manager_of_readiness_and_of_the_stop() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut node = NodedProcess::spawn(scratch, NO_DAEMONS, &[], |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    let mut buffer = [0; 64];
    let mut hear = || {
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert_eq!(hear(), "READY=1");
    node.ask(&["tree"]);
    node.signal(Signal::SIGINT);
    assert_eq!(hear(), "STOPPING=1");
    let (status, lines) = node.wait();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
}

#[test]
fn a_crash_loop_evicts_no_event_of_another_service() {
    let config = format!(
        "events.keep = 40\n{NO_DAEMONS}{}{}",
        service_config("quiet", "exec sleep 1000", PATH),
        service_config("loop", "exit 1", "backoff = { initial = \"1ms\", max = \"1ms\" }"),
    );
    let node = NodedProcess::start_in(ScratchDir::new().unwrap(), &config, &[]);
    let live = node.follow(&["events", "-f", "-o", "json"]);
    live.find_value(|event| event["dn"] == "root.service.loop" && event["generation"].as_u64() >= Some(50));
    // Events of a running loop come while they are read.
    node.ask(&["stop", "root.service.loop"]);
    let events = node.ask(&["events", "-o", "json"]);
    let events: Vec<serde_json::Value> =
        events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |dn| events.iter().filter(move |event| event["dn"] == dn).map(|event| event["change"].clone());
    assert_eq!(of("root.service.quiet").collect::<Vec<_>>(), ["started", "ready"]);
    assert!(of("root.service.loop").count() > 10 && events.len() <= 40, "{events:?}");
    node.stop();
}

/// Ignores SIGTERM, and says so when it does.
const STUBBORN: &str = "trap '' TERM; echo set; while :; do sleep 1000; done";

/// A node with these services, which all ignore SIGTERM by now.
fn node_with_stubborn_services(count: usize, service: impl Fn(usize) -> String) -> NodedProcess {
    let config: String = (0..count).map(service).collect();
    let node = NodedProcess::start_in(ScratchDir::new().unwrap(), &format!("{NO_DAEMONS}{config}"), &[]);
    let mut set = 0;
    node.follow(&["logs", "-f", "--raw", "--children", "root.service"]).find_value(|entry| {
        set += usize::from(entry["text"] == "set");
        set == count
    });
    node
}

// One after the other, they take 100 seconds.
#[test]
fn independent_services_that_ignore_sigterm_take_one_grace_period_together() {
    let keys = format!("grace = \"1s\"\n{PATH}");
    let mut node = node_with_stubborn_services(100, |n| service_config(&format!("s{n}"), STUBBORN, &keys));
    let started = Instant::now();
    node.signal(Signal::SIGTERM);
    let (status, lines) = node.wait();
    let elapsed = started.elapsed();
    println!("100 services that ignore SIGTERM, grace 1 s: exit after {elapsed:?}");
    assert_eq!(status.code(), Some(0), "{lines:#?}");
    assert!((Duration::from_secs(1)..Duration::from_secs(20)).contains(&elapsed), "{elapsed:?}");
}

#[test]
fn services_stop_before_what_they_depend_on() {
    let chain = |n: usize| {
        let after = if n > 0 { format!("depends_on = [\"s{}\"]\n", n - 1) } else { String::new() };
        service_config(&format!("s{n}"), STUBBORN, &format!("grace = \"100ms\"\n{after}{PATH}"))
    };
    let mut node = node_with_stubborn_services(10, chain);
    let started = Instant::now();
    node.signal(Signal::SIGTERM);
    let (status, lines) = node.wait();
    println!("a chain of 10, grace 100 ms: exit after {:?}", started.elapsed());
    assert_eq!(status.code(), Some(0), "{lines:#?}");
    assert!(started.elapsed() >= 10 * Duration::from_millis(100), "{:?}", started.elapsed());
    let killed = lines.iter().filter(|line| line.contains("killed by SIGKILL"));
    let order: Vec<&str> = killed.filter_map(|line| line.split_whitespace().next()).collect();
    let expected: Vec<String> = (0..10).rev().map(|n| format!("root.service.s{n}")).collect();
    assert_eq!(order, expected, "{lines:#?}");
}

#[test]
fn a_stop_that_needed_sigkill_is_seen_in_events_status_and_log() {
    let keys = format!("grace = \"300ms\"\n{PATH}");
    let config = format!("{NO_DAEMONS}{}", service_config("stubborn", STUBBORN, &keys));
    let node = NodedProcess::start_in(ScratchDir::new().unwrap(), &config, &[]);
    let dn = "root.service.stubborn";
    node.follow(&["logs", "-f", "--raw", dn]).find_value(|entry| entry["text"] == "set");
    node.ask(&["stop", "--wait", dn]);
    let kill = "killed by SIGKILL: still running 300ms after SIGTERM";
    let events = node.ask(&["events"]);
    assert!(events.contains(kill), "{events}");
    let status = node.ask_json(&["status", dn]);
    let exit = &status["node"]["exits"][0];
    assert_eq!(
        (&exit["reason"], &exit["signal"]),
        (&format!("canceled; {kill}").into(), &9.into()),
        "{status}"
    );
    let log = node.ask(&["logs", "--min-level", "warn", dn]);
    assert!(log.contains(kill), "{log}");
    node.stop();
}

#[test]
fn sigterm_stops_services_in_reverse_order_and_exits_with_0() {
    let scratch = ScratchDir::new().unwrap();
    let order = scratch.path().join("order");
    let script = |name: &str| {
        let said = format!("echo {name} >> {}", order.display());
        format!("trap '{said}; exit 0' TERM; echo set; while :; do sleep 1000 & wait; done")
    };
    let config = format!(
        "{NO_DAEMONS}{}{}",
        service_config("first", &script("first"), "environment = { PATH = \"/usr/bin:/bin\" }"),
        service_config(
            "second",
            &script("second"),
            "depends_on = [\"first\"]\nenvironment = { PATH = \"/usr/bin:/bin\" }"
        )
    );
    let mut node = NodedProcess::start_in(scratch, &config, &[]);
    for dn in ["root.service.first", "root.service.second"] {
        node.follow(&["logs", "-f", "--raw", dn]).find_value(|entry| entry["text"] == "set");
    }
    node.signal(Signal::SIGTERM);
    let (status, lines) = node.wait();
    assert_eq!(status.code(), Some(0), "{lines:#?}");
    assert_eq!(std::fs::read_to_string(order).unwrap(), "second\nfirst\n");
    assert!(!node.socket().exists());
}

/// A service that ignores TERM, and the pid of its shell.
fn start_stubborn_service(grace: &str) -> (NodedProcess, u32) {
    let script = "trap '' TERM; echo $$; while :; do sleep 1000; done";
    let config =
        format!("{NO_DAEMONS}{}", service_config("stubborn", script, &format!("grace = {grace:?}\n{PATH}")));
    let node = NodedProcess::start(&config);
    node.ask(&["start", "--wait", "root.service.stubborn"]);
    // The shell writes the line after it has set its trap.
    let line = node.follow(&["logs", "-f", "--raw", "root.service.stubborn"]).find_value(|_| true);
    let pid = line["text"].as_str().unwrap().parse().unwrap();
    (node, pid)
}

#[test]
fn a_second_signal_forces_the_exit_and_leaves_no_process_behind() {
    let (mut node, pid) = start_stubborn_service("1h");
    node.signal(Signal::SIGTERM);
    node.wait_for_line("a second signal forces");
    let forced = || {
        node.signal(Signal::SIGTERM);
        node.try_wait().ok_or_else(|| anyhow::anyhow!("still running"))
    };
    let status = testbed::wait_until(TEST_TIMEOUT, "its exit", forced).unwrap();
    let (_, lines) = node.wait();
    assert_eq!(status.code(), Some(7), "{lines:#?}");
    let has_exited = || match std::path::Path::new(&format!("/proc/{pid}")).exists() {
        false => Ok(()),
        true => anyhow::bail!("{pid} is running"),
    };
    testbed::wait_until(TEST_TIMEOUT, "the exit of the service", has_exited).unwrap();
}

/// A forked process holds a lock, which is free when it has exited.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn processes_forked_by_services_of_a_killed_node_end_at_the_next_start() {
    let scratch = ScratchDir::new().unwrap();
    let lock = scratch.path().join("lock");
    std::fs::write(&lock, "").unwrap();
    let script = format!("setsid flock {} sh -c 'echo locked; exec sleep 1000' & wait", lock.display());
    let config = format!("{NO_DAEMONS}{}", service_config("forks", &script, PATH));
    let mut node = NodedProcess::start_in(ScratchDir::new().unwrap(), &config, &[]);
    node.follow(&["logs", "-f", "--raw", "root.service.forks"]).find_value(|entry| entry["text"] == "locked");
    node.signal(Signal::SIGKILL);
    node.wait();
    let is_free = || match std::fs::File::open(&lock).unwrap().try_lock() {
        Ok(()) => Ok(()),
        Err(error) => anyhow::bail!("{error}"),
    };
    let again =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("other", "exec sleep 1000", "")));
    testbed::wait_until(TEST_TIMEOUT, "the lock", is_free).unwrap();
    again.stop();
}

#[test]
fn repeated_signals_within_a_second_count_as_one() {
    let (mut node, _) = start_stubborn_service("1500ms");
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        node.signal(signal);
    }
    let (status, lines) = node.wait();
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
fn noded_exits_on_a_failure_though_nobody_reads_stderr() {
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
fn sigterm_stops_noded_though_nobody_reads_stderr() {
    let (_reader, writer) = full_pipe();
    let mut node =
        NodedProcess::spawn(ScratchDir::new().unwrap(), NO_DAEMONS, &["--log-level", "info"], |command| {
            command.stderr(writer);
        });
    let ready = || match node.nodectl(&["tree"]).status.success() {
        true => Ok(()),
        false => anyhow::bail!("not yet"),
    };
    testbed::wait_until(TEST_TIMEOUT, "the control API", ready).unwrap();
    node.signal(Signal::SIGTERM);
    let ended = || node.try_wait().ok_or_else(|| anyhow::anyhow!("still running"));
    let status = testbed::wait_until(TEST_TIMEOUT, "its exit", ended).unwrap();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn debug_entries_of_noded_are_shown_on_request() {
    for (level, shown) in [("debug", true), ("info", false)] {
        let scratch = ScratchDir::new().unwrap();
        let mut node = NodedProcess::start_in(scratch, NO_DAEMONS, &["--log-level", level]);
        let log = node.ask(&["-o", "json", "logs"]);
        assert_eq!(log.contains(r#""level":"debug""#), shown, "{log}");
        node.signal(Signal::SIGTERM);
        let (_, lines) = node.wait();
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
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc", env!("CARGO_BIN_EXE_noded")]);
        command.args(words).arg("--config").arg(&file).arg("--data").arg(&data);
        command.stderr(std::process::Stdio::piped());
        let mut node = NodedProcess::spawn_command(scratch, command);
        let lines = node.wait_for_line("control socket at");
        let ignored = "noded: ignoring \"nokaslr\" from the kernel's command line";
        assert!(lines.iter().any(|line| line.starts_with(ignored)), "{lines:#?}");
        assert_eq!(node.ask_json(&["version"])["pid"], 1);
    }
    // For any other process a wrong subcommand is an error.
    let (text, code) = stderr_and_code(&noded_command(&["nokaslr"]).output().unwrap());
    assert!(code == Some(2) && text.contains("unrecognized subcommand 'nokaslr'"), "{text}");
}

#[test]
fn lines_on_the_console_name_no_unknown_source_file() {
    let scratch = ScratchDir::new().unwrap();
    let etcd = scratch.path().join("etcd");
    let line = r#"{"level":"warn","ts":"2026-11-21T21:20:49.655Z","msg":"a line without a caller"}"#;
    std::fs::write(&etcd, format!("#!/bin/sh\necho '{line}'\nexec sleep 1000\n")).unwrap();
    std::fs::set_permissions(&etcd, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ports = [testbed::reserve_port().unwrap(), testbed::reserve_port().unwrap()];
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = {etcd:?}\nclient_port = {}\npeer_port = {}\n",
        ports[0].number(),
        ports[1].number()
    );
    let mut node = NodedProcess::spawn(scratch, &config, &[], |_| {});
    let lines = node.wait_for_line("a line without a caller");
    assert!(lines.last().unwrap().contains("root.etcd"), "{lines:#?}");
    assert!(lines.iter().all(|line| !line.contains("???")), "{lines:#?}");
}

#[test]
fn dev_mode_skips_missing_services_with_the_reason_and_runs_the_rest() {
    let config = format!(
        "services.containerd.binary = \"/nowhere/containerd\"\nservices.etcd.binary = \"/nowhere/etcd\"\nkernel.log = false\n{}{}{}",
        service_config("runs", "exec sleep 1000", ""),
        service_config("needs-etcd", "exec sleep 1000", "depends_on = [\"etcd\"]"),
        "[[service]]\nname = \"absent\"\ncommand = [\"/nowhere/program\"]\n",
    );
    let mut node = NodedProcess::spawn(ScratchDir::new().unwrap(), &config, &["--dev"], |_| {});
    let is_skipped = |line: &String| line.contains("root.etcd") && line.contains("skipped: /nowhere/etcd");
    // The log is forwarded to stderr beside the line about the socket, in either order.
    if !node.wait_for_line("control socket at").iter().any(is_skipped) {
        let lines = node.wait_for_line("skipped: /nowhere/etcd");
        assert!(lines.last().is_some_and(is_skipped), "{lines:#?}");
    }
    node.ask(&["start", "--wait", "root.service.runs"]);

    let tree = node.ask_json(&["tree"]);
    let state = |dn: &str| {
        let node = tree
            .as_array()
            .unwrap()
            .iter()
            .find(|node| node["dn"] == dn)
            .unwrap_or_else(|| panic!("{dn}: {tree}"));
        (
            node["state"].as_str().unwrap().to_owned(),
            node["waiting_for"].as_str().unwrap_or_default().to_owned(),
        )
    };
    for (dn, reason) in [
        ("root.etcd", "/nowhere/etcd does not exist"),
        ("root.containerd", "/nowhere/containerd does not exist"),
        ("root.service.absent", "/nowhere/program does not exist"),
        ("root.service.needs-etcd", "depends on root.etcd, which is skipped"),
    ] {
        let (is, why) = state(dn);
        assert!(is == "skipped" && why.contains(reason), "{dn}: {is}, {why}");
        assert!(node.ask(&["logs", dn]).contains("skipped: "), "{dn}");
        assert!(node.ask(&["status", dn]).contains(reason), "{dn}");
    }
    assert_eq!(state("root.service.runs").0, "ready");
    let refused = node.nodectl(&["restart", "root.etcd"]);
    assert_eq!(refused.status.code(), Some(1));
    let status = node.nodectl(&["status"]);
    let text = String::from_utf8_lossy(&status.stdout);
    assert!(status.status.success() && text.contains(" runnables are ready, 4 skipped"), "{text}");
    node.stop();
}

#[test]
fn containerd_without_root_is_skipped_in_dev_mode_and_otherwise_rejected() {
    let scratch = ScratchDir::new().unwrap();
    // Any executable will do: it does not run.
    let config = "services.etcd.enable = false\nservices.containerd.binary = \"/bin/true\"\n";
    std::fs::write(scratch.path().join("noded.toml"), config).unwrap();
    std::os::unix::fs::chown(scratch.path(), plain_user(), plain_user()).unwrap();
    let noded = PublicProgram::noded();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    let args = ["--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let check = noded.command(&[&["check"], &args[..]].concat()).output().unwrap();
    let (text, code) = stderr_and_code(&check);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.starts_with("noded: containerd: needs root: run noded as root, or set"), "{text}");

    let mut run = noded.command(&[&["run", "--dev"], &args[..]].concat());
    run.stderr(std::process::Stdio::piped());
    let mut node = NodedProcess::spawn_command(scratch, run);
    node.wait_for_line("control socket at");
    let status = node.ask_json(&["status", "root.containerd"]);
    assert_eq!(status["node"]["state"], "skipped", "{status}");
    node.stop();
}
