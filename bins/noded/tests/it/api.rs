//! Operators on other machines call a node by key, with the rights of their role.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testbed::{ReservedPort, ScratchDir, reserve_port};

use crate::cluster::{MemberFixture, join_cluster};
use crate::harness::{Ended, NO_DAEMONS, NodedProcess, TEST_TIMEOUT, nodectl_path, sleep_config, wait};

const A: &str = "root.service.a";

/// The keys and contexts of an operator.
struct OperatorHome(ScratchDir);

impl OperatorHome {
    fn new() -> Self {
        Self(ScratchDir::new().unwrap())
    }

    fn key_file(&self) -> String {
        self.0.path().join("operator.key").to_str().unwrap().to_owned()
    }

    /// Makes the operator's key, and returns the public half.
    fn make_key(&self) -> String {
        self.nodectl(&["key", "new", &self.key_file()]).output().trim().to_owned()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(nodectl_path());
        command.env_clear().env("XDG_CONFIG_HOME", self.0.path()).args(args).stdin(Stdio::null());
        command.args(["--timeout", "60"]);
        command
    }

    fn nodectl(&self, args: &[&str]) -> Ended {
        Ended::of(&mut self.command(args))
    }

    /// Calls the node from now on.
    fn use_node(&self, address: SocketAddrV4, node_key: &str) {
        let (address, file) = (address.to_string(), self.key_file());
        let line =
            ["context", "add", "n", "--address", &address, "--node-key", node_key, "--key-file", &file];
        self.nodectl(&line).output();
    }
}

/// A configuration with these operators: name, key, role.
fn config(port: &ReservedPort, operators: &[(&str, &str, &str)]) -> String {
    let entry = |(name, key, role): &(&str, &str, &str)| {
        format!("{{ name = \"{name}\", key = \"{key}\", role = \"{role}\" }}")
    };
    let entries: Vec<_> = operators.iter().map(entry).collect();
    let address = port.socket_address();
    let api = format!("[api]\naddress = \"{address}\"\noperators = [{}]\n", entries.join(", "));
    format!("{NO_DAEMONS}{}{api}", sleep_config("a", ""))
}

/// The key by which operators know the node.
fn node_key(node: &NodedProcess) -> String {
    node.wait_ready("root.api");
    node.ask_json(&["operator", "list"])["node_key"].as_str().unwrap().to_owned()
}

/// The text and the fields of the entries of a DN.
fn entries(node: &NodedProcess, dn: &str) -> Vec<Value> {
    let lines = node.ask(&["-o", "json", "logs", dn]);
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_operator_on_another_machine_may_what_the_role_permits() {
    let port = reserve_port().unwrap();
    let homes = [(); 4].map(|()| OperatorHome::new());
    let keys = homes.each_ref().map(OperatorHome::make_key);
    let [reader, operator, admin, stranger] = &homes;
    let operators =
        [("rita", &*keys[0], "reader"), ("olga", &*keys[1], "operator"), ("alice", &*keys[2], "admin")];
    let node = NodedProcess::start(&config(&port, &operators));
    node.wait_ready(A);
    let (address, known) = (port.socket_address(), node_key(&node));
    homes.iter().for_each(|home| home.use_node(address, &known));

    for home in [reader, operator, admin] {
        let tree = home.nodectl(&["-o", "json", "tree"]).json();
        assert!(tree.as_array().unwrap().iter().any(|node| node["dn"] == A), "{tree}");
        assert!(home.nodectl(&["logs", "root"]).code == Some(0));
    }
    reader
        .nodectl(&["restart", A])
        .assert_fails_in_a_line(5, "Restart needs the role operator, and rita has the role reader");
    operator.nodectl(&["restart", "--wait", "a"]).output();
    operator.nodectl(&["reload", "--dry-run"]).assert_fails_in_a_line(5, "CheckConfig needs the role admin");
    admin.nodectl(&["reload", "--dry-run"]).output();
    stranger
        .nodectl(&["tree"])
        .assert_fails_in_a_line(5, &format!("does not admit your key, {}: an admin can type", keys[3]));
    // A node with another key gets no call.
    stranger.use_node(address, &keys[0]);
    let wrong = stranger.nodectl(&["-o", "json", "tree"]);
    wrong.assert_fails_in_a_line(3, &format!("has another key than the one that is known, {}", keys[0]));
    assert!(wrong.stderr.contains(&known), "{wrong:?}");

    let events = node.events();
    let requested: Vec<_> = events.iter().filter(|event| event["action"] == "restart").collect();
    let [restart] = &requested[..] else { panic!("{requested:#?}") };
    let caller = &restart["caller"];
    assert_eq!((&caller["operator"], &caller["uid"]), (&"olga".into(), &Value::Null), "{restart}");
    assert!(caller["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{restart}");
    let calls = |dn| {
        let text = |entry: &Value| entry["message"].as_str().unwrap().to_owned();
        entries(&node, dn).iter().map(text).collect::<Vec<_>>()
    };
    assert_eq!(calls("root.api.calls"), ["Restart by olga: ok", "CheckConfig by alice: ok"]);
    let denied = ["Restart by rita: PermissionDenied", "CheckConfig by olga: PermissionDenied"];
    assert_eq!(calls("root.api.denied"), denied);
    assert!(entries(&node, "root.api.reads").iter().any(|entry| entry["message"] == "Tree by rita: ok"));
    let refusals = entries(&node, "root.api");
    let is_named =
        |entry: &Value| entry["message"].as_str().unwrap().contains(&format!("unknown key {}", keys[3]));
    assert!(refusals.iter().any(is_named), "{refusals:#?}");

    // The socket of the machine is as it was, and the key of the node outlives it.
    node.ask(&["restart", "--wait", A]);
    let scratch = node.stop_and_keep();
    let node = NodedProcess::start_in(scratch, &config(&port, &operators), &[]);
    assert_eq!(node_key(&node), known);
    admin.nodectl(&["health"]).output();
    node.stop();
}

#[test]
fn an_operator_who_is_removed_or_has_another_role_has_no_stream_a_second_later() {
    let port = reserve_port().unwrap();
    let homes = [(); 3].map(|()| OperatorHome::new());
    let keys = homes.each_ref().map(OperatorHome::make_key);
    let all = [("rita", &*keys[0], "reader"), ("olga", &*keys[1], "operator"), ("alice", &*keys[2], "admin")];
    let node = NodedProcess::start(&config(&port, &all));
    node.wait_ready(A);
    let (address, known) = (port.socket_address(), node_key(&node));
    let mut streams = homes.each_ref().map(|home| {
        home.use_node(address, &known);
        let mut command = home.command(&["logs", "-f", "--children", "root"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let connections = || {
        let listed = node.ask_json(&["operator", "list"]);
        let of = |operator: &Value| operator["connections"].as_u64().unwrap();
        listed["operators"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    wait("three streams", || {
        anyhow::ensure!(connections() == [1, 1, 1], "{:?}", connections());
        Ok(())
    });
    let reads = || node.nodectl(&["logs", "root.api.reads"]).stdout.lines().count();
    wait("three calls", || {
        anyhow::ensure!(reads() >= 3, "{}", reads());
        Ok(())
    });

    // rita goes, olga gets another role; alice stays.
    node.write_config(&config(&port, &[("olga", &keys[1], "reader"), ("alice", &keys[2], "admin")]));
    let changes = node.ask(&["reload"]);
    let applied = Instant::now();
    assert!(changes.contains("apply api.operators"), "{changes}");
    for stream in &mut streams[..2] {
        assert!(testbed::wait_exit(stream, TEST_TIMEOUT).unwrap().is_some());
    }
    let took = applied.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(connections(), [0, 1]);
    assert!(streams[2].try_wait().unwrap().is_none(), "the stream of another operator goes on");
    homes[0].nodectl(&["tree"]).assert_fails_in_a_line(5, "does not admit your key");
    homes[1]
        .nodectl(&["restart", A])
        .assert_fails_in_a_line(5, "needs the role operator, and olga has the role reader");
    homes[1].nodectl(&["tree"]).output();
    // Without the API, nobody has a stream.
    node.write_config(&format!("{NO_DAEMONS}{}", sleep_config("a", "")));
    assert!(node.ask(&["reload"]).contains("remove root.api"));
    assert!(testbed::wait_exit(&mut streams[2], TEST_TIMEOUT).unwrap().is_some());
    node.nodectl(&["operator", "list"]).assert_fails_in_a_line(1, "set api.address");
    node.stop();
}

#[test]
fn strangers_at_the_port_hold_up_no_operator() {
    let port = reserve_port().unwrap();
    let home = OperatorHome::new();
    let key = home.make_key();
    let node = NodedProcess::start(&config(&port, &[("alice", &key, "admin")]));
    home.use_node(port.socket_address(), &node_key(&node));
    let connect = || TcpStream::connect(port.socket_address()).unwrap();
    let opened = Instant::now();
    let mut silent: Vec<_> = (0..300).map(|_| connect()).collect();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0x16; 600]] {
        let mut stranger = connect();
        stranger.write_all(garbage).unwrap();
        let mut answer = Vec::new();
        // A reset is as good as a close.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.len() < 100, "an alert at most: {answer:?}");
    }
    home.nodectl(&["tree"]).output();
    // 256 handshakes at once have a place; the others were closed for later ones, and the rest after ten seconds.
    for stranger in &mut silent {
        stranger.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let read = stranger.read(&mut [0; 100]);
        assert!(read.as_ref().map_or(true, |bytes| *bytes < 100), "{read:?}");
    }
    let took = opened.elapsed();
    assert!((Duration::from_secs(9)..Duration::from_secs(40)).contains(&took), "{took:?}");
    let refusals = entries(&node, "root.api");
    assert!(refusals.len() < 60, "a flood is counted: {}", refusals.len());
    home.nodectl(&["tree"]).output();
    node.stop();
}

#[test]
fn an_operator_without_a_valid_name_key_or_role_is_an_error_of_the_configuration() {
    let scratch = ScratchDir::new().unwrap();
    let port = reserve_port().unwrap();
    let home = OperatorHome::new();
    let key = home.make_key();
    for (operators, text) in [
        (&[("", &*key, "admin")][..], "invalid name \"\" of an operator"),
        (&[("a", "ed25519:AAAA", "admin")], "not a public key"),
        (
            &[("a", "ed25519:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "admin")],
            "anyone could sign for it",
        ),
        (&[("a", &key, "root")], "unknown role \"root\": use admin, operator or reader"),
        (&[("a", &key, "admin"), ("b", &key, "reader")], "operators \"a\" and \"b\" have the same key"),
    ] {
        crate::harness::check(scratch.path(), &config(&port, operators), &[]).assert_fails(3, text);
    }
    let file = fs::metadata(home.key_file()).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&file.permissions()) & 0o777, 0o600);
}

#[test]
#[ignore = "needs etcd"]
fn an_operator_of_the_cluster_loses_its_streams_on_every_node_a_second_after_the_removal() {
    let ports = [(); 2].map(|()| reserve_port().unwrap());
    let [alice, rita] = [(); 2].map(|()| OperatorHome::new());
    let [of_alice, of_rita] = [&alice, &rita].map(OperatorHome::make_key);
    let section = |port: &ReservedPort, operators: &str| {
        let address = port.socket_address();
        format!("[api]\naddress = \"{address}\"\ncluster_operators = true\noperators = [{operators}]\n")
    };
    let entry = format!("{{ name = \"alice\", key = \"{of_alice}\", role = \"admin\" }}");
    let first = MemberFixture::new().with_sections(&section(&ports[0], &entry));
    let second = MemberFixture::new().with_sections(&section(&ports[1], ""));
    let (one, two) = join_cluster(&first, &second, "127.0.0.1");
    one.wait_ready("root.api.records");
    two.wait_ready("root.api.records");
    alice.use_node(ports[0].socket_address(), &node_key(&one));
    rita.use_node(ports[1].socket_address(), &node_key(&two));
    rita.nodectl(&["tree"]).assert_fails_in_a_line(5, "does not admit your key");
    // By the API of one node, for that of the other, where the one who adds is not admitted.
    alice.nodectl(&["operator", "add", "rita", "--key", &of_rita, "--role", "reader"]).output();
    wait("the operator on the other node", || {
        let ended = rita.nodectl(&["tree"]);
        anyhow::ensure!(ended.code == Some(0), "{ended:#?}");
        Ok(())
    });
    let other = alice.nodectl(&["operator", "add", "eve", "--key", &of_rita, "--role", "admin"]);
    other.assert_fails_in_a_line(1, "operator rita has this key");
    rita.nodectl(&["operator", "remove", "rita"])
        .assert_fails_in_a_line(5, "RemoveOperator needs the role admin");
    one.nodectl(&["operator", "remove", "alice"]).assert_fails_in_a_line(1, "remove it from api.operators");

    let follow = |role: &str| {
        let mut command = rita.command(&["logs", "-f", "--children", "root"]);
        let stream = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let is_open = || two.ask_json(&["operator", "list"])["operators"][0]["connections"] == 1;
        wait("the stream", || {
            anyhow::ensure!(is_open(), "no stream as {role}");
            Ok(())
        });
        stream
    };
    // Another role, and then no more.
    for (change, role) in [
        (&["operator", "add", "rita", "--key", &of_rita, "--role", "operator"][..], "reader"),
        (&["operator", "remove", "rita"], "operator"),
    ] {
        let mut stream = follow(role);
        assert_eq!(two.ask_json(&["operator", "list"])["operators"][0]["role"], role);
        one.ask(change);
        let changed = Instant::now();
        assert!(testbed::wait_exit(&mut stream, TEST_TIMEOUT).unwrap().is_some());
        let took = changed.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
    rita.nodectl(&["tree"]).assert_fails_in_a_line(5, "does not admit your key");
    two.stop();
    one.stop();
}
