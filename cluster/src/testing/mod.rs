//! Test support: the contracts of consensus and of stores as conformance checks, and checks over arbitrary
//! input.

mod consensus;
mod kv;

use crate::backup::Recipient;
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

/// Arbitrary bytes as a segment of etcd's write-ahead log, and as its records: never panics, and the rewritten log has each index
/// once.
///
/// # Panics
/// If that does not hold.
#[cfg(feature = "etcd")]
pub fn fuzz_etcd_log(bytes: &[u8]) {
    crate::consensus::etcd::check_arbitrary_log(bytes);
}

/// Arbitrary bytes as the recipient of a backup: never panics, and a valid one is printed as it was read, in lower case.
///
/// # Panics
/// If that does not hold.
pub fn fuzz_recipient(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(recipient) = text.parse::<Recipient>() {
        assert_eq!(recipient.to_string(), text.to_ascii_lowercase());
    }
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
