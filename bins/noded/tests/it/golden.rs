//! Files and messages of release 0.1.0 are read by this one; `testdata/golden/README.md` lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_node::config::{DEFAULT_CONFIG, NodedConfig};
use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use serde_json::Value;
use testbed::{ScratchDir, reserve_port};

use crate::harness::{NO_DAEMONS, NodedProcess, service_config, wait};

/// The peer ports of the data directory and of its ticket. They are part of the files, and outside of the range of
/// `reserve_port`.
const PEER_PORTS: [u16; 2] = [11834, 11835];

const PROTO: &str = "nodekeel/control/v1/control.proto";

fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(name)
}

fn golden_text(name: &str) -> String {
    fs::read_to_string(golden_path(name)).unwrap()
}

/// Unpacks the data directory of the first release as `data` below a new scratch directory.
fn unpack_data(archive: &str) -> ScratchDir {
    let scratch = ScratchDir::new().unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(golden_path(archive)).arg("--no-same-owner").arg("-C").arg(scratch.path());
    testbed::command_output(&mut tar).unwrap();
    scratch
}

/// Starts a member, and waits until it is in its cluster.
fn start_member(scratch: ScratchDir, peer_port: u16) -> NodedProcess {
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\npeer_port = {peer_port}\n\
         [cluster]\naddress = \"127.0.0.1\"\ndeadline = \"60s\"\ngolden_tickets = true\n"
    );
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    noded.wait_ready("root.cluster");
    noded
}

/// The values that the first release printed.
fn expected_values() -> BTreeMap<String, String> {
    let rows = golden_text("expected.tsv");
    rows.lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(key, value)| (key.into(), value.into()))
        .collect()
}

/// The private key of the CA in etcd's database as the first release stored it: 32 bytes, the seed.
fn stored_ca_key(database: &[u8]) -> Vec<u8> {
    const KEY: &[u8] = b"/etcd-ca/ca-key.der";
    // The value of 64 bytes in the record of the key. *Source:* `KeyValue` in etcd's kv.proto.
    const VALUE: &[u8] = &[0x2a, 0x40];
    let key = database.windows(KEY.len()).position(|window| window == KEY).expect("the key");
    let record = &database[key + KEY.len()..];
    let value = record.windows(VALUE.len()).position(|window| window == VALUE).expect("its value");
    record[value + VALUE.len()..][..32].to_vec()
}

#[test]
#[ignore = "needs etcd"]
fn a_data_directory_of_the_first_release_is_continued_as_the_same_node_of_the_same_cluster() {
    let expected = expected_values();
    let scratch = unpack_data("bootstrapped.tar.gz");
    let database = scratch.path().join("data/data/cluster/etcd/data/member/snap/db");
    let seed = stored_ca_key(&fs::read(&database).unwrap());
    let noded = start_member(scratch, PEER_PORTS[0]);
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["state"], "Running", "{status}");
    assert_eq!(status["node"], expected["node"].as_str(), "{status}");
    assert_eq!(status["cluster"], expected["cluster"].as_str(), "{status}");
    assert_eq!(status["history"], serde_json::json!(["New", "Restarting", "Running"]));
    assert_json_paths("cluster status", &[status]);
    assert_json_paths("cluster members", &[noded.ask_json(&["cluster", "members"])]);

    // The private key of its CA, which was in the database as it is, is sealed, and leaves no trace there.
    let has = |part: &[u8]| {
        let content = fs::read(&database)?;
        anyhow::Ok(content.windows(part.len()).any(|window| window == part))
    };
    wait("a database without the private key", || {
        anyhow::ensure!(!has(&seed)?, "it is still there");
        Ok(())
    });
    assert!(has(b"/etcd-ca/seal/ca-key.age").unwrap());

    // Its peer port admits each certificate of the CA while a ticket of that release is unused, whose certificate has no name.
    let warns = |command: &str| {
        wait(command, || {
            let status = noded.ask(&["cluster", "status"]);
            anyhow::ensure!(status.contains(command), "{status}");
            Ok(())
        });
    };
    warns("`nodectl cluster ticket revoke --address 127.0.0.1 --port 11835`");

    // A node with an unused ticket of the first release joins by the learner that is listed for it, and gets its vote:
    // the ticket is not requested again.
    let second = ScratchDir::new().unwrap();
    let state = second.path().join("data/esp");
    fs::create_dir_all(&state).unwrap();
    fs::copy(golden_path("enrolment.pb"), state.join("enrolment.pb")).unwrap();
    let second = start_member(second, PEER_PORTS[1]);
    let joined = second.ask_json(&["cluster", "status"]);
    assert_eq!(joined["node"], expected["joining-node"].as_str(), "{joined}");
    assert_eq!(joined["cluster"], expected["cluster"].as_str(), "{joined}");
    wait("the vote of the second node", || {
        // With its vote, the cluster may elect a leader, and has no list until then.
        let members: Value =
            serde_json::from_str(&noded.nodectl(&["-o", "json", "cluster", "members"]).stdout)?;
        let voters = members.as_array().into_iter().flatten().filter(|member| member["learner"] == false);
        anyhow::ensure!(voters.count() == 2, "{members}");
        Ok(())
    });
    warns("`nodectl restart root.cluster`");
    noded.ask(&["restart", "root.cluster", "--wait"]);
    wait("a peer port for members alone", || {
        let status = noded.ask(&["cluster", "status"]);
        anyhow::ensure!(status.starts_with("Running") && !status.contains("peer port"), "{status}");
        Ok(())
    });
    second.stop();
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_bootstrap_that_the_first_release_started_is_completed_with_its_ca() {
    let expected = expected_values();
    let scratch = unpack_data("bootstrap-in-progress.tar.gz");
    let etcd = scratch.path().join("data/data/cluster/etcd");
    let pending_ca = fs::read_to_string(etcd.join("new_authority/ca.pem")).unwrap();
    let peer_port = reserve_port().unwrap();
    let noded = start_member(scratch, peer_port.number());
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["node"], expected["bootstrap-in-progress-node"].as_str(), "{status}");
    assert_eq!(status["cluster"], expected["bootstrap-in-progress-cluster"].as_str(), "{status}");
    assert_eq!(fs::read_to_string(etcd.join("peer_pki/ca.pem")).unwrap(), pending_ca);
    assert!(!etcd.join("client_pki/cert-key.pem").exists(), "its client has no use for a key");
    assert!(!etcd.join("new_authority/cert-key.pem").exists(), "the CA's key is still on the disk");
    noded.stop();
}

#[test]
fn configurations_of_the_first_release_are_read() {
    let default = golden_text("noded.toml");
    let parse = |name: &str, text: &str| NodedConfig::parse_toml(Path::new(name), text).unwrap();
    let uncommented: Vec<_> = default
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
        .collect();
    for text in [&default, &uncommented.join("\n")] {
        assert_eq!(parse("noded.toml", text), NodedConfig::default());
    }
    for name in ["noded-every-key.toml", "noded-other-values.toml", "noded-own-containerd.toml"] {
        assert_ne!(parse(name, &golden_text(name)), NodedConfig::default(), "{name}");
    }
    assert_eq!(parse("noded.toml", DEFAULT_CONFIG), NodedConfig::default());
}

#[test]
fn the_control_api_keeps_every_message_field_and_method_of_the_first_release() {
    let old = FileDescriptorSet::decode(&fs::read(golden_path("control.binpb")).unwrap()[..]).unwrap();
    let new =
        protox::compile([PROTO], [Path::new(env!("CARGO_MANIFEST_DIR")).join("../../node/proto")]).unwrap();
    // Through bytes: protox may be built with another prost.
    let new = FileDescriptorSet::decode(&new.encode_to_vec()[..]).unwrap();
    let file = |set: &FileDescriptorSet| set.file.iter().find(|file| file.name() == PROTO).unwrap().clone();
    let (old, new) = (list_wire(&file(&old)), list_wire(&file(&new)));
    let lost: Vec<_> = old.difference(&new).collect();
    assert!(lost.is_empty(), "no longer in {PROTO}: {lost:#?}");
    assert!(old.len() > 100, "{old:#?}");
}

/// Every message field, enum value and method of a proto file, as a line each.
fn list_wire(file: &FileDescriptorProto) -> BTreeSet<String> {
    let mut lines = BTreeSet::from([format!("package {} {}", file.package(), file.syntax())]);
    for message in &file.message_type {
        list_message(file.package(), message, &mut lines);
    }
    for enumeration in &file.enum_type {
        list_enum(file.package(), enumeration, &mut lines);
    }
    for service in &file.service {
        for method in &service.method {
            let stream = |is_stream| if is_stream { "stream " } else { "" };
            lines.insert(format!(
                "rpc {}.{}/{}({}{}) returns ({}{})",
                file.package(),
                service.name(),
                method.name(),
                stream(method.client_streaming()),
                method.input_type(),
                stream(method.server_streaming()),
                method.output_type()
            ));
        }
    }
    lines
}

fn list_message(parent: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{parent}.{}", message.name());
    lines.insert(format!("message {name}"));
    for field in &message.field {
        let oneof = field.oneof_index.and_then(|index| message.oneof_decl.get(usize::try_from(index).ok()?));
        lines.insert(format!(
            "{name}.{} = {}: {:?} {:?} {} {:?} {}",
            field.name(),
            field.number(),
            field.label(),
            field.r#type(),
            field.type_name(),
            oneof.map(|oneof| oneof.name()),
            field.proto3_optional()
        ));
    }
    for nested in &message.nested_type {
        list_message(&name, nested, lines);
    }
    for enumeration in &message.enum_type {
        list_enum(&name, enumeration, lines);
    }
}

fn list_enum(parent: &str, enumeration: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    for value in &enumeration.value {
        lines.insert(format!("{parent}.{}.{} = {}", enumeration.name(), value.name(), value.number()));
    }
}

#[test]
fn the_json_of_nodectl_keeps_every_key_of_the_first_release() {
    let talks = r#"echo started; echo 'level=warn msg="a message" key=value'; exec sleep 1000"#;
    let node = NodedProcess::start(&format!(
        "{NO_DAEMONS}{}{}",
        service_config("talks", talks, ""),
        service_config("fails", "echo no; exit 3", "")
    ));
    node.wait_ready("root.service.talks");
    node.wait_for_event("root.service.fails", 2, "exited");
    node.wait_for_event("root.service.fails", 2, "scheduled");
    for command in [
        "status",
        "status root.service.fails",
        "tree",
        "version",
        "logs root --children -n 50",
        "events",
        "restart root.service.talks",
        "stop root.service.talks",
        "start root.service.talks",
    ] {
        let args: Vec<_> = ["-o", "json"].into_iter().chain(command.split(' ')).collect();
        let output = node.ask(&args);
        let values: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_json_paths(command, &values);
    }
    node.stop();
}

/// Fails for a key, or an enumerated value, that the first release printed for this command and this one does not.
fn assert_json_paths(command: &str, values: &[Value]) {
    let mut found = BTreeSet::new();
    values.iter().for_each(|value| list_json_paths("", value, &mut found));
    let golden = golden_text("nodectl-json.tsv");
    let golden: Vec<_> = golden.lines().filter_map(|line| line.split_once('\t')).collect();
    let missing: Vec<_> = golden
        .iter()
        .filter(|(of, path)| *of == command && !path.ends_with("=CreatingCluster") && !found.contains(*path))
        .collect();
    assert!(golden.iter().any(|(of, _)| *of == command), "no golden keys of {command}");
    assert!(missing.is_empty(), "nodectl -o json {command}: no longer printed: {missing:#?} in {values:#?}");
}

/// The paths of all keys, and those of strings with their values: `nodes[].state`, `nodes[].state=ready`.
fn list_json_paths(path: &str, value: &Value, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    match value {
        Value::Object(members) => members.iter().for_each(|(key, value)| {
            let separator = if path.is_empty() { "" } else { "." };
            list_json_paths(&format!("{path}{separator}{key}"), value, found);
        }),
        Value::Array(items) => {
            items.iter().for_each(|item| list_json_paths(&format!("{path}[]"), item, found));
        }
        Value::String(text) => drop(found.insert(format!("{path}={text}"))),
        _ => {}
    }
}

#[test]
fn the_manuals_keep_the_exit_codes_of_the_first_release() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for line in golden_text("exit-codes.tsv").lines() {
        let (program, codes) = line.split_once('\t').unwrap();
        let manual = fs::read_to_string(docs.join(program).with_extension("md")).unwrap();
        let (_, section) = manual.split_once("## Exit codes").unwrap();
        let rows = section.lines().filter_map(|row| row.strip_prefix("| ")?.split_once(" |"));
        let listed: Vec<_> = rows.map(|(code, _)| code).filter(|code| code.parse::<u8>().is_ok()).collect();
        assert!(listed.join(" ").starts_with(codes), "{program}: {listed:?}");
    }
}
