//! What a system is told about itself.

use std::fs;
use std::sync::Arc;

use nodekeel_cluster::node::{EphemeralHosts, LocalNames, NodeId};
use nodekeel_localstorage::tree::{Ephemeral, Site};
use nodekeel_localstorage::{Dir, OsPlacement};

use crate::machine::ip;

fn names(path: &std::path::Path) -> LocalNames {
    let placement = OsPlacement::new(Dir::open(path).expect("it opens"));
    let ephemeral: Ephemeral = Site::new(Arc::new(placement), path).place().expect("it is placed");
    let hosts: EphemeralHosts = ephemeral.extend().expect("beside what is there");
    LocalNames {
        hosts: Some(hosts.hosts.clone()),
        machine_id: Some(ephemeral.machine_id.clone()),
        set_hostname: false,
    }
}

fn node() -> NodeId {
    format!("nodekeel-{}", "0123456789abcdef".repeat(2)).parse().expect("a name")
}

#[test]
fn hosts_and_machine_id_have_the_form_that_programs_read() {
    let scratch = tempfile::tempdir().expect("a directory");
    names(scratch.path()).tell(&node(), ip("192.0.2.7")).expect("it is told");
    let read = |name: &str| fs::read_to_string(scratch.path().join(name)).expect("it is there");
    let own = format!("192.0.2.7 {}", node());
    assert_eq!(read("hosts"), format!("127.0.0.1 localhost\n::1 localhost\n{own}\n"));
    assert_eq!(read("machine-id"), format!("{}\n", "0123456789abcdef".repeat(2)));
}

#[test]
fn what_says_so_already_is_left_alone_and_another_address_is_told() {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = tempfile::tempdir().expect("a directory");
    let names = names(scratch.path());
    let inode = |name: &str| fs::metadata(scratch.path().join(name)).expect("it is there").ino();
    names.tell(&node(), ip("192.0.2.7")).expect("it is told");
    let before = (inode("hosts"), inode("machine-id"));
    names.tell(&node(), ip("192.0.2.7")).expect("it is told");
    assert_eq!((inode("hosts"), inode("machine-id")), before);
    names.tell(&node(), ip("2001:db8::7")).expect("it is told");
    assert!(
        fs::read_to_string(scratch.path().join("hosts"))
            .expect("it is there")
            .contains("2001:db8::7 nodekeel-")
    );
    assert_eq!(inode("machine-id"), before.1);
}
