//! The section `[cluster]`, without an etcd.

use std::net::TcpListener;

use testbed::ScratchDir;

use super::{cluster_identity, create_ticket_args};
use crate::harness::{EtcdPorts, NO_DAEMONS, NodedProcess, check};

#[test]
fn a_development_node_without_etcd_keeps_its_cluster_in_memory() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n\
                  cluster.address = \"127.0.0.1\"\ncluster.bootstrap = true\n";
    let noded = NodedProcess::start_in(ScratchDir::new().unwrap(), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    let first = cluster_identity(&noded);
    assert_eq!(noded.ask_json(&["cluster", "members"]).as_array().map(Vec::len), Some(1));
    let ticket = noded.data().join("ticket");
    let create = create_ticket_args("127.0.0.2", "0", ticket.to_str().unwrap());
    noded.nodectl(&create).assert_fails(1, "cluster.golden_tickets = true");
    assert!(!ticket.exists());
    noded.ask(&["stop", "--wait", "root.cluster"]);
    noded.nodectl(&["cluster", "members"]).assert_fails(1, "the node's enrolment is Failed");

    let noded = NodedProcess::start_in(noded.kill(), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    assert_ne!(cluster_identity(&noded), first, "a cluster in memory is not kept");
    noded.stop();
}

#[test]
fn a_port_conflict_is_reported_only_at_the_address_of_the_member() {
    let (ports, scratch) = (EtcdPorts::reserve(), ScratchDir::new().unwrap());
    let config = format!("cluster.address = \"127.0.0.2\"\n{}", ports.config_to_check());
    let check_while_taken = |address| {
        let _held = TcpListener::bind((address, ports.peer.number())).unwrap();
        check(scratch.path(), &config, &[])
    };
    check_while_taken("127.0.0.3").output();
    let hint = format!("(pid {}): set services.etcd.peer_port to another port", std::process::id());
    check_while_taken("127.0.0.2").assert_fails(4, &hint);
}

#[test]
fn a_node_without_a_cluster_section_reports_that() {
    let noded = NodedProcess::start(NO_DAEMONS);
    noded.nodectl(&["cluster", "status"]).assert_fails(1, "[cluster]");
    noded.stop();
}

#[test]
fn an_impossible_cluster_is_rejected_before_anything_is_done() {
    let scratch = ScratchDir::new().unwrap();
    let data = scratch.path().join("data");
    let record = format!(
        "services.containerd.enable = false\nservices.etcd.binary = \"/bin/true\"\n\
         [cluster]\naddress = \"127.0.0.1\"\nbootstrap_record = {:?}\n",
        data.join("record")
    );
    let cases = [
        ("[cluster]\n", "requires cluster.address or cluster.interface"),
        ("[cluster]\naddress = \"0.0.0.0\"\n", "cluster.address"),
        ("[cluster]\naddress = \"127.0.0.1\"\ninterface = \"lo\"\n", "one of the two"),
        ("[cluster]\naddress = \"192.0.2.7\"\n", "no interface of this machine has the address 192.0.2.7"),
        ("[cluster]\ninterface = \"none0\"\n", "interface none0 does not exist"),
        ("services.etcd.enable = false\n[cluster]\naddress = \"127.0.0.1\"\n", "[cluster] requires etcd"),
        (
            "[services.etcd]\nextra_args = [\"--peer-cert-allowed-hostname=\"]\n[cluster]\naddress = \"127.0.0.1\"\n",
            "services.etcd.extra_args: must not have --peer-cert-allowed-hostname, which [cluster] sets",
        ),
        // In the data directory of the command line.
        (&*record, "would be lost with it: use a file outside"),
    ];
    for (config, expected) in cases {
        let ended = check(scratch.path(), config, &[]);
        assert!(matches!(ended.code, Some(3 | 4)) && ended.stderr.contains(expected), "{config}: {ended:#?}");
    }
    assert!(!data.exists());
}
