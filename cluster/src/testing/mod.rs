//! What tests need: the contracts of consensus and of stores as checks, and checks over arbitrary input.

mod consensus;
mod kv;

use crate::{machine, node, pki};

pub use consensus::consensus_conformance;
pub use kv::kv_conformance;

/// What the values of an authority may hold: never panics, and what is read as a key is stored as the same bytes.
///
/// # Panics
/// Where that isn't so.
pub fn authority_values(bytes: &[u8]) {
    pki::arbitrary(bytes);
}

/// What an enrolment configuration, a node's record in the cluster, and a journal of the enrolment may hold: never panics,
/// and what is read is read again as it was written.
///
/// # Panics
/// Where that isn't so.
pub fn enrolment_files(bytes: &[u8]) {
    node::arbitrary(bytes);
    machine::arbitrary(bytes);
}
