//! What goes wrong before a node runs, or for want of one: a line that says what to do, an exit code, nothing touched.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use testbed::{Scratch, free_port};

use crate::harness::{BARE, NOBODY, Noded, failed, nodectl_path, noded};

/// Runs `noded run` with a configuration, expects it to fail, and that there is no data directory then.
fn refused(config: &str, args: &[&str]) -> (String, Option<i32>) {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, config).unwrap();
    let data = scratch.path().join("data");
    let given =
        [&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()], args].concat();
    let output = noded(&given).output().unwrap();
    assert!(!data.exists(), "the data directory was made");
    let checked = noded(&[&["check"], &given[1..]].concat()).output().unwrap();
    assert_eq!(failed(&checked), failed(&output), "`check` says the same");
    let (text, code) = failed(&output);
    (text.replace(scratch.path().to_str().unwrap(), "DIR"), code)
}

#[test]
fn a_bad_configuration_is_refused_with_its_place() {
    let (text, code) = refused("[node]\nname = 3\n", &[]);
    assert_eq!(code, Some(3), "{text}");
    assert_eq!(text, "noded: DIR/noded.toml:2:8: node.name: must be text in quotes, not 3");
}

#[test]
fn an_absent_configuration_is_refused_with_a_way_to_get_one() {
    let (text, code) = failed(&noded(&["run", "--config", "/nowhere/noded.toml"]).output().unwrap());
    assert_eq!(code, Some(3));
    assert!(
        text.starts_with("noded: /nowhere/noded.toml: can't be read: ") && text.contains("`noded config`"),
        "{text}"
    );
}

#[test]
fn a_missing_daemon_is_named_with_where_it_comes_from() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n";
    let (text, code) = refused(config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert_eq!(
        text,
        "noded: etcd: /nowhere/etcd is no program that this user can execute; Debian: apt-get install etcd-server, \
         or run with --dev to skip it"
    );
}

#[test]
fn a_missing_program_of_a_service_is_named() {
    let config = format!("{BARE}[[service]]\nname = \"a\"\ncommand = [\"no-such-program-anywhere\"]\n");
    let (text, code) = refused(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.starts_with("noded: a: no-such-program-anywhere is not installed (searched /usr/bin, /bin"),
        "{text}"
    );
}

#[test]
fn a_missing_directory_of_a_service_is_named() {
    let config =
        format!("{BARE}[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\ndirectory = \"/nowhere\"\n");
    let (text, code) = refused(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    let says =
        "noded: a: there is no directory /nowhere: create it, or correct its directory, or run with --dev";
    assert!(text.starts_with(says), "{text}");
}

#[test]
fn a_log_larger_than_memory_is_refused() {
    let (text, code) = refused(&format!("{BARE}log.bytes = {}\n", 1_u64 << 60), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("log.bytes is 1152921504606846976, and this machine has "), "{text}");
}

#[test]
fn a_taken_port_is_named_with_its_holder_and_its_key() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, free) = (taken.local_addr().unwrap().port(), free_port().unwrap());
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {port}\npeer_port = {}\n",
        free.number()
    );
    let (text, code) = refused(&config, &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.starts_with(&format!("noded: port {port} is taken by ")), "{text}");
    assert!(
        text.contains(&format!("(pid {}); set services.etcd.client_port to another", std::process::id())),
        "{text}"
    );
}

#[test]
fn a_socket_path_that_is_too_long_is_refused() {
    let long = format!("/tmp/{}/s", "x".repeat(110));
    let (text, code) = refused(&format!("{BARE}control.socket = \"{long}\"\n"), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("has 117 bytes, and a unix socket's has at most 107; set control.socket"),
        "{text}"
    );
}

#[test]
fn what_is_no_socket_is_not_replaced_by_one() {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path().join("precious");
    fs::write(&file, "data").unwrap();
    let (text, code) = refused(&format!("{BARE}control.socket = {file:?}\n"), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("a file is there and will not be replaced; move it away, or set control.socket"),
        "{text}"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
    let (text, code) = refused(&format!("{BARE}control.socket = {:?}\n", scratch.path()), &[]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("a directory is there and will not be replaced"), "{text}");
}

#[test]
fn a_socket_that_can_not_be_made_is_refused_with_its_reason() {
    let scratch = Scratch::new().unwrap();
    fs::write(scratch.path().join("file"), "").unwrap();
    let below = |name: &str| scratch.path().join(name).display().to_string();
    for (socket, code, says) in [
        (String::new(), 3, "noded.toml:3:18: control.socket: must be a path, or left out"),
        (below("absent/s"), 4, "there is no directory "),
        (below("file/s"), 4, "/file is no directory; set control.socket to another path"),
        ("/proc/s".into(), 4, "/proc is a view of the kernel, not a disk; set control.socket"),
    ] {
        let (text, is) = refused(&format!("{BARE}control.socket = {socket:?}\n"), &[]);
        assert_eq!(is, Some(code), "{text}");
        assert!(text.contains(says) && text.lines().count() == 1, "{socket}: {text}");
    }
}

#[test]
fn a_relative_socket_is_found_from_anywhere() {
    let scratch = Scratch::new().unwrap();
    let directory = scratch.path().to_owned();
    let mut node = Noded::spawn(scratch, &format!("{BARE}control.socket = \"s\"\n"), &[], |command| {
        command.current_dir(&directory);
    });
    let lines = node.wait_for_line("control socket at");
    let socket = directory.join("s");
    assert!(lines.last().unwrap().ends_with(socket.to_str().unwrap()), "{lines:?}");
    node.ask(&["--socket", socket.to_str().unwrap(), "tree"]);
    node.stop();
}

#[test]
fn a_second_instance_is_refused_and_the_first_goes_on() {
    let first = Noded::start(BARE);
    let config = first.scratch.path().join("noded.toml");
    let args = ["run", "--config", config.to_str().unwrap(), "--data", first.data().to_str().unwrap()]
        .map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for command in ["run", "check"] {
        let (text, code) = failed(&noded(&[&[command], &args[1..]].concat()).output().unwrap());
        assert_eq!(code, Some(5), "{text}");
        assert!(
            text.contains(&format!("is used by another noded (pid {}); stop that one", first.pid())),
            "{text}"
        );
    }
    first.ask(&["tree"]);
    first.stop();
}

#[test]
fn a_dead_socket_is_told_from_an_absent_one_and_replaced_by_the_next_node() {
    let mut node = Noded::start(BARE);
    node.signal(Signal::SIGKILL);
    node.wait();
    let (text, code) = failed(&node.nodectl(&["tree"]));
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("the socket is dead; start noded again"), "{text}");

    let scratch = Scratch::new().unwrap();
    fs::rename(node.data(), scratch.path().join("data")).unwrap();
    let again = Noded::start_in(scratch, BARE, &[]);
    again.ask(&["tree"]);
    let socket = again.socket();
    again.stop();
    assert!(!socket.exists(), "a clean stop leaves no socket");

    let output =
        Command::new(nodectl_path()).args(["--socket", socket.to_str().unwrap(), "tree"]).output().unwrap();
    let (text, code) = failed(&output);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("there is no such socket; start noded"), "{text}");
}

#[test]
fn an_unknown_dn_has_its_own_exit_code_and_suggestions() {
    let node = Noded::start(BARE);
    for args in [&["status", "root.contro"][..], &["restart", "root.contro"], &["logs", "root.contro"]] {
        let (text, code) = failed(&node.nodectl(args));
        assert_eq!(code, Some(4), "{text}");
        assert_eq!(text, "nodectl: no DN is called \"root.contro\"; did you mean root.control?");
    }
    node.stop();
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    for args in
        [&["--nonsense"][..], &["logs", "--raw", "--leveled"], &["logs", "--min-level", "loud"], &["stop"]]
    {
        assert_eq!(
            Command::new(nodectl_path()).args(args).output().unwrap().status.code(),
            Some(2),
            "{args:?}"
        );
    }
    assert_eq!(noded(&["dance"]).output().unwrap().status.code(), Some(2));
}

#[test]
#[ignore = "needs root: it acts as another user"]
fn another_user_is_refused_by_the_sockets_mode_and_by_its_credentials() {
    let scratch = Scratch::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = scratch.path().join("control.sock");
    let node = Noded::start_in(scratch, &format!("{BARE}control.socket = {socket:?}\n"), &[]);
    let ask = || {
        let mut command = Command::new(nodectl_path());
        command.args(["--socket", socket.to_str().unwrap(), "tree"]).uid(NOBODY).gid(NOBODY);
        failed(&command.output().unwrap())
    };
    let (text, code) = ask();
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("only the user that runs noded, and root, may use it"), "{text}");
    // Whatever the file's mode becomes, who calls is asked of the kernel.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let (text, code) = ask();
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains(&format!("no permission for uid {NOBODY}")), "{text}");
    let root =
        Command::new(nodectl_path()).args(["--socket", socket.to_str().unwrap(), "tree"]).output().unwrap();
    assert!(root.status.success(), "{:?}", failed(&root));
    node.stop();
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let node = Noded::start(BARE);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output =
        node.nodectl_command(&["logs", "--children", "root"]).stdout(writer).stderr(Stdio::piped()).output();
    let (text, code) = failed(&output.unwrap());
    assert_eq!((text.as_str(), code), ("", Some(0)));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = node.nodectl_command(&["tree"]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(failed(&output), (String::new(), Some(0)));
    node.stop();
}

#[test]
fn check_touches_nothing_and_shows_the_order() {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path().join("noded.toml");
    let service = |name: &str, keys: &str| {
        format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/true\"]\n{keys}\n")
    };
    fs::write(&file, format!("{BARE}{}{}", service("b", "depends_on = [\"a\"]"), service("a", ""))).unwrap();
    let data = scratch.path().join("data");
    let output =
        noded(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{:?}", failed(&output));
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part:?} in {text}"));
    assert!(at("root.service.a ") < at("root.service.b "), "{text}");
    assert!(text.contains("after root.service.a"), "{text}");
    assert!(!data.exists());
}

#[test]
fn the_printed_configuration_is_the_shipped_one() {
    let output = noded(&["config"]).output().unwrap();
    assert_eq!(output.stdout, fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("noded.toml")).unwrap());
}
