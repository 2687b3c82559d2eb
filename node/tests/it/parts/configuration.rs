//! The tables, names and DNs of parts.

use nodekeel_node::node::NodeHandle;
use testbed::ScratchDir;

use super::dependencies::part_of_dns;
use super::{NTP, assert_rejected, ntp_node};
use crate::harness::{TestPart, run_ready, service_config};

#[test]
fn the_section_of_a_part_is_rejected_with_line_column_and_field() {
    for (config, says) in [
        ("[ntp]\nport = 1\n", "test.toml:4:1: ntp: missing field `server`"),
        ("[ntp]\nserver = 7\n", ":5:10: ntp.server: must be text in quotes, not 7"),
        ("[ntp]\nsrver = \"a\"\n", ":5:1: ntp.srver: unknown field `srver`, expected"),
        ("[ntp]\nserver = \"\"\n", ":5:10: ntp.server: must name a server"),
        ("ntp = 1\n", ":4:7: ntp: must be a table, written [ntp]"),
        ("[[ntp]]\nserver = \"a\"\n", ": ntp: must be a table, written [ntp]"),
        ("[npt]\nserver = \"a\"\n", ":4:2: npt: unknown field `npt`, expected one of"),
        ("[npt]\n", ", `ntp`"),
        (
            &format!("{NTP}depends_on = [\"x\"]"),
            ":6:15: ntp.depends_on[0]: unknown service \"x\" in depends_on; known: ",
        ),
        (&format!("{NTP}depends_on = \"x\""), ":6:14: ntp.depends_on: must be a list in brackets"),
        (
            &format!("{NTP}depends_on = [\"a\"]\n{}", service_config("a", "true", "depends_on = [\"ntp\"]")),
            "dependency cycle: ntp -> a -> ntp",
        ),
        (&service_config("ntp", "true", ""), "service[0].name: \"ntp\" is a part of this node"),
    ] {
        let (_scratch, builder) = ntp_node(config);
        assert_rejected(builder, says);
    }
}

#[test]
fn parts_are_replaced_and_removed_by_name() {
    let named = |name: &str| TestPart::runnable(name, run_ready);
    let builder = || ntp_node("").1;
    // NO_DAEMONS has the sections of etcd and containerd. The cluster has the ports of its etcd from the former.
    builder().without("etcd").without("control").plan().unwrap();
    assert_rejected(
        builder().replace(named("etcd")).without("cluster"),
        "services.etcd: belongs to a part that this node does not have",
    );
    let scratch = ScratchDir::new().unwrap();
    let empty =
        || NodeHandle::builder("test.toml", "").data(scratch.path().join("data")).without("containerd");
    let plan = empty().replace(named("etcd")).without("control").plan().unwrap();
    let dns: Vec<_> = plan.services.iter().map(|planned| planned.dn.as_str()).collect();
    assert!(dns.contains(&"root.etcd") && !dns.contains(&"root.control"), "{dns:?}");
    assert!(plan.to_string().contains("root.etcd                a runnable of the test"), "{plan}");
    assert_rejected(
        builder().without("containerd"),
        "services.containerd: belongs to a part that this node does not have",
    );
    assert_rejected(
        empty().without("containrd"),
        "unknown part \"containrd\"; known: control, api, metrics, kernel, storage, etcd, network",
    );
    // Another network has the address from elsewhere; the shipped one needs a key.
    let cluster = || {
        let config =
            "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\n[cluster]\n";
        NodeHandle::builder("test.toml", config).data(scratch.path().join("data"))
    };
    assert_rejected(cluster(), "cluster: requires cluster.address or cluster.interface");
    let shown = cluster().replace(named("network")).plan().unwrap().to_string();
    assert!(
        shown.contains("root.cluster             a member at the address that the program provides"),
        "{shown}"
    );
    assert_rejected(empty().replace(named("ntp")), "unknown part \"ntp\"");
    assert_rejected(empty().with(named("etcd")), "duplicate part name \"etcd\"");
    assert_rejected(empty().with(named("a.b")), "invalid part name \"a.b\"");
}

#[test]
fn a_part_has_its_own_dns_and_sections() {
    let rejected = |part: TestPart| ntp_node("").1.with(part).plan().unwrap_err().to_string();
    for (dn, says) in [
        (&["root.lease"], "invalid DN \"root.lease\" of part \"a\": use root.a or root.a.NAME"),
        (&["root.ab"], "invalid DN \"root.ab\" of part \"a\""),
        (&["root.a.b.c"], "invalid DN \"root.a.b.c\" of a part"),
    ] {
        let error = rejected(part_of_dns("a", dn));
        assert!(error.contains(says), "{error}");
    }
    for (section, says) in [
        ("node", "test.toml: invalid section name \"node\" of a part"),
        ("a.b", "invalid section name \"a.b\" of a part"),
        ("ntp", "duplicate section name \"ntp\" of two parts"),
        ("cluster", "duplicate section name \"cluster\" of two parts"),
    ] {
        let error = rejected(part_of_dns("a", &[]).section(section));
        assert!(error.contains(says), "{error}");
    }
}
