//! Test support: the contracts of consensus and of stores as conformance checks, and checks over arbitrary
//! input.

mod consensus;
mod kv;

use crate::{enrolment, node, pki};

pub use consensus::consensus_conformance;
pub use kv::kv_conformance;

/// Arbitrary bytes as the stored values of a CA: never panics, and a parsed key is stored as the same bytes.
///
/// # Panics
/// If that does not hold.
pub fn fuzz_ca_values(bytes: &[u8]) {
    pki::check_arbitrary_values(bytes);
}

/// Arbitrary bytes as the answer of another member's etcd: never panics.
///
/// # Panics
/// If that does not hold.
#[cfg(feature = "etcd")]
pub fn fuzz_peer_answers(bytes: &[u8]) {
    crate::consensus::etcd::check_arbitrary_answer(bytes);
}

/// Arbitrary bytes as the output of etcd: never panics, and a fault that it names is one line.
///
/// # Panics
/// If that does not hold.
#[cfg(feature = "etcd")]
pub fn fuzz_etcd_output(bytes: &[u8]) {
    crate::consensus::etcd::check_arbitrary_output(bytes);
}

/// Arbitrary bytes as an enrolment configuration, as a node's record in the cluster, and as an enrolment
/// journal: never panics, and valid content survives a round trip.
///
/// # Panics
/// If that does not hold.
pub fn fuzz_enrolment_files(bytes: &[u8]) {
    node::check_arbitrary_files(bytes);
    enrolment::check_arbitrary_progress(bytes);
}
