//! A node's place in a cluster, by the real etcd where it matters.

use std::fs;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_cluster::node::GoldenTicket;
use nodekeel_localstorage::pki::RevocationList;
use serde_json::Value;
use testbed::{Port, Scratch, free_port, gotool};

use crate::harness::{HANG, Noded, failed, noded};
use crate::site::{Site, within};

/// A node of a cluster, which stays where it was when it is started again.
struct Member {
    config: String,
    ports: [Port; 2],
    /// The network namespace that it runs in, if not in this one.
    network: Option<String>,
}

impl Member {
    fn new() -> Self {
        Self::reached("address = \"127.0.0.1\"", None)
    }

    fn reached(how: &str, network: Option<&Site>) -> Self {
        let ports = [free_port().unwrap(), free_port().unwrap()];
        let config = format!(
            "services.containerd.enable = false\n[services.etcd]\nclient_port = {}\npeer_port = {}\n\
             [cluster]\n{how}\ndeadline = \"60s\"\ngolden_tickets = true\n",
            ports[0].number(),
            ports[1].number()
        );
        Self { config, ports, network: network.map(|site| site.name.clone()) }
    }

    /// With the newest release of etcd in the place of Debian's.
    fn on_newest_etcd(mut self) -> Self {
        let binary = gotool::ETCD.program("etcd").unwrap();
        let table = "[services.etcd]\n";
        self.config = self.config.replace(table, &format!("{table}binary = {binary:?}\n"));
        self
    }

    fn start(&self, scratch: Scratch) -> Noded {
        let mut noded = Noded::spawn(scratch, &self.config, &[], |command| {
            if let Some(network) = &self.network {
                *command = within(network, command);
            }
        });
        noded.wait_for_line("control socket at");
        noded.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
        noded
    }
}

/// Kills it like a power cut, and gives back its directory.
fn cut_off(mut noded: Noded) -> Scratch {
    noded.signal(Signal::SIGKILL);
    noded.wait();
    std::mem::replace(&mut noded.scratch, Scratch::new().unwrap())
}

fn place(noded: &Noded) -> (Value, Value) {
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["state"], "Running", "{status}");
    (status["node"].clone(), status["cluster"].clone())
}

#[test]
#[ignore = "needs etcd"]
fn a_node_founds_a_cluster_and_comes_back_to_it_whatever_was_killed() {
    let member = Member::new();
    let noded = member.start(Scratch::new().unwrap());
    let (node, cluster) = place(&noded);
    let members = noded.ask_json(&["cluster", "members"]);
    assert_eq!((members[0]["name"].clone(), members[0]["this"].clone()), (node.clone(), true.into()));

    let log = noded.ask(&["-o", "json", "logs", "root.cluster.consensus.etcd", "--leveled"]);
    assert!(log.lines().count() > 10, "etcd's lines are parsed: {log}");

    let etcd = testbed::leftovers::processes(noded.scratch.path()).unwrap();
    let etcd = etcd.iter().find(|process| process.command.contains("--data-dir")).expect("etcd runs");
    kill(Pid::from_raw(etcd.pid), Signal::SIGKILL).unwrap();
    noded.wait_for_event("root.cluster.consensus.etcd", 2, "ready");

    let noded = member.start(cut_off(noded));
    assert_eq!(place(&noded), (node.clone(), cluster));
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["history"], serde_json::json!(["New", "Restarting", "Running"]));
    let names = noded.data().join("cluster/names");
    let hosts = fs::read_to_string(names.join("hosts")).unwrap();
    assert!(hosts.contains(node.as_str().unwrap()), "{hosts}");
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_second_node_joins_by_a_golden_ticket() {
    // etcd wants members to come from the address of their certificate, and the loopback interface's is this one.
    joins(&Member::new(), &Member::new(), "127.0.0.1");
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_is_taken_back_is_of_no_use_and_its_place_is_free() {
    let founder = Member::new().start(Scratch::new().unwrap());
    let scratch = Scratch::new().unwrap();
    let file = |name| scratch.path().join(name).to_str().unwrap().to_owned();
    let (mistyped, wanted) = (file("mistyped.pb"), file("wanted.pb"));
    let made = founder.ask_json(&create_at("127.0.0.8", "7001", &mistyped));
    let (said, code) = failed(&founder.nodectl(&create_at("127.0.0.9", "7001", &wanted)));
    let told = "there is a learner already; it is at https://127.0.0.8:7001";
    let command = "nodectl cluster ticket withdraw --address 127.0.0.8 --port 7001";
    assert!(said.contains(told) && said.contains(command) && code == Some(1), "{said} {code:?}");

    let command: Vec<_> = command.split(' ').skip(1).collect();
    assert_eq!(founder.ask_json(&command), serde_json::json!({"url": "https://127.0.0.8:7001"}));
    let members = founder.ask_json(&["cluster", "members"]);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    let credentials = GoldenTicket::parse(&fs::read(&mistyped).unwrap()).unwrap().member();
    let list = founder.data().join("cluster/volume/etcd/peer_crl");
    testbed::wait_until(HANG, "the certificate among the revoked", || {
        let revoked = RevocationList::from_der(&fs::read(&list)?, &credentials.ca)?;
        revoked.revokes(&credentials.certificate).then_some(()).context("it is not among them")
    })
    .unwrap();

    let (said, code) = failed(&founder.nodectl(&command));
    assert!(said.contains("there is no ticket for https://127.0.0.8:7001") && code == Some(1), "{said}");
    let own = ["cluster", "ticket", "withdraw", "--address", "127.0.0.1"];
    let (said, code) = failed(&founder.nodectl(&own));
    assert!(said.contains("there is a member at") && code == Some(1), "{said}");
    let another = founder.ask_json(&create_at("127.0.0.9", "7001", &wanted));
    assert_ne!(another["node"], made["node"]);
    founder.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_comes_too_late_is_told_and_joins_once_the_founded_cluster_is_given_up() {
    let (first, second) = (Member::new(), Member::new());
    let founder = first.start(Scratch::new().unwrap());
    let early = second.start(Scratch::new().unwrap());
    let alone = place(&early);
    let (port, state) = (second.ports[1].number().to_string(), early.data().join("cluster/state"));
    let (late, kept) = (state.join("enrolment.pb"), early.scratch.path().join("kept.pb"));
    let made = founder.ask_json(&create_at("127.0.0.1", &port, late.to_str().unwrap()));

    let told = |noded: &Noded| noded.ask(&["logs", "root.cluster"]).matches("has no say").count();
    assert_eq!(told(&early), 0);
    let early = second.start(cut_off(early));
    assert_eq!((place(&early), told(&early)), (alone, 1));

    // As the documentation says.
    let scratch = cut_off(early);
    fs::rename(&late, &kept).unwrap();
    fs::remove_dir_all(scratch.path().join("data/cluster")).unwrap();
    fs::create_dir_all(&state).unwrap();
    fs::rename(&kept, &late).unwrap();
    let joined = second.start(scratch);
    assert_eq!(place(&joined), (made["node"].clone(), place(&founder).1));

    // The ticket by which it has joined is no reason for a word, and may be removed.
    let joined = second.start(cut_off(joined));
    assert_eq!((&place(&joined).0, told(&joined)), (&made["node"], 0));
    fs::remove_file(&late).unwrap();
    let joined = second.start(cut_off(joined));
    assert_eq!(place(&joined).0, made["node"]);
    joined.stop();
    founder.stop();
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_in_a_network_of_its_own_joins_at_its_interfaces_address() {
    let site = Site::new();
    let [here, there] = &site.link;
    let first = Member::reached(&format!("address = \"{here}\""), None);
    joins(&first, &Member::reached("interface = \"uplink0\"", Some(&site)), there);
}

#[test]
#[ignore = "needs go, ip and root: it makes a network namespace"]
fn a_node_in_a_network_of_its_own_joins_on_the_newest_etcd_too() {
    let site = Site::new();
    let [here, there] = &site.link;
    let first = Member::reached(&format!("address = \"{here}\""), None).on_newest_etcd();
    joins(&first, &Member::reached("interface = \"uplink0\"", Some(&site)).on_newest_etcd(), there);
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_whose_interface_gets_another_address_is_the_same_node_there() {
    let site = Site::new();
    let [here, there] = &site.link;
    let first = Member::reached(&format!("address = \"{here}\""), None);
    let second = Member::reached("interface = \"uplink0\"", Some(&site));
    let (founder, joined) = join(&first, &second, there);
    let (node, cluster) = place(&joined);
    let is_listed_at = |address: &str| {
        let members = founder.ask_json(&["cluster", "members"]);
        let listed = members.as_array().unwrap().iter().find(|member| member["name"] == node);
        let url = format!("https://{address}:{}", second.ports[1].number());
        assert_eq!(listed.expect("it is listed")["peer_urls"], serde_json::json!([url]), "{members}");
    };
    is_listed_at(there);

    // While it runs. It is one of two, so nothing is agreed on until it is back.
    site.address("del", there);
    site.address("add", &site.spare);
    joined.wait_for_event("root.cluster", 2, "ready");
    assert_eq!(place(&joined), (node.clone(), cluster.clone()));
    is_listed_at(&site.spare);

    // While it is off: the other is asked, and says that the cluster owes its answer.
    let scratch = cut_off(joined);
    let (said, code) = failed(&founder.nodectl(&["cluster", "members"]));
    assert!(said.contains("list the members") && code == Some(1), "{said} {code:?}");
    site.address("del", &site.spare);
    site.address("add", there);
    let joined = second.start(scratch);
    assert_eq!(place(&joined), (node.clone(), cluster));
    is_listed_at(there);
    joined.stop();
    founder.stop();
}

fn joins(first: &Member, second: &Member, address: &str) {
    let (founder, joined) = join(first, second, address);
    let before = place(&joined);
    let joined = second.start(cut_off(joined));
    assert_eq!(place(&joined), before);
    joined.stop();
    founder.stop();
}

fn create_at<'a>(address: &'a str, port: &'a str, file: &'a str) -> [&'a str; 10] {
    ["cluster", "ticket", "create", "--golden", "--address", address, "--port", port, "--file", file]
}

/// Both, once the second is a member beside the first.
fn join(first: &Member, second: &Member, address: &str) -> (Noded, Noded) {
    let founder = first.start(Scratch::new().unwrap());
    let scratch = Scratch::new().unwrap();
    let state = scratch.path().join("data/cluster/state");
    fs::create_dir_all(&state).unwrap();
    let ticket = state.join("enrolment.pb");
    let (port, file) = (second.ports[1].number().to_string(), ticket.to_str().unwrap());
    let create = create_at(address, &port, file);
    let made = founder.ask_json(&create);
    let again = failed(&founder.nodectl(&create));
    assert!(again.0.contains("can't use") && again.1 == Some(1), "{again:?}");
    let spare = scratch.path().join("spare.pb");
    let (said, code) = failed(&founder.nodectl(&create_at("127.0.0.9", &port, spare.to_str().unwrap())));
    assert!(said.contains("there is a learner already") && code == Some(1), "{said} {code:?}");

    let joined = second.start(scratch);
    let (node, cluster) = place(&joined);
    assert_eq!((&node, &cluster), (&made["node"], &place(&founder).1));
    let members = founder.ask_json(&["cluster", "members"]);
    let votes: Vec<_> = members.as_array().unwrap().iter().map(|member| member["learner"].clone()).collect();
    assert_eq!(votes, [false, false], "{members}");
    let spare = founder.scratch.path().join("spare.pb");
    let (said, code) = failed(&founder.nodectl(&create_at(address, &port, spare.to_str().unwrap())));
    assert!(said.contains("there is a member at") && code == Some(1), "{said} {code:?}");
    (founder, joined)
}

#[test]
fn without_etcd_a_development_node_is_a_cluster_in_memory() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n\
                  cluster.address = \"127.0.0.1\"\n";
    let noded = Noded::start_in(Scratch::new().unwrap(), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    let first = place(&noded);
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
    let (said, code) = failed(&noded.nodectl(&create));
    assert!(said.contains("cluster.golden_tickets = true") && code == Some(1), "{said}");
    assert!(!ticket.exists());
    noded.ask(&["stop", "--wait", "root.cluster"]);
    let (said, code) = failed(&noded.nodectl(&["cluster", "members"]));
    assert!(said.contains("the node is Failed, not Running") && code == Some(1), "{said} {code:?}");

    let noded = Noded::start_in(cut_off(noded), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    assert_ne!(place(&noded), first, "nothing of it is kept");
    noded.stop();
}

#[test]
fn a_port_is_taken_where_the_member_listens_and_not_elsewhere() {
    let (ports, scratch) = ([free_port().unwrap(), free_port().unwrap()], Scratch::new().unwrap());
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
        failed(
            &noded(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()])
                .output()
                .unwrap(),
        )
    };
    assert_eq!(check("127.0.0.3"), (String::new(), Some(0)));
    let (said, code) = check("127.0.0.2");
    let told = format!("(pid {}); set services.etcd.client_port to another", std::process::id());
    assert!(said.contains(&told) && code == Some(4), "{said}");
}

#[test]
fn a_node_that_is_to_be_in_no_cluster_says_so() {
    let noded = Noded::start(crate::harness::BARE);
    let (said, code) = failed(&noded.nodectl(&["cluster", "status"]));
    assert!(said.contains("[cluster]") && code == Some(1), "{said}");
    noded.stop();
}

#[test]
fn a_cluster_that_can_not_be_is_told_before_anything_is_done() {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path().join("noded.toml");
    let data = scratch.path().join("data");
    let cases = [
        ("[cluster]\n", "give the node's address"),
        ("[cluster]\naddress = \"0.0.0.0\"\n", "cluster.address"),
        ("[cluster]\naddress = \"127.0.0.1\"\ninterface = \"lo\"\n", "one of the two"),
        ("[cluster]\naddress = \"192.0.2.7\"\n", "no interface of this machine has the address 192.0.2.7"),
        ("[cluster]\ninterface = \"none0\"\n", "there is no interface none0"),
        ("services.etcd.enable = false\n[cluster]\naddress = \"127.0.0.1\"\n", "kept in etcd"),
    ];
    for (config, told) in cases {
        fs::write(&file, config).unwrap();
        let mut command =
            noded(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{config}");
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(told), "{config}: {said}");
    }
    assert!(!data.exists());
}
