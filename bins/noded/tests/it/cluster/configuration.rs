//! What `[cluster]` accepts, without an etcd.

use std::fs;

use testbed::{ScratchDir, reserve_port};

use super::{cluster_identity, kill_node};
use crate::harness::{NodedProcess, noded_command, stderr_and_code};

#[test]
fn a_bootstrap_record_in_the_data_directory_of_the_command_line_is_rejected() {
    let scratch = ScratchDir::new().unwrap();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    let config = format!(
        "services.containerd.enable = false\nservices.etcd.binary = \"/bin/true\"\n\
         [cluster]\naddress = \"127.0.0.1\"\nbootstrap_record = {:?}\n",
        data.join("record")
    );
    fs::write(&file, config).unwrap();
    let mut command =
        noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
    let (stderr, code) = stderr_and_code(&command.output().unwrap());
    assert!(stderr.contains("would be lost with it: use a file outside") && code == Some(4), "{stderr}");
}

#[test]
fn a_development_node_without_etcd_keeps_its_cluster_in_memory() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n\
                  cluster.address = \"127.0.0.1\"\ncluster.bootstrap = true\n";
    let noded = NodedProcess::start_in(ScratchDir::new().unwrap(), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    let first = cluster_identity(&noded);
    assert_eq!(noded.ask_json(&["cluster", "members"]).as_array().map(Vec::len), Some(1));
    let ticket = noded.data().join("ticket");
    let create = [
        "cluster",
        "ticket",
        "create",
        "--golden",
        "--address=127.0.0.2",
        "--file",
        ticket.to_str().unwrap(),
    ];
    let (stderr, code) = stderr_and_code(&noded.nodectl(&create));
    assert!(stderr.contains("cluster.golden_tickets = true") && code == Some(1), "{stderr}");
    assert!(!ticket.exists());
    noded.ask(&["stop", "--wait", "root.cluster"]);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "members"]));
    assert!(stderr.contains("the node's enrolment is Failed") && code == Some(1), "{stderr} {code:?}");

    let noded = NodedProcess::start_in(kill_node(noded), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    assert_ne!(cluster_identity(&noded), first, "a cluster in memory is not kept");
    noded.stop();
}

#[test]
fn a_port_conflict_is_reported_only_at_the_address_of_the_member() {
    let (ports, scratch) = ([reserve_port().unwrap(), reserve_port().unwrap()], ScratchDir::new().unwrap());
    let [client, peer] = [ports[0].number(), ports[1].number()];
    let config = format!(
        "services.containerd.enable = false\ncluster.address = \"127.0.0.2\"\n\
         [services.etcd]\nbinary = \"/bin/true\"\nclient_port = {client}\npeer_port = {peer}\n"
    );
    let file = scratch.path().join("noded.toml");
    fs::write(&file, config).unwrap();
    let check = |taken| {
        let _held = std::net::TcpListener::bind((taken, client)).unwrap();
        let data = scratch.path().join("data");
        stderr_and_code(
            &noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()])
                .output()
                .unwrap(),
        )
    };
    assert_eq!(check("127.0.0.3"), (String::new(), Some(0)));
    let (stderr, code) = check("127.0.0.2");
    let expected = format!("(pid {}): set services.etcd.client_port to another port", std::process::id());
    assert!(stderr.contains(&expected) && code == Some(4), "{stderr}");
}

#[test]
fn a_node_without_a_cluster_section_reports_that() {
    let noded = NodedProcess::start(crate::harness::NO_DAEMONS);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "status"]));
    assert!(stderr.contains("[cluster]") && code == Some(1), "{stderr}");
    noded.stop();
}

#[test]
fn an_impossible_cluster_is_rejected_before_anything_is_done() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    let data = scratch.path().join("data");
    let cases = [
        ("[cluster]\n", "requires cluster.address or cluster.interface"),
        ("[cluster]\naddress = \"0.0.0.0\"\n", "cluster.address"),
        ("[cluster]\naddress = \"127.0.0.1\"\ninterface = \"lo\"\n", "one of the two"),
        ("[cluster]\naddress = \"192.0.2.7\"\n", "no interface of this machine has the address 192.0.2.7"),
        ("[cluster]\ninterface = \"none0\"\n", "interface none0 does not exist"),
        ("services.etcd.enable = false\n[cluster]\naddress = \"127.0.0.1\"\n", "[cluster] requires etcd"),
    ];
    for (config, expected) in cases {
        fs::write(&file, config).unwrap();
        let mut command =
            noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{config}");
        let stderr =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(stderr.contains(expected), "{config}: {stderr}");
    }
    assert!(!data.exists());
}
