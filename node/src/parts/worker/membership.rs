//! What a worker keeps of its cluster: it is what the node knows when it starts without any voter.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_cluster::node::NodeId;
use nodekeel_localstorage::tree::LayoutFile;
use prost::Message;

use crate::access::Principal;
use crate::node_v1;
#[cfg(any(test, feature = "testing"))]
use crate::parts::api::cluster_records::ToldRecords;
use crate::parts::api::cluster_records::parse_operator;
use crate::parts::api::identities::Identity;

/// What to do on a node that has lost what it kept: a ticket alone is not looked at, as long as the node is in a cluster.
pub(super) const RESET_AND_JOIN: &str = "type `nodectl reset` on it, and join it by another ticket";

/// The worker's place in its cluster. The voters are in a file of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Membership {
    pub(crate) node: NodeId,
    /// The id of the cluster.
    pub(crate) cluster: String,
    /// The id of the ticket by which it has joined.
    pub(crate) ticket: String,
    /// True if the cluster has no such node any more.
    pub(crate) is_removed: bool,
    /// Those of the cluster.
    pub(crate) operators: Vec<Identity>,
    /// Since when no voter that it has asked could be followed, to the second; `None` as long as one is.
    pub(crate) cut_off_since: Option<SystemTime>,
}

#[derive(Clone, PartialEq, Message)]
struct StoredMembership {
    #[prost(string, tag = "1")]
    node: String,
    #[prost(string, tag = "2")]
    cluster: String,
    #[prost(string, tag = "3")]
    ticket: String,
    #[prost(bool, tag = "4")]
    is_removed: bool,
    #[prost(message, repeated, tag = "5")]
    operators: Vec<node_v1::Operator>,
    /// Seconds since 1970; 0 for `None`.
    #[prost(uint64, tag = "6")]
    cut_off_since: u64,
}

/// The file, which is there once the worker has joined.
#[derive(Debug, Clone)]
pub(crate) struct MembershipFile(LayoutFile);

impl MembershipFile {
    pub(crate) fn new(file: LayoutFile) -> Self {
        Self(file)
    }

    /// The membership that was written last, if there was one. It blocks.
    pub(crate) fn read(&self) -> io::Result<Option<Membership>> {
        let Some(bytes) = self.0.read_if_present().map_err(io::Error::other)? else { return Ok(None) };
        let damaged = || {
            let text = format!("{} is damaged: {RESET_AND_JOIN}", self.0.path().display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        decode(&bytes).map(Some).ok_or_else(damaged)
    }

    /// Writes it, if it is another one. It blocks.
    pub(crate) fn write(&self, membership: &Membership) -> io::Result<()> {
        let bytes = encode(membership);
        if self.0.read_if_present().is_ok_and(|found| found.is_some_and(|found| *found == bytes)) {
            return Ok(());
        }
        self.0.write(&bytes).map_err(io::Error::other)
    }
}

fn encode(membership: &Membership) -> Vec<u8> {
    let operators = membership.operators.iter().filter_map(|operator| {
        let Principal::Operator(role) = operator.principal else { return None };
        let (name, key) = (operator.name.clone(), operator.key.to_string());
        Some(node_v1::Operator { name, key, role: role.to_string() })
    });
    StoredMembership {
        node: membership.node.to_string(),
        cluster: membership.cluster.clone(),
        ticket: membership.ticket.clone(),
        is_removed: membership.is_removed,
        operators: operators.collect(),
        cut_off_since: membership.cut_off_since.map_or(0, unix_seconds),
    }
    .encode_to_vec()
}

fn decode(bytes: &[u8]) -> Option<Membership> {
    let StoredMembership { node, cluster, ticket, is_removed, operators, cut_off_since } =
        StoredMembership::decode(bytes).ok()?;
    let operators = operators.iter().filter_map(parse_operator).collect();
    let since = UNIX_EPOCH.checked_add(Duration::from_secs(cut_off_since));
    let cut_off_since = since.filter(|since| *since != UNIX_EPOCH);
    Some(Membership { node: node.parse().ok()?, cluster, ticket, is_removed, operators, cut_off_since })
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Arbitrary bytes as what a voter tells, and as the file: never panics, and a membership survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_membership(bytes: &[u8]) {
    if let Ok(message) = node_v1::ClusterRecords::decode(bytes) {
        let _ = ToldRecords::parse(&message);
    }
    if let Some(membership) = decode(bytes) {
        assert_eq!(decode(&encode(&membership)), Some(membership));
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::Dir;
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{ApiLayout, place_layout};

    const KEY: &str = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";

    fn operator(name: &str, role: &str) -> node_v1::Operator {
        node_v1::Operator { name: name.into(), key: KEY.into(), role: role.into() }
    }

    fn records() -> node_v1::ClusterRecords {
        let voter = |address: &str| node_v1::Voter {
            node: format!("nodekeel-{}", "1".repeat(32)),
            key: KEY.into(),
            address: address.into(),
        };
        node_v1::ClusterRecords {
            node: format!("nodekeel-{}", "2".repeat(32)),
            cluster: "3".repeat(32),
            voters: vec![voter("192.0.2.1:7443"), voter("node-1:7443")],
            operators: vec![
                operator("alice", "reader"),
                operator("bob", "auditor"),
                operator("a b", "admin"),
            ],
        }
    }

    #[test]
    fn what_a_later_release_tells_admits_nobody_and_hides_nothing() {
        let told = ToldRecords::parse(&records()).expect("a voter");
        assert_eq!(told.voters.len(), 1);
        let names: Vec<_> = told.operators.iter().map(|operator| &*operator.name).collect();
        assert_eq!(names, ["alice"]);
        let without = node_v1::ClusterRecords { voters: Vec::new(), ..records() };
        assert!(ToldRecords::parse(&without).is_err(), "it could ask nobody any more");
    }

    #[test]
    fn the_membership_that_is_read_is_that_which_was_written() {
        let scratch = tempfile::tempdir().expect("a directory");
        let root = place_layout(Dir::open(scratch.path()).expect("open")).expect("placed");
        let file = root.add_layout::<ApiLayout>().expect("placed").api.membership;
        let path = file.path().to_owned();
        let file = MembershipFile::new(file);
        assert_eq!(file.read().expect("none"), None);
        let ToldRecords { node, cluster, operators, .. } = ToldRecords::parse(&records()).expect("a voter");
        let membership = Membership {
            node,
            cluster,
            ticket: "1".into(),
            is_removed: false,
            operators,
            cut_off_since: Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        };
        file.write(&membership).expect("written");
        assert_eq!(file.read().expect("read"), Some(membership));
        std::fs::write(&path, b"\xff").expect("written");
        let damaged = file.read().expect_err("damaged").to_string();
        assert!(
            damaged.contains("api/membership is damaged: type `nodectl reset` on it, and join"),
            "{damaged}"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_membership_or_none(bytes: Vec<u8>, at in 0..200_usize, byte: u8) {
            check_arbitrary_membership(&bytes);
            let mut message = records().encode_to_vec();
            message[at] = byte;
            check_arbitrary_membership(&message);
        }
    }
}
