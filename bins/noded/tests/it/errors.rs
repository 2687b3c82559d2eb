//! Errors before a node runs, or without a node: one line with a hint, an exit code, and nothing changed.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::Signal;
use testbed::ScratchDir;

use crate::harness::{
    Ended, EtcdPorts, NO_DAEMONS, NodedProcess, PLAIN_UID, PublicProgram, check, node_command, nodectl_path,
    noded_command, run_nodectl, service_config,
};

/// The error of `noded run` with a configuration, which `noded check` prints too; nothing is created.
#[track_caller]
fn run_rejected(config: &str) -> Ended {
    let scratch = ScratchDir::new().unwrap();
    let [run, checked] =
        ["run", "check"].map(|verb| Ended::of(&mut node_command(verb, scratch.path(), config)));
    assert!(!scratch.path().join("data").exists(), "the data directory was created");
    assert_eq!(checked, run);
    let stderr = run.stderr.replace(scratch.path().to_str().unwrap(), "DIR");
    Ended { stderr, ..run }
}

#[test]
fn a_configuration_that_can_not_run_is_rejected_with_its_key_and_a_hint() {
    let scratch = ScratchDir::new().unwrap();
    let (file, ports) = (scratch.path().join("precious"), EtcdPorts::reserve());
    fs::write(&file, "data").unwrap();
    let below = |name: &str| scratch.path().join(name).display().to_string();
    let daemons_off = |keys: &str| format!("{NO_DAEMONS}{keys}\n");
    let socket = |path: &str| daemons_off(&format!("control.socket = {path:?}"));
    let service = |command: &str, keys: &str| {
        daemons_off(&format!("[[service]]\nname = \"a\"\ncommand = [{command:?}]\n{keys}"))
    };
    let port = ports.client.number();
    let cases = [
        (
            "an invalid value",
            "[node]\nname = 3\n".to_owned(),
            3,
            "noded: DIR/noded.toml:2:8: node.name: must be text in quotes, not 3".to_owned(),
        ),
        (
            "a missing daemon, with its package",
            "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n".into(),
            4,
            "noded: etcd: /nowhere/etcd does not exist or is not executable by this user; Debian: apt-get install \
             etcd-server, or run with --dev to skip it"
                .into(),
        ),
        (
            "a missing program of a service",
            service("no-such-program-anywhere", ""),
            4,
            "noded: a: no-such-program-anywhere is not installed (searched /usr/bin, /bin".into(),
        ),
        (
            "an address of another machine",
            daemons_off("metrics.address = \"192.0.2.1:9100\""),
            4,
            "noded: no interface of this machine has the address 192.0.2.1: set metrics.address to one that it has"
                .into(),
        ),
        (
            "a missing directory of a service",
            service("/bin/true", "directory = \"/nowhere\""),
            4,
            "noded: a: directory /nowhere does not exist: create it, or correct its key directory, or run with --dev"
                .into(),
        ),
        (
            "a log larger than memory",
            daemons_off(&format!("log.bytes = {}", 1_u64 << 60)),
            4,
            "log.bytes is 1Ei, but this machine has ".into(),
        ),
        (
            "a port of two keys",
            format!("{}[metrics]\naddress = \"0.0.0.0:{port}\"\n", ports.config_to_check()),
            3,
            format!(
                "port {port} is set by metrics.address and by services.etcd.client_port: set one of them to another"
            ),
        ),
        (
            "a socket of two keys",
            format!("{NO_DAEMONS}[control]\nsocket = \"{0}\"\n[metrics]\naddress = \"{0}\"\n", below("two")),
            3,
            format!("socket {} is set by control.socket and by metrics.address", below("two")),
        ),
        (
            "a socket path that is too long",
            socket(&format!("/tmp/{}", "x".repeat(112))),
            4,
            "has 117 bytes, but the limit of a unix socket is 107; set control.socket".into(),
        ),
        (
            "a file that is not a socket",
            socket(&below("precious")),
            4,
            "a file exists there and will not be replaced; move it away, or set control.socket".into(),
        ),
        (
            "a directory that is not a socket",
            socket(&scratch.path().display().to_string()),
            4,
            "a directory exists there and will not be replaced".into(),
        ),
        (
            "a socket without a path",
            socket(""),
            3,
            "noded.toml:4:18: control.socket: must be a path, or left out".into(),
        ),
        ("a socket in no directory", socket(&below("absent/s")), 4, "/absent does not exist; create it".into()),
        (
            "a socket below a file",
            socket(&below("precious/s")),
            4,
            "/precious is not a directory; set control.socket to another path".into(),
        ),
        (
            "a socket in /proc",
            socket("/proc/s"),
            4,
            "/proc is a kernel file system, not a disk; set control.socket".into(),
        ),
    ];
    for (name, config, code, says) in cases {
        let ended = run_rejected(&config);
        assert!(ended.code == Some(code) && ended.stderr.contains(&says), "{name}: {ended:#?}\nnot: {says}");
        assert_eq!(ended.stderr.lines().count(), 1, "{name}: {ended:#?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
}

#[test]
fn a_missing_configuration_is_rejected_with_how_to_get_one() {
    let ended = Ended::of(&mut noded_command(&["run", "--config", "/nowhere/noded.toml"]));
    ended.assert_fails(3, "noded: /nowhere/noded.toml: can't be read: ");
    ended.assert_fails(3, "`noded config`");
}

#[test]
fn a_port_in_use_is_named_with_its_holder_and_its_key() {
    let ports = EtcdPorts::reserve();
    let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let taken = holder.local_addr().unwrap().port();
    let from = format!("client_port = {}", ports.client.number());
    let config = ports.config_to_check().replace(&from, &format!("client_port = {taken}"));
    let ended = run_rejected(&config);
    ended.assert_fails(4, &format!("noded: port {taken} is in use by "));
    let hint = format!("(pid {}): set services.etcd.client_port to another port", std::process::id());
    ended.assert_fails(4, &hint);
}

#[test]
fn a_relative_socket_path_is_reported_as_absolute() {
    let scratch = ScratchDir::new().unwrap();
    let directory = scratch.path().to_owned();
    let config = format!("{NO_DAEMONS}control.socket = \"s\"\n");
    let mut node = NodedProcess::spawn(scratch, &config, &[], |command| {
        command.current_dir(&directory);
    });
    let lines = node.wait_for_line("control socket at");
    let socket = directory.join("s");
    assert!(lines.last().unwrap().ends_with(socket.to_str().unwrap()), "{lines:?}");
    node.ask(&["--socket", socket.to_str().unwrap(), "tree"]);
    node.stop();
}

#[test]
fn a_second_instance_is_rejected_and_the_first_keeps_running() {
    let first = NodedProcess::start(NO_DAEMONS);
    let says = format!("is in use by another noded (pid {}): stop that process", first.pid());
    for verb in ["run", "reset"] {
        Ended::of(&mut node_command(verb, first.scratch.path(), NO_DAEMONS)).assert_fails(5, &says);
    }
    first.ask(&["tree"]);
    first.stop();
}

#[test]
fn a_stale_socket_is_distinguished_from_a_missing_one_and_replaced_by_the_next_node() {
    let mut node = NodedProcess::start(NO_DAEMONS);
    node.signal(Signal::SIGKILL);
    node.wait_end();
    node.nodectl(&["tree"]).assert_fails(3, "the socket is stale; start noded again");
    let again = NodedProcess::start_in(node.take_scratch(), NO_DAEMONS, &[]);
    again.ask(&["tree"]);
    let socket = again.socket();
    let _scratch = again.stop_and_keep();
    assert!(!socket.exists(), "a clean stop leaves no socket");
    run_nodectl(&["--socket", socket.to_str().unwrap(), "tree"])
        .assert_fails(3, "the socket does not exist; start noded");
}

#[test]
fn an_unknown_dn_has_a_dedicated_exit_code_and_suggestions() {
    let node = NodedProcess::start(NO_DAEMONS);
    for verb in ["status", "restart", "logs"] {
        let ended = node.nodectl(&[verb, "root.contro"]);
        let says = "nodectl: unknown DN \"root.contro\"; did you mean root.control?";
        assert_eq!((ended.code, &*ended.stderr), (Some(4), says), "{verb}");
    }
    node.stop();
}

#[test]
fn wrong_usage_has_a_dedicated_exit_code() {
    Ended::of(&mut noded_command(&["dance"])).assert_fails(2, "dance");
}

#[test]
#[ignore = "needs root: it acts as another user"]
fn another_user_is_rejected_by_the_mode_of_the_socket_and_by_its_credentials() {
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = scratch.path().join("control.sock");
    let node = NodedProcess::start_in(scratch, &format!("{NO_DAEMONS}control.socket = {socket:?}\n"), &[]);
    let args = ["--socket", socket.to_str().unwrap(), "tree"];
    let nodectl = PublicProgram::new(nodectl_path());
    let ask = || Ended::of(&mut nodectl.command(&args));
    ask().assert_fails(5, "only the user that runs noded, and root, may use it");
    // Regardless of the file's mode, the kernel reports the credentials of the caller.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    ask().assert_fails(5, &format!("permission denied for uid {PLAIN_UID}"));
    run_nodectl(&args).output();
    node.stop();
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let node = NodedProcess::start(NO_DAEMONS);
    for args in [&["logs", "--children", "root"][..], &["tree"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = Ended::of(node.nodectl_command(args).stdout(writer).stderr(Stdio::piped()));
        assert_eq!((&*ended.stderr, ended.code), ("", Some(0)), "{args:?}");
    }
    node.stop();
}

#[test]
fn check_touches_nothing_and_shows_the_order() {
    let scratch = ScratchDir::new().unwrap();
    let services = [service_config("b", "true", "depends_on = [\"a\"]"), service_config("a", "true", "")];
    let text = check(scratch.path(), &format!("{NO_DAEMONS}{}", services.concat()), &[]).output();
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part:?} in {text}"));
    assert!(at("root.service.a ") < at("root.service.b "), "{text}");
    assert!(text.contains("after root.service.a"), "{text}");
    assert!(!scratch.path().join("data").exists());
}

#[test]
fn the_printed_configuration_is_the_shipped_one() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../node/noded.toml");
    assert_eq!(Ended::of(&mut noded_command(&["config"])).output(), fs::read_to_string(shipped).unwrap());
}
