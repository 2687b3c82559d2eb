//! A node's enrolment.

#[cfg(feature = "etcd")]
mod etcd;
mod flows;
mod kills;
mod node_fixture;
mod redemption;
mod rejections;
mod truncation;

pub(crate) use kills::read_snapshot;
pub(crate) use node_fixture::{
    InProcessVoter, MemoryCluster, NodeFixture, NodeRun, create_disks, error_chain, node_address, parse_ip,
    peer_url,
};
