//! Errors before a node runs, or without a node: one line with a hint, an exit code, and nothing changed.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use testbed::{ScratchDir, reserve_port};

use crate::harness::{
    NO_DAEMONS, NodedProcess, PLAIN_UID, PublicProgram, nodectl_path, noded_command, stderr_and_code,
};

/// Runs `noded run` with a configuration, and asserts that it fails without a data directory.
fn run_rejected(config: &str, args: &[&str]) -> (String, Option<i32>) {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, config).unwrap();
    let data = scratch.path().join("data");
    let given =
        [&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()], args].concat();
    let output = noded_command(&given).output().unwrap();
    assert!(!data.exists(), "the data directory was created");
    let checked = noded_command(&[&["check"], &given[1..]].concat()).output().unwrap();
    assert_eq!(stderr_and_code(&checked), stderr_and_code(&output), "`check` says the same");
    let (text, code) = stderr_and_code(&output);
    (text.replace(scratch.path().to_str().unwrap(), "DIR"), code)
}

#[test]
fn an_invalid_configuration_is_rejected_with_its_location() {
    let (text, code) = run_rejected("[node]\nname = 3\n", &[]);
    assert_eq!(code, Some(3), "{text}");
    assert_eq!(text, "noded: DIR/noded.toml:2:8: node.name: must be text in quotes, not 3");
}

#[test]
fn a_missing_configuration_is_rejected_with_how_to_get_one() {
    let (text, code) =
        stderr_and_code(&noded_command(&["run", "--config", "/nowhere/noded.toml"]).output().unwrap());
    assert_eq!(code, Some(3));
    assert!(
        text.starts_with("noded: /nowhere/noded.toml: can't be read: ") && text.contains("`noded config`"),
        "{text}"
    );
}

#[test]
fn a_missing_daemon_is_named_with_its_package() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n";
    let (text, code) = run_rejected(config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert_eq!(
        text,
        "noded: etcd: /nowhere/etcd does not exist or is not executable by this user; Debian: apt-get install etcd-server, \
         or run with --dev to skip it"
    );
}

#[test]
fn a_missing_program_of_a_service_is_named() {
    let config = format!("{NO_DAEMONS}[[service]]\nname = \"a\"\ncommand = [\"no-such-program-anywhere\"]\n");
    let (text, code) = run_rejected(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.starts_with("noded: a: no-such-program-anywhere is not installed (searched /usr/bin, /bin"),
        "{text}"
    );
}

#[test]
fn a_missing_directory_of_a_service_is_named() {
    let config = format!(
        "{NO_DAEMONS}[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\ndirectory = \"/nowhere\"\n"
    );
    let (text, code) = run_rejected(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    let says = "noded: a: directory /nowhere does not exist: create it, or correct its key directory, or run with --dev";
    assert!(text.starts_with(says), "{text}");
}

#[test]
fn a_log_larger_than_memory_is_rejected() {
    let (text, code) = run_rejected(&format!("{NO_DAEMONS}log.bytes = {}\n", 1_u64 << 60), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("log.bytes is 1152921504606846976, but this machine has "), "{text}");
}

#[test]
fn a_port_in_use_is_named_with_its_holder_and_its_key() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, free) = (taken.local_addr().unwrap().port(), reserve_port().unwrap());
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {port}\npeer_port = {}\n",
        free.number()
    );
    let (text, code) = run_rejected(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.starts_with(&format!("noded: port {port} is in use by ")), "{text}");
    assert!(
        text.contains(&format!(
            "(pid {}): set services.etcd.client_port to another port",
            std::process::id()
        )),
        "{text}"
    );
}

#[test]
fn an_address_of_two_keys_is_rejected_with_both() {
    let [port, peer] = [(); 2].map(|()| reserve_port().unwrap());
    let etcd = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
        port.number(),
        peer.number()
    );
    let (text, code) =
        run_rejected(&format!("{etcd}[metrics]\naddress = \"0.0.0.0:{}\"\n", port.number()), &[]);
    assert_eq!(code, Some(3), "{text}");
    let both = format!(
        "port {} is set by metrics.address and by services.etcd.client_port: set one of them to another",
        port.number()
    );
    assert!(text.contains(&both), "{text}");
    // Nothing is there before the check, nor after it.
    let socket = std::env::temp_dir().join("nodekeel-test-of-two-keys.sock");
    let sockets = format!(
        "{NO_DAEMONS}[control]\nsocket = {socket:?}\n[metrics]\naddress = {:?}\n",
        socket.display().to_string()
    );
    let (text, code) = run_rejected(&sockets, &[]);
    assert_eq!(code, Some(3), "{text}");
    let both = format!("socket {} is set by control.socket and by metrics.address", socket.display());
    assert!(text.contains(&both), "{text}");
}

#[test]
fn a_socket_path_that_is_too_long_is_rejected() {
    let long = format!("/tmp/{}/s", "x".repeat(110));
    let (text, code) = run_rejected(&format!("{NO_DAEMONS}control.socket = \"{long}\"\n"), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("has 117 bytes, but the limit of a unix socket is 107; set control.socket"),
        "{text}"
    );
}

#[test]
fn a_file_that_is_not_a_socket_is_not_replaced() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("precious");
    fs::write(&file, "data").unwrap();
    let (text, code) = run_rejected(&format!("{NO_DAEMONS}control.socket = {file:?}\n"), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("a file exists there and will not be replaced; move it away, or set control.socket"),
        "{text}"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
    let (text, code) = run_rejected(&format!("{NO_DAEMONS}control.socket = {:?}\n", scratch.path()), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("a directory exists there and will not be replaced"), "{text}");
}

#[test]
fn a_socket_that_cannot_be_created_is_rejected_with_the_reason() {
    let scratch = ScratchDir::new().unwrap();
    fs::write(scratch.path().join("file"), "").unwrap();
    let below = |name: &str| scratch.path().join(name).display().to_string();
    for (socket, code, says) in [
        (String::new(), 3, "noded.toml:4:18: control.socket: must be a path, or left out"),
        (below("absent/s"), 4, "/absent does not exist; create it"),
        (below("file/s"), 4, "/file is not a directory; set control.socket to another path"),
        ("/proc/s".into(), 4, "/proc is a kernel file system, not a disk; set control.socket"),
    ] {
        let (text, is) = run_rejected(&format!("{NO_DAEMONS}control.socket = {socket:?}\n"), &[]);
        assert_eq!(is, Some(code), "{text}");
        assert!(text.contains(says) && text.lines().count() == 1, "{socket}: {text}");
    }
}

#[test]
fn a_relative_socket_path_is_reported_as_absolute() {
    let scratch = ScratchDir::new().unwrap();
    let directory = scratch.path().to_owned();
    let mut node =
        NodedProcess::spawn(scratch, &format!("{NO_DAEMONS}control.socket = \"s\"\n"), &[], |command| {
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
    let config = first.scratch.path().join("noded.toml");
    let args = ["run", "--config", config.to_str().unwrap(), "--data", first.data().to_str().unwrap()]
        .map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for command in ["run", "check"] {
        let (text, code) =
            stderr_and_code(&noded_command(&[&[command], &args[1..]].concat()).output().unwrap());
        assert_eq!(code, Some(5), "{text}");
        assert!(
            text.contains(&format!("is in use by another noded (pid {}): stop that process", first.pid())),
            "{text}"
        );
    }
    first.ask(&["tree"]);
    first.stop();
}

#[test]
fn a_stale_socket_is_distinguished_from_a_missing_one_and_replaced_by_the_next_node() {
    let mut node = NodedProcess::start(NO_DAEMONS);
    node.signal(Signal::SIGKILL);
    node.wait();
    let (text, code) = stderr_and_code(&node.nodectl(&["tree"]));
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("the socket is stale; start noded again"), "{text}");

    let scratch = ScratchDir::new().unwrap();
    fs::rename(node.data(), scratch.path().join("data")).unwrap();
    let again = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    again.ask(&["tree"]);
    let socket = again.socket();
    again.stop();
    assert!(!socket.exists(), "a clean stop leaves no socket");

    let output =
        Command::new(nodectl_path()).args(["--socket", socket.to_str().unwrap(), "tree"]).output().unwrap();
    let (text, code) = stderr_and_code(&output);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("the socket does not exist; start noded"), "{text}");
}

#[test]
fn an_unknown_dn_has_a_dedicated_exit_code_and_suggestions() {
    let node = NodedProcess::start(NO_DAEMONS);
    for args in [&["status", "root.contro"][..], &["restart", "root.contro"], &["logs", "root.contro"]] {
        let (text, code) = stderr_and_code(&node.nodectl(args));
        assert_eq!(code, Some(4), "{text}");
        assert_eq!(text, "nodectl: unknown DN \"root.contro\"; did you mean root.control?");
    }
    node.stop();
}

#[test]
fn wrong_usage_has_a_dedicated_exit_code() {
    for args in
        [&["--nonsense"][..], &["logs", "--raw", "--leveled"], &["logs", "--min-level", "loud"], &["stop"]]
    {
        assert_eq!(
            Command::new(nodectl_path()).args(args).output().unwrap().status.code(),
            Some(2),
            "{args:?}"
        );
    }
    assert_eq!(noded_command(&["dance"]).output().unwrap().status.code(), Some(2));
}

#[test]
#[ignore = "needs root: it acts as another user"]
fn another_user_is_rejected_by_the_mode_of_the_socket_and_by_its_credentials() {
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = scratch.path().join("control.sock");
    let node = NodedProcess::start_in(scratch, &format!("{NO_DAEMONS}control.socket = {socket:?}\n"), &[]);
    let nodectl = PublicProgram::new(nodectl_path());
    let ask = || {
        let mut command = nodectl.command(&["--socket", socket.to_str().unwrap(), "tree"]);
        stderr_and_code(&command.output().unwrap())
    };
    let (text, code) = ask();
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("only the user that runs noded, and root, may use it"), "{text}");
    // Regardless of the file's mode, the kernel reports the credentials of the caller.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let (text, code) = ask();
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains(&format!("permission denied for uid {PLAIN_UID}")), "{text}");
    let root =
        Command::new(nodectl_path()).args(["--socket", socket.to_str().unwrap(), "tree"]).output().unwrap();
    assert!(root.status.success(), "{:?}", stderr_and_code(&root));
    node.stop();
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let node = NodedProcess::start(NO_DAEMONS);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output =
        node.nodectl_command(&["logs", "--children", "root"]).stdout(writer).stderr(Stdio::piped()).output();
    let (text, code) = stderr_and_code(&output.unwrap());
    assert_eq!((text.as_str(), code), ("", Some(0)));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = node.nodectl_command(&["tree"]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(stderr_and_code(&output), (String::new(), Some(0)));
    node.stop();
}

#[test]
fn check_touches_nothing_and_shows_the_order() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    let service = |name: &str, keys: &str| {
        format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/true\"]\n{keys}\n")
    };
    fs::write(&file, format!("{NO_DAEMONS}{}{}", service("b", "depends_on = [\"a\"]"), service("a", "")))
        .unwrap();
    let data = scratch.path().join("data");
    let output =
        noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()])
            .output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{:?}", stderr_and_code(&output));
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part:?} in {text}"));
    assert!(at("root.service.a ") < at("root.service.b "), "{text}");
    assert!(text.contains("after root.service.a"), "{text}");
    assert!(!data.exists());
}

#[test]
fn the_printed_configuration_is_the_shipped_one() {
    let output = noded_command(&["config"]).output().unwrap();
    assert_eq!(
        output.stdout,
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../node/noded.toml")).unwrap()
    );
}
