//! A node's enrolment.

#[cfg(feature = "etcd")]
mod etcd;
mod flows;
mod kills;
mod node_fixture;
mod rejections;
mod truncation;

pub(crate) use node_fixture::{NodeFixture, NodeRun, bootstrapped_node, error_chain, node_address, parse_ip};
