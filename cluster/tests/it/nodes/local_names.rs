//! The local names of a host.

use std::fs;
use std::sync::Arc;

use nodekeel_cluster::node::{LocalNames, LocalNamesDir, NodeId};
use nodekeel_localstorage::tree::LayoutTarget;
use nodekeel_localstorage::{Dir, OsFileStore};

use crate::enrolment::parse_ip;

/// The names of the host, in this directory.
pub(crate) fn local_names(path: &std::path::Path) -> LocalNames {
    let placement = OsFileStore::new(Dir::open(path).expect("opened"));
    let names: LocalNamesDir = LayoutTarget::new(Arc::new(placement), path).create_layout().expect("placed");
    LocalNames {
        hosts: Some(names.hosts.clone()),
        machine_id: Some(names.machine_id.clone()),
        set_hostname: false,
    }
}

fn node_id() -> NodeId {
    format!("nodekeel-{}", "0123456789abcdef".repeat(2)).parse().expect("a valid name")
}

#[test]
fn hosts_and_machine_id_have_their_documented_formats() {
    let scratch = tempfile::tempdir().expect("a directory");
    local_names(scratch.path()).apply_names(&node_id(), parse_ip("192.0.2.7")).expect("applied");
    let read = |name: &str| fs::read_to_string(scratch.path().join(name)).expect("it exists");
    let this = format!("192.0.2.7 {}", node_id());
    assert_eq!(read("hosts"), format!("127.0.0.1 localhost\n::1 localhost\n{this}\n"));
    assert_eq!(read("machine-id"), format!("{}\n", "0123456789abcdef".repeat(2)));
}

#[test]
fn unchanged_names_are_skipped_and_a_new_address_is_written() {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = tempfile::tempdir().expect("a directory");
    let names = local_names(scratch.path());
    let inode = |name: &str| fs::metadata(scratch.path().join(name)).expect("it exists").ino();
    names.apply_names(&node_id(), parse_ip("192.0.2.7")).expect("applied");
    let before = (inode("hosts"), inode("machine-id"));
    names.apply_names(&node_id(), parse_ip("192.0.2.7")).expect("applied");
    assert_eq!((inode("hosts"), inode("machine-id")), before);
    names.apply_names(&node_id(), parse_ip("2001:db8::7")).expect("applied");
    assert!(
        fs::read_to_string(scratch.path().join("hosts"))
            .expect("it exists")
            .contains("2001:db8::7 nodekeel-")
    );
    assert_eq!(inode("machine-id"), before.1);
}
